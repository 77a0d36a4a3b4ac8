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
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.deriver import Deriver, run_one
from aotlab.trace.edges import next_edges
from aotlab.trace.history import nodes_of
from aotlab.trace.inputs import value_of
from aotlab.trace.records import Pattern
from aotlab.trace.segments import Segment
from aotlab.trace.tape import Operation, Tape, tensors_in

#: So many nodes are run to find out; then it is quicker to derive all of the backward.
_MOST_NODES = 24


def does_the_same(deriver: Deriver, number: int, pattern: Pattern) -> bool:
    """Tell whether a segment's backward for a pattern's tangents has the same ops as for those of the usual strides."""
    part = deriver.segments[number]
    usual = deriver.given(number, [bool(way) for way in pattern])
    arriving: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}
    for edge, first, second in zip(part.entries, usual, deriver.given(number, pattern), strict=True):
        if first is None or second is None or first is second:
            continue
        if not part.has(edge[0]) or edge in part.inputs or edge[1] in arriving.setdefault(edge[0], {}):
            return False
        arriving[edge[0]][edge[1]] = first, second
    starts = [edge for edge, way in zip(part.entries, pattern, strict=True) if way]
    sent = [e for node in nodes_of(part, starts, lost=False) for e in next_edges(node) if e not in part.stops]
    with deriver.recording(autocast=False), torch.no_grad():
        return _walk(deriver, part, arriving, Counter(node for node, _ in (*starts, *sent)))


def _walk(
    deriver: Deriver,
    part: Segment,
    arriving: dict[Any, dict[int, tuple[Tensor, Tensor]]],
    senders: Mapping[Any, int],
) -> bool:
    """Run the nodes twice to which gradients of other strides come, until none does.

    ``senders`` says how many gradients come to a node: of several, some may be the usual.
    """
    tape = deriver.recorder.tape
    ready = [(-internals.sequence_of(node), i, node) for i, node in enumerate(arriving)]
    heapq.heapify(ready)
    count = 0
    while ready:
        *_, node = heapq.heappop(ready)
        count += 1
        given = arriving[node]
        if len(given) != senders[node] or internals.is_custom_function_node(node) or count > _MOST_NODES:
            return False
        found, ops = [], []
        for which in (0, 1):
            first = len(tape.operations)
            own = {slot: pair[which] for slot, pair in given.items()}
            found.append(run_one(node, own, part))
            names = {id(internals.from_functional(wrapper)): ("given", slot) for slot, wrapper in own.items()}
            ops.append(spelled(tape.operations[first:], names))
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


class _Constant:
    """Equals another constant with the same values: each run of a function makes its own."""

    def __init__(self, real: Tensor) -> None:
        self._real = real

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return False
        one, two = self._real, other._real
        return (one.dtype, one.device) == (two.dtype, two.device) and torch.equal(one, two)


def spelled(
    operations: Sequence[Operation], names: dict[int, Any], results: Any = (), tape: Tape | None = None
) -> list[Any]:
    """Write ops, and ``results`` of theirs, down so that those of two runs can be compared.

    Tensors that they made have numbers; ``names`` are those of what each run was given, by their ``id``. Constants of
    the ``tape``, if it is given, are compared by their values, which takes place outside of the trace.
    """

    def spell(value: Any) -> Any:
        if isinstance(value, Tensor):
            constant = None if tape is None else tape.constant(value)
            return names.get(id(value), id(value)) if constant is None else _Constant(constant)
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(spell, value)]
        return type(value), value

    found: list[Any] = []
    for n, operation in enumerate(operations):
        found.append((operation.target, spell(operation.args), {k: spell(v) for k, v in operation.kwargs.items()}))
        names.update({id(made): ("made", n, i) for i, made in enumerate(tensors_in(operation.result))})
    return [*found, spell(results)]
