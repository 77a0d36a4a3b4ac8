"""Why a value is kept and not computed again: the ban, or the edge that the cut goes through, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from aotlab.partition.costs import Cost


class Reasons:
    """Explains a choice; ``costs`` and ``inputs`` are as in `aotlab.partition.joint.Joint`."""

    def __init__(
        self, kept: Sequence[fx.Node], costs: Mapping[fx.Node, Cost], inputs: Mapping[fx.Node, Sequence[fx.Node]]
    ) -> None:
        self._kept = frozenset(kept)
        self._costs = costs
        self._inputs = inputs

    def of(self, node: fx.Node) -> str:
        """Say why a value is kept."""
        cost = self._costs[node]
        if cost.again is None:
            return cost.ban
        needs = self._needs(node)
        costs = {each: self._costs[each] for each in needs}
        to_keep = [each for each in needs if costs[each].again is None]
        banned = next((each for each in to_keep if costs[each].is_op), None)
        if banned is not None:
            ban = costs[banned].ban
            return f"to compute it again, as {cost.kind}, takes `{banned.name}`, which is not kept either: {ban}"
        more = _listed([each for each in needs if costs[each].again is not None], "computed again")
        more += _listed(to_keep, "kept for it")
        keep = cost.keep or 0
        again = cost.again + sum(c.again if c.again is not None else c.keep or 0 for c in costs.values())
        moves = f"to keep it moves {in_bytes(keep)}, to compute it again, as {cost.kind}, {in_bytes(again)}"
        if again >= keep:
            return moves + more
        held = sum(costs[each].nbytes for each in to_keep)
        if held >= cost.nbytes:
            return f"{moves}{more}; but that would hold {in_bytes(held)}, and this {in_bytes(cost.nbytes)}"
        return f"{moves}{more}; but what is kept elsewhere was settled before"

    def _needs(self, node: fx.Node) -> list[fx.Node]:
        """Return what is not kept and would have to be there as well for a value to be computed again."""
        found: dict[fx.Node, None] = {}
        todo = [each for each in self._inputs[node] if each not in self._kept]
        while todo:
            each = todo.pop()
            if each not in found:
                found[each] = None
                if self._costs[each].again is not None:
                    todo += [one for one in self._inputs[each] if one not in self._kept]
        return [*found]


def _listed(nodes: Sequence[fx.Node], what: str) -> str:
    names = " and ".join(f"`{node.name}`" for node in nodes[:3])
    return f", with {names}{' and others' if len(nodes) > 3 else ''} {what}" if nodes else ""


def in_bytes(count: float) -> str:
    """Write a number of bytes.

    Examples
    --------
    >>> in_bytes(512), in_bytes(3 * 1024**2)
    ('512 bytes', '3 MiB')
    """
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
