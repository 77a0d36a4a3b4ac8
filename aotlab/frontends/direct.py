"""The direct frontend: trace the call itself.

It sees what the call does, not what Python does around it. Besides the arguments, the closures, defaults and globals
of the function and the ``training`` flags of modules are guarded; what other objects hold is a documented exclusion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import torch_internals as internals
from aotlab.errors import HooksError, LeakedTensorError, UsageError, UserLine
from aotlab.leaks import Watch
from aotlab.reached import Reached, fast_check, reached_objects, reached_state
from aotlab.recorder import Untraceable
from aotlab.stages.capture import ArgumentKind, names_of_arguments


def line_of_function(function: Any) -> UserLine | None:
    """Return where a function is defined, None if it has no Python code."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return None
    return UserLine(file=code.co_filename, line=code.co_firstlineno, function=code.co_qualname)


class FunctionTarget:
    """A plain function; its first ``num_params_buffers`` flat arguments may be parameters and buffers."""

    frontend = "direct"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        qualified = str(getattr(function, "__qualname__", type(function).__qualname__))
        self.name = qualified.split(".")[-1] if isinstance(function, BuiltinFunctionType) else qualified
        self.line = line_of_function(function)

    def lifted(self) -> Sequence[Tensor]:
        """Lift nothing."""
        return ()

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Lift nothing."""
        return tuple

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Lift nothing."""
        return ()

    def reached(self) -> tuple[Reached, ...]:
        """Return closures, defaults, globals and flags that the function may read."""
        return reached_state(self.function)

    def still_same(self) -> Callable[[], bool] | None:
        """Return a check that they are what they are now."""
        return fast_check(self.reached())

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, and refuse one that changes what others can see."""
        before = self.reached()
        modules = [(name, value) for name, value in reached_objects(self.function) if isinstance(value, nn.Module)]
        refuse_backward_hooks([(name, child) for name, module in modules for child in module.modules()])
        watch = Watch(reached_objects(self.function))
        try:
            result = self.function(*args, **kwargs)
        except BaseException:  # eager may run next and must find everything as it was
            watch.restore()
            for item in before:
                if not item.holds():
                    item.put_back()
            raise
        leak = watch.leaked()
        if leak is not None:
            watch.restore()
            raise _leak(leak)
        for item in before:
            if not item.holds():
                item.put_back()
                raise LeakedTensorError(
                    f"the function changes `{item.name}`",
                    why="a compiled call would not",
                    suggestion="return the new value",
                )
        return result

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Name arguments by the function's parameters."""
        return names_of_arguments(self.function, args, kwargs)


