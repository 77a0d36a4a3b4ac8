"""The autograd graph of a trace, cut where the caller can see it.

    def f(x, w):
        y = x * w
        return y, y.exp().sum()

In eager the second output hangs on the first: ``autograd.grad(out[1], out[0])`` works, and a hook on ``out[0]`` sees
what comes down from ``out[1]``. So one autograd node for the call is not enough. The nodes of the traced program are
divided into *segments*, each of which becomes one node of the caller's graph. Where a gradient goes from one segment to
another it passes an edge that the caller can see, or, where two ways lead to the same node, an edge that is made for it
(a *carrier*). Every node of the traced program belongs to one segment, so it runs as often as in eager.

A program whose outputs do not hang on each other, and reach the same inputs, has a single segment.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from aotlab import torch_internals as internals
from aotlab.recorder import Tape, tensors_in

#: Into so many groups of nodes that are reached by other roots a graph is divided; with more it is by depth only.
_MOST_PARTS = 64

#: A stop, and if it is no input the node that sends a gradient there and in which place; None where all is summed.
Exit = tuple["Edge", Any, int]

#: An autograd node and the number of one of its forward outputs: where the gradient of that output goes.
Edge = tuple[Any, int]


def edge_of(tensor: Tensor) -> Edge:
    """Return where the gradient of ``tensor`` goes."""
    if tensor.grad_fn is None:
        # what torch's own function does for a leaf costs an op, and there may be hundreds of parameters
        with torch.enable_grad():
            looked = _Look.apply(tensor)  # type: ignore[no-untyped-call]  # untyped in torch
            # in two steps: torch 2.11's node is gone as soon as what it made is
            found: Edge = looked.grad_fn.next_functions[0]
        return found
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class _Look(torch.autograd.Function):
    """Hangs a node behind a tensor, to see what its gradient goes to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def next_edges(node: Any) -> list[Edge]:
    """Return where a node sends gradients, each place once."""
    return list(dict.fromkeys(edge for edge in node.next_functions if edge[0] is not None))


def edges_behind(starts: Iterable[Edge]) -> set[Edge]:
    """Return the edges that gradients of ``starts`` pass, these included."""
    found = set(starts)
    todo = [node for node, _ in found]
    entered: set[Any] = set()
    while todo:
        node = todo.pop()
        if node not in entered:
            entered.add(node)
            edges = next_edges(node)
            found.update(edges)
            todo += [following for following, _ in edges]
    return found


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the traced program's autograd graph.

    ``entries`` are where gradients come in: the first ``len(roots)`` of them are the edges of ``roots`` (numbers of
    differentiable forward outputs), the others are carriers. ``stops`` are the edges where they leave, ``inputs`` those
    of them that are inputs of the program: there all that arrives is summed, while elsewhere each gradient goes on by
    itself, so that autograd sums as it does in eager. ``nodes`` are what lies between; None if the segment is the only
    one. ``lost`` are the nodes of the whole graph that lead nowhere: a gradient that gets there uses up what they keep.
    ``apart`` are stops at which several segments' gradients are summed: there too, each goes on by itself.
    """

    roots: tuple[int, ...]
    entries: tuple[Edge, ...]
    stops: tuple[Edge, ...]
    inputs: frozenset[Edge]
    nodes: frozenset[Any] | None = field(repr=False)
    lost: frozenset[Any] = field(default=frozenset(), repr=False)
    apart: frozenset[Edge] = frozenset()

    def sums(self, edge: Edge) -> bool:
        """Tell whether the segment sums its gradients for a stop."""
        return edge in self.inputs and edge not in self.apart

    @property
    def exits(self) -> tuple[Exit, ...]:
        """The ways out: inputs, and for other stops each node's way there."""
        if self.nodes is None:
            return tuple((edge, None, 0) for edge in self.stops)
        found: dict[Exit, None] = {(edge, None, 0): None for edge in self.stops if self.sums(edge)}
        for edge in self.entries:
            if edge in self.stops and not self.sums(edge) and not self.has(edge[0]):
                found[edge, None, 0] = None
        for node in sorted(self.nodes, key=lambda node: -internals.sequence_of(node)):
            for i, edge in enumerate(node.next_functions):
                if edge in self.stops and not self.sums(edge):
                    found[edge, node, i] = None
        return tuple(found)

    def has(self, node: Any) -> bool:
        """Tell whether the node is of this segment."""
        return self.nodes is None or node in self.nodes

    def runs(self, node: Any) -> bool:
        """Tell whether eager would run the node in a backward through this segment."""
        return self.has(node) or node in self.lost


