"""The autograd graph of a trace, cut where the caller can see it.

    def f(x, w):
        y = x * w
        return y, y.exp().sum()

In eager ``autograd.grad(out[1], out[0])`` works, and a hook on ``out[0]`` sees the gradient that comes from
``out[1]``. So the nodes of the traced program are divided into *segments*. Each segment becomes one node of the
caller's autograd graph. A gradient enters a segment along an edge that the caller can see, or along a *cut edge*. A cut
edge comes from another segment, and is no edge of an input or output. The segment's node in the caller's graph gets an
extra result for it. Each node of the program belongs to exactly one segment, so it runs as often as in eager. There is
a single segment if no output depends on another and all outputs reach the same inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from aotlab import _torch as internals
from aotlab.trace.autograd_edges import Edge, next_edges

#: Nodes that the same set of roots reaches form a group. If there are more groups than this, roots that reach a common
#: node are treated as one root, so that there are fewer segments.
_MOST_PARTS = 64

#: An edge along which gradients leave a segment, the node that sends them (None if the segment sums the gradients
#: first), and the index of the edge in this node's `next_functions`.
Exit = tuple[Edge, Any, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the traced program's autograd graph.

    - ``entries`` are the edges along which gradients enter the segment: first the edges of roots, then the cut edges.
    - ``roots`` are the indices of these roots.
    - ``stops`` are the edges along which gradients leave the segment.
    - ``inputs`` are the edges of the program's inputs. If several nodes of the segment send gradients to the edge of an
      input, the segment sums these gradients. At other stops it returns each gradient separately, and autograd sums
      them.
    - ``unsummed`` are the inputs at which the segment does not sum its gradients either, because several segments send
      gradients there.
    - ``nodes`` are the autograd nodes of the segment, or None if the segment is the whole graph.
    """

    roots: tuple[int, ...]
    entries: tuple[Edge, ...]
    stops: tuple[Edge, ...]
    inputs: frozenset[Edge]
    nodes: frozenset[Any] | None = field(repr=False)
    unsummed: frozenset[Edge] = frozenset()

    def sums(self, edge: Edge) -> bool:
        """Tell whether the segment sums its gradients for the stop ``edge``, so that it returns only one."""
        return edge in self.inputs and edge not in self.unsummed

    @property
    def exits(self) -> tuple[Exit, ...]:
        """The exits of the segment.

        A stop at which the segment sums its gradients has one exit. Every other stop has one exit per gradient that a
        node sends to it.
        """
        if self.nodes is None:
            return tuple((edge, None, 0) for edge in self.stops)
        exits: dict[Exit, None] = {}
        for edge in self.stops:
            if self.sums(edge) or (edge in self.entries and not self.has(edge[0])):
                exits[edge, None, 0] = None
        for node in sorted(self.nodes, key=lambda node: -internals.sequence_of(node)):
            for i, edge in enumerate(node.next_functions):
                if edge in self.stops and not self.sums(edge):
                    exits[edge, node, i] = None
        return tuple(exits)

    def has(self, node: Any) -> bool:
        """Tell whether the node belongs to this segment."""
        return self.nodes is None or node in self.nodes


#: The edges of outputs that the epilogue makes as views, each with the roots from which it makes them.
ViewEdges = Mapping[Edge, tuple[int, ...]]


def cut_into_segments(
    roots: Sequence[Edge],
    inputs: Sequence[Edge],
    view_edges: ViewEdges,
    *,
    cuts: Collection[Edge] = (),
    alike: bool = False,
    nested: bool = False,
) -> list[Segment]:
    """Divide the autograd graph between the forward outputs and the inputs into segments.

    ``roots`` are the edges of the roots, ``inputs`` the edges of the inputs, and ``view_edges`` the edges of outputs
    that are views. The graph is also cut at the edges ``cuts``. With ``alike``, roots that reach a common node are in
    the same segment. With ``nested``, the edge of an input may lie behind the edge of another input. Then no segment is
    the whole graph, because `torch.autograd.grad` would not stop at the first of these edges.

    The segments are returned in the order in which the forward makes their autograd nodes. The segment that is farthest
    from the outputs comes first, because a later segment may need the autograd history that an earlier one makes.
    """
    ends = set(inputs)
    whole = Segment(tuple(range(len(roots))), tuple(roots), tuple(inputs), frozenset(ends), None)
    cuts = {edge for edge in cuts if edge not in view_edges and edge not in roots and edge not in ends}
    if len(roots) < 2 and not view_edges and not cuts and not nested:
        return [whole] if roots else []
    graph = _Graph(roots, ends, view_edges, cuts)
    keys = graph.keys(alike)
    through = [n for n, edge in enumerate(roots) if edge in ends]
    order = sorted(set(keys.values()), key=lambda k: (-k[0], -k[1].bit_count(), k[1]))
    if through and not order:
        order = [(0, 0)]
    divided = [graph.segment(keys, key, through if key == order[0] else []) for key in order]
    divided = [segment for segment in divided if segment.entries]
    if len(divided) == 1 and ends.issuperset(divided[0].stops) and not cuts and not nested:
        return [whole]
    return divided


