"""A backward of which not all gradients are asked for, where something stands in the way of the others.

    y = a.sin() * c
    y.sum().backward(retain_graph=True)
    a.detach().add_(1)                  # spoils what a node on the way to a keeps
    torch.autograd.grad(y.sum(), c)     # is no error if no node on the way to c keeps it

Autograd runs the nodes on the way to what is asked for, and these alone look at what they keep and let it go. A
compiled backward computes all of its gradients at once. So where something that was kept has been written or let go,
the nodes on the way are looked up, and a backward of these alone is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from aotlab import torch_internals as internals
from aotlab.analysis.history import LASTING, leading_to
from aotlab.analysis.late_reads import only_read_late
from aotlab.stages.partition import Split
from aotlab.stages.trace.live import Trace
from aotlab.stages.trace.records import Pattern

Derive = Callable[[Pattern, Collection[int]], tuple[GraphModule, tuple[int, ...]]]


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
    idle
        The bits of those nodes that do not look at what they saved.
    late
        The numbers of those that it reads as they are by then.
    compute
        The backward: saved values and defined tangents in, one gradient or None per slot out.
    """

    mask: int
    kept: tuple[int, ...]
    needs: tuple[int, ...]
    idle: int
    late: frozenset[int]
    compute: Callable[..., Any]

    def gradients(self, saved: Sequence[Tensor], tangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Compute the gradients that are asked for; None stands for the others."""
        with internals.disable_autocast():
            found: Sequence[Tensor | None] = self.compute(*saved, *tangents)
        return found


class Askers:
    """Knows the nodes on the way to the gradients of a segment that are asked for.

    Parameters
    ----------
    slots
        The slots of the segment that go through autograd, in the order of the running node's edges.
    derive
        Writes the backward graph for a pattern of defined tangents and the slots that are asked for; says which saved
        values it takes.
    """

    def __init__(self, trace: Trace, split: Split, segment: int, slots: Sequence[int], derive: Derive) -> None:
        self._trace = trace
        self._split = split
        self._segment = segment
        self._slots = slots
        self._derive = derive
        self._masks: dict[frozenset[int], int] = {}

    def slots(self) -> frozenset[int] | None:
        """Return the slots whose gradients the backward that is being run was asked for; None if it is for all."""
        own = internals.current_node()
        edges = () if own is None else own.next_functions
        runs = [node is None or internals.is_to_be_run(node) for node, _ in edges]
        if all(runs) or not any(runs):
            return None
        return frozenset(slot for slot, is_run in zip(self._slots, runs, strict=False) if is_run)

    def mask(self, asked: frozenset[int]) -> int:
        """Return the bits of the nodes on the way to some slots."""
        if asked not in self._masks:
            bits = self._trace.bits
            own = {1 << bits[node] for node in self._nodes(asked) if node in bits}  # several may have the same
            self._masks[asked] = sum(own, LASTING)
        return self._masks[asked]

    def look_up(self, asked: frozenset[int], pattern: Pattern, mask: int) -> Asked:
        """Make the backward for some slots; ``mask`` says what the tangents of ``pattern`` reach."""
        places = {
            internals.storage_key(internals.from_functional(tensor))
            for node in self._nodes(asked)
            for tensor in internals.saved_tensors_of(node)
            if internals.is_functional(tensor)
        }
        split = self._split
        module, needs = self._derive(pattern, asked)
        kept = {n for n, v in enumerate(split.saved_values) if v is not None and internals.storage_key(v) in places}
        return Asked(
            mask=mask & self.mask(asked),
            kept=tuple(sorted({*kept, *needs})),
            needs=needs,
            idle=self._trace.idle,
            late=only_read_late(module.graph, needs, split.lent),
            compute=internals.forward_of(module),
        )

    def _nodes(self, asked: frozenset[int]) -> list[Any]:
        part, ways = self._trace.segments[self._segment], self._trace.slots[self._segment]
        return leading_to(part, [way for i in asked if (way := ways[i]) is not None])