def refuse_backward_hooks(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse modules whose backward hooks would run at trace time and never again.

    Raises
    ------
    HooksError
        With the module's name.
    """
    for name, module in modules:
        if internals.has_backward_hooks(module):
            raise HooksError(
                f"module `{name or type(module).__qualname__}` has hooks on its backward",
                why="they would run at trace time only",
                suggestion="register hooks on parameters instead",
            )


def _leak(place: str) -> LeakedTensorError:
    return LeakedTensorError(
        f"the function leaves a tensor behind in `{place}`",
        why="a compiled call would not, and the one there belongs to the trace",
        suggestion="return it",
    )


class ModuleTarget:
    """A module; its parameters and buffers become inputs, read anew at each call."""

    frontend = "direct"

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.function = module.forward
        self.name = type(module).__qualname__
        self.line = line_of_function(module.forward)
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"`{self.name}` is a ScriptModule, whose code and parameters are not Python's; compile the module that "
                "it was made from"
            )
        self._find()
        for (name, _), tensor in zip(self._names, self.lifted(), strict=True):
            if isinstance(tensor, internals.FakeTensor):
                raise UsageError(f"`{name}` is a fake tensor; give aot_module a module with real parameters")

    def _find(self) -> None:
        """List where the parameters and buffers are kept."""
        self._slots: list[tuple[dict[str, Tensor | None], str]] = []
        self._names: list[tuple[str, ArgumentKind]] = []
        self._links: list[tuple[dict[str, Any], str, nn.Module]] = []
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._modules = list(self.module.named_modules(remove_duplicate=True))
        holders: tuple[tuple[Callable[[nn.Module], dict[str, Tensor | None]], ArgumentKind], ...] = (
            (internals.parameters_held, "parameter"),
            (internals.buffers_held, "buffer"),
        )
        for holder, kind in holders:
            for path, module in self._modules:
                held = holder(module)
                self._sizes.append((held, sum(v is not None for v in held.values())))
                for key, tensor in held.items():
                    if tensor is not None:
                        self._slots.append((held, key))
                        self._names.append((f"{path}.{key}" if path else key, kind))
        for _, module in self._modules:
            children = internals.children_held(module)
            self._sizes.append((children, sum(v is not None for v in children.values())))
            self._links += [(children, key, child) for key, child in children.items() if child is not None]

    def lifted(self) -> Sequence[Tensor]:
        """Read the parameters and buffers."""
        return self.lifter()()

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads them from where they are kept now."""
        slots = self._slots
        return lambda: [held[key] for held, key in slots]  # type: ignore[misc]  # `_find` took those that are not None

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Name them by their path in the module."""
        return self._names

    def reached(self) -> tuple[Reached, ...]:
        """Return the ``training`` flags, and what the ``forward`` functions of the user's classes may read."""
        self._find()  # a new entry may see another module tree
        return reached_state(self.module)

    def still_same(self) -> Callable[[], bool] | None:
        """Return a check of the module tree, of where tensors hang in it, and of the ``training`` flags."""
        links, sizes = self._links, self._sizes
        state = [item for item in reached_state(self.module) if item.name.rpartition(".")[2] != "training"]
        state_holds = fast_check(state)
        flags = [(module, module.training) for _, module in self._modules]
        forwards = [(vars(module), vars(module).get("forward")) for _, module in self._modules]
        hooks = [internals.hooks_held(module) for module, _ in flags]
        hooked = [(held, list(held.values())) for pair in hooks for held in pair]

        def check() -> bool:
            for held, key, child in links:
                if held.get(key) is not child:
                    return False
            for held, count in sizes:
                if len(held) != count and sum(v is not None for v in held.values()) != count:
                    return False
            for module, training in flags:
                if module.training is not training:
                    return False
            for attributes, forward in forwards:
                if attributes.get("forward") is not forward:
                    return False
            if state_holds is not None and not state_holds():
                return False
            return all(list(held.values()) == had if held else not had for held, had in hooked)

        return check

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module with other tensors in the places of its own, and look whether it kept any of them."""
        refuse_backward_hooks(self._modules)
        for path, module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise Untraceable(f"`{path}` is a ScriptModule, whose code and parameters are not Python's")
        before = [held[key] for held, key in self._slots]
        attributes = [(module, dict(module.__dict__)) for _, module in self._modules]
        watch = Watch([(path or "self", module) for path, module in self._modules])
        try:
            for (held, key), tensor in zip(self._slots, lifted, strict=True):
                held[key] = tensor
            result = self.module(*args, **kwargs)
            replaced = [
                name
                for (held, key), (name, _), tensor in zip(self._slots, self._names, lifted, strict=True)
                if held.get(key) is not tensor
            ]
        except BaseException:
            self._put_back(before)
            watch.restore()
            raise
        self._put_back(before)
        for module, was in attributes:  # torch's own modules keep caches, as an LSTM its list of weights
            if type(module).__module__.startswith("torch."):
                changed = [k for k, v in module.__dict__.items() if k.startswith("_") and v is not was.get(k)]
                module.__dict__.update({key: was[key] for key in changed if key in was})
        leak = watch.leaked()
        if leak is not None:
            watch.restore()
            raise _leak(leak)
        for module, was in attributes:
            for key, value in list(module.__dict__.items()):
                if value is not was.get(key) and not key.startswith("_"):
                    replaced.append(key)
                    if key in was:
                        module.__dict__[key] = was[key]
                    else:
                        del module.__dict__[key]
        if replaced:
            raise LeakedTensorError(
                f"the module assigns to its `{replaced[0]}`",
                why="a compiled call would not",
                suggestion="write buffers in place (`self.buffer.copy_(…)`), or return the value",
            )
        return result

    def _put_back(self, own: Sequence[Any]) -> None:
        for (held, key), tensor in zip(self._slots, own, strict=True):
            held[key] = tensor

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Name arguments by the parameters of ``forward``."""
        return names_of_arguments(self.module.forward, args, kwargs)
