"""The backward of each segment, compiled for each pattern of tangents that is met, and differentiated in its turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import config, observe
from aotlab._torch.compiling import compiling, made_once, never_lost
from aotlab.backends import stage as compile
from aotlab.backends.base import Backend, Boxed
from aotlab.capture.signals import RunEagerly
from aotlab.derivatives.graphs import BY_GRAPH, casting_of, derive_backward
from aotlab.derivatives.higher import MOST_LAYOUTS, Higher
from aotlab.derivatives.levels import first_level
from aotlab.errors import PartialBackwardError, RefusedError
from aotlab.ir.graphs import is_size, placeholders
from aotlab.partition import stage as partition
from aotlab.runtime.saved import SavedValues, restride
from aotlab.trace import stage as trace
from aotlab.trace.history import LASTING, kept_entries, nodes_before

#: A backward, and which of the saved values it takes.
_CompiledBackward = tuple[Boxed, tuple[int, ...]]
#: What says which tangents are defined, and with which strides if not the usual.
_Pattern = tuple[bool | tuple[int, ...], ...]
#: A result of so many bytes, as a loss, may be kept only for what hangs on it.
_SMALL = 64


class Backward:
    """The compiled backwards of one segment, one for each pattern of defined tangents that was asked for."""

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
        self.strides = self._strides_of(*[symbol.node.hint for _, symbol in live.symbols])
        self.wanted = live.through(segment)
        self.kept_entries = kept_entries(live.segments[segment], live.saving.bits)
        self.anchors = self.kept_entries or _anchors(live, segment)
        self._labels = live.gradient_labels(segment)
        self._higher: Higher | None = None
        self._masks_of_asked: dict[frozenset[int], int] = {}
        #: A backward for each pattern, and the autocast it was made for.
        self._compiled: dict[tuple[Any, ...], _CompiledBackward] = {}
        #: The pattern to look up, by strides that were met before; None where tangents are copied.
        self._of_strides: dict[tuple[Any, ...], _Pattern | None] = {}
        usual = (True,) * len(self.masks)
        if full is not None and live.is_whole:
            self._compiled[usual] = full, tuple(range(len(split.saved_names)))
        elif not live.is_whole and not config.lazy_backward:
            with internals.disable_autocast():
                self._compiled[usual] = self._compile(usual)

    # --- compiling

    def sized(self, values: Sequence[Any], saved: SavedValues) -> list[Any]:
        """Compute symbolic numbers for a call."""
        if not saved.sizes:
            return list(values)
        return list(internals.sizes_function(list(values), self.trace.size_names)(*saved.sizes))

    def _compile(self, pattern: trace.Pattern, key: tuple[Any, ...] = ()) -> _CompiledBackward:
        """Compile the backward for a pattern, or run its graph as it is; ``key`` says for what besides."""
        started = time.perf_counter_ns()
        by_graph, asked = key[-1:] == BY_GRAPH, key[0] if key and isinstance(key[0], frozenset) else None
        live, record = self.trace, self._record
        usual = trace.is_full(pattern) and live.is_whole and not by_graph and asked is None
        if usual and record.backward is not None and not internals.any_autocast_enabled():
            module, needs = record.backward, tuple(range(len(self._split.saved_names)))
        else:
            with internals.no_dispatch_modes():  # the caller's are not asked about fake tensors
                module, needs = derive_backward(live, self._split, self._segment, pattern, asked)
        return self.compile_module(module, pattern, started, by_graph=by_graph), needs

    def compile_module(
        self, module: fx.GraphModule, pattern: trace.Pattern, started: int | None = None, *, by_graph: bool = False
    ) -> Boxed:
        """Compile a graph that was written, and announce it."""
        if by_graph:
            return internals.boxed_forward_of(module)
        started = time.perf_counter_ns() if started is None else started
        self._context.detailed = observe.listening()
        first_size = next((n for n, node in enumerate(placeholders(module.graph)) if is_size(node)), 0)
        with torch.no_grad(), internals.disable_autocast():
            compiled, graph = compile.compile_graph(
                module, "backward", self._backend, self.trace, self._context, 0, self._labels
            )
        compiled = self._for_its_sizes(compiled, first_size)
        if observe.listening():
            defined = tuple(map(bool, pattern))
            observe.emit(
                observe.BackwardCompiled(
                    entry=self._context.number,
                    pattern=defined,
                    record=compile.BackwardRecord(pattern=defined, graph=graph),
                    duration_ns=time.perf_counter_ns() - started,
                )
            )
        return compiled

    def _for_its_sizes(self, compiled: Boxed, first: int) -> Boxed:
        """Have a backward, whose sizes begin at its input ``first``, refuse those for which it was not derived."""
        names, sizes = self.trace.size_names, self.trace.recorder.sizes
        holds = None if sizes is None else sizes.assumed_since(names)
        if holds is None:
            return compiled

        def call(inputs: list[Any]) -> Any:
            if not holds(*inputs[first : first + len(names)]):
                raise PartialBackwardError(
                    f"a backward of compiled `{self.name}` was derived for other sizes",
                    why="it assumes something of the sizes that its forward does not",
                    suggestion="compile with dynamic=False",
                )
            return compiled(inputs)

        return call

    def _with_strides(
        self, pattern: _Pattern, tangents: list[Any], casting: tuple[Any, ...], expected: Sequence[tuple[int, ...]]
    ) -> _Pattern:
        """Return the pattern that says which strides the defined tangents have, if a backward for these does otherwise.

        Where none can be had, they are copied, in the list, into the strides that the backward was traced with: equal
        values, but what is summed in another order may be rounded otherwise.
        """
        strides = tuple(t.stride() if t.layout is torch.strided else None for t in tangents)
        key = (pattern, casting, strides)
        follows = (self.exact or casting[-1:] == BY_GRAPH) and None not in strides and not self.trace.symbols
        if follows and len(self._of_strides) < MOST_LAYOUTS:
            made_once(self._of_strides, key, lambda: self._try_strides(pattern, strides, casting))
        found = self._of_strides.get(key)
        if found is None:
            usual = [stride for stride, defined in zip(expected, pattern, strict=True) if defined]
            given = zip(tangents, strides, usual, strict=True)
            tangents[:] = [t if own == stride else restride(t, stride) for t, own, stride in given]
        return pattern if found is None else found

    def _try_strides(self, pattern: _Pattern, strides: Sequence[Any], casting: tuple[Any, ...]) -> _Pattern | None:
        """Return the usual pattern if its backward does for these strides, else that of one that is compiled for them.

        None if that cannot be: what it needs may not have been saved for the usual strides.
        """
        left = iter(strides)
        own = [next(left) if defined else usual for defined, usual in zip(pattern, self.strides, strict=True)]
        ways = zip(pattern, own, self.strides, strict=True)
        found = tuple([stride if stride != usual else defined for defined, stride, usual in ways])
        with suppress(RefusedError, RunEagerly, RuntimeError):  # other errors come again for the usual ones
            with internals.no_dispatch_modes():
                if not casting and trace.does_the_same(self.trace.deriver, self._segment, found):
                    return pattern
            self._compiled[*found, *casting] = self._compile(found)
            return found
        return None

    def _of_higher_order(self) -> Higher:
        """Return the backwards under ``create_graph``, and those in which gradients of gradients come in."""
        if self._higher is None:
            with compiling(), never_lost():
                if self._higher is None:
                    level = first_level(self.trace, self._segment)
                    self._higher = Higher(
                        self, level, self._split, wanted=self.wanted, all_masks=self.all_masks, is_first=True
                    )
        return self._higher

    def __call__(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of what went through ``apply``, in their order; raise what differentiating raises."""
        if saved.pending is not None or torch.is_grad_enabled():
            higher = self._of_higher_order()
            if saved.live:
                raise higher.nowhere("a checkpoint in it writes an input, as a batch norm does its statistics")
            # or where something came into the midst, in the backward that is being run
            if torch.is_grad_enabled() or (id(higher), internals.current_graph_task()) in (saved.pending or ()):
                return higher(saved, tangents)
        return self._of_first_order(saved, tangents)

    def _asked(self) -> frozenset[int] | None:
        """Return the slots whose gradients are asked for, to which alone autograd runs nodes; None for all."""
        own = internals.current_node()
        edges = () if own is None else own.next_functions
        runs = [node is None or internals.is_to_be_run(node) for node, _ in edges]
        if all(runs) or not any(runs):
            return None
        return frozenset(slot for slot, is_run in zip(self.wanted, runs, strict=False) if is_run)

    def _mask_of(self, asked: frozenset[int] | None) -> int:
        """Return the bits of the nodes on the way to gradients, which alone let go of what they keep."""
        if asked is None:
            return -1
        if asked not in self._masks_of_asked:
            part, ways = self.trace.segments[self._segment], self.trace.slots[self._segment]
            nodes = nodes_before(part, [way for i in asked if (way := ways[i]) is not None])
            bits = self.trace.saving.bits
            self._masks_of_asked[asked] = sum({1 << bits[node] for node in nodes if node in bits}, LASTING)
        return self._masks_of_asked[asked]

    def _of_first_order(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients where nobody differentiates them."""
        pattern: _Pattern = tuple([t is not None for t in tangents])
        if True not in pattern:
            return [None] * len(self.wanted)
        casting = casting_of(tangents, exact=self.exact)
        mask = 0
        inputs: list[Any] = []
        others = False
        strides = self._strides_of(*saved.sizes) if saved.sizes else self.strides
        for tangent, own, stride in zip(tangents, self.masks, strides, strict=True):
            if tangent is not None:
                mask |= own
                others = others or tangent.stride() != stride
                inputs.append(tangent)
        if others:
            pattern = self._with_strides(pattern, inputs, casting, strides)
        asked = None
        # with one entry all nodes go together, and one gradient is asked for; else this takes time for each edge
        several = len(self.all_masks) > 1 and len(self.wanted) > 1
        if saved.live or (several and (saved.released or saved.once or not internals.keeps_graph())):
            asked = self._asked()
            mask &= self._mask_of(asked)
        # what is written hangs on which nodes are run
        key = (asked, *pattern, *casting) if saved.live and asked else (*pattern, *casting)
        compiled, needs = self._compiled.get(key) or made_once(self._compiled, key, lambda: self._compile(pattern, key))
        # from here on the list is the only owner of what this backward uses up, so that it is freed on the way
        arguments = [*saved.use(mask, needs), *saved.sizes]
        saved.release(mask, self.all_masks)
        arguments += [*inputs, *saved.live]
        del inputs
        if casting:
            with internals.disable_autocast():
                gradients = compiled(arguments)
        else:
            gradients = compiled(arguments)
        if saved.live:
            values = gradients[len(gradients) - len(saved.live) :]
            for tensor, value, (_, counts) in zip(saved.live, values, self.trace.deriver.live.values(), strict=False):
                if value is not None:
                    (tensor if counts else tensor.data).copy_(value)
        return [gradients[i] for i in self.wanted]


def _anchors(live: trace.Trace, segment: int) -> tuple[int, ...]:
    """Choose the results of a segment's node on which those of derivatives of derivatives hang.

    Eager keeps none of them: so the smallest. None if that may take memory; then an empty result is added.
    """
    part = live.segments[segment]
    cut_edges = range(len(part.roots), len(part.entries))  # without memory
    if cut_edges:
        return (cut_edges[0],)
    fakes = enumerate(live.tangents.fakes[n] for n in part.roots)
    sizes = [(value.numel() * value.itemsize, n) for n, value in fakes if not internals.is_symbolic(value)]
    return tuple([n for size, n in sorted(sizes)[:1] if size <= _SMALL])
