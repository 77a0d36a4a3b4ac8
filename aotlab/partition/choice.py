"""Which values to keep: the cheapest choice, at a price on kept bytes, is a minimum cut.

Each value that the backward might use becomes an edge between "computed again" and "there in the backward"::

    forward ──again──▶ value ──keep──▶ value' ──∞──▶ each value that can be computed from it ─ ─ ▶ backward

Cutting ``keep`` means to keep the value; cutting ``again``, to compute it again from inputs that are there too; that is
infinite for an op that must not run twice.

Over all prices the choices lie on a convex curve, and a limit in bytes is met by walking along it. Of values that cost
the same those made early go first: else all layers of a model would go at one price.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from aotlab.partition.joint import Joint


class Choice(NamedTuple):
    """What is kept, in the graph's order.

    ``weight``: its bytes and, in the lower digits, a tie-break; ``time``: the traffic for all values.
    """

    kept: tuple[fx.Node, ...]
    weight: int
    time: int


class Chooser:
    """Finds choices for one joint graph."""

    def __init__(self, joint: Joint) -> None:
        self.costs = costs = joint.costs
        count = len(costs)
        #: One byte, as a weight.
        self.unit = count * (count + 1) // 2 + 1
        self.weights = {
            node: cost.nbytes and cost.nbytes * self.unit + count - i for i, (node, cost) in enumerate(costs.items())
        }
        self._network = network = Network()
        positions = {node: (network.node(), network.node()) for node in costs}
        for before, after in positions.values():  # these edges come first: their capacities are costs
            network.edge(network.source, before)
            network.edge(before, after)
        for node, (before, after) in positions.items():
            for each in joint.inputs[node]:
                network.edge(positions[each][1], before)
            if node in joint.needed:
                network.edge(after, network.sink)

    def fastest(self) -> Choice:
        """Return the choice that costs the least time."""
        return self._solve(1, 0)

    def within(self, limit: int, above: Choice) -> Choice:
        """Find the cheapest choice of at most ``limit`` bytes, or else the smallest; ``above`` is the fastest."""
        return self._walk(limit, above, self._least())

    def lowered(self, budget: float, above: Choice) -> Choice:
        """Find the cheapest choice that takes a part of the bytes of ``above``: ``budget`` from the least to all."""
        below = self._least()
        least, most = (sum(self.costs[node].nbytes for node in each.kept) for each in (below, above))
        return self._walk(least + int((most - least) * budget), above, below)

    def _least(self) -> Choice:
        # at this price a byte costs more than all the time that there is
        return self._solve(1, 1 + sum((cost.keep or 0) + (cost.again or 0) for cost in self.costs.values()))

    def _walk(self, limit: int, above: Choice, below: Choice) -> Choice:
        if below.weight // self.unit >= limit:
            return below
        while above.weight // self.unit > limit:
            bytes_saved, price = above.weight - below.weight, below.time - above.time
            between = self._solve(bytes_saved, price)
            worth = [each.time * bytes_saved + each.weight * price for each in (above, between)]
            if worth[1] >= worth[0]:  # no corner lies between them
                return below
            if between.weight // self.unit <= limit:
                below = between
            else:
                above = between
        return above

    def _solve(self, time: int, price: int) -> Choice:
        """Choose by ``time`` per byte of traffic and ``price`` per weight."""
        capacities: list[int | None] = []
        weights = self.weights
        for node, cost in self.costs.items():
            keep = None if cost.keep is None else time * cost.keep + price * weights[node]
            capacities += (None if cost.again is None else time * cost.again, keep)
        infinite = 1 + sum(capacity for capacity in capacities if capacity is not None)
        capacities += [None] * (self._network.edges - len(capacities))
        late = self._network.late_cut([infinite if capacity is None else capacity for capacity in capacities])
        kept = []
        spent = weight = 0
        for i, (node, cost) in enumerate(self.costs.items()):
            if late[2 + 2 * i]:
                spent += cost.again or 0
            elif late[3 + 2 * i]:
                kept.append(node)
                spent += cost.keep or 0
                weight += weights[node]
        return Choice(kept=tuple(kept), weight=weight, time=spent)


class Network:
    """A directed network, whose minimum cuts are found by Dinic's algorithm (Y. Dinitz, 1970).

    Nodes and edges are numbers. Capacities are integers of any size. (networkx takes six times as long at 2,000 nodes.)
    """

    source = 0
    sink = 1

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # of each node, the numbers of its half edges, those back included
        self._to: list[int] = []  # of half edges: 2 * n is the edge n, 2 * n + 1 the way back
        self._left: list[int] = []  # the capacity that is left

    def node(self) -> int:
        """Add a node."""
        self._edges.append([])
        return len(self._edges) - 1

    @property
    def edges(self) -> int:
        """How many edges there are."""
        return len(self._to) // 2

    def edge(self, start: int, end: int) -> int:
        """Add an edge."""
        number = len(self._to)
        self._edges[start].append(number)
        self._edges[end].append(number + 1)
        self._to += (end, start)
        return number // 2

    def late_cut(self, capacities: Sequence[int]) -> list[bool]:
        """Find the minimum cut nearest to the sink; return for each node whether it is on the sink's side."""
        left = self._left = [0] * len(self._to)
        left[::2] = capacities
        while (levels := self._levels())[self.sink] >= 0:
            self._augment(levels)
        edges, to = self._edges, self._to
        reaching = [False] * len(edges)
        reaching[self.sink] = True
        todo = [self.sink]
        while todo:
            for edge in edges[todo.pop()]:
                node = to[edge]
                if left[edge ^ 1] and not reaching[node]:
                    reaching[node] = True
                    todo.append(node)
        return reaching

    def _levels(self) -> list[int]:
        """Return the nodes' distances to the source, up to the sink's; -1 where nothing can flow or beyond that."""
        edges, to, left, sink = self._edges, self._to, self._left, self.sink
        levels = [-1] * len(edges)
        levels[self.source] = level = 0
        todo = [self.source]
        while todo and levels[sink] < 0:
            level += 1
            following = []
            for node in todo:
                for edge in edges[node]:
                    if left[edge] and levels[to[edge]] < 0:
                        levels[to[edge]] = level
                        following.append(to[edge])
            todo = following
        return levels

    def _augment(self, levels: list[int]) -> None:
        """Let flow what can along paths on which the level rises by one at each step."""
        edges, to, left, sink = self._edges, self._to, self._left, self.sink
        following = [0] * len(edges)
        path: list[int] = []
        node = self.source
        while True:
            if node == sink:
                flow = min(left[edge] for edge in path)
                for edge in path:
                    left[edge] -= flow
                    left[edge ^ 1] += flow
                first = next(i for i, edge in enumerate(path) if not left[edge])
                node = to[path[first] ^ 1]
                del path[first:]
                continue
            deeper, ways = levels[node] + 1, edges[node]
            for n in range(following[node], len(ways)):
                edge = ways[n]
                if levels[to[edge]] == deeper and left[edge]:
                    following[node] = n
                    path.append(edge)
                    node = to[edge]
                    break
            else:
                if not path:
                    return
                following[node] = len(ways)
                node = to[path.pop() ^ 1]
                following[node] += 1