def segments(
    roots: Sequence[Edge],
    inputs: Sequence[Edge],
    seen: Mapping[Edge, tuple[int, ...]],
    *,
    nested: bool = False,
    cuts: Collection[Edge] = (),
    alone: Collection[Edge] = (),
) -> list[Segment]:
    """Divide the graph behind ``roots``; the segment that runs first in the forward comes first.

    Parameters
    ----------
    roots
        The edges of the differentiable forward outputs.
    inputs
        The edges of the inputs, where the graph ends.
    seen
        The edges of tensors that the caller gets as views, with the roots that each is made from; none where it is made
        from an input.
    cuts
        Edges that are to be carriers.
    alone
        Those of the roots whose nodes are to be segments of their own.
    nested
        Whether the gradient of one input may go on to another, of which it is a view.
    """
    whole = Segment(tuple(range(len(roots))), tuple(roots), tuple(inputs), frozenset(inputs), None)
    cuts = {edge for edge in cuts if edge not in seen and edge not in roots and edge not in inputs}
    if len(roots) < 2 and not seen and not nested and not cuts and not alone:
        return [whole] if roots else []
    ends = set(inputs)
    visible = {edge: n for n, edge in reversed(list(enumerate(roots))) if edge not in ends}
    order = _topological([node for node, _ in visible], visible, seen, ends, roots, cuts)
    own_segment = {edge[0]: n for n, edge in enumerate(dict.fromkeys(alone), 1)}
    shared = _keys(order, visible, seen, ends, roots, cuts)
    key = {node: (*shared[node], own_segment.get(node, 0)) for node in order}
    useful = _useful(order, visible, seen, ends)
    lost = frozenset(order) - useful
    keys = sorted({key[node] for node in order}, key=lambda k: (-k[0], -k[1].bit_count(), k[1], k[2]))
    through = [n for n, edge in enumerate(roots) if edge in ends]
    if through and not keys:
        keys = [(0, 0, 0)]
    made = []
    for own_key in keys:
        nodes = frozenset(node for node in order if key[node] == own_key)
        own = [n for n, edge in enumerate(roots) if edge not in ends and edge[0] in nodes]
        if own_key == keys[0]:
            own = sorted([*own, *through])
        carriers = dict.fromkeys(
            edge
            for node in order
            for edge in next_edges(node)
            if edge[0] in nodes
            and (key[node] != own_key or edge in cuts)
            and edge not in visible
            and edge not in seen
            and edge not in ends
        )
        stops: dict[Edge, None] = {roots[n]: None for n in own if roots[n] in ends}
        for node in order:
            if node in nodes:
                stops.update(
                    (edge, None)
                    for edge in next_edges(node)
                    if edge in ends or edge in visible or edge in seen or (edge[0] in useful and edge[0] not in nodes)
                )
        entries = (*(roots[n] for n in own), *carriers)
        made.append(Segment(tuple(own), entries, tuple(stops), frozenset(ends), nodes & useful, lost))
    made = [segment for segment in made if segment.entries]
    if len(made) == 1 and ends.issuperset(made[0].stops) and not nested and not cuts and not alone:
        return [whole]
    return made


def _keys(
    order: Sequence[Any],
    visible: Mapping[Edge, int],
    seen: Mapping[Edge, tuple[int, ...]],
    ends: set[Edge],
    roots: Sequence[Edge],
    cuts: Collection[Edge],
) -> dict[Any, tuple[int, int]]:
    """Say for each node to which segment it belongs.

    First by how many things that the caller can see lie on the longest way to it; then by the roots that reach it, as
    bits: were two roots in one node of the caller's graph, of which one reaches an input and the other does not, a
    backward from the latter would hand that input None, which its hooks would see, and which would use up the graph
    behind it. So it is with what the caller can see in the middle. Where all roots reach all of that, nothing is gained
    by telling them apart.
    """
    depth = dict.fromkeys(order, 0)
    reached_by = dict.fromkeys(order, 0)
    for n, edge in enumerate(roots):
        if edge not in ends:
            reached_by[edge[0]] |= 1 << n
    arrived: dict[Edge, int] = {}
    leaves: dict[int, dict[Edge, int]] = {}
    for node in order:
        for target, crossing in _following(node, visible, seen, ends, roots, cuts):
            depth[target] = max(depth[target], depth[node] + crossing)
            reached_by[target] |= reached_by[node]
        for edge in next_edges(node):
            if edge in ends or edge in cuts:
                arrived[edge] = arrived.get(edge, 0) | reached_by[node]
    for node in order:
        for edge in next_edges(node):
            goes_on = depth.get(edge[0], -1) != depth[node]  # to another segment, at the latest
            if goes_on or edge in ends or edge in cuts or edge in visible or edge in seen:
                own = leaves.setdefault(depth[node], {})
                own[edge] = own.get(edge, 0) | reached_by[node]
    every = (1 << len(roots)) - 1
    alike = all(bits == every for bits in arrived.values()) and len({edge for edge in roots if edge in ends}) == 0
    alike = alike and all(len(set(own.values())) < 2 for own in leaves.values())
    if alike or len(set(reached_by.values())) > _MOST_PARTS:
        return {node: (depth[node], 0) for node in order}
    return {node: (depth[node], reached_by[node]) for node in order}


