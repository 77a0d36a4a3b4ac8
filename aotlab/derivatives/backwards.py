"""The compiled backwards of a segment: one for each pattern of defined tangents, plus higher derivatives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import config, events
from aotlab._torch.compiling import compiling, made_once, never_lost
from aotlab.backends import compile_stage as compile
from aotlab.backends.base import Backend, Boxed
from aotlab.capture.signals import RunEagerly
from aotlab.derivatives.backward_graphs import BY_GRAPH, casting_of, derive_backward
from aotlab.derivatives.create_graph import MOST_LAYOUTS, LevelBackwards
from aotlab.derivatives.levels import first_level
from aotlab.errors import PartialBackwardError, RefusedError
from aotlab.ir.fx_graphs import is_size, placeholders
from aotlab.partition import partition_stage as partition
from aotlab.runtime.saved_values import SavedValues, restride
from aotlab.trace import trace_stage as trace
from aotlab.trace.history import LASTING, kept_entries, nodes_to_exits

#: A compiled backward, and the positions of the saved values that it takes.
_CompiledBackward = tuple[Boxed, tuple[int, ...]]
#: One item per tangent: whether it is defined, or its strides if they differ from the strides in the trace.
_Pattern = tuple[bool | tuple[int, ...], ...]
#: `_anchors` chooses only results of at most this many bytes, for example a scalar loss.
_SMALL = 64


class Backward:
    """The compiled backwards of one segment: one for each pattern of defined tangents with which autograd called it.

    ``full`` is the backward for all tangents, if it was compiled together with the forward. ``segment`` is the index of
    the segment.
    """

    def __init__(
        self,
        backend: Backend,
        live: trace.Trace,
        record: partition.PartitionRecord,
        split: partition.Split,
        full: Boxed | None,
        context: compile.CompilationContext,
        segment: int,
    ) -> None:
        self._backend = backend
        self.trace = live
        self._record = record
        self._split = split
        self._context = context
        self._segment = segment
        self.name = live.call_name
        self.exact = backend.exact
        self.masks = live.saving.masks[segment]
        self.all_masks = [mask for masks in live.saving.masks for mask in masks]
        strides = [tuple(live.tangents.fakes[n].stride()) for n in live.tangents.of_entries[segment]]
        self._strides_of = internals.sizes_function(strides, live.size_names)
        self.strides = self._strides_of(*internals.traced([symbol for _, symbol in live.symbols]))
        self.gradient_slots = live.gradient_slots(segment)
        self.kept_entries = kept_entries(live.segments[segment], live.saving.bits)
        self.anchors = self.kept_entries or _anchors(live, segment)
        self._labels = live.gradient_labels(segment)
        self._higher: LevelBackwards | None = None
        self._masks_of_requested: dict[frozenset[int], int] = {}
        #: The compiled backwards. A key has the requested slots (only if there are live inputs and autograd does not
        #: request all slots), the items of the pattern, and the items of the result of `casting_of`.
        self._compiled: dict[tuple[Any, ...], _CompiledBackward] = {}
        #: For strides that tangents had in an earlier call: the pattern with which to look up, in `_compiled`, a
        #: backward that accepts these strides. None means that there is no such backward, and the tangents are copied
        #: into the traced strides. A key has a pattern of defined tangents, the result of `casting_of`, and the
        #: strides.
        self._of_strides: dict[tuple[Any, ...], _Pattern | None] = {}
        usual = (True,) * len(self.masks)
        if full is not None and live.is_whole:
            self._compiled[usual] = full, tuple(range(len(split.saved_names)))
        elif not live.is_whole and not config.lazy_backward:
            with internals.disable_autocast():
                self._compiled[usual] = self._compile(usual)

    # --- compiling

    def sized(self, values: Sequence[Any], saved: SavedValues) -> list[Any]:
        """Replace symbolic sizes in ``values`` by the sizes of the current call."""
        if not saved.sizes:
            return list(values)
        return list(internals.sizes_function(list(values), self.trace.size_names)(*saved.sizes))

    def _compile(self, pattern: trace.Pattern, key: tuple[Any, ...] = ()) -> _CompiledBackward:
        """Compile the backward for a pattern of defined tangents.

        ``key`` is the key in `_compiled`. It may start with the requested slots. It ends with `BY_GRAPH` if the graph
        must run as Python code, without the compiler.
        """
        started = time.perf_counter_ns()
        by_graph, requested = key[-1:] == BY_GRAPH, key[0] if key and isinstance(key[0], frozenset) else None
        live, record = self.trace, self._record
        usual = trace.is_full(pattern) and live.is_whole and not by_graph and requested is None
        if usual and record.backward is not None and not internals.any_autocast_enabled():
            module, needs = record.backward, tuple(range(len(self._split.saved_names)))
        else:
            with internals.no_dispatch_modes():  # the caller's modes must not see fake tensors
                module, needs = derive_backward(live, self._split, self._segment, pattern, requested)
        return self.compile_module(module, pattern, started, by_graph=by_graph), needs

    def compile_module(
        self, module: fx.GraphModule, pattern: trace.Pattern, started: int | None = None, *, by_graph: bool = False
    ) -> Boxed:
        """Compile a backward graph and emit the event `BackwardCompiled`.

        ``started`` is the time at which the work on this backward started. With ``by_graph``, the graph is not
        compiled but runs as Python code.
        """
        if by_graph:
            return internals.boxed_forward_of(module)
        started = time.perf_counter_ns() if started is None else started
        self._context.detailed = events.listening()
        first_size = next((n for n, node in enumerate(placeholders(module.graph)) if is_size(node)), 0)
        with torch.no_grad(), internals.disable_autocast():
            compiled, graph = compile.compile_graph(
                module, "backward", self._backend, self.trace, self._context, 0, self._labels
            )
        compiled = self._for_its_sizes(compiled, first_size)
        if events.listening():
            defined = tuple(map(bool, pattern))
            events.emit(
                events.BackwardCompiled(
                    entry=self._context.number,
                    pattern=defined,
                    record=compile.BackwardRecord(pattern=defined, graph=graph),
                    duration_ns=time.perf_counter_ns() - started,
                )
            )
        return compiled

    def _for_its_sizes(self, compiled: Boxed, first: int) -> Boxed:
        """Wrap a backward so that it raises if the call's sizes break an assumption made while it was derived.

        The sizes are inputs of the backward; ``first`` is the position of the first one.
        """
        names, sizes = self.trace.size_names, self.trace.recorder.sizes
        holds = None if sizes is None else sizes.assumed_since(names)
        if holds is None:
            return compiled

        def call(inputs: list[Any]) -> Any:
            if not holds(*inputs[first : first + len(names)]):
                raise PartialBackwardError(
                    f"the backward of compiled `{self.name}` was derived for other sizes",
                    why="it makes assumptions about the sizes that its forward does not make",
                    suggestion="compile with dynamic=False",
                )
            return compiled(inputs)

        return call

    def _with_strides(
        self, pattern: _Pattern, tangents: list[Any], casting: tuple[Any, ...], expected: Sequence[tuple[int, ...]]
    ) -> _Pattern:
        """Return the pattern with which to look up a backward for the strides of the given tangents.

        ``tangents`` are the defined tangents of ``pattern``, and ``expected`` are the traced strides of all tangents.
        ``casting`` is the result of `casting_of`. The returned pattern contains strides only if a backward compiled for
        the traced strides would give another result. If no backward can be compiled for these strides, the tangents in
        the list are replaced by copies with the traced strides. The values are equal, but a reduction may sum them in
        another order and so round differently.
        """
        strides = tuple(t.stride() if t.layout is torch.strided else None for t in tangents)
        key = (pattern, casting, strides)
        follows = (self.exact or casting[-1:] == BY_GRAPH) and None not in strides and not self.trace.symbols
        if follows and len(self._of_strides) < MOST_LAYOUTS:
            made_once(self._of_strides, key, lambda: self._try_strides(pattern, strides, casting))
        served_pattern = self._of_strides.get(key)
        if served_pattern is None:
            usual = [stride for stride, defined in zip(expected, pattern, strict=True) if defined]
            layouts = zip(tangents, strides, usual, strict=True)
            tangents[:] = [t if actual == stride else restride(t, stride) for t, actual, stride in layouts]
        return pattern if served_pattern is None else served_pattern

    def _try_strides(self, pattern: _Pattern, strides: Sequence[Any], casting: tuple[Any, ...]) -> _Pattern | None:
        """Return a pattern whose backward accepts these ``strides`` of the defined tangents.

        That is ``pattern`` itself, if its backward gives the right result for these strides. Otherwise compile a
        backward for them, and return its pattern. Return None if no backward can be compiled for these strides. For
        example, the backward may need a value that the forward did not save, because the backward for the traced
        strides does not need that value.
        """
        defined_strides = iter(strides)
        all_strides = [
            next(defined_strides) if defined else usual for defined, usual in zip(pattern, self.strides, strict=True)
        ]
        layouts = zip(pattern, all_strides, self.strides, strict=True)
        strided_pattern = tuple([stride if stride != usual else defined for defined, stride, usual in layouts])
        # If the strides are not the cause of one of these errors, compiling for the traced strides raises it again.
        with suppress(RefusedError, RunEagerly, RuntimeError):
            with internals.no_dispatch_modes():
                if not casting and trace.is_right_for_layouts(self.trace.deriver, self._segment, strided_pattern):
                    return pattern
            self._compiled[*strided_pattern, *casting] = self._compile(strided_pattern)
            return strided_pattern
        return None

    def _create_graph_backwards(self) -> LevelBackwards:
        """Return the backwards of this segment for ``create_graph``, which also use the pending gradients.

        They are made at the first call.
        """
        if self._higher is None:
            with compiling(), never_lost():
                if self._higher is None:
                    level = first_level(self.trace, self._segment)
                    self._higher = LevelBackwards(
                        self,
                        level,
                        self._split,
                        gradient_slots=self.gradient_slots,
                        all_masks=self.all_masks,
                        is_first=True,
                    )
        return self._higher

    def __call__(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs of the segment's autograd node (`Compiled.apply`), in order.

        An error that an autograd node of the function raises in eager is raised here, too.
        """
        if saved.pending is not None or torch.is_grad_enabled():
            higher = self._create_graph_backwards()
            if self.trace.deriver.live:
                why = "it writes an input or its incoming gradient: a custom Function or a checkpoint in it does so"
                raise higher.no_derivative(why)
            if self.trace.deriver.draws:
                raise higher.no_derivative("it draws random numbers")
            # `higher` also runs without grad mode, if this backward pass has stored a pending gradient for this
            # segment; see `aotlab.derivatives.create_graph`.
            if torch.is_grad_enabled() or (id(higher), internals.current_graph_task()) in (saved.pending or ()):
                return higher(saved, tangents)
        return self._of_first_order(saved, tangents)

    def _live_tensors(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the caller's tensors that this backward may write, in the order of the deriver's field ``live``.

        An item is None for a tangent of another segment, and for a tangent that is not defined.
        """
        inputs, own = iter(saved.live), dict(zip(self.trace.tangents.of_entries[self._segment], tangents, strict=True))
        return [next(inputs) if k >= 0 else own.get(-1 - k) for k in self.trace.deriver.live]

    def _allocate(self, targets: Sequence[Tensor | None]) -> dict[int, tuple[Tensor, int, int]]:
        """Allocate the storages that this backward resizes.

        Return for each its tensor, its size, and the size that the backward gives it. The keys are positions among
        ``targets``.
        """
        resized, sizes = self.trace.deriver.resized, {}
        for n, (k, tensor) in enumerate(zip(self.trace.deriver.live, targets, strict=True)) if resized else ():
            if k in resized and tensor is not None:
                sizes[n] = tensor, tensor.untyped_storage().nbytes(), 0 if resized[k] else tensor.nbytes
                tensor.untyped_storage().resize_(tensor.nbytes)
        return sizes

    def _requested_slots(self) -> frozenset[int] | None:
        """Return the slots whose gradients autograd requests; None means all slots.

        With ``inputs=…``, autograd runs only the nodes that lead to these inputs. A slot is requested if autograd runs
        the node to which its gradient flows.
        """
        running_node = internals.current_node()
        edges = () if running_node is None else running_node.next_functions
        runs = [node is None or internals.is_to_be_run(node) for node, _ in edges]
        if all(runs) or not any(runs):
            return None
        return frozenset(slot for slot, is_run in zip(self.gradient_slots, runs, strict=False) if is_run)

    def _mask_of(self, requested: frozenset[int] | None) -> int:
        """Return the bit mask of the traced autograd nodes that lead to the gradients of the ``requested`` slots.

        Eager runs only these nodes, and only they free their saved values.
        """
        if requested is None:
            return -1
        if requested not in self._masks_of_requested:
            segment, slots = self.trace.segments[self._segment], self.trace.slots[self._segment]
            nodes = nodes_to_exits(segment, [exit_ for i in requested if (exit_ := slots[i]) is not None])
            bits = self.trace.saving.bits
            self._masks_of_requested[requested] = sum({1 << bits[node] for node in nodes if node in bits}, LASTING)
        return self._masks_of_requested[requested]

    def _of_first_order(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs of the segment's node. They cannot be differentiated again."""
        pattern: _Pattern = tuple([t is not None for t in tangents])
        if True not in pattern:
            return [None] * len(self.gradient_slots)
        casting = casting_of(tangents, exact=self.exact)
        mask = 0
        inputs: list[Any] = []
        unusual_strides = False
        strides = self._strides_of(*saved.sizes) if saved.sizes else self.strides
        for tangent, entry_mask, stride in zip(tangents, self.masks, strides, strict=True):
            if tangent is not None:
                mask |= entry_mask
                unusual_strides = unusual_strides or tangent.stride() != stride
                inputs.append(tangent)
        if unusual_strides:
            pattern = self._with_strides(pattern, inputs, casting, strides)
        requested = None
        live, draws = self.trace.deriver.live, self.trace.deriver.draws
        # `_requested_slots` takes time for each edge, so it is called only if its result can change the mask or the
        # written live inputs. A mask cannot change if there is only one entry, because all nodes then have the same
        # bit, or only one slot.
        several = len(self.all_masks) > 1 and len(self.gradient_slots) > 1
        if live or draws or (several and (saved.released or saved.once or not internals.keeps_graph())):
            requested = self._requested_slots()
            mask &= self._mask_of(requested)
        # A live tensor is written, and a random number is drawn, only if its node runs. So each set of requested slots
        # has its own backward.
        key = (requested, *pattern, *casting) if requested and (live or draws) else (*pattern, *casting)
        compiled, needs = self._compiled.get(key) or made_once(self._compiled, key, lambda: self._compile(pattern, key))
        # From here on, only the list `arguments` refers to the values. So the backward can free each after its use.
        arguments = [*saved.use(mask, needs), *saved.sizes]
        saved.release(mask, self.all_masks)
        arguments += [*inputs, *saved.live]
        del inputs
        targets = self._live_tensors(saved, tangents) if live else []
        sizes = self._allocate(targets) if live else {}
        if casting:
            with internals.disable_autocast():
                gradients = compiled(arguments)
        else:
            gradients = compiled(arguments)
        if live:
            gradients = self._write(targets, gradients, sizes)
        return [gradients[i] for i in self.gradient_slots]

    def _write(
        self, targets: Sequence[Tensor | None], gradients: Any, sizes: dict[int, tuple[Tensor, int, int]]
    ) -> Any:
        """Write the caller's tensors ``targets``, and free storages. Return the gradients.

        The new values of the tensors are the last of the ``gradients``. ``sizes`` is the result of `_allocate`.
        """
        live = self.trace.deriver.live
        values = gradients[len(gradients) - len(live) :]
        for target, value, (_, moves_version) in zip(targets, values, live.values(), strict=True):
            if target is not None and value is not None:
                (target if moves_version else target.data).copy_(value)
                # a custom Function may return the gradient that it has written
                gradients = [target if gradient is value else gradient for gradient in gradients]
        for n, (tensor, size, size_after) in sizes.items():
            tensor.untyped_storage().resize_(size_after if values[n] is not None else size)
        return gradients


def _anchors(live: trace.Trace, number: int) -> tuple[int, ...]:
    """Choose the result that a segment's autograd node saves, so that higher derivatives can get an edge to this node.

    Returns a tuple with the position of this result. Eager saves no result of this segment, so only a tensor without
    memory (of a cut edge) or a small result is chosen. If there is neither, the tuple is empty. Then `Compiled` returns
    an empty tensor in addition to the results, and saves that tensor.
    """
    segment = live.segments[number]
    cut_edges = range(len(segment.roots), len(segment.entries))  # tensors without memory
    if cut_edges:
        return (cut_edges[0],)
    fakes = enumerate(live.tangents.fakes[n] for n in segment.roots)
    sizes = [(value.numel() * value.itemsize, n) for n, value in fakes if not internals.is_symbolic(value)]
    return tuple([n for size, n in sorted(sizes)[:1] if size <= _SMALL])
