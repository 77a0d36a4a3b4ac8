"""A backward of which not all gradients are asked for.

    y, z = a.sin() * c, c.exp()
    torch.autograd.grad(y.sum(), a)

Autograd runs the nodes on the way to what is asked for: these alone let go of what they keep, and draw random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotlab import _torch as internals
from aotlab.trace.history import LASTING, leading_to
from aotlab.trace.live import Trace


class Askers:
    """Knows the nodes on the way to the gradients of a segment that are asked for.

    ``slots`` are those of the segment that go through autograd, in the order of the running node's edges.
    """

    def __init__(self, trace: Trace, segment: int, slots: Sequence[int]) -> None:
        self._trace = trace
        self._segment = segment
        self._slots = slots
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
            part, ways = self._trace.segments[self._segment], self._trace.slots[self._segment]
            nodes = leading_to(part, [way for i in asked if (way := ways[i]) is not None])
            bits = self._trace.saving.bits
            own = {1 << bits[node] for node in nodes if node in bits}  # several may have the same
            self._masks[asked] = sum(own, LASTING)
        return self._masks[asked]
