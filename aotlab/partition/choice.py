"""Which values to keep: the cheapest choice, at a price on kept bytes, is a minimum cut.

Each value that the backward might use becomes an edge between "computed again" and "there in the backward"::

    forward ──again──▶ value ──keep──▶ value' ──∞──▶ each value that can be computed from it ─ ─ ▶ backward

Cutting ``keep`` means to keep the value; cutting ``again``, to compute it again, and then its inputs must be there in
the backward too. For an op that must not run twice ``again`` is infinite.

At a higher price fewer bytes are kept and more time is spent. Over all prices the choices lie on a convex curve, and a
limit in bytes is met by walking along it. Of values that cost the same those that were made early go first: without
that all layers of a model would go at one price, and there would be nothing between all and none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import fx

from aotlab.partition.costs import Cost
from aotlab.partition.flow import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is kept, in the graph's order, and what follows for the values to which the price applied.

    ``weight`` is their bytes and, in its lower digits, what tells choices of as many bytes apart; ``time`` is the
    traffic of keeping and computing again, of all values.
    """

    kept: tuple[fx.Node, ...]
    weight: int
    time: int


class Chooser:
    """Finds choices for one joint graph; ``costs``, ``inputs`` and ``needed`` are as in `Joint`."""

    def __init__(
        self,
        costs: Mapping[fx.Node, Cost],
        inputs: Mapping[fx.Node, Collection[fx.Node]],
        needed: Collection[fx.Node],
    ) -> None:
        self.costs = costs
        count = len(costs)
        #: One byte, as a weight.
        self.unit = count * (count + 1) // 2 + 1
        self.weights = {
            node: cost.nbytes and cost.nbytes * self.unit + count - i for i, (node, cost) in enumerate(costs.items())
        }
        self._network = network = Network()
        positions = {node: (network.node(), network.node()) for node in costs}
        for before, after in positions.values():
            network.edge(network.source, before)
            network.edge(before, after)
        self._count = 2 * count  # those of the edges whose capacities are costs
        self._edges = self._count
        for node, (before, after) in positions.items():
            for each in inputs[node]:
                network.edge(positions[each][1], before)
                self._edges += 1
            if node in needed:
                network.edge(after, network.sink)
                self._edges += 1

    def fastest(self) -> Choice:
        """Return the choice that costs the least time."""
        return self._solve(1, 0, self.costs, None)

    def within(self, limit: int, above: Choice) -> Choice:
        """Find the cheapest choice of at most ``limit`` bytes, or else the smallest; ``above`` is the fastest."""
        above = self._weighed(above, self.costs)
        return self._walk(limit, above, self._least(self.costs, None), self.costs, None)

    def lowered(self, budget: float, above: Choice, own: Collection[fx.Node]) -> Choice:
        """Find the cheapest choice in which the values ``own`` take a part of the bytes that ``above`` gives them.

        ``budget`` lies between the least that they can take (0) and what they take (1). Of all other values those are
        kept that ``above`` keeps, as far as they are still of use, and none that take memory besides.
        """
        kept = frozenset(above.kept)
        above = self._weighed(above, own)
        below = self._least(own, kept)
        least, most = (self.bytes_of(choice, own) for choice in (below, above))
        return self._walk(least + int((most - least) * budget), above, below, own, kept)

    def bytes_of(self, choice: Choice, own: Collection[fx.Node]) -> int:
        """Return how many bytes a choice keeps of some values."""
        return sum(self.costs[node].nbytes for node in choice.kept if node in own)

    def _weighed(self, choice: Choice, own: Collection[fx.Node]) -> Choice:
        weight = sum(self.weights[node] for node in choice.kept if node in own)
        return Choice(kept=choice.kept, weight=weight, time=choice.time)

    def _least(self, own: Collection[fx.Node], kept: frozenset[fx.Node] | None) -> Choice:
        # at this price a byte costs more than all the time that there is
        return self._solve(1, 1 + sum((cost.keep or 0) + (cost.again or 0) for cost in self.costs.values()), own, kept)

    def _walk(
        self, limit: int, above: Choice, below: Choice, own: Collection[fx.Node], kept: frozenset[fx.Node] | None
    ) -> Choice:
        if below.weight // self.unit >= limit:
            return below
        while above.weight // self.unit > limit:
            bytes_saved, price = above.weight - below.weight, below.time - above.time
            between = self._solve(bytes_saved, price, own, kept)
            worth = [each.time * bytes_saved + each.weight * price for each in (above, between)]
            if worth[1] >= worth[0]:  # no corner lies between them
                return below
            if between.weight // self.unit <= limit:
                below = between
            else:
                above = between
        return above

    def _solve(self, time: int, price: int, own: Collection[fx.Node], fixed: frozenset[fx.Node] | None) -> Choice:
        """Choose so that ``time`` per byte of traffic and ``price`` per weight of the ``own`` values cost least.

        ``fixed`` is what is kept of the others, if that is settled.
        """
        capacities: list[int | None] = []
        weights = self.weights
        for node, cost in self.costs.items():
            again = None if cost.again is None else time * cost.again
            keep = None if cost.keep is None else time * cost.keep
            if node in own:
                if keep is not None:
                    keep += price * weights[node]
            elif fixed is not None and cost.nbytes:
                again, keep = (None, keep) if node in fixed else (again, None)
            capacities += (again, keep)
        infinite = 1 + sum(capacity for capacity in capacities if capacity is not None)
        found = [infinite if capacity is None else capacity for capacity in capacities]
        late = self._network.late_cut([*found, *[infinite] * (self._edges - self._count)])
        kept = []
        spent = weight = 0
        for i, (node, cost) in enumerate(self.costs.items()):
            if late[2 + 2 * i]:
                spent += cost.again or 0
            elif late[3 + 2 * i]:
                kept.append(node)
                spent += cost.keep or 0
                if node in own:
                    weight += weights[node]
        return Choice(kept=tuple(kept), weight=weight, time=spent)