def _following(
    node: Any,
    visible: Mapping[Edge, int],
    seen: Mapping[Edge, tuple[int, ...]],
    ends: set[Edge],
    roots: Sequence[Edge],
    cuts: Collection[Edge],
) -> list[tuple[Any, int]]:
    """Return the nodes behind ``node``, each with 1 if the way there passes something that the caller can see."""
    found = []
    for edge in next_edges(node):
        if edge in ends:
            continue
        if edge in seen:
            others = [roots[root] for root in seen[edge] if roots[root] not in ends]
            found += [(start, 1) for start, _ in others if node not in _views_behind(start, visible, seen, ends)]
        if edge in visible:
            found.append((edge[0], 1))
        elif edge not in seen:
            found.append((edge[0], int(edge in cuts)))
    return found


def _views_behind(
    node: Any, visible: Mapping[Edge, int], seen: Mapping[Edge, tuple[int, ...]], ends: set[Edge]
) -> set[Any]:
    """Return the nodes from ``node`` to the first edge that the caller can see, as far as there is only one way.

    Those of a view lead to what it is a view of, and need not wait for the write through the view.
    """
    found = {node}
    while len(edges := next_edges(node)) == 1 and not any(edges[0] in known for known in (visible, seen, ends)):
        node = edges[0][0]
        found.add(node)
    return found


def _topological(
    starts: Sequence[Any],
    visible: Mapping[Edge, int],
    seen: Mapping[Edge, tuple[int, ...]],
    ends: set[Edge],
    roots: Sequence[Edge],
    cuts: Collection[Edge],
) -> list[Any]:
    """List all nodes behind ``starts``, each before those that it sends gradients to."""
    done: dict[Any, None] = {}
    entered: set[Any] = set()
    for start in starts:
        stack: list[tuple[Any, bool]] = [(start, False)]
        while stack:
            node, left = stack.pop()
            if left:
                done[node] = None
            elif node not in entered:
                entered.add(node)
                stack.append((node, True))
                stack += [(target, False) for target, _ in _following(node, visible, seen, ends, roots, cuts)]
    return list(done)[::-1]


def _useful(
    order: Sequence[Any], visible: Mapping[Edge, int], seen: Mapping[Edge, tuple[int, ...]], ends: set[Edge]
) -> set[Any]:
    """Return the nodes from which a gradient can get to an input or to something that the caller can see."""
    useful: set[Any] = set()
    for node in reversed(order):
        if any(e in ends or e in visible or e in seen or e[0] in useful for e in next_edges(node)):
            useful.add(node)
    return useful


def differentiate(
    segment: Segment,
    tangents: Sequence[Tensor | None],
    arrived: list[Edge] | None = None,
    asked: Collection[Exit] | None = None,
    *,
    create_graph: bool = False,
) -> dict[Exit, Tensor]:
    """Run the segment's nodes and return the gradients that leave it, by exit.

    Of ``asked``, if it is given, there are the exits that matter: only nodes on the way to these are run. With
    ``create_graph`` the gradients have histories.

    ``arrived`` is given the edges of leaves in the order in which autograd comes to them; not by a segment of several.

    ``tangents`` has one gradient or None per entry. A segment that is the only one is run by one call of autograd; else
    each node is run by a call of its own, in autograd's order, because autograd would not stop at an edge that the
    caller can see.
    """
    if segment.nodes is None:
        chosen = [(GradientEdge(*edge), t) for edge, t in zip(segment.entries, tangents, strict=True) if t is not None]
        # in torch 2.11 the node of a custom function that nothing leads to may be gone, and autograd crashes on it
        reached = reachable(segment)
        stops = [edge for edge in segment.stops if edge in reached]
        if asked is not None:
            stops = [edge for edge in stops if (edge, None, 0) in asked]
        if not stops or not chosen:
            return {}
        with internals.arrivals(stops, arrived):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                [edge for edge, _ in chosen],
                [GradientEdge(*edge) for edge in stops],
                [tangent for _, tangent in chosen],
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
            )
        return {(edge, None, 0): g for edge, g in zip(stops, found, strict=True) if g is not None}
    if asked is None:
        return _node_by_node(segment, tangents, create_graph=create_graph)
    some = replace(segment, nodes=frozenset(leading_to(segment, list(asked))))
    gradients = _node_by_node(some, tangents, create_graph=create_graph)
    return {way: gradient for way, gradient in gradients.items() if way in asked}


