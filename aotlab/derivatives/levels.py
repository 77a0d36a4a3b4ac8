"""Higher-order derivatives: autograd differentiates the autograd graph of the same trace again.

    (g,) = torch.autograd.grad(f(x), x, t, create_graph=True)
    g.sum().backward()

Under ``create_graph`` autograd runs the nodes of ``f`` in grad mode. They compute ``g`` with ops, and these ops have
autograd nodes, which form the next *level*. The new nodes save the values that the nodes of ``f`` saved, with the
``grad_fn`` of these values. So a gradient that arrives at ``g`` flows to three kinds of destinations: ``t``, the inputs
of ``f``, and inner edges of ``f``. An inner edge leads to a node of the level below. There the gradient is added to the
other gradients that arrive.

The trace keeps the autograd graph of its traced tensors, and the recorder runs these nodes in grad mode, as eager does.
``no_grad`` regions, checkpoints, ``once_differentiable`` and custom Functions have shaped that graph as in eager. The
joint graph no longer shows them, so it is never differentiated. Random values are values of the forward, as for any
backward. Each level is differentiated like the level below it, so any order is possible.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.autograd_edges import Edge, edge_of, edges_behind, next_edges
from aotlab.trace.deriver import differentiate, fake_gradient, tangent_like
from aotlab.trace.history import kept_entries, node_bits, reachable_stops, state_masks
from aotlab.trace.inputs import value_of
from aotlab.trace.live_trace import Trace
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import tensors_in


@dataclass(kw_only=True, eq=False)
class Level:
    """The autograd nodes of one order of derivatives, for one segment of a trace.

    ``segment`` is the graph of these nodes. ``slots`` are the exits of the segment, in the order in which its gradients
    are returned. ``tangents`` are the fake incoming gradients, one for each entry. ``bits`` maps each node that saves
    tensors to the index of its bit in bit masks. For each entry, ``masks`` has the mask of the nodes that gradients
    reach from this entry.
    """

    trace: Trace
    segment: Segment
    slots: Sequence[Exit | None]
    tangents: Sequence[Tensor]
    bits: Mapping[Any, int]
    masks: Sequence[int]
    #: The nodes at which the next level ends: all nodes of this level and of lower levels, the nodes of the incoming
    #: gradients of lower levels, and the leaves of the function's inputs.
    boundary_nodes: set[Any]
    #: The values that nodes of this level save. Empty for the first level, whose saved values the partitioner chooses.
    saved: Sequence[Tensor]
    #: The positions of the entries whose tensors are saved by a node, with their autograd history. Such an entry also
    #: receives gradients from the next level.
    self_saved_entries: tuple[int, ...]
    #: The differentiated tensors. They keep nodes alive: in torch 2.11 a custom function's node dies with its outputs.
    traced_tensors: Sequence[Tensor] = ()

    def mask(self, pattern: Sequence[bool], inner_edges: Sequence[Edge]) -> int:
        """Return the bits of the nodes reached from the defined entries and from ``inner_edges``."""
        entry_masks = [mask for mask, is_defined in zip(self.masks, pattern, strict=True) if is_defined]
        return reduce(
            or_, [*entry_masks, *state_masks([replace(self.segment, entries=tuple(inner_edges))], self.bits)[0]], 0
        )

    def derive(self, kind: IncomingGradients) -> DifferentiatedLevel:
        """Run the nodes under the recorder, for one kind of incoming gradients. Errors of the nodes are not caught."""
        trace, create_graph = self.trace, kind.requires is not None
        defined_tangents = [tangent for tangent, defined in zip(self.tangents, kind.pattern, strict=True) if defined]
        likes = [(tuple(t.shape), t.dtype, t.device) for t in defined_tangents]
        likes += [internals.edge_metadata(*edge) for edge in kind.inner_edges]
        # if sizes are symbolic, all incoming gradients have the usual strides
        usual = [t.stride() for t in defined_tangents] + [
            internals.make_contiguous_strides_for(s) for s, _, _ in likes[len(defined_tangents) :]
        ]
        incoming = [
            fake_gradient(trace.recorder, shape, strides, dtype, device)
            for (shape, dtype, device), strides in zip(likes, kind.strides or usual, strict=True)
        ]
        traced_incoming = [internals.to_functional(fake) for fake in incoming]
        for traced, does in zip(traced_incoming, kind.requires or [False] * len(incoming), strict=True):
            traced.requires_grad_(does)
        unused = iter(traced_incoming)
        tangents = [
            next(unused) if is_defined else None for is_defined in [*kind.pattern, *(True for _ in kind.inner_edges)]
        ]
        segment = replace(self.segment, entries=(*self.segment.entries, *kind.inner_edges))
        numbers = {id(traced): n for n, traced in enumerate(traced_incoming)}
        comes_from = {edge_of(traced): n for n, traced in enumerate(traced_incoming) if traced.requires_grad}
        next_level = None
        same_as: dict[int, int] = {}
        roots: tuple[int, ...] = ()
        ends: tuple[int | Edge, ...] = ()
        first = len(trace.tape.operations)
        with trace.deriver.recording(autocast=bool(kind.casting)), torch.set_grad_enabled(create_graph):
            exit_gradients = differentiate(segment, tangents, create_graph=create_graph)
            gradients = [None if exit_ is None else exit_gradients.get(exit_) for exit_ in self.slots]
            for slot, gradient in enumerate(gradients if create_graph else ()):
                if gradient is not None and id(gradient) in numbers:
                    same_as[slot] = numbers[id(gradient)]
                elif gradient is not None and gradient.requires_grad:
                    roots += (slot,)
            if roots:
                results = [gradient for i in roots if (gradient := gradients[i]) is not None]
                next_level, ends = _next_level(self, results, comes_from, first)
                next_level.traced_tensors = [*results, *traced_incoming]
            values = [None if gradient is None else value_of(gradient, "a gradient") for gradient in gradients]
        if next_level is not None:  # after the `with` block, because inside it new tensors would be traced tensors
            next_level.tangents = [
                tangent_like(trace.recorder, value) for i in roots if (value := values[i]) is not None
            ]
        return DifferentiatedLevel(
            gradients=values, incoming=incoming, same_as=same_as, roots=roots, ends=ends, next_level=next_level
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingGradients:
    """The kind of gradients that arrive at a level; each kind has its own compiled plan.

    ``pattern`` says which tangents are defined. ``inner_edges`` are the inner edges that receive gradients. ``strides``
    are the strides of the defined tangents and of the gradients at ``inner_edges``. Under ``create_graph``,
    ``requires`` says which of these gradients require grad; otherwise it is None. ``casting`` is the result of
    `aotlab.derivatives.backward_graphs.casting_of` for these gradients.
    """

    pattern: tuple[bool, ...]
    inner_edges: tuple[Edge, ...]
    strides: tuple[tuple[int, ...], ...]
    requires: tuple[bool, ...] | None
    casting: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentiatedLevel:
    """The result of differentiating a level.

    ``incoming`` are the fake incoming gradients. ``gradients`` has one gradient or None for each slot. ``same_as`` maps
    a slot to an index in ``incoming`` if the slot's gradient is that incoming gradient. ``roots`` are the slots whose
    gradients can be differentiated again, in the order of the entries of ``next_level``. ``ends`` are the destinations
    of the gradients of the next level: an index in ``incoming``, or an edge.
    """

    gradients: Sequence[Tensor | None]
    incoming: Sequence[Tensor]
    same_as: dict[int, int]
    roots: tuple[int, ...]
    ends: tuple[int | Edge, ...]
    next_level: Level | None


def first_level(trace: Trace, number: int) -> Level:
    """Return the level of the function's own autograd nodes, for the segment ``number``."""
    segment = trace.segments[number]
    entries = [edge for each in trace.segments for edge in each.entries]
    stops = [edge for each in trace.segments for edge in each.stops]
    # In torch 2.11, the autograd node of an input is already freed if no other node has an edge to it. The next edges
    # of a freed node must not be read.
    behind = edges_behind([*entries, *(edge for each in trace.segments for edge in reachable_stops(each))])
    ends = [*stops, *(behind if trace.recorder.subclass_mode is None else ())]
    # leaves that the function itself made, and that the caller cannot see
    unseen = (e for e in ends if (source := trace.sources.get(e)) is None or source.kind == "cut")
    own_leaves = {node for node, _ in unseen if internals.leaf_of(node) is not None}
    return Level(
        trace=trace,
        segment=segment,
        slots=trace.slots[number],
        tangents=[trace.tangents.fakes[n] for n in trace.tangents.of_entries[number]],
        bits=trace.saving.bits,
        masks=trace.saving.masks[number],
        boundary_nodes={node for node, _ in ends} - own_leaves,
        saved=(),
        self_saved_entries=kept_entries(segment, trace.saving.bits),
    )


