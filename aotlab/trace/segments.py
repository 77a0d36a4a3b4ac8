"""The autograd graph of a trace, cut where the caller can see it.

    def f(x, w):
        y = x * w
        return y, y.exp().sum()

In eager ``autograd.grad(out[1], out[0])`` works, and a hook on ``out[0]`` sees what comes down from ``out[1]``. So the
nodes of the traced program are divided into *segments*, each of which becomes one node of the caller's graph. From one
to another a gradient passes an edge that the caller can see, or, where two ways lead to the same node, one that is made
for it (a *cut edge*). Each node belongs to one segment, so it runs as often as in eager. Where outputs do not hang on
each other, and reach the same inputs, there is a single segment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from aotlab import _torch as internals
from aotlab.trace.edges import Edge, next_edges

#: Where the roots reach more groups of nodes than this, those that reach a node together go together.
_MOST_PARTS = 64

#: An edge where gradients leave, the sender (None where the segment sums first), and its place in `next_functions`.
Exit = tuple[Edge, Any, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the traced program's autograd graph.

    Gradients come in at ``entries``, first the edges of ``roots`` (numbers of differentiable forward outputs), then cut
    edges, and leave at ``stops``. At ``inputs`` of the program they are summed, unless they are ``apart``: met by
    several segments' gradients; elsewhere each goes on by itself, for autograd to sum. A lone one has no ``nodes``.
    """

    roots: tuple[int, ...]
    entries: tuple[Edge, ...]
    stops: tuple[Edge, ...]
    inputs: frozenset[Edge]
    nodes: frozenset[Any] | None = field(repr=False)
    apart: frozenset[Edge] = frozenset()

    def sums(self, edge: Edge) -> bool:
        """Tell whether the segment sums its gradients for a stop."""
        return edge in self.inputs and edge not in self.apart

    @property
    def exits(self) -> tuple[Exit, ...]:
        """The ways out: inputs, and for other stops each node's way there."""
        if self.nodes is None:
            return tuple((edge, None, 0) for edge in self.stops)
        found: dict[Exit, None] = {}
        for edge in self.stops:
            if self.sums(edge) or (edge in self.entries and not self.has(edge[0])):
                found[edge, None, 0] = None
        for node in sorted(self.nodes, key=lambda node: -internals.sequence_of(node)):
            for i, edge in enumerate(node.next_functions):
                if edge in self.stops and not self.sums(edge):
                    found[edge, node, i] = None
        return tuple(found)

    def has(self, node: Any) -> bool:
        """Tell whether the node is of this segment."""
        return self.nodes is None or node in self.nodes


#: Edges of the caller's views, and the roots behind them.
Seen = Mapping[Edge, tuple[int, ...]]


def segments(
    roots: Sequence[Edge], inputs: Sequence[Edge], seen: Seen, *, cuts: Collection[Edge] = (), alike: bool = False
) -> list[Segment]:
    """Divide the graph between ``roots``, the edges of the differentiable forward outputs, and those of the inputs.

    ``cuts`` are edges to be cut; if ``alike``, roots that share a node go together. The first to run leads.
    """
    ends = set(inputs)
    whole = Segment(tuple(range(len(roots))), tuple(roots), tuple(inputs), frozenset(ends), None)
    cuts = {edge for edge in cuts if edge not in seen and edge not in roots and edge not in ends}
    if len(roots) < 2 and not seen and not cuts:
        return [whole] if roots else []
    graph = _Graph(roots, ends, seen, cuts)
    keys = graph.keys(alike)
    through = [n for n, edge in enumerate(roots) if edge in ends]
    order = sorted(set(keys.values()), key=lambda k: (-k[0], -k[1].bit_count(), k[1]))
    if through and not order:
        order = [(0, 0)]
    made = [graph.segment(keys, key, through if key == order[0] else []) for key in order]
    made = [segment for segment in made if segment.entries]
    if len(made) == 1 and ends.issuperset(made[0].stops) and not cuts:
        return [whole]
    return made


#: To which segment a node belongs: how deep, and reached by which roots (as bits).
_Key = tuple[int, int]


