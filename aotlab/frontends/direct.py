"""The direct frontend: trace the Python function itself.

A trace sees the ops of a call, but not the Python code around them. So the values that the function can read besides
its arguments are guarded; `aotlab.guards.reach` finds these values. If the function changes a number, it becomes an
input, and each call writes its new value (`aotlab.guards.numbers_in_state`). If the function sets a flag or a string to
a literal, the entry serves only calls that find the old value, and each of these calls writes the new value. If the
function changes anything else, the call is refused and the change is undone.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import BuiltinFunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.capture.call import ArgumentKind, Target, names_of_arguments
from aotlab.capture.signals import NumbersChange, RunEagerly
from aotlab.errors import BY_DYNAMO, HooksError, LeakedTensorError, UsageError, UserLine
from aotlab.frontends.module_stack import modules_named
from aotlab.guards.code_names import line_that_changes
from aotlab.guards.guarded_values import Mentioned
from aotlab.guards.leaks import Watch
from aotlab.guards.numbers_in_state import changed_constants, changed_numbers, is_number
from aotlab.guards.reach import Reach, reach
from aotlab.guards.reached import Place, Reached, Slot, codes_in, fast_check, reader
from aotlab.trace.tape import Untraceable


class _DirectTarget(Target):
    """A function or module that the direct frontend compiles.

    Each compilation first calls `reached`, which searches for the values that the function can reach and stores the
    result. The other methods use this result.
    """

    frontend = "direct"
    _reach: Reach | None = None
    _watch: Watch | None = None
    _slots: tuple[Slot, ...] = ()

    def __init__(self, target: Callable[..., Any], function: Callable[..., Any], name: str) -> None:
        self._callable = target
        self._numbers: dict[Hashable, Place] = {}  # the numbers in state that are inputs
        self._before: tuple[Reached, ...] = ()  # the reached values of the last call that was captured
        self._changed: list[Place] = []  # the numbers in state that the traced function has changed
        self._constants: list[tuple[Reached, Any]] = []  # flags and strings that it has set, with new values
        self._times_changed: Counter[Hashable] = Counter()  # in how many entries each of them was set, by place
        self.function = function
        self.name = name
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        self.line = None
        if code is not None:
            self.line = UserLine(file=code.co_filename, line=code.co_firstlineno, function=code.co_qualname)

    @property
    def sets_constants(self) -> bool:
        return bool(self._constants)

    def reached(self) -> tuple[Reached, ...]:
        """Return the closures, defaults, globals and states of modules that the function may read."""
        self._numbers = self._numbers | changed_numbers(self._before) if self.lifts_numbers else {}
        self._reach, self._watch = reach(self._callable, self._numbers), None
        self._slots, self._before = self._reach.slots, self._reach.state
        return self._reach.state

    def lifted(self) -> Sequence[Tensor]:
        """Return the lifted inputs: the parameters, buffers and other tensors that the function reaches."""
        return self.lifter()() if self._slots else []

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads the lifted inputs again from their places."""
        return reader(self._slots)

    def holder(self, lifted: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes a context manager, in which the tensors ``lifted`` replace the lifted inputs.

        If numbers are lifted, the context raises `LeakedTensorError` if the function or its backward changes them: the
        backward must not read a number that the function changes, because it would get the value before the change.
        """
        return partial(_held, self._modules(), self._slots, lifted, self._changed, self._reach_once().state)

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Return the name and kind of each lifted input."""
        return [(slot.name, slot.kind) for slot in self._slots]

    def _reach_once(self) -> Reach:
        self._reach = reach(self._callable) if self._reach is None else self._reach
        return self._reach

    def mentioned(self) -> Mentioned:
        return self._reach_once().mentioned

    def objects(self) -> list[Any]:
        return [] if self._watch is None else list(self._watch.objects.values())

    def still_same(self) -> Callable[[], bool] | None:
        """Return a check, for the entry, that all reached values are unchanged, or None if there is nothing to check.

        Raises `LeakedTensorError` if the backward of a custom function changed one of the values while it was traced.
        """
        reach, watch = self._reach_once(), self._watch
        self._reach = self._watch = None
        if (changed := _name_of_changed(reach.state)) is None:
            return fast_check(reach.state)
        if watch is not None:
            _undo(reach.state, watch)
        text, reason = "the backward of a function changes `{}`", "a compiled backward would not repeat the change"
        raise _leak(text, changed, reach.state, "return the new value from the forward", reason)

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with the traced tensors ``lifted`` in place of its parameters, buffers and other tensors.

        If the function changes an object that outlives the call, undo the change and raise `LeakedTensorError`.
        """
        reach = self._reach_once()
        modules = self._traceable_modules()
        if reach.unseen is not None:
            raise RunEagerly("no-guard-for-what-it-reads", what=reach.unseen)
        if reach.by_identity is not None:
            raise RunEagerly("finds-tensor-by-identity", what=reach.by_identity)
        self._watch, self._constants = (watch := Watch([*modules, *reach.objects])), []
        try:
            result = self._run(lifted, args, kwargs)
            if (leak := watch.leaked()) is not None:
                reason = f"{_WHY}, and the stored tensor belongs to the trace"
                text = "the function stores a tensor in `{}`"
                raise _leak(text, leak, reach.state, f"return it, or {BY_DYNAMO}", reason)
            if (changed := _name_of_changed(reach.state)) is not None:
                numbers = changed_numbers(reach.state) if self.lifts_numbers else {}
                if not numbers.keys() <= self._numbers.keys():
                    self._numbers |= numbers
                    raise NumbersChange
                constants = changed_constants(reach.state) if self.repeats_changes else {}
                if not constants or any(self._times_changed[place] >= _MOST_CHANGES for place in constants):
                    advice = f"return the new value, or {BY_DYNAMO}"
                    raise _leak("the function changes `{}`", changed, reach.state, advice)
                self._constants = list(constants.values())
                for item, _ in self._constants:
                    item.put_back()  # the first compiled call writes the new value
        except BaseException:
            _undo(reach.state, watch)
            raise
        return result

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that the function reaches, each once, with a name. The target's own modules come first."""
        named: dict[int, tuple[str, nn.Module]] = {}
        for name, top in [("self", self._callable), *self._reach_once().objects]:
            for path, module in top.named_modules() if isinstance(top, nn.Module) else ():
                named.setdefault(id(module), (f"{name}.{path}" if path else name, module))
        return list(named.values())

    def _traceable_modules(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that the function reaches, with names; raise if one of them cannot be traced."""
        modules = self._modules()
        refuse_backward_hooks(modules)
        for path, module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise Untraceable(f"`{path}` is a ScriptModule, which has no Python code to trace")
            # The hooks of a module that FSDP2 has sharded communicate, but not its `forward`.
            is_forward = internals.is_sharded(module) and self._callable == MethodType(type(module).forward, module)
            if internals.talks_to_processes(module) and not is_forward:
                raise RunEagerly("module-talks-to-processes", name=path, kind=type(module).__name__)
        return modules

    def _run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with ``lifted`` in the slots. Raise if it assigns another tensor to one of the slots.

        If the function changes numbers in slots, the result is a pair of its result and the list of the new numbers.
        """
        modules, numbers = self._modules(), []
        self._changed = []
        with tensors_replaced(modules, self._slots, lifted):
            with modules_named(modules):
                result = self._callable(*args, **kwargs)
            for slot, tensor in zip(self._slots, lifted, strict=True):
                if (now := slot.place.read()) is tensor:
                    continue
                if _may_change(tensor, now):
                    self._changed.append(slot.place)
                    numbers.append(now)
                else:
                    instead = f"write it in place (`copy_`), return the value, or {BY_DYNAMO}"
                    raise _leak("the function assigns to `{}`", slot.name, self._reach_once().state, instead)
        return (result, numbers) if numbers else result

    def after_call(self) -> Callable[[Any], Any] | None:
        """Return a function that writes the changed values into their places, and returns the result of the call."""
        changed, constants = self._changed, self._constants
        self._times_changed.update([item.place.identity() for item, _ in constants])

        def write(returned: Any) -> Any:
            result, numbers = returned if changed else (returned, ())
            for place, number in zip(changed, numbers, strict=True):
                place.write(number)
            for item, value in constants:
                item.place.write(value)
            return result

        return write if changed or constants else None

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._callable(*args, **kwargs)

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        return names_of_arguments(self.function, args, kwargs)


class FunctionTarget(_DirectTarget):
    """A function to compile."""

    def __init__(self, function: Callable[..., Any]) -> None:
        qualified = str(getattr(function, "__qualname__", type(function).__qualname__))
        name = qualified.split(".")[-1] if isinstance(function, BuiltinFunctionType) else qualified
        super().__init__(function, function, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function,)

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionTarget:
        """Copy the object of a method and return a target for the copy. A plain function's target is not copied."""
        function = copy.deepcopy(self.function, memo)
        return self if function is self.function else type(self)(function)


def refuse_backward_hooks(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise `HooksError` if a module has backward hooks, which would run at trace time only."""
    for name, module in modules:
        if internals.has_backward_hooks(module):
            raise HooksError(
                f"module `{name or type(module).__qualname__}` has backward hooks",
                why="they would run only while the module is traced",
                suggestion="register hooks on parameters instead",
            )


#: If so many entries set the same value, it probably differs at each call, so the next entry is refused.
_MOST_CHANGES = 4
_WHY = "a compiled call would not repeat the change"
_IN_BACKWARD = "the function changes `{}`, and its backward may read or change it, too"


def _may_change(given: Any, now: Any) -> bool:
    """Tell whether a compiled call can change the number ``given`` in state to ``now``.

    It cannot if each call would need its own entry. A float 0.0 is not a symbol, but it probably differs next time.
    """
    is_start = type(given) is float and given == 0
    return is_number(now) and is_number(given) and (is_start or type(given) not in (int, float))


def _name_of_changed(reached: Sequence[Reached]) -> str | None:
    """Return the name of the first reached value that has changed, or None.

    Attributes of library modules are not compared, because a trace itself replaces some functions of libraries.
    """
    comparable = (item for item in reached if item.place.kind != "attributes")
    return next((item.present_name() for item in comparable if not item.holds()), None)


def _leak(text: str, name: str, reached: Sequence[Reached], suggestion: str, why: str = _WHY) -> LeakedTensorError:
    """Return the error that the function changes the object called ``name``, with the line that probably changes it.

    The line is searched in the code objects among the values ``reached``. ``text`` is the message, with ``{}`` in place
    of the name. ``suggestion`` and ``why`` are the further parts of the message.
    """
    line = line_that_changes(codes_in(reached), name)
    return LeakedTensorError(text.format(name), why=why, suggestion=suggestion, line=line)


def _undo(reached: Sequence[Reached], watch: Watch) -> None:
    """Undo the changes that a refused trace made to Python objects. If the call then runs eagerly, it makes them again.

    The changed objects are values in ``reached``, or objects whose former contents ``watch`` has recorded.
    """
    for item in reached:
        if item.place.kind != "attributes" and not item.holds():
            item.put_back()
    watch.restore()


def _forget_caches(attributes: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Restore private attributes in which torch's own modules cache their tensors, as an LSTM caches its weights.

    ``attributes`` are pairs of a module and a copy of its ``__dict__`` from before the trace.
    """
    for module, was in attributes:
        if type(module).__module__.startswith("torch."):
            changed = [k for k, v in module.__dict__.items() if k.startswith("_") and v is not was.get(k)]
            module.__dict__.update({key: was[key] for key in changed if key in was})


@contextmanager
def _held(
    modules: Sequence[tuple[str, nn.Module]],
    slots: Sequence[Slot],
    lifted: Sequence[Any],
    changed: Sequence[Place],
    reached: Sequence[Reached],
) -> Iterator[None]:
    """Like `tensors_replaced`, but raise if a number in a slot is in ``changed``, or if it changes in the context."""
    with tensors_replaced(modules, slots, lifted):
        yield
        for slot, given in zip(slots, lifted, strict=True):
            if is_number(given) and (slot.place.read() is not given or slot.place in changed):
                raise _leak(_IN_BACKWARD, slot.name, reached, f"return the new value, or {BY_DYNAMO}")


@contextmanager
def tensors_replaced(
    modules: Sequence[tuple[str, nn.Module]], slots: Sequence[Slot], lifted: Sequence[Tensor]
) -> Iterator[None]:
    """Store the tensors ``lifted`` in the slots while the context is open, and then the original tensors again.

    ``modules`` are pairs of a name and a module. Attributes in which torch's own modules among them cache tensors are
    restored, too.
    """
    tensors_before = [slot.place.read() for slot in slots]
    attributes = [(module, dict(module.__dict__)) for _, module in modules]
    try:
        for slot, tensor in zip(slots, lifted, strict=True):
            slot.place.write(tensor)
        yield
    finally:
        for slot, before in zip(slots, tensors_before, strict=True):
            slot.place.write(before)
        _forget_caches(attributes)


class ModuleTarget(_DirectTarget):
    """A module to compile. Its parameters and buffers become graph inputs, and are read again at each call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, module.forward, type(module).__qualname__)
        self.module = module
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"`{self.name}` is a ScriptModule, which has no Python code to trace; compile the module from which it "
                "was made"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleTarget, (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleTarget:
        return ModuleTarget(copy.deepcopy(self.module, memo))
