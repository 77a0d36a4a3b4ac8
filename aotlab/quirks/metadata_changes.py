"""In-place changes of a tensor's metadata or history.

    y = x * 2
    y.unsqueeze_(0)
    x.t_()

Such an op changes the sizes and strides of a tensor, or detaches it. Afterwards autograd regenerates the histories of
the tensor's views: from sizes and strides in eager, but from view ops in a trace. So such an op is compiled only for a
tensor that shares its memory with no other tensor, and for an argument that is a view of an input
(`aotlab.capture.view_bases`). For an argument, the epilogue repeats the op on the caller's tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.trace.boundary import CHANGES_SIZES
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.findings import Findings
from aotlab.trace.inputs import TracedInput
from aotlab.trace.quirk import Quirk
from aotlab.trace.write_calls import may_overlap_itself

_DETACHES = (Tensor.detach_, torch.detach_)
_RESTRIDES = (Tensor.as_strided_, torch.as_strided_)
_CHANGES_LAYOUT = (Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_)


class MetadataChanges(Quirk):
    """Runs ops that change metadata in the trace, if autograd treats the changed tensor there as in eager.

    For an argument, it notes the op as a step that the epilogue repeats.
    """

    name = "metadata_changes"

    def claims(self) -> Mapping[Any, Handler]:
        return dict.fromkeys(CHANGES_SIZES, _step)

    def check(self, findings: Findings) -> None:
        counted = {position for pair in findings.call.state.counters for position in pair}
        for item, position in zip(findings.inputs, findings.dedupe.kept, strict=True):
            foreign = item.real.is_inference() and not torch.is_inference_mode_enabled()
            if item.steps and (foreign or (position in counted and not item.is_family)):
                op = item.steps[-1].partition("(")[0]
                raise RunEagerly("changes-sizes-of-argument", op=op, name=f"`{item.name}`", why=_SHARES)


_SHARES = "is an inference tensor, or shares memory or a version counter with another one"


def _step(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    item = guard.inputs.get(id(tensor))
    op, line = func.__name__, user_line()
    if func in _DETACHES and torch.is_inference_mode_enabled():
        return tensor  # in inference mode autograd records nothing, so eager does nothing here either
    is_view = item is not None and item.view_of is not None
    is_view_of_another = item is not None and internals.base_of(item.real) is not None
    may_restride = func in _RESTRIDES and (is_view_of_another or not tensor.requires_grad)
    of_all_elements = func in _CHANGES_LAYOUT or (may_restride and _keeps_elements(tensor, func, args, kwargs))
    if not of_all_elements and func not in _DETACHES:
        raise RunEagerly("gives-other-elements", op=op, at=line)
    if item is not None and (why := _why_not(item, func)):
        raise RunEagerly("changes-sizes-of-argument", op=op, name=f"`{item.name}`", why=why, at=line)
    if not is_view and (internals.base_of(tensor) is not None or not internals.has_its_memory_to_itself(tensor)):
        raise RunEagerly("changes-sizes-of-view", op=op, at=line)
    if of_all_elements and tensor.requires_grad and (tensor.is_leaf or not torch.is_grad_enabled()):
        raise RunEagerly("changes-sizes-of-leaf", op=op, at=line)
    if guard.hooks_of(tensor):  # in eager, the hooks stay on the `grad_fn` that the tensor had before the op
        raise RunEagerly("changes-sizes-with-hook", op=op, at=line)
    if item is None:
        return func(*args, **kwargs)
    arguments = [*map(repr, args[1:]), *(f"{key}={value!r}" for key, value in kwargs.items())]
    item.steps.append(f"{func.__name__}({', '.join(arguments)})")
    if is_view:
        return _replace_view(tensor, func, args, kwargs)
    was_written = item.written_visibly
    result = func(*args, **kwargs)
    if not was_written:  # the op changes the history, but it is not a write
        item.history = tensor.grad_fn
    return result


def _why_not(item: TracedInput, func: Any) -> str:
    """Return why an op that changes metadata is not compiled for an argument, or an empty text."""
    if func in _DETACHES:
        return "is detached"
    if item.base is not None or item.has_views:
        return "shares memory with another one"
    is_view_of_unknown = internals.base_of(item.real) is not None and item.view_of is None
    return "is a view of a tensor that requires grad" if item.real.requires_grad and is_view_of_unknown else ""


def _changed(tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a meta tensor with the sizes, strides and offset that ``tensor`` has after the op."""
    with internals.outside_of_trace():
        memory = torch.empty(2**40, dtype=tensor.dtype, device="meta")  # surely large enough
        like = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        func(like, *args[1:], **kwargs)
    return like


def _keeps_elements(tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether the op gives a tensor exactly its own elements, in another order or with other sizes."""
    like = _changed(tensor, func, args, kwargs)
    unchanged = (like.numel(), like.storage_offset()) == (tensor.numel(), tensor.storage_offset())
    distinct = not may_overlap_itself(like.shape, like.stride())
    return unchanged and distinct and internals.is_dense(tensor) and internals.is_dense(like)


def _replace_view(tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Give a traced argument that is a view of an input the sizes and strides that it has after the op.

    If the view or its base is written, eager regenerates the view's history from its present sizes and strides. So
    the traced tensor becomes a view of its base that is made from these sizes and strides.
    """
    like, base = _changed(tensor, func, args, kwargs), internals.base_of(tensor)
    assert base is not None
    torch.autograd.graph.increment_version(tensor)
    internals.become(tensor, base.as_strided(like.shape, like.stride(), like.storage_offset()))
    return tensor