class _Graph:
    """The nodes behind ``roots``, in order, up to the ``ends``, and what the caller can see of their edges.

    From the ``useful`` nodes a gradient can get to an input or to something ``visible``, as the roots' edges are.
    """

    def __init__(self, roots: Sequence[Edge], ends: set[Edge], seen: Seen, cuts: Collection[Edge]) -> None:
        self.roots, self.ends, self.seen, self.cuts = roots, ends, seen, cuts
        self.visible = {edge: n for n, edge in reversed(list(enumerate(roots))) if edge not in ends}
        self.nodes = self._topological()
        self.useful: set[Any] = set()
        for node in reversed(self.nodes):
            if any(self._is_seen(edge) or edge[0] in self.useful for edge in next_edges(node)):
                self.useful.add(node)

    def _is_seen(self, edge: Edge) -> bool:
        return edge in self.ends or edge in self.visible or edge in self.seen

    def segment(self, keys: Mapping[Any, _Key], key: _Key, through: Sequence[int]) -> Segment:
        """Make the segment of the nodes with a key; gradients of ``through``, roots that are inputs, pass it."""
        nodes = frozenset(node for node in self.nodes if keys[node] == key)
        own = [n for n, edge in enumerate(self.roots) if edge not in self.ends and edge[0] in nodes]
        own = sorted([*own, *through])
        cut_edges = dict.fromkeys(
            edge
            for node in self.nodes
            for edge in next_edges(node)
            if edge[0] in nodes and (keys[node] != key or edge in self.cuts) and not self._is_seen(edge)
        )
        stops: dict[Edge, None] = {self.roots[n]: None for n in through}
        for node in self.nodes:
            if node in nodes:
                for edge in next_edges(node):
                    if self._is_seen(edge) or (edge[0] in self.useful and edge[0] not in nodes):
                        stops[edge] = None
        entries = (*(self.roots[n] for n in own), *cut_edges)
        return Segment(tuple(own), entries, tuple(stops), frozenset(self.ends), nodes & self.useful)

    def keys(self, alike: bool) -> dict[Any, _Key]:
        """Say for each node to which segment it belongs.

        Nodes go together that have the same depth (how many things that the caller can see lie on the longest way to
        them) and that the same roots reach, given as bits. Were roots A and B in one node of the caller's graph, of
        which only A reaches an input, a backward from B would hand that input None: its hooks would see that, and the
        graph behind it would be used up. Where all roots reach all inputs, they need not be told apart.
        """
        depth = dict.fromkeys(self.nodes, 0)
        reached_by = dict.fromkeys(self.nodes, 0)
        for n, edge in enumerate(self.roots):
            if edge not in self.ends:
                reached_by[edge[0]] |= 1 << n
        for node in self.nodes:
            for target, crossing in self._following(node):
                depth[target] = max(depth[target], depth[node] + crossing)
                reached_by[target] |= reached_by[node]
        if self._are_alike(depth, reached_by):
            reached_by = dict.fromkeys(self.nodes, 0)
        elif alike or len(set(reached_by.values())) > _MOST_PARTS:
            groups: list[int] = []  # of roots that share nodes
            for bits in set(reached_by.values()):
                joined = [each for each in groups if each & bits]
                groups = [*(each for each in groups if each not in joined), reduce(or_, joined, bits)]
            reached_by = {node: next(each for each in groups if each & bits) for node, bits in reached_by.items()}
        return {n: (depth[n], reached_by[n]) for n in self.nodes}

    def _are_alike(self, depth: Mapping[Any, int], reached_by: Mapping[Any, int]) -> bool:
        """Tell whether all roots reach all ends, and all nodes of one depth by which gradients leave it are alike."""
        arrived: dict[Edge, int] = {}
        leaves: dict[int, dict[Edge, int]] = {}
        for node in self.nodes:
            for edge in next_edges(node):
                if edge in self.ends or edge in self.cuts:
                    arrived[edge] = arrived.get(edge, 0) | reached_by[node]
                goes_on = depth.get(edge[0], -1) != depth[node]  # to another segment, at the latest
                if goes_on or edge in self.cuts or self._is_seen(edge):
                    own = leaves.setdefault(depth[node], {})
                    own[edge] = own.get(edge, 0) | reached_by[node]
        every = (1 << len(self.roots)) - 1
        alike = all(bits == every for bits in arrived.values()) and self.ends.isdisjoint(self.roots)
        return alike and all(len(set(own.values())) < 2 for own in leaves.values())

    def _following(self, node: Any) -> list[tuple[Any, int]]:
        """Return the nodes behind one, each with 1 if the way there passes something that the caller can see."""
        found = []
        for edge in next_edges(node):
            if edge in self.ends:
                continue
            if edge in self.seen:
                others = [self.roots[root] for root in self.seen[edge] if self.roots[root] not in self.ends]
                found += [(start, 1) for start, _ in others if node not in self._views_behind(start)]
            if edge in self.visible:
                found.append((edge[0], 1))
            elif edge not in self.seen:
                found.append((edge[0], int(edge in self.cuts)))
        return found

    def _views_behind(self, node: Any) -> set[Any]:
        """Return the nodes up to the first edge in sight on a lone way: those of views, which await no write."""
        found = {node}
        while len(edges := next_edges(node)) == 1 and not self._is_seen(edges[0]):
            node = edges[0][0]
            found.add(node)
        return found

    def _topological(self) -> list[Any]:
        """List all nodes, each before those that it sends gradients to."""
        done: dict[Any, None] = {}
        entered: set[Any] = set()
        for start, _ in self.visible:
            stack: list[tuple[Any, bool]] = [(start, False)]
            while stack:
                node, left = stack.pop()
                if left:
                    done[node] = None
                elif node not in entered:
                    entered.add(node)
                    stack.append((node, True))
                    stack += [(target, False) for target, _ in self._following(node)]
        return list(done)[::-1]


