"""Derivatives of derivatives: the same trace, differentiated once more by autograd itself.

    (g,) = torch.autograd.grad(f(x), x, t, create_graph=True)
    g.sum().backward()

Under ``create_graph`` autograd runs the nodes of ``f`` in grad mode: they compute ``g`` by ops that have nodes of their
own, of the next *level*. These keep what the nodes of ``f`` kept, with its history, so a gradient that comes in at
``g`` goes on to three kinds of places: to ``t``; to inputs of ``f``; and into the midst of ``f``, to nodes of the level
below, where it is added to what else arrives.

The trace keeps the autograd graph of its wrappers. So its nodes are run in grad mode under the recorder, which is what
eager does: ``no_grad`` regions, checkpoints, ``once_differentiable`` and custom Functions have made of the graph what
they make of it in eager. The joint graph, in which their traces are lost, is never differentiated. Random numbers are
values of the forward, as for any backward. A level is differentiated like the one below it, to any order.
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
from aotlab.trace.deriver import differentiate, stand_in, tangent_like
from aotlab.trace.edges import Edge, edge_of, edges_behind, next_edges
from aotlab.trace.history import kept_entries, node_bits, reachable, state_masks
from aotlab.trace.inputs import value_of
from aotlab.trace.live import Trace
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import tensors_in


@dataclass(kw_only=True, eq=False)
class Level:
    """The autograd nodes of one order of derivatives, of one segment of a trace: ``part``.

    Its gradients are listed in the order of ``slots``. ``tangents`` stand for what comes in, one for each entry.
    ``bits`` number the nodes that hold tensors, ``masks`` say for each entry which of these it reaches.
    """

    trace: Trace
    part: Segment
    slots: Sequence[Exit | None]
    tangents: Sequence[Tensor]
    bits: Mapping[Any, int]
    masks: Sequence[int]
    #: All nodes of this level and those below, with what comes in from below and the inputs' leaves.
    known: set[Any]
    #: What nodes of this level keep, unless it is the first: the first keeps what the partitioner chose.
    saved: Sequence[Tensor]
    #: The entries at which gradients from the level above come in, too: nodes keep what they made.
    own: tuple[int, ...]
    #: What is differentiated: in torch 2.11 a custom function's node lives no longer than what it made.
    wrappers: Sequence[Tensor] = ()

    def mask(self, pattern: Sequence[bool], extras: Sequence[Edge]) -> int:
        """Return the bits of the nodes that are reached from the defined entries and from the midst."""
        own = [mask for mask, is_defined in zip(self.masks, pattern, strict=True) if is_defined]
        return reduce(or_, [*own, *state_masks([replace(self.part, entries=tuple(extras))], self.bits)[0]], 0)

    def derive(self, kind: Kind) -> Derived:
        """Run the nodes for what comes in; what they raise is raised."""
        trace, create_graph = self.trace, kind.requires is not None
        own = [tangent for tangent, defined in zip(self.tangents, kind.pattern, strict=True) if defined]
        likes = [(tuple(t.shape), t.dtype, t.device) for t in own]
        likes += [internals.edge_metadata(*edge) for edge in kind.extras]
        # under sizes that vary, all have the usual strides
        usual = [t.stride() for t in own] + [internals.make_contiguous_strides_for(s) for s, _, _ in likes[len(own) :]]
        given = [
            stand_in(trace.recorder, shape, strides, dtype, device)
            for (shape, dtype, device), strides in zip(likes, kind.strides or usual, strict=True)
        ]
        wrappers = [internals.to_functional(fake) for fake in given]
        for wrapper, does in zip(wrappers, kind.requires or [False] * len(given), strict=True):
            wrapper.requires_grad_(does)
        left = iter(wrappers)
        tangents = [next(left) if is_defined else None for is_defined in [*kind.pattern, *(True for _ in kind.extras)]]
        part = replace(self.part, entries=(*self.part.entries, *kind.extras))
        numbers = {id(wrapper): n for n, wrapper in enumerate(wrappers)}
        comes_from = {edge_of(wrapper): n for n, wrapper in enumerate(wrappers) if wrapper.requires_grad}
        above = None
        same_as: dict[int, int] = {}
        roots: tuple[int, ...] = ()
        ends: tuple[int | Edge, ...] = ()
        first = len(trace.tape.operations)
        with trace.deriver.recording(autocast=bool(kind.casting)), torch.set_grad_enabled(create_graph):
            found = differentiate(part, tangents, create_graph=create_graph)
            gradients = [None if way is None else found.get(way) for way in self.slots]
            for slot, gradient in enumerate(gradients if create_graph else ()):
                if gradient is not None and id(gradient) in numbers:
                    same_as[slot] = numbers[id(gradient)]
                elif gradient is not None and gradient.requires_grad:
                    roots += (slot,)
            if roots:
                made = [gradient for i in roots if (gradient := gradients[i]) is not None]
                above, ends = _level_above(self, made, comes_from, first)
                above.wrappers = [*made, *wrappers]
            values = [None if gradient is None else value_of(gradient, "a gradient") for gradient in gradients]
        if above is not None:  # not above, where what is made is a wrapper
            above.tangents = [tangent_like(trace.recorder, value) for i in roots if (value := values[i]) is not None]
        return Derived(gradients=values, given=given, same_as=same_as, roots=roots, ends=ends, above=above)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What comes into a level: what a plan for its gradients is compiled for.

    ``pattern`` says which tangents are defined, ``extras`` are the edges at which more comes into the midst;
    ``strides`` are those of all of these. Under ``create_graph``, ``requires`` says which of them require grad; else it
    is None. ``casting`` is the autocast that is on.
    """

    pattern: tuple[bool, ...]
    extras: tuple[Edge, ...]
    strides: tuple[tuple[int, ...], ...]
    requires: tuple[bool, ...] | None
    casting: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What came of differentiating a level.

    ``gradients`` has one or None for each slot; ``same_as`` says of those that are what came in which of ``given`` they
    are, and ``roots`` which can be differentiated, in the order of the entries of the level ``above``. Where the
    gradients of that go is in ``ends``: a number in ``given``, or an edge.
    """

    gradients: Sequence[Tensor | None]
    given: Sequence[Tensor]
    same_as: dict[int, int]
    roots: tuple[int, ...]
    ends: tuple[int | Edge, ...]
    above: Level | None


def first_level(trace: Trace, segment: int) -> Level:
    """Return the level of the function's own autograd nodes, of one segment."""
    part = trace.segments[segment]
    entries = [edge for each in trace.segments for edge in each.entries]
    stops = [edge for each in trace.segments for edge in each.stops]
    # in torch 2.11 the node of an input that nothing leads to is gone, and must not be asked what is behind it
    behind = edges_behind([*entries, *(edge for each in trace.segments for edge in reachable(each))])
    ends = [*stops, *(behind if trace.recorder.above is None else ())]
    # those that the function made, which nobody else can see
    unseen = (e for e in ends if (source := trace.sources.get(e)) is None or source.kind == "cut")
    own_leaves = {node for node, _ in unseen if internals.leaf_of(node) is not None}
    return Level(
        trace=trace,
        part=part,
        slots=trace.slots[segment],
        tangents=[trace.tangents.fakes[n] for n in trace.tangents.of_entries[segment]],
        bits=trace.saving.bits,
        masks=trace.saving.masks[segment],
        known={node for node, _ in ends} - own_leaves,
        saved=(),
        own=kept_entries(part, trace.saving.bits),
    )


