"""Hooks that the traced program registers on its tensors.

    def f(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return y.exp()

A hook is Python that runs in each backward. While tracing it is only noted, with the place of the autograd graph where
it hangs; each compiled call registers the same hook on the caller's tensor, or on one that stands for the intermediate.
In eager each call makes a hook of its own. So a hook that holds what the call made, as one of its tensors or a list to
which it appends, runs eagerly; what is outside of the call is shared by all calls, in eager as here.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import UserLine
from aotlab.trace.places import user_line

HookKind = Literal["hook", "retain_grad", "post_accumulate"]

#: What a call may make anew for a hook to hold: it is never changed.
_FIXED = (
    bool, int, float, complex, str, bytes, range, slice, enum.Enum, type(None), type, types.ModuleType, torch.dtype,
    torch.device, torch.layout, Tensor, nn.Module,
)  # fmt: skip
#: What is no more changeable than its parts.
_MADE_OF_PARTS = (
    types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial, tuple, frozenset,
)  # fmt: skip
_FROM_OUTSIDE = "let hooks hold only what is made outside of the function, or register them there, to have it compiled"
#: So many containers, closures and objects deep a traced tensor is looked for.
_DEPTH = 5


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A hook: where in the autograd graph it hangs (a node and the number of its output), on which traced tensor."""

    kind: HookKind
    edge: tuple[Any, int]
    tensor: Tensor
    function: Callable[..., Any] | None
    line: UserLine | None


def _edge_of(tensor: Tensor) -> GradientEdge:
    with torch.inference_mode(False):  # torch looks at a leaf through a view, which has no history in inference mode
        return get_gradient_edge(tensor)


class Hooks:
    """The hooks of one trace, in the order of their registration."""

    def __init__(self) -> None:
        self._table: OrderedDict[int, Hook] = OrderedDict()

    @property
    def all(self) -> tuple[Hook, ...]:
        """Those that were not removed again."""
        return tuple(self._table.values())

    def retains(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` was asked to retain its gradient."""
        return any(hook.kind == "retain_grad" and hook.tensor is tensor for hook in self.all)

    def has(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has a hook, of whatever history."""
        return any(hook.tensor is tensor for hook in self.all)

    def has_older(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has hooks on a history that it had before a write."""
        edge = _edge_of(tensor)
        older = (hook for hook in self.all if hook.tensor is tensor and hook.kind == "hook")
        return any(hook.edge != (edge.node, edge.output_nr) for hook in older)

    def add(self, kind: HookKind, tensor: Tensor, function: Callable[..., Any] | None = None) -> RemovableHandle:
        """Note a hook and return its handle.

        Raises
        ------
        RunEagerly
            The hook keeps state that each call makes anew.
        """
        line = user_line()
        state = None if function is None else _state_of_the_call(function)
        if state is not None:
            raise RunEagerly(f"a hook {state}, registered at {line}", suggestion=_FROM_OUTSIDE)
        edge = _edge_of(tensor)
        handle = RemovableHandle(self._table)
        self._table[handle.id] = Hook(kind, (edge.node, edge.output_nr), tensor, function, line)
        return handle

    def check(self) -> None:
        """Leave to eager hooks that hold a tensor of the call; to be called when the function has returned.

        Raises
        ------
        RunEagerly
            One does, wherever Python lets us look.
        """
        for hook in self.all:
            if _holds_traced(hook.function, _DEPTH):
                raise RunEagerly(
                    f"a hook holds a tensor of the call, registered at {hook.line}", suggestion=_FROM_OUTSIDE
                )


def _state_of_the_call(hook: Any) -> str | None:
    """Say which variable, container or object that the call made anew a hook holds; None if none."""
    frames = list(_running())
    outer = {name for frame in frames for name in frame.f_code.co_freevars}
    todo: list[tuple[str, Any]] = [("the hook", hook)]
    seen: set[int] = set()
    while todo and frames:
        name, value = todo.pop()
        if id(value) in seen or isinstance(value, _FIXED) or _is_outside(value, frames):
            continue
        seen.add(id(value))
        assigned = _assigned(value.__code__) - outer if isinstance(value, types.FunctionType) else ()
        if assigned:
            return f"assigns to `{min(assigned)}`, a variable of the call"
        if not isinstance(value, _MADE_OF_PARTS) or (isinstance(value, types.FunctionType) and vars(value)):
            return f"holds `{name}`, a `{type(value).__qualname__}` of the call"
        todo += [(free, each) for free, each in _parts(name, value) if free not in outer]
    return None


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """List what a function, a method, a partial or a container holds, by names."""
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        found = [(free, cell.cell_contents) for free, cell in cells if _is_filled(cell)]
        found += [(f"a default of `{value.__name__}`", each) for each in value.__defaults__ or ()]
        return found + list((value.__kwdefaults__ or {}).items())
    inner: Sequence[Any] = ()
    if isinstance(value, types.MethodType | types.BuiltinMethodType):
        inner = (value.__self__,)
    elif isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, tuple | list | set | frozenset | deque):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    return [(name, each) for each in inner]


def _running() -> Iterator[types.FrameType]:
    """Go through the frames of the traced function and of what it called, innermost first; no library's are among them.

    The recorder's own stand between; what else of aotlab is met called the function.
    """
    package, room = __name__.split(".")[:2]
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_globals.get("__name__", "").split(".")
        if names[0] == package and names[1:2] != [room]:
            return
        if names[0] not in (package, "torch"):
            yield frame
        frame = frame.f_back


def _assigned(code: types.CodeType) -> set[str]:
    """Return the variables of outer functions that the code, or code in it, assigns to or deletes."""
    found = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
    }
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _assigned(const) & set(code.co_freevars)
    return found


def _is_outside(value: Any, frames: Sequence[types.FrameType]) -> bool:
    """Tell whether what outlives the call holds ``value``: a global, an outer variable, an argument, one of these."""
    code = frames[-1].f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = [frames[-1].f_locals[name] for name in arguments if name in frames[-1].f_locals]
    known = [each for each in known if not isinstance(each, list | dict | set)]  # a call is traced with copies of these
    for frame in frames:
        known += [frame.f_locals[name] for name in frame.f_code.co_freevars if name in frame.f_locals]
        known += [each for each in frame.f_locals.values() if isinstance(each, nn.Module)]
        known += frame.f_globals.values()
    attributes = (each for owner in known if _has_vars(owner) for each in vars(owner).values())
    return any(value is each for each in known) or any(value is each for each in attributes)


def _holds_traced(value: Any, depth: int) -> bool:
    """Look for a traced tensor wherever Python lets us look, to the given depth."""
    if isinstance(value, Tensor):
        return internals.is_functional(value)
    if not depth:
        return False
    inner = [each for _, each in _parts("", value)]
    inner += vars(value).values() if _has_vars(value) else []
    return any(_holds_traced(each, depth - 1) for each in inner)


def _has_vars(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if the name is not bound yet
    except ValueError:
        return False
    return True