def _node_by_node(
    segment: Segment, tangents: Sequence[Tensor | None], *, create_graph: bool = False
) -> dict[Exit, Tensor]:
    stops = set(segment.stops)
    arrived: dict[Exit, Tensor] = {}
    buffers: dict[Any, dict[int, Tensor]] = {}

    def add(place: dict[Any, Tensor], key: Any, gradient: Tensor) -> None:
        place[key] = place[key] + gradient if key in place else gradient

    for edge, tangent in zip(segment.entries, tangents, strict=True):
        if tangent is not None and segment.has(edge[0]):
            add(buffers.setdefault(edge[0], {}), edge[1], tangent)
        elif tangent is not None:
            add(arrived, (edge, None, 0), tangent)
    waiting = _dependencies(buffers, segment, stops)
    ready = [(-internals.sequence_of(node), i, node) for i, node in enumerate(buffers) if not waiting.get(node)]
    heapq.heapify(ready)
    counter = len(buffers)
    while ready:
        _, _, node = heapq.heappop(ready)
        found = _run(node, buffers.pop(node, {}), segment, stops, create_graph=create_graph)
        targets: dict[Any, None] = {}
        for i, edge in enumerate(node.next_functions):
            gradient = found.get(i)
            if edge in stops:
                if gradient is not None:
                    add(arrived, (edge, None, 0) if segment.sums(edge) else (edge, node, i), gradient)
            elif segment.has(edge[0]):
                targets[edge[0]] = None
                if gradient is not None:
                    add(buffers.setdefault(edge[0], {}), edge[1], gradient)
        for target in targets:
            waiting[target] -= 1
            if not waiting[target]:
                counter += 1
                heapq.heappush(ready, (-internals.sequence_of(target), counter, target))
    return arrived


def _run(
    node: Any, buffer: dict[int, Tensor], segment: Segment, stops: set[Edge], *, create_graph: bool = False
) -> dict[int, Tensor]:
    """Run one node; return its gradients by their place in ``next_functions``."""
    wanted = [(i, e) for i, e in enumerate(node.next_functions) if e[0] and (e in stops or segment.has(e[0]))]
    if not buffer or not wanted:
        return {}
    edges = list(dict.fromkeys(edge for _, edge in wanted))
    returned = internals.run_node(node, buffer, edges, create_graph=create_graph)
    found = {i: (returned[i], edge) for i, edge in wanted}
    return {i: _fitted(gradient, edge) for i, (gradient, edge) in found.items() if gradient is not None}


def run_one(node: Any, buffer: dict[int, Tensor], segment: Segment) -> dict[int, Tensor]:
    """Run one node of a segment by itself; return its gradients by their place in ``next_functions``."""
    return _run(node, buffer, segment, set(segment.stops))


def _fitted(gradient: Tensor, edge: Edge) -> Tensor:
    """Do to a gradient what autograd does before it hands it on: sum what was broadcast, cast it."""
    shape, dtype, _ = internals.edge_metadata(*edge)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    if dtype.is_complex != gradient.is_complex() and not dtype.is_complex:
        gradient = torch.real(gradient)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _dependencies(starts: Mapping[Any, Any], segment: Segment, stops: set[Edge]) -> dict[Any, int]:
    """Count for each node behind ``starts`` how many others send it gradients."""
    counts: dict[Any, int] = {}
    entered = set(starts)
    todo = list(starts)
    while todo:
        node = todo.pop()
        for target in dict.fromkeys(e[0] for e in next_edges(node) if e not in stops and segment.has(e[0])):
            counts[target] = counts.get(target, 0) + 1
            if target not in entered:
                entered.add(target)
                todo.append(target)
    return counts