def _level_above(
    level: Level, wrappers: Sequence[Tensor], given: dict[Edge, int], first: int
) -> tuple[Level, tuple[int | Edge, ...]]:
    """Make the level of the nodes that computed gradients from what was ``given``; also say where its gradients go.

    ``first`` is the first operation by which they were computed. What the node of a write to a view keeps cannot be
    seen. Where there is one, all that was computed with counts as kept.
    """
    trace = level.trace
    entries = [edge_of(wrapper) for wrapper in wrappers]
    nodes, stops = _new_nodes(entries, level, {*given, *trace.written_views})
    part = Segment(tuple(range(len(entries))), tuple(entries), tuple(stops), frozenset(), frozenset(nodes))
    bits = node_bits([part])
    kept = {id(value): value for value in trace.kept_by(nodes)}
    if any(map(internals.is_copy_slices, nodes)):
        tape = trace.tape
        used = tensors_in([(operation.args, operation.kwargs) for operation in tape.operations[first:]])
        kept.update((id(value), value) for value in used if tape.knows(value) and tape.constant(value) is None)
    made = Level(
        trace=trace,
        part=part,
        slots=part.exits,
        tangents=(),
        bits=bits,
        masks=state_masks([part], bits)[0],
        known={*level.known, *(nodes if trace.recorder.above is None else ()), *(node for node, _ in given)},
        saved=list(kept.values()),
        own=kept_entries(part, nodes),
    )
    return made, tuple(given.get(way[0], way[0]) for way in part.exits)


def _new_nodes(starts: Sequence[Edge], level: Level, ends: Collection[Edge]) -> tuple[list[Any], list[Edge]]:
    """Return the new nodes behind ``starts``, up to some ``ends``, and the edges at which they are left."""
    nodes: dict[Any, None] = {}
    stops: dict[Edge, None] = {}
    todo = list(starts)
    while todo:
        edge = todo.pop()
        if edge in ends or edge in level.part.stops or edge[0] in level.known:
            stops[edge] = None
        elif edge[0] not in nodes and internals.leaf_of(edge[0]) is None:  # a leaf of the function's own: out of sight
            nodes[edge[0]] = None
            todo += next_edges(edge[0])
    return list(nodes), list(stops)
