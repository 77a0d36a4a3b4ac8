"""Choose the values to save for the backward. For a given price per saved byte, the cheapest choice is a minimum cut.

Each value that the backward might use becomes two nodes of a network. The edge ``recompute`` leads to the first node,
the edge ``save`` from the first to the second::

    forward ──recompute──▶ value ──save──▶ value' ──∞──▶ each value that can be computed from it ─ ─ ▶ backward

To cut ``save`` means to save the value. To cut ``recompute`` means to compute the value again in the backward, from
values that are available there. The capacity of an edge is the cost of what its cut means. The capacity of
``recompute`` is infinite for an op that must not run twice.

With a higher price per byte, the cheapest choice saves fewer bytes and takes more time. The choices for all prices,
drawn as time against bytes, form a convex curve. To find a choice within a limit in bytes, `Chooser` walks along this
curve. If several values cost the same, a rising price makes the earliest of them the first that is no longer saved.
Without this rule, a model with equal layers would stop saving the values of all layers at the same price.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

from aotlab.partition.costs import Cost

N = TypeVar("N", bound=Hashable)


class Values(Protocol[N]):
    """The values that the backward might use, in the graph's order: nodes of a graph, or their positions.

    The attributes are explained at `aotlab.partition.joint_analysis.JointAnalysis`.
    """

    @property
    def costs(self) -> Mapping[N, Cost]:
        """The costs of all values."""

    @property
    def inputs(self) -> Mapping[N, Sequence[N]]:
        """The inputs of each value."""

    @property
    def needed(self) -> Collection[N]:
        """The values that the backward reads."""


class Choice(NamedTuple, Generic[N]):
    """One choice of the values to save.

    ``saved`` are these values, in the graph's order. ``weight`` is the sum of their sizes in bytes, times
    `Chooser.unit`, plus a small number for each value. These small numbers break ties: they are larger for values that
    come earlier in the graph. ``time`` is the memory traffic, in bytes, that it takes to save these values and to
    compute the others again.
    """

    saved: tuple[N, ...]
    weight: int
    time: int


def saved_of(values: Values[N], preferred: Collection[N]) -> tuple[N, ...]:
    """Return the saved values if the backward computes a value again wherever it may, unless the value is preferred.

    Of the ``preferred`` values, those that the backward needs are saved. The other values are computed again. For this,
    further values may be needed that must not be computed twice (`Cost.ban`); these are saved, too.
    """
    again: dict[N, bool] = {}  # whether a value can be computed again
    for node, cost in values.costs.items():
        inputs = values.inputs[node]
        again[node] = cost.recompute is not None and all(
            again[each] or values.costs[each].save is not None for each in inputs
        )
    saved, seen, todo = set(), set(), list(values.needed)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if values.costs[node].save is not None and (node in preferred or not again[node]):
                saved.add(node)
            else:
                todo += values.inputs[node]
    return tuple([node for node in values.costs if node in saved])


class Chooser(Generic[N]):
    """Finds the cheapest choices of saved values for one joint graph.

    It uses the network that the docstring of this module describes.
    """

    def __init__(self, joint: Values[N]) -> None:
        self.costs = costs = joint.costs
        count = len(costs)
        #: The weight of one saved byte. It is larger than the sum of all numbers that break ties (see `Choice`).
        self.unit = count * (count + 1) // 2 + 1
        self.weights = {
            node: cost.nbytes and cost.nbytes * self.unit + count - i for i, (node, cost) in enumerate(costs.items())
        }
        self._network = network = Network()
        positions = {node: (network.node(), network.node()) for node in costs}
        # The edges whose capacities are costs come first, two for each value. `_solve` lists their capacities in this
        # order, and gives infinite capacities to the edges after them.
        for value_in, value_out in positions.values():
            network.edge(network.source, value_in)
            network.edge(value_in, value_out)
        for node, (value_in, value_out) in positions.items():
            for each in joint.inputs[node]:
                network.edge(positions[each][1], value_in)
            if node in joint.needed:
                network.edge(value_out, network.sink)

    def fastest(self) -> Choice[N]:
        """Return the choice that costs the least time."""
        return self._solve(1, 0)

    def within(self, limit: int, larger: Choice[N]) -> Choice[N]:
        """Return the fastest choice of at most ``limit`` bytes.

        If every choice has more bytes, return the choice with the fewest. ``larger`` is the result of `fastest`, where
        the search starts.
        """
        return self._walk(limit, larger, self._least())

    def lowered(self, budget: float, larger: Choice[N]) -> Choice[N]:
        """Return the fastest choice within a memory budget.

        ``budget`` is a fraction: 0 allows the bytes of the choice with the fewest bytes, 1 allows the bytes of
        ``larger``, a choice that was found before.
        """
        smaller = self._least()
        least, most = (sum(self.costs[node].nbytes for node in each.saved) for each in (smaller, larger))
        return self._walk(least + int((most - least) * budget), larger, smaller)

    def _least(self) -> Choice[N]:
        # at this price for memory, one saved byte costs more than the time to save and compute all values
        return self._solve(1, 1 + sum((cost.save or 0) + (cost.recompute or 0) for cost in self.costs.values()))

    def _walk(self, limit: int, larger: Choice[N], smaller: Choice[N]) -> Choice[N]:
        if smaller.weight // self.unit >= limit:
            return smaller
        while larger.weight // self.unit > limit:
            between = self._between(larger, smaller)
            if between is None:
                return smaller
            if between.weight // self.unit <= limit:
                smaller = between
            else:
                larger = between
        return larger

    def corners(self, larger: Choice[N], most: int) -> list[Choice[N]]:
        """Return corners of the curve from the choice with the fewest bytes to ``larger``, with rising bytes.

        If the curve has many corners, at most ``most`` corners between the two choices are searched, in the largest
        gaps first.
        """
        corners, edges = [self._least(), larger], set()
        for _ in range(most):
            gaps = [(b.weight - a.weight, i) for i, (a, b) in enumerate(pairwise(corners)) if a not in edges]
            widest, i = max(gaps, default=(0, 0))
            between = self._between(corners[i + 1], corners[i]) if widest >= self.unit else None
            if between is not None:
                corners.insert(i + 1, between)
            elif widest >= self.unit:
                edges.add(corners[i])
            else:
                break
        return corners if corners[0].weight < larger.weight else [larger]

    def _between(self, larger: Choice[N], smaller: Choice[N]) -> Choice[N] | None:
        """Return a corner of the curve between two choices; None if the curve has no corner there."""
        bytes_saved, price = larger.weight - smaller.weight, smaller.time - larger.time
        between = self._solve(bytes_saved, price)
        worth = [each.time * bytes_saved + each.weight * price for each in (larger, between)]
        return None if worth[1] >= worth[0] else between

    def _solve(self, time: int, price: int) -> Choice[N]:
        """Return the cheapest choice if a byte of traffic costs ``time`` and a unit of `Choice.weight` ``price``."""
        capacities: list[int | None] = []
        weights = self.weights
        for node, cost in self.costs.items():
            save = None if cost.save is None else time * cost.save + price * weights[node]
            capacities += (None if cost.recompute is None else time * cost.recompute, save)
        infinite = 1 + sum(capacity for capacity in capacities if capacity is not None)
        capacities += [None] * (self._network.edges - len(capacities))
        late = self._network.late_cut([infinite if capacity is None else capacity for capacity in capacities])
        saved = []
        traffic = weight = 0
        for i, (node, cost) in enumerate(self.costs.items()):
            if late[2 + 2 * i]:
                traffic += cost.recompute or 0
            elif late[3 + 2 * i]:
                saved.append(node)
                traffic += cost.save or 0
                weight += weights[node]
        return Choice(saved=tuple(saved), weight=weight, time=traffic)


class Network:
    """A directed network that finds minimum cuts by Dinic's algorithm (Y. Dinitz, 1970).

    Nodes and edges are identified by numbers. Capacities are integers of any size. (With 2,000 nodes, networkx takes
    six times as long.)
    """

    source = 0
    sink = 1

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # per node, the half edges that begin at it
        # The node to which each half edge leads. Half edge 2 * n is edge n, and half edge 2 * n + 1 is its reverse.
        self._to: list[int] = []
        self._residual: list[int] = []  # the residual capacity of each half edge

    def node(self) -> int:
        """Add a node and return its number."""
        self._edges.append([])
        return len(self._edges) - 1

    @property
    def edges(self) -> int:
        """The number of edges."""
        return len(self._to) // 2

    def edge(self, start: int, end: int) -> int:
        """Add an edge and return its number."""
        number = len(self._to)
        self._edges[start].append(number)
        self._edges[end].append(number + 1)
        self._to += (end, start)
        return number // 2

    def late_cut(self, capacities: Sequence[int]) -> list[bool]:
        """Find the minimum cut nearest to the sink, and return for each node whether it is on the sink's side.

        ``capacities`` has the capacity of each edge.
        """
        residual = self._residual = [0] * len(self._to)
        residual[::2] = capacities
        while (levels := self._levels())[self.sink] >= 0:
            self._augment(levels)
        edges, to = self._edges, self._to
        reaching = [False] * len(edges)
        reaching[self.sink] = True
        todo = [self.sink]
        while todo:
            for edge in edges[todo.pop()]:
                node = to[edge]
                if residual[edge ^ 1] and not reaching[node]:
                    reaching[node] = True
                    todo.append(node)
        return reaching

    def _levels(self) -> list[int]:
        """Return each node's distance from the source; -1 if it cannot be reached, or is farther than the sink."""
        edges, to, residual, sink = self._edges, self._to, self._residual, self.sink
        levels = [-1] * len(edges)
        levels[self.source] = level = 0
        todo = [self.source]
        while todo and levels[sink] < 0:
            level += 1
            following = []
            for node in todo:
                for edge in edges[node]:
                    if residual[edge] and levels[to[edge]] < 0:
                        levels[to[edge]] = level
                        following.append(to[edge])
            todo = following
        return levels

    def _augment(self, levels: list[int]) -> None:
        """Push a blocking flow along the paths on which the level rises by one at each edge."""
        edges, to, residual, sink = self._edges, self._to, self._residual, self.sink
        following = [0] * len(edges)
        path: list[int] = []
        node = self.source
        while True:
            if node == sink:
                flow = min(residual[edge] for edge in path)
                for edge in path:
                    residual[edge] -= flow
                    residual[edge ^ 1] += flow
                first = next(i for i, edge in enumerate(path) if not residual[edge])
                node = to[path[first] ^ 1]
                del path[first:]
                continue
            deeper, half_edges = levels[node] + 1, edges[node]
            for n in range(following[node], len(half_edges)):
                edge = half_edges[n]
                if levels[to[edge]] == deeper and residual[edge]:
                    following[node] = n
                    path.append(edge)
                    node = to[edge]
                    break
            else:
                if not path:
                    return
                following[node] = len(half_edges)
                node = to[path.pop() ^ 1]
                following[node] += 1