def watches(
    bits: Mapping[Any, int], tensors: Sequence[Tensor], kept_by: Mapping[Any, Sequence[Tensor]] | None = None
) -> list[int]:
    """Say for each tensor which autograd nodes keep it or an alias of it, as bits like those of the masks.

    ``kept_by`` says of some nodes what they keep unseen.

    A write to the tensor after the call is an error in the backward of these nodes, also where the compiled forward
    saved something else.
    """
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_storage.setdefault(internals.storage_key(tensor), []).append(i)
    # what was given other memory still counts with what was kept of it before
    moved = [i for i, t in enumerate(tensors) if internals.is_functional(t) and internals.was_storage_changed(t)]
    found = [0] * len(tensors)
    for node, bit in bits.items():
        hidden = kept_by.get(node, ()) if kept_by else ()
        for kept in [*internals.saved_tensors_of(node), *internals.kept_by_checkpoint(node), *hidden]:
            for i in (*by_storage.get(internals.storage_key(kept), ()), *moved):
                if internals.share_version(kept, tensors[i]):
                    found[i] |= 1 << bit
    return found


def read_by_themselves(tape: Tape, nodes: Iterable[Any], bits: Mapping[Any, int]) -> dict[int, int]:
    """Find what custom functions and checkpoints among ``nodes`` read in the backward, whether or not they saved it.

    Eager reads what they did not save, as an attribute or a captured tensor, as it is by then; here it is saved like
    all else, so that a write to it is an error. Returns masks of the nodes by the keys of storages.
    """
    masks = {
        internals.sequence_of(node): 1 << bits[node] if node in bits else LASTING
        for node in nodes
        if internals.is_custom_function_node(node) or internals.is_checkpointed(node)
    }
    found: dict[int, int] = {}
    for operation in tape.operations:
        if operation.phase == "backward" and (mask := masks.get(operation.sequence or -1)):
            for tensor in tensors_in((operation.args, operation.kwargs)):
                if tensor.layout == torch.strided:
                    found[internals.storage_key(tensor)] = found.get(internals.storage_key(tensor), 0) | mask
    return found


def users_of(edge: Edge, roots: Sequence[Edge]) -> list[Any]:
    """Return the nodes behind ``roots`` that send a gradient to ``edge``."""
    found = []
    entered: set[Any] = set()
    todo = [node for node, _ in roots]
    while todo:
        node = todo.pop()
        if node is None or node in entered:
            continue
        entered.add(node)
        following = next_edges(node)
        if edge in following:
            found.append(node)
        todo += [target for target, _ in following]
    return found


