"""The direct frontend: trace the call itself.

It sees what the call does, not what Python does around it. What else the function can read is guarded, as found by
`aotlab.guards.reach`; if the function changes any of that it is refused, and the change taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.capture.call import ArgumentKind, Target, names_of_arguments
from aotlab.capture.signals import RunEagerly
from aotlab.errors import BY_DYNAMO, TAKE_DYNAMO, HooksError, LeakedTensorError, UsageError, UserLine
from aotlab.frontends.module_names import modules_named
from aotlab.guards.code import line_that_changes
from aotlab.guards.leaks import Watch
from aotlab.guards.reach import Reach, reach
from aotlab.guards.reached import Reached, Slot, codes_in, fast_check, reader
from aotlab.guards.values import Mentioned
from aotlab.trace.tape import Untraceable


class _DirectTarget(Target):
    """A function or a module; what it reaches is looked up once for each compilation, by `reached`, asked first."""

    frontend = "direct"
    _found: Reach | None = None
    _watch: Watch | None = None
    _slots: tuple[Slot, ...] = ()

    def __init__(self, called: Callable[..., Any], function: Callable[..., Any], name: str) -> None:
        self._called = called
        self.function = function
        self.name = name
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        self.line = None
        if code is not None:
            self.line = UserLine(file=code.co_filename, line=code.co_firstlineno, function=code.co_qualname)

    def reached(self) -> tuple[Reached, ...]:
        """Return closures, defaults, globals, and the modules with their flags, that the function may read."""
        self._found, self._watch = reach(self._called), None
        self._slots = self._found.slots
        return self._found.state

    def lifted(self) -> Sequence[Tensor]:
        """Read the parameters, buffers and other tensors that it reaches."""
        return self.lifter()() if self._slots else []

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads them from where they are kept now."""
        return reader(self._slots)

    def holder(self, lifted: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
        """Return what puts ``lifted`` once more where those tensors are now."""
        return partial(_held, self._modules(), self._slots, lifted)

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Name them by their places."""
        return [(slot.name, slot.kind) for slot in self._slots]

    def _known(self) -> Reach:
        self._found = reach(self._called) if self._found is None else self._found
        return self._found

    def mentioned(self) -> Mentioned:
        return self._known().mentioned

    def objects(self) -> list[Any]:
        return [] if self._watch is None else list(self._watch.objects.values())

    def still_same(self) -> Callable[[], bool] | None:
        """Write the check of what was found, for the entry; raise if the backward, run for the trace, changed it."""
        found, watch = self._known(), self._watch
        self._found = self._watch = None
        if (changed := _changed(found.state)) is None:
            return fast_check(found.state)
        if watch is not None:
            _undo(found.state, watch)
        text, why = "the backward of a function changes `{}`", "a compiled backward would not"
        raise _leak(text, changed, found.state, "return the new value from the forward", why)

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it with ``lifted`` in their places; refuse it if it changes what others can see."""
        found = self._known()
        own = self._traceable_modules()
        if found.unseen is not None:
            raise RunEagerly(found.unseen, suggestion=f"pass the value as an argument, or {TAKE_DYNAMO}")
        self._watch = watch = Watch([*own, *found.objects])
        try:
            result = self._run(lifted, args, kwargs)
            if (leak := watch.leaked()) is not None:
                why = f"{_WHY}, and the one there belongs to the trace"
                text = "the function leaves a tensor behind in `{}`"
                raise _leak(text, leak, found.state, f"return it, or {BY_DYNAMO}", why)
            if (changed := _changed(found.state)) is not None:
                raise _leak("the function changes `{}`", changed, found.state, f"return the new value, or {BY_DYNAMO}")
        except BaseException:
            _undo(found.state, watch)
            raise
        return result

    def _modules(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that it reaches, each once, named; its own come first, by their path."""
        named: dict[int, tuple[str, nn.Module]] = {}
        for name, top in [("self", self._called), *self._known().objects]:
            for path, module in top.named_modules() if isinstance(top, nn.Module) else ():
                named.setdefault(id(module), (f"{name}.{path}" if path else name, module))
        return list(named.values())

    def _traceable_modules(self) -> list[tuple[str, nn.Module]]:
        """Refuse modules that cannot be traced; return those that are the target's own, named."""
        modules = self._modules()
        refuse_backward_hooks(modules)
        for path, module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise Untraceable(f"`{path}` is a ScriptModule, whose code and parameters are not Python's")
        return modules

    def _run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function while ``lifted`` are in their places; refuse it if they did not stay there."""
        modules = self._modules()
        with _held(modules, self._slots, lifted):
            with modules_named(modules):
                result = self._called(*args, **kwargs)
            for slot, tensor in zip(self._slots, lifted, strict=True):
                if slot.place.read() is not tensor:
                    instead = f"write it in place (`copy_`), return the value, or {BY_DYNAMO}"
                    raise _leak("the function assigns to `{}`", slot.name, self._known().state, instead)
        return result

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._called(*args, **kwargs)

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        return names_of_arguments(self.function, args, kwargs)


class FunctionTarget(_DirectTarget):
    """A plain function; its first ``num_params_buffers`` flat arguments may be parameters and buffers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        qualified = str(getattr(function, "__qualname__", type(function).__qualname__))
        name = qualified.split(".")[-1] if isinstance(function, BuiltinFunctionType) else qualified
        super().__init__(function, function, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function,)

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionTarget:
        """Copy what the function is a method of, if it is one; a function is its own copy."""
        function = copy.deepcopy(self.function, memo)
        return self if function is self.function else type(self)(function)


def refuse_backward_hooks(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules whose backward hooks would run at trace time and never again."""
    for name, module in modules:
        if internals.has_backward_hooks(module):
            raise HooksError(
                f"module `{name or type(module).__qualname__}` has hooks on its backward",
                why="they would run at trace time only",
                suggestion="register hooks on parameters instead",
            )


_WHY = "a compiled call would not"


def _changed(reached: Sequence[Reached]) -> str | None:
    """Return the name of the first thing that is not what it was, None if all is."""
    return next((item.present_name() for item in reached if not item.holds()), None)


def _leak(text: str, name: str, reached: Sequence[Reached], suggestion: str, why: str = _WHY) -> LeakedTensorError:
    """Make the error that says in which line ``name`` was changed; ``reached`` has the code, the function's first."""
    line = line_that_changes(codes_in(reached), name)
    return LeakedTensorError(text.format(name), why=why, suggestion=suggestion, line=line)


def _undo(reached: Sequence[Reached], watch: Watch) -> None:
    """Take back what a run that will not be compiled did to Python objects: eager is going to do it, or nobody is."""
    for item in reached:
        if not item.holds():
            item.put_back()
    watch.restore()


def _forget_caches(attributes: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Take back what torch's own modules keep of their tensors, as an LSTM its list of weights."""
    for module, was in attributes:
        if type(module).__module__.startswith("torch."):
            changed = [k for k, v in module.__dict__.items() if k.startswith("_") and v is not was.get(k)]
            module.__dict__.update({key: was[key] for key in changed if key in was})


@contextmanager
def _held(modules: Sequence[tuple[str, nn.Module]], slots: Sequence[Slot], lifted: Sequence[Tensor]) -> Iterator[None]:
    """Let slots hold other tensors than their own."""
    own = [slot.place.read() for slot in slots]
    attributes = [(module, dict(module.__dict__)) for _, module in modules]
    try:
        for slot, tensor in zip(slots, lifted, strict=True):
            slot.place.write(tensor)
        yield
    finally:
        for slot, before in zip(slots, own, strict=True):
            slot.place.write(before)
        _forget_caches(attributes)


class ModuleTarget(_DirectTarget):
    """A module; its parameters and buffers become inputs, read anew at each call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, module.forward, type(module).__qualname__)
        self.module = module
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"`{self.name}` is a ScriptModule, whose code and parameters are not Python's; compile the module that "
                "it was made from"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleTarget, (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleTarget:
        return ModuleTarget(copy.deepcopy(self.module, memo))
