"""Where gradients of several segments are summed, and in which order eager sums them.

    h = norm(x)
    q, k, v = h @ a, h @ b, h @ c
    return attend(q, k, v), k, v        # q, k and v are in three segments: the caller can see k and v

Autograd runs the nodes of a graph in the order in which they were made, the last first, and sums in this order what
arrives at an edge: (v's + k's) + q's. Of two terms the order makes no difference; of three it is that of the roundings.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aotlab import _torch as internals
from aotlab.trace.edges import Edge, next_edges
from aotlab.trace.segments import Exit, Segment


def summed_apart(parts: Sequence[Segment], outside: Collection[Edge]) -> frozenset[Edge]:
    """Return the edges at which three gradients or more arrive, not all of them from one segment.

    At those of ``outside`` there is one of the caller's besides.
    """
    arriving: dict[Edge, list[int]] = {edge: [-1] for edge in outside}
    for number, part in enumerate(parts):
        if part.nodes is None:
            continue
        stops = set(part.stops)
        for node in part.nodes:
            for edge in node.next_functions:
                if edge in stops:
                    arriving.setdefault(edge, []).append(number)
    return frozenset(edge for edge, own in arriving.items() if len(own) > 2 and len(set(own)) > 1)


def to_be_cut(parts: Sequence[Segment]) -> set[Edge]:
    """Return the edges at which a segment adds gradients of its own, one by one, to some of another.

    What arrives there is to be summed by autograd: these are to be carriers, with a segment behind them.
    """
    arriving: dict[Edge, list[int]] = {}
    for number, part in enumerate(parts):
        for node in part.nodes or ():
            for edge in next_edges(node):
                arriving.setdefault(edge, []).append(number)
    return {
        edge
        for number, part in enumerate(parts)
        for edge in part.entries[len(part.roots) :]
        if number in (own := arriving.get(edge, [])) and len(own) > 2 and len(set(own)) > 1
    }


def in_order_of_nodes(parts: Sequence[Segment]) -> dict[Edge, list[Exit]]:
    """List by edge the ways of several segments that lead there, in the order in which eager made their nodes."""
    found: dict[Edge, list[tuple[int, Exit]]] = {}
    for number, part in enumerate(parts):
        for way in part.exits:
            if way[0] in part.apart and way[1] is not None:
                found.setdefault(way[0], []).append((number, way))
    several = {edge: own for edge, own in found.items() if len({number for number, _ in own}) > 1}
    return {
        edge: sorted((way for _, way in own), key=lambda way: (internals.sequence_of(way[1]), -way[2]))
        for edge, own in several.items()
    }
