"""Changes of views, which change the histories of what they are views of, and of all its other views.

    def f(v):                        # v = w[1:], and w has a history
        v.mul_(2)
        return v.sum()

After the write autograd leads the gradient of ``v`` to ``w``, which the trace does not have unless it is an input too,
and of which the caller may hold other views. Such a call runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.metadata import InputAliasInfo
from aotlab.trace.function import Findings
from aotlab.trace.inputs import Entered
from aotlab.trace.live import Trace


def check_owners(trace: Trace, findings: Findings) -> None:
    """Leave to eager changes of views that show in histories which the trace does not have."""
    inputs = findings.inputs
    for info, item in zip(trace.metadata.input_info, inputs, strict=True):
        if info.requires_grad_set:
            _check_required(findings, trace, info, item)
        unready = not (info.moves_version and item.real.requires_grad)
        if unready and _is_hooked(findings, item) and _is_counted_by_others(findings, trace, item):
            raise RunEagerly(f"`{info.name}`, a view of which another view is written, gets a hook")
        if _is_hooked_before_a_write(findings, trace, item):
            raise RunEagerly(f"`{info.name}` gets a hook, and what is written to it shows in another view")
        if not item.real.numel() and item.wrapper.requires_grad and _is_moved_by_others(findings, trace, item):
            raise RunEagerly(f"`{info.name}`, a view without elements, shares a history with one that is written")
        is_owned_leaf = internals.base_of(item.real) is not None and item.wrapper.requires_grad and item.real.is_leaf
        if not info.moves_version and not (is_owned_leaf and _is_moved_by_others(findings, trace, item)):
            continue
        older = [] if info.mutates_data else _older_outputs(findings, item)
        if is_owned_leaf and (older or findings.chronicle.used_late(item.storage)):
            # autograd makes the histories of its views anew from what it is a view of, which has none before the write
            raise RunEagerly(f"a view of `{info.name}`, a leaf that is a view, is used after that was written")
        if not info.moves_version:
            continue
        if _has_owner_outside(item, inputs):
            raise RunEagerly(
                f"`{info.name}` is a view of a tensor that requires grad, and is written",
                suggestion="pass that tensor too, or a clone of the view, to have it compiled",
            )
        if _gives_others_a_history(item) and any(_is_passed_by(findings, other, item) for other in inputs):
            raise RunEagerly(
                f"a view that was made before `{info.name}`, of the same memory, got a history is returned"
            )
        unseen = item.base is not None and item.base not in trace.inputs.sources
        if unseen and item.wrapper.requires_grad:
            raise RunEagerly(f"a view of `{info.name}`, which shares a history with another tensor, is changed")


def _check_required(findings: Findings, trace: Trace, info: InputAliasInfo, item: Entered) -> None:
    """Leave to eager that an input is made to require grad where its views, or what it is a view of, hang on when."""
    if _is_hooked(findings, item) and not trace.gets_gradient(info.index):
        raise RunEagerly(f"`{info.name}` is made to require grad and gets a hook, and no gradient")
    tensors = findings.outputs.tensors.values()
    within = [t for t in tensors if t is not item.wrapper and internals.storage_key(t) == item.storage]
    if any(tensor.requires_grad and tensor.grad_fn is None for tensor in within) or _older_outputs(findings, item):
        raise RunEagerly(f"`{info.name}` is made to require grad, and a view of it from before is returned")
    if internals.base_of(item.real) is None:
        return
    if findings.chronicle.was_viewed(item.storage):
        # they are views of what it is itself a view of, and go on to require no grad
        raise RunEagerly(f"`{info.name}`, a view, is made to require grad, and there are views of it")
    if any(other is not item and internals.share_version(other.real, item.real) for other in findings.inputs):
        raise RunEagerly(f"`{info.name}`, one of several views, is made to require grad")


def _is_hooked(findings: Findings, item: Entered) -> bool:
    return any(hook.tensor is item.wrapper for hook in findings.hooks)


def _is_hooked_before_a_write(findings: Findings, trace: Trace, item: Entered) -> bool:
    """Tell whether an input has a hook as it was left, and the epilogue writes another view of its memory after it.

    That makes its history anew. In eager one write is one to both.
    """
    if item.base is None or not any(h.kind == "hook" and h.tensor is item.wrapper for h in findings.hooks):
        return False
    order = [write.index for write in trace.writes if write.index in item.base.members]
    return any(findings.inputs[k] is item for k in order[:-1])


def _is_counted_by_others(findings: Findings, trace: Trace, item: Entered) -> bool:
    """Tell whether an input is a view, and a write to another input counts for it."""
    if internals.base_of(item.real) is None:
        return False
    return any(
        info.moves_version and other is not item and internals.share_version(other.real, item.real)
        for info, other in zip(trace.metadata.input_info, findings.inputs, strict=True)
    )


def _is_moved_by_others(findings: Findings, trace: Trace, item: Entered) -> bool:
    """Tell whether another view of what an input is a view of was written, which counts for all of them."""
    owner = internals.base_of(item.real)
    return owner is not None and any(
        info.moves_version and other is not item and (other.real is owner or internals.base_of(other.real) is owner)
        for info, other in zip(trace.metadata.input_info, findings.inputs, strict=True)
    )


def _gives_others_a_history(item: Entered) -> bool:
    """Tell whether a write gave a history to what an input is a view of, and so to all other views of that."""
    is_view = internals.base_of(item.real) is not None
    return is_view and not item.real.requires_grad and item.wrapper.requires_grad and item.written_visibly


def _is_passed_by(findings: Findings, other: Entered, item: Entered) -> bool:
    """Tell whether an output is a view of another such input from before the write: its history then passes that by."""
    if other is item or internals.base_of(other.real) is not internals.base_of(item.real):
        return False
    return bool(_older_outputs(findings, other))


def _older_outputs(findings: Findings, item: Entered) -> list[Tensor]:
    """Return the outputs that are views of an input from before a write that counts for it."""
    tensors = findings.outputs.tensors.values()
    within = [t for t in tensors if t is not item.wrapper and internals.storage_key(t) == item.storage]
    return [tensor for tensor in within if findings.chronicle.is_older(tensor)]


def _has_owner_outside(item: Entered, inputs: Sequence[Entered]) -> bool:
    """Tell whether an input is a view with the history of a tensor that is no input."""
    owner = internals.base_of(item.real)
    if owner is None or not item.real.requires_grad or item.real.is_leaf:
        return False
    return item.base is None or not any(other.real is owner for other in inputs)
