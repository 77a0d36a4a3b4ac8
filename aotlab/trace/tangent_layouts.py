"""Whether a backward computes the same of gradients that are laid out otherwise than those that it was traced with.

    y = (x @ w).relu()
    y.sum().backward()      # the gradient of y is one number, expanded: its strides are all 0

Autograd's formulas look at strides now and then: what is copied first if it is not contiguous, or summed in another
order. So where gradients of other strides come in, a backward is derived for these. But mostly the first node makes of
them what has the usual strides again, by the same ops, as ``relu`` does here; then the backward for the usual strides
is the very same, and takes them as they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.deriver import Deriver
from aotlab.trace.differentiate import run_one
from aotlab.trace.edges import next_edges
from aotlab.trace.escapes import guard_of_backward
from aotlab.trace.inputs import value_of
from aotlab.trace.records import Pattern
from aotlab.trace.segments import Segment
from aotlab.trace.surroundings import tracing
from aotlab.trace.tape import Operation

#: So many nodes are run to find out; then it is quicker to derive all of the backward.
_MOST_NODES = 24


def does_the_same(deriver: Deriver, number: int, pattern: Pattern) -> bool:
    """Tell whether the backward for a pattern's tangents consists of the same ops as for those of the usual strides.

    Parameters
    ----------
    deriver, number
        Of the trace, and which of its segments.
    pattern
        Some of its strides are not the usual.
    """
    if deriver.draws:
        return False  # each run draws
    part = deriver.segments[number]
    usual = deriver.given(number, [bool(way) for way in pattern])
    arriving: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}
    for edge, way, first, second in zip(part.entries, pattern, usual, deriver.given(number, pattern), strict=True):
        if not isinstance(way, tuple) or first is None or second is None:
            continue
        if not part.has(edge[0]) or edge in part.inputs or edge[1] in arriving.setdefault(edge[0], {}):
            return False
        arriving[edge[0]][edge[1]] = first[1], second[1]
    senders = _senders(part, [edge for edge, way in zip(part.entries, pattern, strict=True) if way])
    deriver.recorder.phase = "backward"
    try:
        guard = guard_of_backward(deriver.recorder.quirks)
        with deriver.holder(), tracing(deriver.recorder), guard, internals.disable_autocast(), torch.no_grad():
            return _walk(deriver, part, arriving, senders)
    finally:
        deriver.recorder.phase = "forward"


def _senders(part: Segment, starts: Sequence[tuple[Any, int]]) -> dict[Any, int]:
    """Count for each node the edges by which gradients come to it, from outside or from other nodes."""
    counts: dict[Any, int] = {}
    for node, _ in starts:
        counts[node] = counts.get(node, 0) + 1
    entered: set[Any] = set()
    todo = [node for node, _ in starts if part.has(node)]
    while todo:
        node = todo.pop()
        if node in entered:
            continue
        entered.add(node)
        for edge in next_edges(node):
            if edge not in part.stops and part.has(edge[0]):
                counts[edge[0]] = counts.get(edge[0], 0) + 1
                todo.append(edge[0])
    return counts


def _walk(
    deriver: Deriver,
    part: Segment,
    arriving: dict[Any, dict[int, tuple[Tensor, Tensor]]],
    senders: dict[Any, int],
) -> bool:
    """Run the nodes twice to which gradients of other strides come, until none does."""
    ready = [(-internals.sequence_of(node), i, node) for i, node in enumerate(arriving)]
    heapq.heapify(ready)
    count = 0
    while ready:
        *_, node = heapq.heappop(ready)
        count += 1
        given = arriving[node]
        # of several gradients, some may be the usual
        if len(given) != senders[node] or internals.is_custom_function_node(node) or count > _MOST_NODES:
            return False
        found, ops = [], []
        for which in (0, 1):
            first = len(deriver.recorder.tape.operations)
            own = {slot: pair[which] for slot, pair in given.items()}
            found.append(run_one(node, own, part))
            names = {id(internals.from_functional(wrapper)): ("given", slot) for slot, wrapper in own.items()}
            ops.append(_spelled(deriver.recorder.tape.operations[first:], names))
        if ops[0] != ops[1] or found[0].keys() != found[1].keys():
            return False
        for i, left in found[0].items():
            (target, slot), right = node.next_functions[i], found[1][i]
            if (target, slot) in part.stops or _lie_alike(left, right):
                continue
            if slot in arriving.setdefault(target, {}):
                return False
            if not arriving[target]:
                heapq.heappush(ready, (-internals.sequence_of(target), count, target))
            arriving[target][slot] = left, right
    return True


def _lie_alike(left: Tensor, right: Tensor) -> bool:
    a, b = (value_of(gradient, "a gradient") for gradient in (left, right))
    return a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def _spelled(operations: Sequence[Operation], names: dict[int, Any]) -> list[Any]:
    """Write ops down so that those of two runs can be compared."""

    def spell(value: Any) -> Any:
        if isinstance(value, Tensor):
            return names.get(id(value), id(value))
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(spell, value)]
        return type(value), value

    found = []
    for n, operation in enumerate(operations):
        found.append((operation.target, spell(operation.args), {k: spell(v) for k, v in operation.kwargs.items()}))
        results = operation.result if isinstance(operation.result, (list, tuple)) else [operation.result]
        names.update({id(result): ("made", n, i) for i, result in enumerate(results) if isinstance(result, Tensor)})
    return found
