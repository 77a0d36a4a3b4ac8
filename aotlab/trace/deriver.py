"""Deriving backwards from a trace: the nodes of its autograd graph are run, and what they compute is recorded."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import GraphExecGroup

from aotlab import _torch as internals
from aotlab.errors import DoubleBackwardError, RandomOpError
from aotlab.trace.edges import Edge, next_edges
from aotlab.trace.effects import effects_in, thread_backward
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.history import nodes_before, nodes_of, reachable
from aotlab.trace.inputs import value_of
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Pattern, is_full
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.surroundings import tracing
from aotlab.trace.tape import tensors_in
from aotlab.trace.write_calls import may_overlap_itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangents:
    """The fake tangents, for roots, then cut edges; ``wrappers`` for autograd; their numbers by segment."""

    fakes: Sequence[Tensor]
    wrappers: Sequence[Tensor]
    of_entries: Sequence[Sequence[int]]


def tangent_like(recorder: Recorder, value: Tensor) -> Tensor:
    """Make what stands for the gradient of ``value``: it has memory for each of its elements."""
    # also where that is expanded or unfolded
    shared = may_overlap_itself(value.shape, value.stride())
    strides = torch.empty(value.shape, device="meta").stride() if shared else value.stride()
    return stand_in(recorder, value.shape, strides, value.dtype, value.device)


def stand_in(
    recorder: Recorder, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make a fake tensor that stands for a gradient that comes in."""
    return recorder.tape.enter(internals.new_fake(recorder.fake_mode, shape, strides, dtype, device))


@dataclass(eq=False)
class Deriver:
    """Runs the backwards of a trace under its recorder, and remembers what came of it.

    ``holder`` puts the traced parameters in place for checkpoints, of which ``spent`` are the caches that backwards use
    up; ``full`` has each segment's gradients for all tangents, ``arrived`` the edges of leaves as autograd came to
    them, if there is one segment.

    ``writable`` are wrappers of inputs, by number, that a checkpoint may write when it runs its function once more.
    Those that it reads or writes then, ``live``, are read as they are by then: for each there is what stands for that
    value, and whether a write counts. ``touching`` says which segments do.
    """

    recorder: Recorder
    segments: Sequence[Segment]
    slots: Sequence[Sequence[Exit | None]]
    tangents: Tangents
    holder: Callable[[], AbstractContextManager[None]]
    writable: Mapping[int, Tensor] = field(default_factory=dict)
    live: dict[int, tuple[Tensor, bool]] = field(default_factory=dict, init=False)
    touching: dict[int, set[int]] = field(default_factory=dict, init=False)
    full: dict[int, list[Tensor | None]] = field(default_factory=dict, init=False)
    arrived: list[Edge] = field(default_factory=list, init=False)
    spent: set[Any] = field(default_factory=set, init=False)
    _restrided: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict, init=False)

    @property
    def live_inputs(self) -> list[tuple[str, Tensor]]:
        """The names and fakes of what backwards take behind the tangents."""
        return [(f"tangents_live_{k}", stands) for k, (stands, _) in self.live.items()]

    def given(self, segment: int, pattern: Pattern) -> list[Tensor | None]:
        """Return the wrappers for the tangents of a pattern; None for those not defined."""
        return [
            self.wrapper(n, way if isinstance(way, tuple) else None) if way else None
            for n, way in zip(self.tangents.of_entries[segment], pattern, strict=True)
        ]

    def wrapper(self, n: int, strides: tuple[int, ...] | None) -> Tensor:
        """Return what stands for a tangent, with the usual strides if none are given."""
        usual = self.tangents.fakes[n]
        if strides is None or strides == usual.stride():
            return self.tangents.wrappers[n]
        if (n, strides) not in self._restrided:
            fake = stand_in(self.recorder, usual.shape, strides, usual.dtype, usual.device)
            self._restrided[n, strides] = internals.to_functional(fake)
        return self._restrided[n, strides]

    def derive(
        self, segment: int, pattern: Pattern, *, autocast: bool = False, asked: Collection[int] | None = None
    ) -> list[Tensor | None]:
        """Run a segment's backward for a pattern's tangents, under ``autocast`` perhaps, to all or the ``asked`` slots.

        Return a gradient for each slot, None for those not reached, then the new values of the ``live`` inputs. Where
        more of these are found it has to be called again.
        """
        full = is_full(pattern) and not autocast and asked is None
        if full and segment in self.full:
            return self.full[segment]
        given, part, slots = self.given(segment, pattern), self.segments[segment], self.slots[segment]
        if asked is not None:
            ways = [way for n in asked if (way := slots[n]) is not None]
            nodes = part.nodes and frozenset(nodes_before(part, ways))
            part = replace(part, stops=tuple([way[0] for way in ways]), nodes=nodes)
        first = len(self.recorder.tape.operations)
        versions = {k: internals.version_of(wrapper) for k, wrapper in self.writable.items()}
        once = GraphExecGroup() if self.writable else nullcontext()  # also where nodes are run one by one
        with self.recording(autocast=autocast) as before, torch.no_grad(), once:
            found = differentiate(part, given, self.arrived if full and not self.arrived else None)
            values = {way: value_of(gradient, "a gradient") for way, gradient in found.items()}
            thread_backward(self.recorder, self.segments[segment], values, first)
            after = {k: value_of(wrapper, "an input") for k, wrapper in self.writable.items()}
        written = {k: value for k, value in after.items() if value is not before[k]}
        gradients = [None if way is None else values.get(way) for way in slots] + [written.get(k) for k in self.live]
        own = self.recorder.tape.operations[first:] if self.writable else ()
        read = {id(each) for operation in own for each in tensors_in((operation.args, operation.kwargs))}
        touched = [k for k, value in before.items() if k in written or id(value) in read]
        new = [k for k in touched if k not in self.live]
        assert not new or segment not in self.full, "a backward reads or writes what the one of all gradients does not"
        if full and not new:
            self.full[segment] = gradients
        for k in new:
            like, counts = before[k], internals.version_of(self.writable[k]) != versions[k]
            self.live[k] = stand_in(self.recorder, like.shape, like.stride(), like.dtype, like.device), counts
            for others in self.full.values():
                others.append(None)
        for k in touched:
            self.touching.setdefault(k, set()).add(segment)
        for operation in own if new else ():
            operation.sequence = None  # it is nobody's: all is done again with the values by then
        return gradients

    @contextmanager
    def recording(self, *, autocast: bool) -> Iterator[dict[int, Tensor]]:
        """Record what autograd computes in a ``with`` block; refuse a backward that draws random numbers.

        It tells what the ``writable`` inputs hold at first in the block; afterwards they are as the forward left them.
        """
        operations = self.recorder.tape.operations
        first = len(operations)
        left = {k: value_of(wrapper, "an input") for k, wrapper in self.writable.items()}
        before = left | {k: stands for k, (stands, _) in self.live.items()}
        self._put(before)
        self.recorder.phase = "backward"
        self.recorder.states.begin()
        try:
            casting = nullcontext() if autocast else internals.disable_autocast()
            guard = EscapeGuard(quirks=[type(quirk)() for quirk in self.recorder.quirks])
            caches = internals.caches_kept(self.spent) if self.recorder.has_checkpoints else nullcontext()
            above = self.recorder.above or nullcontext()
            with internals.fake_mode_set_aside(), caches, self.holder(), tracing(self.recorder), guard, casting, above:
                yield before
                self.recorder.states.end()
        finally:
            self._put(left)
            self.recorder.phase = "forward"
            if autocast:
                torch.clear_autocast_cache()  # it would keep the traced tensors, for others to find
        effects_in(operations[first:], DoubleBackwardError)
        for operation in operations[first:]:
            if operation.is_random and operation.is_impure:
                raise RandomOpError(
                    f"a backward draws random numbers by `{operation.target}`",
                    line=None if operation.place is None else operation.place(),
                    why="eager draws them in each backward anew, as far as that runs the nodes that draw",
                    suggestion="draw in the forward, and save what was drawn",
                )

    def _put(self, values: Mapping[int, Tensor]) -> None:
        for k, value in values.items():
            if value_of(self.writable[k], "an input") is not value:
                internals.replace_value(self.writable[k], value)