#: A key that identifies the segment of a node: the node's depth, and a mask of the roots that reach it.
_Key = tuple[int, int]


class _Graph:
    """The autograd graph between the roots and the inputs, for `cut_into_segments`.

    ``nodes`` are its nodes, in topological order. ``ends`` are the edges of the inputs. ``visible`` maps the edge of
    each root that is not an input to the index of the root. ``useful`` are the nodes from which a gradient can reach an
    input or another edge that the caller can see. ``cuts`` are more edges at which the graph is cut.
    """

    def __init__(self, roots: Sequence[Edge], ends: set[Edge], view_edges: ViewEdges, cuts: Collection[Edge]) -> None:
        self.roots, self.ends, self.view_edges, self.cuts = roots, ends, view_edges, cuts
        self.visible = {edge: n for n, edge in reversed(list(enumerate(roots))) if edge not in ends}
        self.nodes = self._topological()
        self.useful: set[Any] = set()
        for node in reversed(self.nodes):
            if any(self._is_visible(edge) or edge[0] in self.useful for edge in next_edges(node)):
                self.useful.add(node)

    def _is_visible(self, edge: Edge) -> bool:
        return edge in self.ends or edge in self.visible or edge in self.view_edges

    def segment(self, keys: Mapping[Any, _Key], key: _Key, through: Sequence[int]) -> Segment:
        """Make the segment of the nodes with the key ``key``; ``keys`` has the key of each node.

        ``through`` has the indices of roots that are themselves inputs. The gradient of such a root enters the segment,
        and leaves it unchanged.
        """
        nodes = frozenset(node for node in self.nodes if keys[node] == key)
        root_numbers = [n for n, edge in enumerate(self.roots) if edge not in self.ends and edge[0] in nodes]
        root_numbers = sorted([*root_numbers, *through])
        cut_edges = dict.fromkeys(
            edge
            for node in self.nodes
            for edge in next_edges(node)
            if edge[0] in nodes and (keys[node] != key or edge in self.cuts) and not self._is_visible(edge)
        )
        stops: dict[Edge, None] = {self.roots[n]: None for n in through}
        for node in self.nodes:
            if node in nodes:
                for edge in next_edges(node):
                    if self._is_visible(edge) or (edge[0] in self.useful and edge[0] not in nodes):
                        stops[edge] = None
        entries = (*(self.roots[n] for n in root_numbers), *cut_edges)
        return Segment(tuple(root_numbers), entries, tuple(stops), frozenset(self.ends), nodes & self.useful)

    def keys(self, alike: bool) -> dict[Any, _Key]:
        """Return for each node the key of its segment. With ``alike``, roots that reach a common node count as one.

        Two nodes are in the same segment if they have the same depth and the same roots reach them. The depth of a
        node is a number of edges on a path from a root to this node. Only edges that the caller can see and edges in
        ``cuts`` are counted, and the path is the one with the most such edges.

        The roots matter for this reason. Assume that roots A and B were in one node of the caller's graph, and only A
        reaches an input. Then a backward from B would pass None to that input: its hooks would be called, and the
        graph before it would be freed. If all roots reach all inputs, there is no such difference.
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
            groups: list[int] = []  # masks of roots that share nodes
            for bits in set(reached_by.values()):
                joined = [each for each in groups if each & bits]
                groups = [*(each for each in groups if each not in joined), reduce(or_, joined, bits)]
            reached_by = {node: next(each for each in groups if each & bits) for node, bits in reached_by.items()}
        return {n: (depth[n], reached_by[n]) for n in self.nodes}

    def _are_alike(self, depth: Mapping[Any, int], reached_by: Mapping[Any, int]) -> bool:
        """Tell whether all nodes of the same depth can form one segment, even if different roots reach them.

        ``depth`` maps each node to its depth (see `keys`). ``reached_by`` maps each node to a mask of the roots that
        reach it. The result is True under three conditions:

        - No root is itself an input.
        - If one root reaches an input or an edge in ``cuts``, all roots reach it.
        - For each depth, consider the edges along which gradients leave the nodes of this depth. The same roots reach
          all these edges.
        """
        roots_at_end: dict[Edge, int] = {}
        leaving_edges: dict[int, dict[Edge, int]] = {}
        for node in self.nodes:
            for edge in next_edges(node):
                if edge in self.ends or edge in self.cuts:
                    roots_at_end[edge] = roots_at_end.get(edge, 0) | reached_by[node]
                goes_on = depth.get(edge[0], -1) != depth[node]  # the edge leaves this depth, and so the segment
                if goes_on or edge in self.cuts or self._is_visible(edge):
                    masks = leaving_edges.setdefault(depth[node], {})
                    masks[edge] = masks.get(edge, 0) | reached_by[node]
        every = (1 << len(self.roots)) - 1
        alike = all(bits == every for bits in roots_at_end.values()) and self.ends.isdisjoint(self.roots)
        return alike and all(len(set(masks.values())) < 2 for masks in leaving_edges.values())

    def _following(self, node: Any) -> list[tuple[Any, int]]:
        """Return the next nodes of a node, each with 1 if the edge to it is visible to the caller or cut, else 0."""
        following = []
        for edge in next_edges(node):
            if edge in self.ends:
                continue
            if edge in self.view_edges:
                view_roots = [self.roots[root] for root in self.view_edges[edge] if self.roots[root] not in self.ends]
                following += [(start, 1) for start, _ in view_roots if node not in self._views_behind(start)]
            if edge in self.visible:
                following.append((edge[0], 1))
            elif edge not in self.view_edges:
                following.append((edge[0], int(edge in self.cuts)))
        return following

    def _views_behind(self, node: Any) -> set[Any]:
        """Return the nodes on the unbranched path from ``node`` to the first edge that the caller can see.

        ``node`` is the node of a root. In the forward, the ops of the returned nodes compute this root, so `_following`
        must not lead from these nodes back to the root.
        """
        views = {node}
        while len(edges := next_edges(node)) == 1 and not self._is_visible(edges[0]):
            node = edges[0][0]
            views.add(node)
        return views

    def _topological(self) -> list[Any]:
        """Return all nodes, each before the nodes to which it sends gradients."""
        done: dict[Any, None] = {}
        entered: set[Any] = set()
        for start, _ in self.visible:
            stack: list[tuple[Any, bool]] = [(start, False)]
            while stack:
                node, is_finished = stack.pop()
                if is_finished:
                    done[node] = None
                elif node not in entered:
                    entered.add(node)
                    stack.append((node, True))
                    stack += [(target, False) for target, _ in self._following(node)]
        return list(done)[::-1]


def _senders(segments: Sequence[Segment]) -> dict[Edge, list[int]]:
    """Return for each edge the indices of the segments that send gradients to it, one index for each gradient."""
    senders: dict[Edge, list[int]] = {}
    for number, segment in enumerate(segments):
        for node in segment.nodes or ():
            for edge in node.next_functions:
                senders.setdefault(edge, []).append(number)
    return senders


def _order_affects_sum(senders: Sequence[int]) -> bool:
    """Tell whether the order in which gradients are summed at an edge affects rounding and depends on the segments.

    ``senders`` has the index of the sending segment for each gradient. The order matters if there are three or more
    gradients and they come from several segments.
    """
    return len(senders) > 2 and len(set(senders)) > 1


def edges_left_unsummed(segments: Sequence[Segment], outside: Collection[Edge]) -> frozenset[Edge]:
    """Return the edges that receive three or more gradients, not all from one segment.

        h = norm(x)
        q, k, v = h @ a, h @ b, h @ c
        return attend(q, k, v), k, v        # q, k and v are in three segments: the caller can see k and v

    Three gradients flow to ``h``. Eager sums them in the reverse order of the nodes: first the gradients from ``v`` and
    ``k``, then the one from ``q``. With three or more terms, the order affects the rounding. At the edges in
    ``outside``, the caller's code may add one more gradient.
    """
    stops = {edge for segment in segments for edge in segment.stops}
    arriving = {edge: numbers for edge, numbers in _senders(segments).items() if edge in stops}
    return frozenset(
        e for e, numbers in arriving.items() if _order_affects_sum([-1, *numbers] if e in outside else numbers)
    )


def edges_to_cut(segments: Sequence[Segment]) -> set[Edge]:
    """Return the cut edges that receive gradients both from the segment that they enter and from other segments.

    Only edges with three or more gradients are returned, because only then the order of the sum affects the rounding.
    The segment would sum its own gradients first. Therefore the graph is also cut at such an edge inside of the
    segment, and autograd sums all gradients in eager's order.
    """
    senders = _senders(segments)
    cut_edges = (
        (number, edge) for number, segment in enumerate(segments) for edge in segment.entries[len(segment.roots) :]
    )
    return {
        edge
        for number, edge in cut_edges
        if number in (sending := senders.get(edge, [])) and _order_affects_sum(sending)
    }


def exits_in_node_order(segments: Sequence[Segment]) -> dict[Edge, list[Exit]]:
    """Return, for each edge in ``unsummed`` at which several segments have exits, these exits.

    They have the order in which eager made their nodes, so that autograd sums the gradients as in eager.
    """
    exits_at: dict[Edge, list[Exit]] = {}
    senders: dict[Edge, set[int]] = {}
    for number, segment in enumerate(segments):
        for exit_ in segment.exits:
            if exit_[0] in segment.unsummed and exit_[1] is not None:
                exits_at.setdefault(exit_[0], []).append(exit_)
                senders.setdefault(exit_[0], set()).add(number)
    return {
        edge: sorted(exits, key=lambda exit_: (internals.sequence_of(exit_[1]), -exit_[2]))
        for edge, exits in exits_at.items()
        if len(senders[edge]) > 1
    }
