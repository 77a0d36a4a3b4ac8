"""Hooks that the traced program registers on its tensors.

    def f(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return y.exp()

The trace only notes a hook and the autograd edge on which it is registered. Each compiled call registers the same hook
on the caller's tensor, or on a tensor that replaces the intermediate. If a hook holds an object that the call made (a
tensor, or a list to which it appends), the call runs eagerly, because each call would need its own object.
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
from aotlab.guards.user_code import user_line
from aotlab.trace.autograd_edges import edge_of, edges_behind
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.findings import Findings
from aotlab.trace.inputs import TracedInput
from aotlab.trace.output_aliases import Outputs
from aotlab.trace.quirk import Quirk
from aotlab.trace.records import Hook
from aotlab.trace.sources import edges_to_bases

#: Types of objects that a hook may hold even if the call made them: they never change.
_FIXED = (
    bool, int, float, complex, str, bytes, range, slice, enum.Enum, type(None), type, types.ModuleType, torch.dtype,
    torch.device, torch.layout,
)  # fmt: skip


class Hooks(Quirk):
    """Handles `Tensor.register_hook` in the trace: notes the hook in `EscapeGuard.hooks`.

    Each compiled call registers the noted hooks. After the trace, `check` refuses hooks that would behave differently
    in a compiled call.
    """

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
                raise RunEagerly("hook-holds-call-object", state=state, at=hook.line)
        _check_partners(findings.hooks, findings.outputs, findings.inputs)
        first = {hook.edge: hook for hook in reversed(findings.hooks)}
        for i, edge in edges_to_bases(findings.outputs, findings.inputs):
            if edge in first:
                name = findings.outputs.infos[i].name
                raise RunEagerly("view-of-hooked-view", name=f"`{name}`", at=first[edge].line)

    def _register(self, guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a hook for run time; a tensor that does not require grad gets eager's error."""
        tensor: Tensor = args[0]
        if not tensor.requires_grad:
            return func(*args, **kwargs)
        view = internals.base_of(tensor) is not None
        if view and tensor.grad_fn is None:
            raise RunEagerly("hook-on-no-grad-view", at=user_line())
        # For a leaf, `get_gradient_edge` reads the `grad_fn` of a view of the leaf. In inference mode, this `grad_fn`
        # is None, so inference mode is left.
        with torch.inference_mode(False):
            edge = get_gradient_edge(tensor)
        if view and any(hook.edge != (edge.node, edge.output_nr) for hook in guard.hooks_of(tensor)):
            # Before torch 2.15, eager adds such a hook to the node of the older hooks, unless the view itself was
            # written. So the hook is refused.
            raise RunEagerly("another-hook-on-written-view", at=user_line())
        function = args[1] if len(args) > 1 else kwargs["hook"]
        handle = RemovableHandle(guard.hooks)
        hook = guard.hooks[handle.id] = Hook((edge.node, edge.output_nr), tensor, function, user_line())
        self._outside[hook] = _Outside()
        return handle


def _check_partners(hooks: Sequence[Hook], outputs: Outputs, inputs: Sequence[TracedInput]) -> None:
    """Refuse a hook on one of several results of an autograd node.

    In eager, if only another result of the node gets a gradient, autograd calls the hook with None.
    """
    ends = [*outputs.tensors.values(), *(item.traced for item in inputs)]
    passed = edges_behind([edge_of(tensor) for tensor in ends if tensor.grad_fn is not None])
    for hook in hooks:
        if any(edge[0] is hook.edge[0] and edge != hook.edge for edge in passed):
            raise RunEagerly("hook-may-get-none", at=hook.line)


class _Outside:
    """The objects that exist outside of the present call. If a hook holds only these objects, each call can use it.

    They are the globals and the outer variables of the running user functions, the modules in their variables, the
    arguments of the outermost function, and the attributes of all these objects. ``variables`` are the names of the
    outer variables.
    """

    def __init__(self) -> None:
        frames = list(_running())
        self._is_graph = not frames  # no user frame: the function is Dynamo's graph, whose hooks are submodules
        self.variables = {name for frame in frames for name in frame.f_code.co_freevars}
        objects: list[Any] = []
        for frame in frames:
            objects += [frame.f_locals[name] for name in frame.f_code.co_freevars if name in frame.f_locals]
            modules = [each for each in frame.f_locals.values() if isinstance(each, nn.Module)]
            objects += [part for each in modules for part in each.modules()]
            objects += frame.f_globals.values()
        if frames:
            code = frames[-1].f_code
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            argument_values = [frames[-1].f_locals[name] for name in arguments if name in frames[-1].f_locals]
            # the trace works on copies of container arguments, so these belong to the call
            objects += [each for each in argument_values if not isinstance(each, list | dict | set)]
        owners = (each for each in objects if not isinstance(each, type | types.ModuleType))
        attributes = [each for owner in owners for each in getattr(owner, "__dict__", {}).values()]
        self._objects = {id(each): each for each in (*objects, *attributes)}

    def has(self, value: Any) -> bool:
        return id(value) in self._objects or (self._is_graph and isinstance(value, nn.Module))


def _state_of_the_call(hook: Any, outside: _Outside) -> str | None:
    """Return a text about an object or variable of the present call that the hook holds or assigns to.

    The result is None if there is no such object. Then each compiled call can use the same hook.
    """
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
    except ValueError:  # the cell is empty: its variable is deleted or not assigned yet
        return None


def _running() -> Iterator[types.FrameType]:
    """Yield the frames of the traced function and of its callees, innermost first; skip frames of torch and aotlab."""
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
    """Return the variables of outer functions that this code, or code nested in it, assigns to or deletes."""
    names = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
    }
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _assigned(const) & set(code.co_freevars)
    return names
