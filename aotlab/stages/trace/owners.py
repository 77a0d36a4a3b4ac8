"""Changes of a view of a tensor with a history, which change the history of that tensor and of all its views.

    def f(v):                        # v = w[1:], and w has a history
        v.squeeze_(0)
        v.mul_(2)
        return v.sum()

Where such a view has a base, the trace knows that tensor too. It has none where nothing can be done to windows of a
base what the function does, as above. Then the traced input is no view, and the history that a write gives it stands
for what autograd makes of that tensor's. That is right as long as all that comes after the write hangs on the view
itself, as the caller sees it then: so no other view of it from before the write may be used, and none of the moments
at which autograd makes the view's history anew without a write may lie between two uses.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.analysis import Entered
from aotlab.analysis.edges import Edge, edge_of, users_of
from aotlab.ir.metadata import InputAliasInfo
from aotlab.recorder import RunEagerly
from aotlab.stages.trace.function import Findings
from aotlab.stages.trace.live import Trace


def check_owners(trace: Trace, findings: Findings, roots: Sequence[Edge]) -> None:
    """Leave to eager changes of a view of a tensor with a history where the trace cannot do without that of the tensor.

    It does not see it where the view has no base, and where a step on a view of it changed the history without a write.
    """
    inputs = findings.inputs
    for info, item in zip(trace.metadata.input_info, inputs, strict=True):
        if info.requires_grad_set:
            _check_required(findings, trace, info, item)
        unready = not (info.moves_version and item.real.requires_grad)
        if unready and _is_hooked(findings, item) and _is_counted_by_others(findings, trace, item):
            raise RunEagerly(f"`{info.name}`, a view of which another view is written, gets a hook")
        if _is_hooked_before_a_write(findings, trace, item):
            raise RunEagerly(f"`{info.name}` gets a hook, and what is written to it shows in another view")
        if not item.real.numel() and _shares_a_history_that_moves(trace, findings, item):
            raise RunEagerly(f"`{info.name}`, a view without elements, shares a history with one that is written")
        is_owned_leaf = internals.base_of(item.real) is not None and item.wrapper.requires_grad and item.real.is_leaf
        if not info.moves_version and not (is_owned_leaf and _is_moved_by_others(findings, trace, item)):
            continue
        older = [] if info.mutates_data else _older_outputs(findings, item)
        if item.is_over:  # views that the trace knows for such as require no grad have no history to be made anew
            older = [view for view in older if view.requires_grad]
        if is_owned_leaf and (older or findings.chronicle.used_late(item.storage)):
            # autograd makes the histories of its views anew from what it is a view of, which has none before the write
            raise RunEagerly(f"a view of `{info.name}`, a leaf that is a view, is used after that was written")
        if not info.moves_version:
            continue
        only_steps = bool(info.metadata_steps) and not info.mutates_data  # the epilogue takes the steps themselves
        is_view = internals.base_of(item.real) is not None and item.real.requires_grad and not item.real.is_leaf
        if item.base is None and not only_steps and is_view and not _stands_for_its_owner(findings, info, item, roots):
            raise RunEagerly(f"`{info.name}` is a view of a tensor with a history, and is written")
        if _gives_others_a_history(item) and any(_is_passed_by(findings, other, item) for other in inputs):
            raise RunEagerly(
                f"a view that was made before `{info.name}`, of the same memory, got a history is returned"
            )
        unseen = item.base is not None and item.base not in trace.placeholder_sources
        if unseen and item.wrapper.requires_grad:
            raise RunEagerly(f"a view of `{info.name}`, which shares a history with another tensor, is changed")


def _check_required(findings: Findings, trace: Trace, info: InputAliasInfo, item: Entered) -> None:
    """Leave to eager that an input is made to require grad where its views, or what it is a view of, hang on when."""
    if info.given:
        raise RunEagerly(f"`{info.name}` is given other memory and made to require grad")
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
    return any(
        info.moves_version and other is not item and (other.real is owner or internals.base_of(other.real) is owner)
        for info, other in zip(trace.metadata.input_info, findings.inputs, strict=True)
    )


def _shares_a_history_that_moves(trace: Trace, findings: Findings, item: Entered) -> bool:
    """Tell whether an input is among several views of one tensor with a history, one of which is written.

    In a base that they share there is no place for one without elements, so that in the trace a write to one is none
    to the others.
    """
    infos = zip(trace.metadata.input_info, findings.inputs, strict=True)
    family = [(info, other) for info, other in infos if _viewed(other) is _viewed(item)]
    moved = len(family) > 1 and any(info.moves_version for info, _ in family)
    return moved and any(other.wrapper.requires_grad for _, other in family)


def _viewed(item: Entered) -> Tensor:
    owner = internals.base_of(item.real)
    return item.real if owner is None else owner


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


def _stands_for_its_owner(findings: Findings, info: InputAliasInfo, item: Entered, roots: Sequence[Edge]) -> bool:
    """Tell whether what hangs on a view without a base does so as if the view were no view."""
    chronicle = findings.chronicle
    if not internals.hangs_on_its_base(item.real) or chronicle.used_late(item.storage):
        return False
    if any(internals.storage_key(hook.tensor) == item.storage for hook in findings.hooks):
        return False
    if not (info.mutates_data or info.metadata_steps):
        return False  # a view of it was moved, which makes its history anew without a word
    between = item.written_visibly or bool(info.metadata_steps)
    if between and chronicle.moved_unseen(item.storage) is not None and item.wrapper.grad_fn is not None:
        return not users_of(edge_of(item.wrapper), roots)
    return True
