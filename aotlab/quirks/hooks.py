"""Hooks that the traced program registers on its tensors.

    def f(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return y.exp()

While tracing a hook is only noted, with its place in the autograd graph; each compiled call registers the same one on
the caller's tensor, or on one that stands for the intermediate. A hook that holds what the call made, a tensor or a
list to which it appends, runs eagerly, as each call would have its own.
"""

from __future__ import annotations

import dis
import enum
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.places import user_line
from aotlab.trace.edges import edge_of, edges_behind
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.function import Findings
from aotlab.trace.inputs import Entered
from aotlab.trace.outputs import Outputs
from aotlab.trace.quirk import Handler, Quirk
from aotlab.trace.records import Hook
from aotlab.trace.sources import ways_back

#: What a call may make anew for a hook to hold: it is never changed.
_FIXED = (
    bool, int, float, complex, str, bytes, range, slice, enum.Enum, type(None), type, types.ModuleType, torch.dtype,
    torch.device, torch.layout,
)  # fmt: skip
_FROM_OUTSIDE = "let hooks hold only what is made outside of the function, or register them there, to have it compiled"


class Hooks(Quirk):
    """Notes the hooks in the table of the guard, from which each compiled call registers them."""

    name = "hooks"

    def __init__(self) -> None:
        self._outside: dict[Hook, _Outside] = {}

    def claims(self) -> Mapping[Any, Handler]:
        return {Tensor.register_hook: self._register}

    def check(self, findings: Findings) -> None:
        outside, self._outside = self._outside, {}
        if not findings.hooks:
            return
        for hook in findings.hooks:
            state = _state_of_the_call(hook.function, outside[hook])
            if state is not None:
                raise RunEagerly(f"a hook {state}, registered at {hook.line}", suggestion=_FROM_OUTSIDE)
        _check_partners(findings.hooks, findings.outputs, findings.inputs)
        first = {hook.edge: hook for hook in reversed(findings.hooks)}
        for i, edge in ways_back(findings.outputs, findings.inputs):
            if edge in first:
                name = findings.outputs.infos[i].name
                raise RunEagerly(f"`{name}` is a view of a view with a hook, registered at {first[edge].line}")

    def _register(self, guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a hook for the run time; where eager has an error to raise, it does."""
        tensor: Tensor = args[0]
        if not tensor.requires_grad:
            return func(*args, **kwargs)
        view = internals.base_of(tensor) is not None
        if view and tensor.grad_fn is None:
            raise RunEagerly(f"a hook on a view made under no_grad, at {user_line()}")
        with torch.inference_mode(False):  # torch looks at a leaf through a view, which has no history in that mode
            edge = get_gradient_edge(tensor)
        if view and any(hook.edge != (edge.node, edge.output_nr) for hook in guard.hooks_of(tensor)):
            # before torch 2.15 such a hook stays with the older ones, unless the view itself was written
            raise RunEagerly(f"a view gets another hook after a write, at {user_line()}")
        function = args[1] if len(args) > 1 else kwargs["hook"]
        handle = RemovableHandle(guard.hooks)
        hook = guard.hooks[handle.id] = Hook((edge.node, edge.output_nr), tensor, function, user_line())
        self._outside[hook] = _Outside()
        return handle


def _check_partners(hooks: Sequence[Hook], outputs: Outputs, inputs: Sequence[Entered]) -> None:
    """Leave to eager hooks on one of several results of a node: it calls them with None for gradients of the others."""
    ends = [*outputs.tensors.values(), *(item.wrapper for item in inputs)]
    passed = edges_behind([edge_of(tensor) for tensor in ends if tensor.grad_fn is not None])
    for hook in hooks:
        if any(edge[0] is hook.edge[0] and edge != hook.edge for edge in passed):
            raise RunEagerly(
                f"a hook on one of several results of a function may be called with None, registered at {hook.line}"
            )


class _Outside:
    """What outlives the call, as its running frames show: globals, outer variables, arguments, what these hold."""

    def __init__(self) -> None:
        frames = list(_running())
        self._is_graph = not frames  # one of Dynamo's, to which hooks belong as modules
        self.variables = {name for frame in frames for name in frame.f_code.co_freevars}
        known: list[Any] = []
        for frame in frames:
            known += [frame.f_locals[name] for name in frame.f_code.co_freevars if name in frame.f_locals]
            modules = [each for each in frame.f_locals.values() if isinstance(each, nn.Module)]
            known += [part for each in modules for part in each.modules()]
            known += frame.f_globals.values()
        if frames:
            code = frames[-1].f_code
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given = [frames[-1].f_locals[name] for name in arguments if name in frames[-1].f_locals]
            # of the containers among them, the trace has copies
            known += [each for each in given if not isinstance(each, list | dict | set)]
        owners = (each for each in known if not isinstance(each, type | types.ModuleType))
        attributes = [each for owner in owners for each in getattr(owner, "__dict__", {}).values()]
        self._known = {id(each): each for each in (*known, *attributes)}

    def has(self, value: Any) -> bool:
        return id(value) in self._known or (self._is_graph and isinstance(value, nn.Module))


def _state_of_the_call(hook: Any, outside: _Outside) -> str | None:
    """Say which variable, tensor, container or object that the call made anew a hook holds; None if none."""
    todo: list[tuple[str, Any]] = [("the hook", hook)]
    seen: set[int] = set()
    while todo:
        name, value = todo.pop()
        is_traced = isinstance(value, Tensor) and internals.is_functional(value)
        if id(value) in seen or isinstance(value, _FIXED) or (outside.has(value) and not is_traced):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and not vars(value):
            assigned = _assigned(value.__code__) - outside.variables
            if assigned:
                return f"assigns to `{min(assigned)}`, a variable of the call"
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            todo += [(free, _content(cell)) for free, cell in cells.items() if free not in outside.variables]
            todo += [(f"a default of `{value.__name__}`", each) for each in value.__defaults__ or ()]
            todo += (value.__kwdefaults__ or {}).items()
        elif isinstance(value, types.MethodType | types.BuiltinMethodType):
            todo.append((name, value.__self__))
        elif isinstance(value, partial):
            todo += [(name, each) for each in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, tuple | frozenset):
            todo += [(name, each) for each in value]
        else:
            return f"holds `{name}`, a `{type(value).__qualname__}` of the call"
    return None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is not bound any more
        return None


def _running() -> Iterator[types.FrameType]:
    """Go through the frames of the traced function and of what it called, innermost first; of no library."""
    package = __name__.partition(".")[0]
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_globals.get("__name__", "").split(".")
        if names[0] == package and names[1:2] not in (["trace"], ["quirks"]):
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
