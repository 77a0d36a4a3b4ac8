"""Where to cut the autograd graph, so that `DistributedDataParallel` can exchange gradients during the backward.

`DistributedDataParallel` (DDP) collects the gradients of parameters in buckets. As soon as a bucket is full, DDP starts
to exchange it between the processes, and the backward goes on meanwhile. A compiled backward returns all gradients
together, so nothing would be left to overlap with. If a call is compiled inside of a DDP module, the graph is therefore
cut into one segment per bucket.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from aotlab import _torch as internals
from aotlab.trace.autograd_edges import Edge, next_edges, walk


def cuts_at_buckets(roots: Sequence[Edge], sizes: Mapping[Edge, int], capacities: tuple[int, int]) -> set[Edge]:
    """Return the edges at which a backward has just filled a bucket.

    ``sizes`` has the edge of each input that gets a gradient, with the bytes of this gradient. ``capacities`` are the
    bytes of the first bucket and of each later one. The nodes are visited in the order in which autograd runs them. The
    graph is only cut at an edge along which all later gradients flow.
    """

    def following(node: Any) -> list[Edge]:
        return [edge for edge in next_edges(node) if edge not in sizes]

    starts = {edge for edge in roots if edge not in sizes}
    nodes = walk([node for node, _ in starts], lambda node: [target for target, _ in following(node)])
    waiting = Counter(target for node in nodes for target, _ in following(node))
    ready = [(-internals.sequence_of(node), n, node) for n, node in enumerate(nodes) if not waiting[node]]
    heapq.heapify(ready)
    pending, cuts, left = set(starts), set[Edge](), dict(sizes)
    filled, capacity, number = 0, capacities[0], itertools.count()
    while ready:
        _, _, node = heapq.heappop(ready)
        if filled >= capacity and len(pending) == 1:
            cuts |= pending
            filled, capacity = 0, capacities[1]
        pending = {edge for edge in pending if edge[0] is not node}
        for edge in next_edges(node):
            if edge in sizes:
                filled += left.pop(edge, 0)
                continue
            pending.add(edge)
            waiting[edge[0]] -= 1
            if not waiting[edge[0]]:
                heapq.heappush(ready, (-internals.sequence_of(edge[0]), len(nodes) + next(number), edge[0]))
    return cuts
