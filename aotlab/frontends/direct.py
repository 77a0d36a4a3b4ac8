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
from aotlab.errors import BY_DYNAMO, HooksError, LeakedTensorError, UsageError, UserLine
from aotlab.frontends.module_names import modules_named
from aotlab.guards.code import line_that_changes
from aotlab.guards.leaks import Watch
from aotlab.guards.reach import Reach, reach
from aotlab.guards.reached import Reached, codes_in, fast_check
from aotlab.guards.values import Mentioned
from aotlab.trace.tape import Untraceable


class _DirectTarget(Target):
    """A function or a module; what it reaches is looked up once for each compilation, by `reached`, asked first."""

    frontend = "direct"
    _found: Reach | None = None
    _watch: Watch | None = None

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
        return self._found.state

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
        changed = _changed(found.state)
        if changed is None:
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
            raise RunEagerly(found.unseen, suggestion=f"pass the value as an argument, or {BY_DYNAMO}")
        attributes = [(module, dict(module.__dict__)) for _, module in own]
        self._watch = watch = Watch([*own, *found.objects])
        try:
            result = self._run(lifted, args, kwargs)
            leak = watch.leaked()
            if leak is not None:
                why = f"{_WHY}, and the one there belongs to the trace"
                text = "the function leaves a tensor behind in `{}`"
                raise _leak(text, leak, found.state, f"return it, or {BY_DYNAMO}", why)
            changed = _changed(found.state)
            if changed is not None:
                text = "the function changes `{}`"
                raise _leak(text, changed, found.state, f"return the new value, or {BY_DYNAMO}")
            for module, was in attributes:
                for key, value in module.__dict__.items():
                    if value is not was.get(key) and not key.startswith("_"):
                        raise _assigned(key, found.state)
        except BaseException:
            _undo(found.state, watch)
            raise
        return result

    def _traceable_modules(self) -> list[tuple[str, nn.Module]]:
        """Refuse modules that cannot be traced; return those that are the target's own, named."""
        raise NotImplementedError

    def _run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

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

    def _reached_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._known().objects:
            if isinstance(module, nn.Module):
                yield from ((f"{name}.{path}" if path else name, child) for path, child in module.named_modules())

    def _traceable_modules(self) -> list[tuple[str, nn.Module]]:
        refuse_backward_hooks(self._reached_modules())
        return []

    def _run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with modules_named(self._reached_modules()):
            return self.function(*args, **kwargs)


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


def _assigned(name: str, reached: Sequence[Reached]) -> LeakedTensorError:
    instead = f"write buffers in place (`self.buffer.copy_(…)`), return the value, or {BY_DYNAMO}"
    return _leak("the module assigns to its `{}`", name, reached, instead)


def _forget_caches(attributes: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Take back what torch's own modules keep of their tensors, as an LSTM its list of weights."""
    for module, was in attributes:
        if type(module).__module__.startswith("torch."):
            changed = [k for k, v in module.__dict__.items() if k.startswith("_") and v is not was.get(k)]
            module.__dict__.update({key: was[key] for key in changed if key in was})


@contextmanager
def _held(
    modules: Sequence[tuple[str, nn.Module]],
    slots: Sequence[tuple[dict[str, Tensor | None], str]],
    lifted: Sequence[Tensor],
) -> Iterator[None]:
    """Let modules hold other tensors in the places of their own."""
    own = [held.get(key) for held, key in slots]
    attributes = [(module, dict(module.__dict__)) for _, module in modules]
    try:
        for (held, key), tensor in zip(slots, lifted, strict=True):
            held[key] = tensor
        yield
    finally:
        for (held, key), before in zip(slots, own, strict=True):
            held[key] = before
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
        self._find()
        for (name, _), tensor in zip(self._names, self.lifted(), strict=True):
            if isinstance(tensor, internals.FakeTensor):
                raise UsageError(f"`{name}` is a fake tensor; give aot_module a module with real parameters")

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleTarget, (self.module,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleTarget:
        return ModuleTarget(copy.deepcopy(self.module, memo))

    def _find(self) -> None:
        self._slots: list[tuple[dict[str, Tensor | None], str]] = []
        self._names: list[tuple[str, ArgumentKind]] = []
        self._modules = list(self.module.named_modules())
        kinds: tuple[ArgumentKind, ...] = ("parameter", "buffer")
        for kind, held_by in zip(kinds, (internals.parameters_held, internals.buffers_held), strict=True):
            for path, module in self._modules:
                held = held_by(module)
                there = [key for key, tensor in held.items() if tensor is not None]
                self._slots += [(held, key) for key in there]
                self._names += [(f"{path}.{key}" if path else key, kind) for key in there]

    def lifted(self) -> Sequence[Tensor]:
        """Read the parameters and buffers."""
        return self.lifter()()

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads them from where they are kept now."""
        slots = self._slots
        return lambda: [held[key] for held, key in slots]  # type: ignore[misc]  # `_find` took those that are not None

    def holder(self, lifted: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
        """Return what lets the module as it is now hold ``lifted`` once more."""
        return partial(_held, self._modules, self._slots, lifted)

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Name them by their path in the module."""
        return self._names

    def reached(self) -> tuple[Reached, ...]:
        """Return the ``training`` flags, and what the ``forward`` functions of the user's classes may read."""
        self._find()  # a new entry may see another module tree
        return super().reached()

    def _traceable_modules(self) -> list[tuple[str, nn.Module]]:
        refuse_backward_hooks(self._modules)
        for path, module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise Untraceable(f"`{path}` is a ScriptModule, whose code and parameters are not Python's")
        return [(path or "self", module) for path, module in self._modules]

    def _run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module while it holds ``lifted``; refuse it if it did not keep them."""
        with _held(self._modules, self._slots, lifted):
            with modules_named((f"self.{path}" if path else "self", module) for path, module in self._modules):
                result = self.module(*args, **kwargs)
            for (held, key), (name, _), tensor in zip(self._slots, self._names, lifted, strict=True):
                if held.get(key) is not tensor:
                    raise _assigned(name, self._known().state)
        return result