def kept_entries(part: Segment, nodes: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers of the entries of a segment that are edges of what ``nodes`` keep with its history.

    What cannot be seen counts as kept: all that went through a node of a checkpoint, which computes again what had
    that history, and through one of a write to a view.
    """
    kept = {edge for node in nodes for edge in (*_edges_kept(node), *_edges_kept_unseen(node, part))}
    return tuple(n for n, edge in enumerate(part.entries) if edge in kept and edge not in part.stops)


def _edges_kept(node: Any) -> list[Edge]:
    return [(tensor.grad_fn, tensor.output_nr) for tensor in internals.saved_tensors_of(node) if tensor.requires_grad]


def _edges_kept_unseen(node: Any, part: Segment) -> list[Edge]:
    """Return the edges of what a node may keep where autograd does not show it, or as an attribute."""
    edges: list[Edge] = []
    if internals.is_custom_function_node(node):
        attributes = tensors_in(list(vars(node).values()))
        edges += [(tensor.grad_fn, tensor.output_nr) for tensor in attributes if tensor.requires_grad]
    if internals.is_copy_slices(node):  # it may keep the view that was written
        edges += [edge for edge in part.entries if any(behind[0] is node for behind in next_edges(edge[0]))]
    if internals.is_copy_slices(node) or internals.is_checkpointed(node):
        edges += [edge for edge in part.entries if edge[0] is node]
        edges += next_edges(node)
    return edges


#: The bit of nodes that hold values which autograd does not let go of after a backward; the others' bits follow.
LASTING = 1


def node_bits(parts: Sequence[Segment], keeping_nothing: Collection[Any] = ()) -> dict[Any, int]:
    """Give the autograd nodes that hold saved tensors their numbers; those ``keeping_nothing`` do not in eager.

    Where there is a single entry all have one.
    """
    lone = sum(len(part.entries) for part in parts) == 1
    bits: dict[Any, int] = {}
    for part in parts:
        stops = set(part.stops)
        entered: set[Any] = set()
        todo = [node for node, _ in part.entries]
        while todo:
            node = todo.pop()
            if node in entered or not part.runs(node):
                continue
            entered.add(node)
            if node not in keeping_nothing and internals.saves_tensors(node):
                bits[node] = 1 if lone else len(bits) + 2
            todo += [edge[0] for edge in next_edges(node) if edge not in stops]
    return bits


@dataclass(frozen=True, slots=True)
class Survey:
    """What is special in an autograd graph: nodes of ``custom`` functions, ``hidden`` and ``lost`` ones.

    From a hidden node a gradient gets to where nobody looks: to a tensor of the function's own that requires grad, or
    to nothing at all, as from a view of a leaf that was made under ``no_grad``. From a lost one it gets nowhere else.
    """

    custom: tuple[Any, ...] = ()
    hidden: tuple[Any, ...] = ()
    lost: tuple[Any, ...] = ()


def survey(parts: Sequence[Segment]) -> Survey:
    """Go through the graph behind all segments."""
    stops = {edge for part in parts for edge in part.inputs}
    entered: dict[Any, list[Any]] = {}
    todo = [node for part in parts for node, _ in part.entries if (node, 0) not in stops]
    ends, arriving = [], []
    while todo:
        node = todo.pop()
        if node in entered:
            continue
        edges = next_edges(node)
        entered[node] = [edge[0] for edge in edges if edge not in stops]
        todo += entered[node]
        if not edges:
            ends.append(node)
        if len(entered[node]) < len(edges):
            arriving.append(node)
    custom = tuple(node for node in entered if internals.is_custom_function_node(node))
    if not ends:
        return Survey(custom)
    before: dict[Any, list[Any]] = {}
    for node, following in entered.items():
        for target in following:
            before.setdefault(target, []).append(node)

    def leading_to(nodes: list[Any]) -> dict[Any, None]:
        found: dict[Any, None] = {}
        while nodes:
            node = nodes.pop()
            if node not in found:
                found[node] = None
                nodes += before.get(node, [])
        return found

    hidden, arrived = leading_to(ends), leading_to(arriving)
    return Survey(custom, tuple(hidden), tuple(node for node in hidden if node not in arrived))


def reachable(segment: Segment) -> set[Edge]:
    """Return the stops to which there is a way, whether or not a gradient goes it."""
    stops = set(segment.stops)
    found = {edge for edge in segment.entries if edge in stops}
    entered: set[Any] = set()
    todo = [node for node, _ in segment.entries if segment.has(node)]
    while todo:
        node = todo.pop()
        if node in entered:
            continue
        entered.add(node)
        for edge in next_edges(node):
            if edge in stops:
                found.add(edge)
            elif segment.has(edge[0]):
                todo.append(edge[0])
    return found


def leading_to(part: Segment, ways: Sequence[Exit]) -> list[Any]:
    """Return the nodes of a segment through which a gradient gets to some of its exits."""
    before: dict[Any, list[Any]] = {}
    senders: list[Any] = []
    entered: set[Any] = set()
    todo = [node for node, _ in part.entries]
    ends = {edge for edge, sender, _ in ways if sender is None}
    while todo:
        node = todo.pop()
        if node in entered or not part.has(node):
            continue
        entered.add(node)
        for edge in next_edges(node):
            if edge in ends:
                senders.append(node)
            if edge not in part.stops:
                before.setdefault(edge[0], []).append(node)
                todo.append(edge[0])
    found: dict[Any, None] = {}
    todo = [*senders, *(sender for _, sender, _ in ways if sender is not None)]
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += before.get(node, [])
    return list(found)


def state_masks(parts: Sequence[Segment], bits: Mapping[Any, int]) -> list[list[int]]:
    """Say for each entry of each segment which of the nodes in ``bits`` it reaches there, and whether lasting ones."""
    masks = []
    for part in parts:
        stops = set(part.stops)
        own = []
        for start, _ in part.entries:
            mask = 0
            entered: set[Any] = set()
            todo = [start]
            while todo:
                node = todo.pop()
                if node in entered or not part.runs(node):
                    continue
                entered.add(node)
                if node in bits:
                    mask |= 1 << bits[node]
                if internals.keeps_unsaved(node) and not internals.saves_tensors(node):
                    mask |= LASTING
                todo += [edge[0] for edge in next_edges(node) if edge not in stops]
            own.append(mask)
        masks.append(own)
    return masks
