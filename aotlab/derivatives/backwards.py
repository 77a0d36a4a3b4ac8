"""The backward of each segment, compiled for each pattern of tangents that is met, and differentiated in its turn."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import fx

from aotlab import _torch as internals
from aotlab import config, observe
from aotlab.backends import stage as compile
from aotlab.backends.base import Backend, Boxed
from aotlab.derivatives.higher import Higher
from aotlab.derivatives.levels import first_level
from aotlab.partition import stage as partition
from aotlab.runtime import stage as runtime
from aotlab.trace import stage as trace


class _Compiler:
    """Writes and compiles the backwards of one segment."""

    def __init__(
        self,
        backend: Backend,
        live: trace.Trace,
        record: partition.PartitionRecord,
        split: partition.Split,
        segment: int,
        context: compile.CompilationContext,
    ) -> None:
        self.backend = backend
        self.live = live
        self.record = record
        self.split = split
        self.segment = segment
        self.context = context
        self.labels = live.gradient_labels(segment)

    def compile_pattern(self, pattern: trace.Pattern, asked: frozenset[int] | None) -> runtime.CompiledBackward:
        """Compile the backward for a pattern; of ``asked``, if given, there are the slots that it is to compute."""
        started = time.perf_counter_ns()
        live, record = self.live, self.record
        usual = trace.is_full(pattern) and live.is_whole and not live.deriver.draws
        if usual and record.backward is not None and not internals.any_autocast_enabled():
            return self.compile_module(record.backward, pattern, started), tuple(range(len(self.split.saved_names)))
        with internals.no_dispatch_modes():  # the caller's are not asked about fake tensors
            module, needs = partition.derive_backward(live, self.split, self.segment, pattern, asked)
        return self.compile_module(module, pattern, started), needs

    def compile_module(self, module: fx.GraphModule, pattern: trace.Pattern, started: int | None = None) -> Boxed:
        """Compile a graph that was written, and announce it."""
        started = time.perf_counter_ns() if started is None else started
        self.context.detailed = observe.listening()
        with torch.no_grad(), internals.disable_autocast():
            compiled, graph = compile.compile_graph(
                module, "backward", self.backend, self.live, self.context, 0, self.labels
            )
        if observe.listening():
            defined = tuple(map(bool, pattern))
            observe.emit(
                observe.BackwardCompiled(
                    entry=self.context.number,
                    pattern=defined,
                    record=compile.BackwardRecord(pattern=defined, graph=graph),
                    duration_ns=time.perf_counter_ns() - started,
                )
            )
        return compiled

    def does_the_same(self, pattern: trace.Pattern) -> bool:
        """Tell whether the backward for tangents of usual strides does the same for others."""
        with internals.no_dispatch_modes():
            return trace.does_the_same(self.live.deriver, self.segment, pattern)

    def make_higher(self, backward: runtime.Backward) -> Higher:
        """Make what differentiates the backward itself."""
        return Higher(
            first_level(self.live, self.segment),
            self.split,
            wanted=backward.wanted,
            all_masks=backward.all_masks,
            write=partial(partition.write_backward, self.live),
            compile=self.compile_module,
            name=self.live.call_name,
            exact=self.backend.exact,
            is_first=True,
        )


def backwards(
    backend: Backend,
    live: trace.Trace,
    record: partition.PartitionRecord,
    split: partition.Split,
    full: Boxed | None,
    context: compile.CompilationContext,
) -> list[runtime.Backward]:
    """Make the backward of each segment; ``full`` is that of the whole function, if it was compiled already."""
    found = []
    for segment in range(len(live.segments)):
        compiler = _Compiler(backend, live, record, split, segment, context)
        made = runtime.Backward(
            live,
            split,
            segment,
            full if live.is_whole else None,
            compiler.compile_pattern,
            compiler.make_higher,
            live.call_name,
            does_the_same=compiler.does_the_same,
            exact=backend.exact,
        )
        if not live.is_whole and not config.lazy_backward:
            made.prepare()
        found.append(made)
    return found
