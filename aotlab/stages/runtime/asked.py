"""A backward of which not all gradients are asked for, where something stands in the way of the others.

    y = a.relu() * c
    y.sum().backward(retain_graph=True)
    a.detach().add_(1)                  # spoils what a node on the way to a keeps
    torch.autograd.grad(y.sum(), c)     # is no error if no node on the way to c keeps it

Autograd runs the nodes on the way to what is asked for, and these alone look at what they keep and let it go. A
compiled backward computes all of its gradients at once. So where something that was kept has been written or let go,
the nodes on the way are looked up, and a backward of these alone is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.analysis.history import LASTING, leading_to, node_bits
from aotlab.stages.partition import Split, derive_backward
from aotlab.stages.trace.live import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is needed for the gradients that are asked for.

    Attributes
    ----------
    mask
        The bits of the nodes on the way.
    kept
        The numbers of the saved values that those keep, or that the backward takes.
    needs
        The numbers of those that it takes.
    compute
        The backward: saved values and defined tangents in, one gradient or None per slot out.
    """

    mask: int
    kept: tuple[int, ...]
    needs: tuple[int, ...]
    compute: Callable[..., Any]


def look_up(
    trace: Trace, split: Split, segment: int, slots: Sequence[int], pattern: Sequence[bool], mask: int
) -> Asked | None:
    """Find out what the backward that is being run needs; None if all of its gradients are asked for.

    Parameters
    ----------
    slots
        The slots of the segment, in the order of the running node's edges.
    pattern
        Which tangents are defined.
    mask
        The bits of the nodes that these reach.
    """
    own = internals.current_node()
    if own is None:
        return None
    runs = [node is not None and internals.is_to_be_run(node) for node, _ in own.next_functions]
    asked = {slot for slot, is_run in zip(slots, runs, strict=False) if is_run}
    if not asked or len(asked) == len(slots):
        return None
    part = trace.segments[segment]
    nodes = leading_to(part, [way for i in asked if (way := trace.slots[segment][i]) is not None])
    bits = node_bits(trace.segments)
    places = {
        internals.storage_key(internals.from_functional(tensor))
        for node in nodes
        for tensor in internals.saved_tensors_of(node)
        if internals.is_functional(tensor)
    }
    module, needs = derive_backward(trace, split, segment, pattern, asked)
    kept = {n for n, v in enumerate(split.saved_values) if v is not None and internals.storage_key(v) in places}
    return Asked(
        mask=mask & sum((1 << bits[node] for node in nodes if node in bits), LASTING),
        kept=tuple(sorted({*kept, *needs})),
        needs=needs,
        compute=internals.forward_of(module),
    )


def gradients_of(asked: Asked, arguments: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Compute the gradients that are asked for; None stands for the others."""
    with internals.disable_autocast():
        found: Sequence[Tensor | None] = asked.compute(*arguments, *tangents)
    return found
