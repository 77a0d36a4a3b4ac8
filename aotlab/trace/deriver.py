"""Derive backwards from a trace: run the nodes of its autograd graph under the recorder, which records their ops."""

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
from aotlab.trace.autograd_edges import Edge, next_edges
from aotlab.trace.effects import chain_backward_effects, effects_in
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.history import nodes_of, nodes_to_exits, reachable_stops
from aotlab.trace.inputs import value_of
from aotlab.trace.quirk import Quirk, claims_of
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Pattern, is_full
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.surroundings import tracing
from aotlab.trace.tape import Operation, tensors_in
from aotlab.trace.write_calls import may_overlap_itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangents:
    """The tangents of a trace: one per root, then one per cut edge.

    ``fakes`` are the fake tensors, and ``traced`` are traced tensors around them, which are passed to autograd.
    ``of_entries`` has for each segment the indices of its tangents in ``fakes``, in the order of ``Segment.entries``.
    """

    fakes: Sequence[Tensor]
    traced: Sequence[Tensor]
    of_entries: Sequence[Sequence[int]]


def tangent_like(recorder: Recorder, value: Tensor) -> Tensor:
    """Make a fake tensor for the gradient of ``value``.

    The fake tensor has the strides of ``value``, or contiguous strides if elements of ``value`` share memory (after
    ``expand`` or ``unfold``).
    """
    shared = may_overlap_itself(value.shape, value.stride())
    strides = torch.empty(value.shape, device="meta").stride() if shared else value.stride()
    return fake_gradient(recorder, value.shape, strides, value.dtype, value.device)