def _next_level(
    level: Level, gradients: Sequence[Tensor], incoming_edges: dict[Edge, int], first: int
) -> tuple[Level, tuple[int | Edge, ...]]:
    """Make the next level: the level of the autograd nodes that computed ``gradients``, the gradients of ``level``.

    The second result has the destination of each gradient of the new level (see `DifferentiatedLevel.ends`).
    ``incoming_edges`` maps the edges of the incoming gradients to their positions. ``first`` is the index, on the tape,
    of the first operation that computed the gradients. The autograd node of a write to a view saves tensors that Python
    cannot see. If there is such a node, all operands of the operations since ``first`` count as saved.
    """
    trace = level.trace
    entries = [edge_of(gradient) for gradient in gradients]
    nodes, stops = _new_nodes(entries, level, {*incoming_edges, *trace.written_views})
    segment = Segment(tuple(range(len(entries))), tuple(entries), tuple(stops), frozenset(), frozenset(nodes))
    bits = node_bits([segment])
    saved = {id(value): value for value in trace.values_kept_by(nodes)}
    if any(map(internals.is_copy_slices, nodes)):
        tape = trace.tape
        used = tensors_in([(operation.args, operation.kwargs) for operation in tape.operations[first:]])
        saved.update((id(value), value) for value in used if tape.knows(value) and tape.constant(value) is None)
    next_level = Level(
        trace=trace,
        segment=segment,
        slots=segment.exits,
        tangents=(),
        bits=bits,
        masks=state_masks([segment], bits)[0],
        boundary_nodes={
            *level.boundary_nodes,
            *(nodes if trace.recorder.subclass_mode is None else ()),
            *(node for node, _ in incoming_edges),
        },
        saved=list(saved.values()),
        self_saved_entries=kept_entries(segment, nodes),
    )
    return next_level, tuple(incoming_edges.get(exit_[0], exit_[0]) for exit_ in segment.exits)


def _new_nodes(starts: Sequence[Edge], level: Level, ends: Collection[Edge]) -> tuple[list[Any], list[Edge]]:
    """Return the autograd nodes of the next level, and the edges along which gradients leave these nodes.

    The nodes are those that gradients reach from ``starts``, before they reach an edge in ``ends`` or a node of
    ``level`` or of a lower level.
    """
    nodes: dict[Any, None] = {}
    stops: dict[Edge, None] = {}
    todo = list(starts)
    while todo:
        edge = todo.pop()
        if edge in ends or edge in level.segment.stops or edge[0] in level.boundary_nodes:
            stops[edge] = None
        elif edge[0] not in nodes and internals.leaf_of(edge[0]) is None:  # skip leaves that the function itself made
            nodes[edge[0]] = None
            todo += next_edges(edge[0])
    return list(nodes), list(stops)