def differentiate(
    segment: Segment,
    tangents: Sequence[Tensor | None],
    arrived: list[Edge] | None = None,
    *,
    create_graph: bool = False,
) -> dict[Exit, Tensor]:
    """Run the segment's nodes and return the gradients that leave it, by exit; ``tangents`` has one per entry, or None.

    With ``create_graph`` the gradients have histories. A segment that is the only one is run by one call of autograd,
    which gives ``arrived`` the edges of leaves in the order in which it comes to them. Else each node is run by a call
    of its own, in autograd's order, because autograd would not stop at an edge that the caller can see.
    """
    if segment.nodes is None:
        chosen = [(GradientEdge(*edge), t) for edge, t in zip(segment.entries, tangents, strict=True) if t is not None]
        # in torch 2.11 the node of a custom function that nothing leads to may be gone, and autograd crashes on it
        reached = reachable(segment)
        stops = [edge for edge in segment.stops if edge in reached]
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
    return _node_by_node(segment, tangents, create_graph=create_graph)


def _node_by_node(segment: Segment, tangents: Sequence[Tensor | None], *, create_graph: bool) -> dict[Exit, Tensor]:
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
    waiting = Counter(  # how many others send a node gradients
        target
        for node in nodes_of(segment, [(node, 0) for node in buffers])
        for target in {edge[0] for edge in next_edges(node) if edge not in stops and segment.has(edge[0])}
    )
    ready = [(-internals.sequence_of(node), i, node) for i, node in enumerate(buffers) if not waiting[node]]
    heapq.heapify(ready)
    counter = len(buffers)
    while ready:
        _, _, node = heapq.heappop(ready)
        found = run_node(node, buffers.pop(node, {}), segment, stops, create_graph=create_graph)
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


def run_node(
    node: Any, buffer: dict[int, Tensor], segment: Segment, stops: Collection[Edge], *, create_graph: bool = False
) -> dict[int, Tensor]:
    """Run one node of a segment; return its gradients by their place in ``next_functions``."""
    wanted = [(i, e) for i, e in enumerate(node.next_functions) if e[0] and (e in stops or segment.has(e[0]))]
    if not buffer or not wanted:
        return {}
    edges = list(dict.fromkeys(edge for _, edge in wanted))
    returned = internals.run_node(node, buffer, edges, create_graph=create_graph)
    return {i: _fitted(gradient, edge) for i, edge in wanted if (gradient := returned[i]) is not None}


def _fitted(gradient: Tensor, edge: Edge) -> Tensor:
    """Do to a gradient what autograd does before it hands it on: sum what was broadcast, cast it."""
    shape, dtype, _ = internals.edge_metadata(*edge)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    if dtype.is_complex != gradient.is_complex() and not dtype.is_complex:
        gradient = torch.real(gradient)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)