def fake_gradient(
    recorder: Recorder, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make a fake tensor for a gradient that a backward receives, and register this tensor on the tape."""
    return recorder.tape.enter(internals.new_fake(recorder.fake_mode, shape, strides, dtype, device))


@dataclass(eq=False)
class Deriver:
    """Runs the backwards of a trace under its recorder, so that they are recorded, and stores the gradients.

    - ``slots`` lists for each segment the exits whose gradients its backward returns, in order (see
      `aotlab.trace.segments`). If a slot is None, the gradient there is always None.
    - ``holder`` returns a context manager in which the parameters of the user's modules are replaced by traced tensors.
      A checkpoint that runs its function again in the backward needs these traced tensors.
    - ``full`` has, by segment, the gradients of its backward with all tangents defined. A segment is added when that
      backward has been derived.
    - ``leaf_order`` has the edges of the leaves, in the order in which autograd computed their gradients. It is empty
      if there are several segments.
    - ``checkpoint_caches`` are the caches of selective checkpoints. A backward takes the values out of such a cache.

    A backward may write inputs of the call. A checkpoint runs its function again in the backward, and this function may
    write, for example, the statistics of a batch norm. The backward of a custom Function may update statistics or a
    counter, or write the gradient that it receives. These fields concern such writes. Their keys are indices of kept
    inputs; for tangent ``n``, the key is ``-1 - n``.

    - ``writable`` has the traced tensors that a backward may write.
    - ``rerun`` has the keys of the inputs that the function of a checkpoint may read and write in the backward.
    - ``writes_tangents`` says that the backward of a custom Function may write the gradient that it receives.
    - ``live`` has the writable tensors that a backward wrote, and the inputs in ``rerun`` that it read. A backward
      receives the current values of live inputs as extra arguments. ``live`` has for each of these tensors a fake
      tensor for the current value, and whether the write changes the version counter.
    - ``resized`` has the live inputs whose storage a backward resizes, and whether it frees the storage at the end.
    - ``draws`` says that a backward draws random numbers.
    - ``segments_using`` has for each key in ``live`` the indices of the segments whose backward reads or writes it.
    """

    recorder: Recorder
    quirks: Sequence[Quirk]
    segments: Sequence[Segment]
    slots: Sequence[Sequence[Exit | None]]
    tangents: Tangents
    holder: Callable[[], AbstractContextManager[None]]
    writable: Mapping[int, Tensor] = field(default_factory=dict)
    rerun: Collection[int] = ()
    writes_tangents: bool = False
    live: dict[int, tuple[Tensor, bool]] = field(default_factory=dict, init=False)
    resized: dict[int, bool] = field(default_factory=dict, init=False)
    segments_using: dict[int, set[int]] = field(default_factory=dict, init=False)
    draws: bool = field(default=False, init=False)
    full: dict[int, list[Tensor | None]] = field(default_factory=dict, init=False)
    leaf_order: list[Edge] = field(default_factory=list, init=False)
    checkpoint_caches: set[Any] = field(default_factory=set, init=False)
    _restrided: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict, init=False)

    @property
    def live_inputs(self) -> list[tuple[str, Tensor]]:
        """The placeholders for the live inputs, as pairs (name, fake tensor). In a graph, they follow the tangents."""
        return [(f"tangents_live_{k}", fake) for k, (fake, _) in self.live.items() if k >= 0]

    def traced_tangents(self, number: int, pattern: Pattern) -> list[Tensor | None]:
        """Return the traced tangents from which autograd runs the backward of segment ``number``.

        The result has None in the place of each tangent that is not defined in ``pattern``.
        """
        return [
            self.traced_tangent(n, layout if isinstance(layout, tuple) else None) if layout else None
            for n, layout in zip(self.tangents.of_entries[number], pattern, strict=True)
        ]

    def traced_tangent(self, n: int, strides: tuple[int, ...] | None) -> Tensor:
        """Return the traced tensor for tangent ``n``, with ``strides`` or (if this is None) with its usual strides."""
        usual = self.tangents.fakes[n]
        if strides is None or strides == usual.stride():
            return self.tangents.traced[n]
        if (n, strides) not in self._restrided:
            fake = fake_gradient(self.recorder, usual.shape, strides, usual.dtype, usual.device)
            self._restrided[n, strides] = internals.to_functional(fake)
        return self._restrided[n, strides]

    def derive(
        self, number: int, pattern: Pattern, *, autocast: bool = False, requested: Collection[int] | None = None
    ) -> list[Tensor | None]:
        """Run the backward of segment ``number`` for a pattern of defined tangents, and record it.

        With ``autocast`` it runs under the current autocast settings, otherwise without autocast. It computes the
        gradients of all slots, or only those of the ``requested`` slots. Return one gradient per slot (None if no
        gradient flows there), then the new values of the ``live`` tensors. If this run finds new live tensors, the
        result is not complete, because they were not arguments of this backward. The caller must then call this method
        again.
        """
        is_full_backward = is_full(pattern) and not autocast and requested is None
        if is_full_backward and number in self.full:
            return self.full[number]
        tangents, segment, slots = self.traced_tangents(number, pattern), self.segments[number], self.slots[number]
        if requested is not None:
            exits = [exit_ for n in requested if (exit_ := slots[n]) is not None]
            nodes = segment.nodes and frozenset(nodes_to_exits(segment, exits))
            segment = replace(segment, stops=tuple([exit_[0] for exit_ in exits]), nodes=nodes)
        first_operation = len(self.recorder.tape.operations)
        writable = dict(self.writable)
        if self.writes_tangents:
            pairs = zip(self.tangents.of_entries[number], tangents, strict=True)
            writable |= {-1 - n: tangent for n, tangent in pairs if tangent is not None}
        versions = {k: internals.version_of(traced) for k, traced in writable.items()}
        # With one group for all nodes, a checkpoint runs its function only once, even if autograd is called for each
        # node separately.
        recompute_group = GraphExecGroup() if self.rerun else nullcontext()
        may_draw = not self.recorder.has_checkpoints
        recording = self.recording(writable, autocast=autocast, may_draw=may_draw)
        with recording as initial_values, torch.no_grad(), recompute_group:
            exit_gradients = differentiate(
                segment, tangents, self.leaf_order if is_full_backward and not self.leaf_order else None
            )
            values = {exit_: value_of(gradient, "a gradient") for exit_, gradient in exit_gradients.items()}
            chain_backward_effects(self.recorder, self.segments[number], values, first_operation)
            final_values = {k: value_of(traced, "an input") for k, traced in writable.items()}
        self._check_draws(first_operation, [*values.values(), *final_values.values()])
        moved = [k for k, traced in writable.items() if internals.version_of(traced) != versions[k]]
        for k in moved:
            internals.set_version(writable[k], versions[k])
        written = {k: value for k, value in final_values.items() if value is not initial_values[k]}
        gradients = [None if exit_ is None else values.get(exit_) for exit_ in slots] + [
            written.get(k) for k in self.live
        ]
        new_operations = self.recorder.tape.operations[first_operation:] if self.rerun or written else ()
        read_ids = {id(each) for operation in new_operations for each in tensors_in((operation.args, operation.kwargs))}
        read = [k for k in {*self.rerun, *self.live} if k in initial_values and id(initial_values[k]) in read_ids]
        touched_inputs = [k for k in initial_values if k in written or k in read]
        new_live = [k for k in touched_inputs if k not in self.live]
        assert not new_live or number not in self.full, (
            "a backward of some gradients uses a live input that the full backward does not use"
        )
        if is_full_backward and not new_live:
            self.full[number] = gradients
        for k in new_live:
            initial = initial_values[k]
            self.live[k] = (
                fake_gradient(self.recorder, initial.shape, initial.stride(), initial.dtype, initial.device),
                k in moved,
            )
            for other_gradients in self.full.values():
                other_gradients.append(None)
        for k in touched_inputs:
            self.segments_using.setdefault(k, set()).add(number)
        for operation in new_operations if new_live else ():
            operation.sequence = None  # the caller repeats this call, and then these ops are recorded again
        return gradients

    @contextmanager
    def recording(
        self, writable: Mapping[int, Tensor] | None = None, *, autocast: bool, may_draw: bool = False
    ) -> Iterator[dict[int, Tensor]]:
        """Return a context manager in which the recorder records the ops of a backward.

        The context manager yields the values that the ``writable`` tensors have at the beginning of the block. After
        the block, it gives these tensors the values that they had before. Then it raises if an op with side effects was
        recorded and not chained by tokens, or if an op drew random numbers although ``may_draw`` is false. (A
        checkpoint may always repeat the random numbers of the forward.) The default of ``writable`` are the inputs in
        the field of this name.
        """
        writable = self.writable if writable is None else writable
        operations = self.recorder.tape.operations
        first = len(operations)
        forward_values = {k: value_of(traced, "an input") for k, traced in writable.items()}
        initial_values = forward_values | {k: fake for k, (fake, _) in self.live.items() if k >= 0}
        _set_values(writable, initial_values)
        self.recorder.phase = "backward"
        self.recorder.states.begin()
        try:
            casting = nullcontext() if autocast else internals.disable_autocast()
            claims = claims_of(type(quirk)() for quirk in self.quirks)
            guard = EscapeGuard(claims=claims, writable=writable, resized=self.resized)
            caches = internals.caches_kept(self.checkpoint_caches) if self.recorder.has_checkpoints else nullcontext()
            subclass_mode = self.recorder.subclass_mode or nullcontext()
            with (
                internals.fake_mode_set_aside(),
                caches,
                self.holder(),
                tracing(self.recorder),
                guard,
                casting,
                subclass_mode,
            ):
                yield initial_values
                self.recorder.states.end()
        finally:
            _set_values(writable, forward_values)
            self.recorder.phase = "forward"
            if autocast:
                torch.clear_autocast_cache()  # otherwise code after the trace would get traced tensors from the cache
        effects_in(operations[first:], DoubleBackwardError)
        for operation in operations[first:]:
            if operation.is_random and operation.is_impure and not (may_draw and operation.draws_as):
                raise _draws(operation, "the backward of a checkpoint repeats the random numbers of the forward")

    def _check_draws(self, first: int, results: Sequence[Tensor]) -> None:
        """Note whether the backward, recorded from the op ``first`` on, draws random numbers.

        Raise if none of its ``results`` depends on some of these numbers, because its graph would not draw them.
        """
        tape = self.recorder.tape
        drawing = [each for each in tape.operations[first:] if each.is_random and each.is_impure]
        self.draws = self.draws or bool(drawing)
        needed = tape.needed(results, set())[0] if drawing else ()
        for operation in drawing:
            if operation.index not in needed:
                raise _draws(operation, "no gradient depends on these numbers, so the graph would not draw them")


def _draws(operation: Operation, why: str) -> RandomOpError:
    return RandomOpError(
        f"a backward draws random numbers by `{operation.target}`",
        line=None if operation.code_position is None else operation.code_position(),
        why=why,
        suggestion="draw the numbers in the forward, and save them for the backward",
    )


def _set_values(writable: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
    """Give the traced tensors in ``writable`` the values with the same keys."""
    for k, traced in writable.items():
        if value_of(traced, "an input") is not values[k]:
            internals.replace_value(traced, values[k])


def differentiate(
    segment: Segment,
    tangents: Sequence[Tensor | None],
    leaf_order: list[Edge] | None = None,
    *,
    create_graph: bool = False,
) -> dict[Exit, Tensor]:
    """Run the nodes of a segment, and return the gradients that leave it, by exit.

    ``tangents`` has a tensor or None for each entry. With ``create_graph`` the gradients have autograd histories.

    If the segment is the whole graph, it is run by one call of `torch.autograd.grad`. Then the edges of leaves are
    appended to ``leaf_order`` in the order in which autograd reaches them. Otherwise each node is run by a separate
    call, in autograd's order, because one call would not stop at the edges between segments.
    """
    if segment.nodes is None:
        defined_entries = [
            (GradientEdge(*edge), t) for edge, t in zip(segment.entries, tangents, strict=True) if t is not None
        ]
        # If no edge leads to the node of a custom Function, torch 2.11 may have freed the node. Autograd crashes if
        # such a node is a stop.
        reached = reachable_stops(segment)
        stops = [edge for edge in segment.stops if edge in reached]
        if not stops or not defined_entries:
            return {}
        with internals.arrivals(stops, leaf_order):
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                [edge for edge, _ in defined_entries],
                [GradientEdge(*edge) for edge in stops],
                [tangent for _, tangent in defined_entries],
                retain_graph=True,
                create_graph=create_graph,
                allow_unused=True,
            )
        return {(edge, None, 0): g for edge, g in zip(stops, gradients, strict=True) if g is not None}
    return _node_by_node(segment, tangents, create_graph=create_graph)


def _node_by_node(segment: Segment, tangents: Sequence[Tensor | None], *, create_graph: bool) -> dict[Exit, Tensor]:
    stops = set(segment.stops)
    gradients: dict[Exit, Tensor] = {}
    buffers: dict[Any, dict[int, Tensor]] = {}

    def add(sums: dict[Any, Tensor], key: Any, gradient: Tensor) -> None:
        sums[key] = sums[key] + gradient if key in sums else gradient

    for edge, tangent in zip(segment.entries, tangents, strict=True):
        if tangent is not None and segment.has(edge[0]):
            add(buffers.setdefault(edge[0], {}), edge[1], tangent)
        elif tangent is not None:
            add(gradients, (edge, None, 0), tangent)
    waiting = Counter(  # the number of nodes that send gradients to each node
        target
        for node in nodes_of(segment, [(node, 0) for node in buffers])
        for target in {edge[0] for edge in next_edges(node) if edge not in stops and segment.has(edge[0])}
    )
    ready = [(-internals.sequence_of(node), i, node) for i, node in enumerate(buffers) if not waiting[node]]
    heapq.heapify(ready)
    counter = len(buffers)
    while ready:
        _, _, node = heapq.heappop(ready)
        node_gradients = run_node(node, buffers.pop(node, {}), segment, stops, create_graph=create_graph)
        targets: dict[Any, None] = {}
        for i, edge in enumerate(node.next_functions):
            gradient = node_gradients.get(i)
            if edge in stops:
                if gradient is not None:
                    add(gradients, (edge, None, 0) if segment.sums(edge) else (edge, node, i), gradient)
            elif segment.has(edge[0]):
                targets[edge[0]] = None
                if gradient is not None:
                    add(buffers.setdefault(edge[0], {}), edge[1], gradient)
        for target in targets:
            waiting[target] -= 1
            if not waiting[target]:
                counter += 1
                heapq.heappush(ready, (-internals.sequence_of(target), counter, target))
    return gradients


def run_node(
    node: Any, buffer: dict[int, Tensor], segment: Segment, stops: Collection[Edge], *, create_graph: bool = False
) -> dict[int, Tensor]:
    """Run one node of a segment, and return its gradients by their index in ``next_functions``.

    ``buffer`` maps the index of a forward output of the node to the sum of the gradients for this output. Only
    gradients that flow to nodes of the segment or along the edges in ``stops`` are computed.
    """
    needed_edges = [(i, e) for i, e in enumerate(node.next_functions) if e[0] and (e in stops or segment.has(e[0]))]
    if not buffer or not needed_edges:
        return {}
    edges = list(dict.fromkeys(edge for _, edge in needed_edges))
    returned = internals.run_node(node, buffer, edges, create_graph=create_graph)
    return {i: _fit_to_edge(gradient, edge) for i, edge in needed_edges if (gradient := returned[i]) is not None}


def _fit_to_edge(gradient: Tensor, edge: Edge) -> Tensor:
    """Fit a gradient to the edge as autograd does: sum broadcast dimensions, and cast it to the edge's dtype."""
    shape, dtype, _ = internals.edge_metadata(*edge)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    if dtype.is_complex != gradient.is_complex() and not dtype.is_complex:
        gradient = torch.real(gradient)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)