def _senders(parts: Sequence[Segment]) -> dict[Edge, list[int]]:
    """List for each edge the numbers of the segments whose nodes send gradients there, once for each gradient."""
    found: dict[Edge, list[int]] = {}
    for number, part in enumerate(parts):
        for node in part.nodes or ():
            for edge in node.next_functions:
                found.setdefault(edge, []).append(number)
    return found


def _are_mixed(senders: Sequence[int]) -> bool:
    """Tell whether several segments send gradients, and so many that the order of the sum shows in its rounding."""
    return len(senders) > 2 and len(set(senders)) > 1


def summed_apart(parts: Sequence[Segment], outside: Collection[Edge]) -> frozenset[Edge]:
    """Return the edges at which three gradients or more arrive, not all of them from one segment.

        h = norm(x)
        q, k, v = h @ a, h @ b, h @ c
        return attend(q, k, v), k, v        # q, k and v are in three segments: the caller can see k and v

    Autograd sums in the order of its nodes, the last first: (v's + k's) + q's. From three terms on that shows in the
    rounding. At the edges of ``outside`` there is one of the caller's besides.
    """
    stops = {edge for part in parts for edge in part.stops}
    arriving = {edge: own for edge, own in _senders(parts).items() if edge in stops}
    return frozenset(e for e, own in arriving.items() if _are_mixed([-1, *own] if e in outside else own))


def to_be_cut(parts: Sequence[Segment]) -> set[Edge]:
    """Return the edges, to be cut, at which a segment adds gradients, one by one, to some of another."""
    senders = _senders(parts)
    cut_edges = ((number, edge) for number, part in enumerate(parts) for edge in part.entries[len(part.roots) :])
    return {edge for number, edge in cut_edges if number in (own := senders.get(edge, [])) and _are_mixed(own)}


def in_order_of_nodes(parts: Sequence[Segment]) -> dict[Edge, list[Exit]]:
    """List by edge the ways of several segments that lead there, in the order in which eager made their nodes."""
    found: dict[Edge, list[Exit]] = {}
    senders: dict[Edge, set[int]] = {}
    for number, part in enumerate(parts):
        for way in part.exits:
            if way[0] in part.apart and way[1] is not None:
                found.setdefault(way[0], []).append(way)
                senders.setdefault(way[0], set()).add(number)
    return {
        edge: sorted(ways, key=lambda way: (internals.sequence_of(way[1]), -way[2]))
        for edge, ways in found.items()
        if len(senders[edge]) > 1
    }
