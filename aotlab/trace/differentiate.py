"""The backward of a segment of the traced autograd graph: its nodes are run, and what they compute is recorded."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from aotlab import _torch as internals
from aotlab.trace.edges import Edge, next_edges
from aotlab.trace.history import leading_to, reachable
from aotlab.trace.segments import Exit, Segment


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
