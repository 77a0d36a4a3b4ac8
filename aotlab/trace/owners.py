"""Changes of views, which change the histories of what they are views of, and of all its other views.

    def f(v):                        # v = w[1:], and w has a history
        v.mul_(2)
        return v.sum()

After the write autograd leads the gradient of ``v`` to ``w``, which the trace does not have unless it is an input too,
and of which the caller may hold other views. Such a call runs eagerly.
"""

from __future__ import annotations

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.metadata import InputAliasInfo
from aotlab.trace.function import Findings
from aotlab.trace.inputs import Entered, owner_of
from aotlab.trace.live import Trace


def check_owners(trace: Trace, findings: Findings) -> None:
    """Leave to eager changes of views that show in histories which the trace does not have."""
    for info, item in zip(trace.metadata.input_info, findings.inputs, strict=True):
        if info.requires_grad_set:
            _check_required(findings, trace, info, item)
        unseen = item.base is not None and item.base not in trace.inputs.sources
        if unseen and info.moves_version and item.wrapper.requires_grad:
            raise RunEagerly(f"a view of `{info.name}`, which shares memory with another input, is changed")
        is_view = internals.base_of(item.real) is not None
        gets_history = not item.real.requires_grad and item.written_visibly
        if not item.wrapper.requires_grad or not (is_view or gets_history):
            continue
        related = _related(findings, item)
        if related and gets_history:
            raise RunEagerly(f"a write gives `{info.name}` a history, and another input shares it")
        moved = info.moves_version or any(trace.metadata.input_info[k].moves_version for k in related)
        if not is_view or not moved:
            continue
        if _is_hooked(findings, item):
            raise RunEagerly(f"`{info.name}`, a view of what is written, gets a hook")
        if item.real.requires_grad and not item.real.is_leaf:
            raise RunEagerly(
                f"`{info.name}` is a view of a tensor that requires grad, and is written",
                suggestion="pass that tensor, or a clone of the view, to have it compiled",
            )
        older = [] if info.mutates_data else _older_outputs(findings, item)
        if item.real.is_leaf and (older or item.storage in findings.chronicle.used_late):
            # autograd makes the histories of its views anew from what it is a view of, which has none before the write
            raise RunEagerly(f"a view of `{info.name}`, a leaf that is a view, is used after that was written")


def _related(findings: Findings, item: Entered) -> list[int]:
    """Return the other inputs with the history of the same tensor, or for which a write to this one counts."""

    def is_related(real: Tensor) -> bool:
        return owner_of(real) is owner_of(item.real) or internals.share_version(real, item.real)

    return [k for k, other in enumerate(findings.inputs) if other is not item and is_related(other.real)]


def _check_required(findings: Findings, trace: Trace, info: InputAliasInfo, item: Entered) -> None:
    """Leave to eager that an input is made to require grad where its views, or what it is a view of, hang on when."""
    if _is_hooked(findings, item) and not trace.gets_gradient(info.index):
        raise RunEagerly(f"`{info.name}` is made to require grad and gets a hook, and no gradient")
    tensors = findings.outputs.tensors.values()
    within = [t for t in tensors if t is not item.wrapper and internals.storage_key(t) == item.storage]
    if any(tensor.requires_grad and tensor.grad_fn is None for tensor in within) or _older_outputs(findings, item):
        raise RunEagerly(f"`{info.name}` is made to require grad, and a view of it from before is returned")
    if internals.base_of(item.real) is not None:  # on which its views hang in eager
        raise RunEagerly(f"`{info.name}`, a view, is made to require grad")


def _is_hooked(findings: Findings, item: Entered) -> bool:
    return any(hook.tensor is item.wrapper for hook in findings.hooks)


def _older_outputs(findings: Findings, item: Entered) -> list[Tensor]:
    """Return the outputs that are views of an input from before a write that counts for it."""
    tensors = findings.outputs.tensors.values()
    within = [t for t in tensors if t is not item.wrapper and internals.storage_key(t) == item.storage]
    return [tensor for tensor in within if findings.chronicle.is_older(tensor)]
