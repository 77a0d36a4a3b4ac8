"""The contents page: what happens to a call, stage by stage.

    capture          what was called, with which tensors
    dedupe           a tensor that is passed twice becomes one input
    synthetic_bases  inputs that share memory are found
    trace            one run says what is computed, mutated and aliased; the joint graph
    partition        the joint graph becomes a forward and a backward
    compile          the graphs become callables
    runtime          the function that stands between the caller and the callables

Every stage hands on one frozen record and announces it to `observe`; capture, trace and partition hand on a live object
beside it (`Call`, `Trace`, `Split`), which holds the tensors that a record must not hold.
What overlaps among the inputs means is decided inside trace, as soon as it is known what was written.

Words: the *primals* are the inputs of the graph; a *tangent* is the gradient of one of its outputs; the *joint graph*
computes outputs and gradients together; the *prologue* and *epilogue* are what the run-time function does before and
after the graphs; an *entry* is one compiled form of a function, for the calls that its *guards* hold for.

Read the rooms in this order: `aotlab.capture`, `aotlab.trace`, `aotlab.partition`, `aotlab.backends`, `aotlab.runtime`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import fx

from aotlab import _torch as internals
from aotlab import config, observe, quirks
from aotlab.backends import stage as compile
from aotlab.backends.base import Backend, Boxed
from aotlab.cache import Declined, Entry
from aotlab.capture import call as capture
from aotlab.capture import dedupe, synthetic_bases
from aotlab.capture.call import Call, Target
from aotlab.capture.dedupe import Strategy
from aotlab.capture.signals import NeedsInputsApart, RunEagerly
from aotlab.capture.synthetic_bases import Base
from aotlab.derivatives.higher import Higher
from aotlab.derivatives.levels import first_level
from aotlab.errors import BY_DYNAMO, RefusedError, UntraceableError, UserLine
from aotlab.guards.call_state import CallState
from aotlab.guards.code_lines import definition, line_like
from aotlab.guards.explain import sentences
from aotlab.ir.graphs import check_graph, op_count
from aotlab.partition import stage as partition
from aotlab.runtime import stage as runtime
from aotlab.trace import stage as trace
from aotlab.trace.printed import Printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to compile.

    ``duplicates`` is the dedupe strategy; ``static_inputs`` says how many of the first inputs keep their addresses
    (None: the lifted parameters and buffers).
    """

    backend: Backend
    partitioner: partition.Partitioner
    duplicates: Strategy = "drop"
    keep_inference_input_mutations: bool = False
    static_inputs: int | None = None


def compile_call(
    options: Options,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    explain: Callable[[CallState], str | None],
    number: int,
    function_id: int,
) -> Entry:
    """Take one call through all stages and return the entry that serves it.

    Raises
    ------
    Declined
        The call cannot be compiled faithfully; nothing was changed.
    """
    started = time.perf_counter_ns()
    journal = _Journal(number)
    pause = _GarbagePause()
    state = None
    surroundings = internals.Surroundings()
    printed = Printed()
    try:
        with journal.stage("capture"), pause:
            captured, call = capture.run(target, args, kwargs)
            state = call.state
            reason = explain(call.state)
        _announce_start(target, function_id, number, options, reason)
        journal.announce("capture", captured)
        if torch.is_anomaly_enabled():
            raise RunEagerly(
                "it is called in anomaly mode, which looks at what each autograd node of eager's returns",
                suggestion="call it outside of torch.autograd.detect_anomaly() to have it compiled",
            )

        with journal.stage("dedupe"):
            deduped = dedupe.run(call, options.duplicates)
        journal.announce("dedupe", deduped)

        with journal.stage("synthetic_bases"):
            based, bases = synthetic_bases.run(call, deduped)
        journal.announce("synthetic_bases", based)

        decompositions = options.backend.decompositions()
        with journal.stage("trace"), pause:
            functional = config.functionalize_rng_ops or options.backend.needs_states(None)
            traced, live = _trace(options, call, deduped, bases, decompositions, printed, functional=functional)
            if not functional and options.backend.needs_states(traced.module):
                traced, live = _trace(options, call, deduped, bases, decompositions, printed, functional=True)
            if config.debug_assert:
                check_graph(traced.module, "joint", writes_inputs=True)
        journal.announce("trace", traced, op_count(traced.module.graph))

        with journal.stage("partition"), pause:
            if live.training and live.is_whole:
                options.backend.prepare(traced.module, live.fake_mode)
            split_record, split = partition.run(traced, live, options.partitioner)
        journal.announce("partition", split_record, _size(split_record))

        context = compile.CompilationContext(model_name="model", number=number, shared={}, detailed=observe.listening())
        with journal.stage("compile"):
            compiled, forward, full_backward = compile.run(
                split_record,
                live,
                options.backend,
                context,
                lazy_backward=config.lazy_backward or not live.is_whole or bool(live.deriver.draws),
                output_labels=[f"`{label}`" for label in traced.outputs],
                gradient_labels=live.gradient_labels(0) if live.training else (),
            )
        journal.announce("compile", compiled)

        with journal.stage("runtime"):
            backward = [
                _backward(options, live, split_record, split, segment, full_backward, context)
                for segment in range(len(live.segments))
            ]
            settings = internals.SettingsGuard()
            generated, run = runtime.run(
                _parts(options, call, deduped, live, split_record, split, forward, backward, settings, number)
            )
        journal.announce("runtime", generated)
    except (RefusedError, RunEagerly, trace.TraceFailed) as error:
        raised = isinstance(error, trace.TraceFailed)
        again = None if isinstance(error, RunEagerly) and error.passing else state
        raise Declined(_refusal(error, target, state), state=again, raised=raised, printed=printed) from error
    except KeyboardInterrupt:
        surroundings.restore()
        raise

    mutates = any(info.must_not_overlap for info in traced.metadata.input_info)
    if observe.listening():
        observe.emit(
            observe.CompileFinished(
                entry=number,
                duration_ns=time.perf_counter_ns() - started,
                guards=sentences(call.state, mutates=mutates),
            )
        )
    return Entry(
        number=number,
        run=run,
        state=state,
        settings=settings,
        mutates=mutates,
        offsets=tuple(deduped.kept[k] for k in live.inputs.offsets_read),
        records=journal.records,
        reason=reason,
        printed=printed,
    )


def _trace(
    options: Options,
    call: Call,
    deduped: dedupe.DedupeRecord,
    bases: Sequence[Base],
    decompositions: dict[Any, Callable[..., Any]],
    printed: Printed,
    *,
    functional: bool,
) -> tuple[trace.TraceRecord, trace.Trace]:
    """Trace the call; once more if inputs share memory in a way that no base can express.

    They are taken apart then, which is right if the function changes none of them. If ``functional``, random ops take
    states of generators.
    """

    def run(chosen: Sequence[Base]) -> tuple[trace.TraceRecord, trace.Trace]:
        with printed:
            return trace.run(
                call,
                deduped,
                decompositions=decompositions,
                keep_input_mutations=options.keep_inference_input_mutations,
                static_inputs=call.lifted_count if options.static_inputs is None else options.static_inputs,
                bases=chosen,
                exact=options.backend.exact,
                functional_draws=functional,
                quirks=quirks.chosen(),
            )

    try:
        return run(bases)
    except NeedsInputsApart:
        if not synthetic_bases.may_be_parted(bases, [call.values[position] for position in deduped.kept]):
            raise
        record, live = run(())
        if not synthetic_bases.are_unchanged(bases, record.metadata.input_info):
            raise
        return record, live


def _line_like(pattern: str | None, state: CallState | None) -> UserLine | None:
    """Look in the function's code for a line that an error cannot name, but describe."""
    if pattern is None or state is None:
        return None
    return line_like((item.expected for item in state.reached if isinstance(item.expected, CodeType)), pattern)


def _definition(target: Target) -> UserLine | None:
    """Return the line where a function begins, for errors that know no better one."""
    function = getattr(target, "function", None)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return target.line if code is None or target.frontend == "dynamo" else definition(code)


def _refusal(
    error: RefusedError | RunEagerly | trace.TraceFailed, target: Target, state: CallState | None
) -> RefusedError:
    """Make of what ended a compilation the error that says so, with the line of the user's program."""
    if isinstance(error, RefusedError):
        if error.line is None:
            error.reword(line=_line_like(error.pattern, state) or _definition(target))
        if target.frontend == "dynamo":
            error.reword(suggestion=error.suggestion.replace(f", or {BY_DYNAMO}", ""))
        return error
    if isinstance(error, trace.TraceFailed):
        return UntraceableError(str(error))
    has_line = ", at " in str(error) or "registered at " in str(error)
    return RefusedError(str(error), suggestion=error.suggestion, line=None if has_line else _definition(target))


class _GarbagePause:
    """Keep Python's cyclic collector from going through all of torch's objects in the middle of a trace.

    A trace makes many objects that live as long as it does; each full collection costs a tenth of a second or more and
    finds nothing.
    """

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._was_enabled:
            gc.enable()


class _Journal:
    """Times the stages and announces their records."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: dict[str, Any] = {}
        self._duration = 0

    @contextmanager
    def stage(self, name: str) -> Any:
        started = time.perf_counter_ns()
        yield
        self._duration = time.perf_counter_ns() - started

    def announce(self, name: str, record: object, nodes: int | None = None) -> None:
        self.records[name] = record
        if observe.listening():
            observe.emit(
                observe.StageFinished(
                    entry=self.number, stage=name, record=record, duration_ns=self._duration, nodes=nodes
                )
            )


def _announce_start(target: Target, function_id: int, number: int, options: Options, reason: str | None) -> None:
    if observe.listening():
        observe.emit(
            observe.CompileStarted(
                function=target.name,
                function_id=function_id,
                entry=number,
                frontend=target.frontend,
                backend=options.backend.name,
                reason=reason,
            )
        )


def _size(record: partition.PartitionRecord) -> int:
    return op_count(record.forward.graph) + (op_count(record.backward.graph) if record.backward is not None else 0)


def _backward(
    options: Options,
    live: trace.Trace,
    record: partition.PartitionRecord,
    split: partition.Split,
    segment: int,
    full: Boxed | None,
    context: compile.CompilationContext,
) -> runtime.Backward:
    """Make the backward of a segment, which compiles itself for each pattern of tangents that is met."""
    labels = live.gradient_labels(segment)

    def compile_pattern(pattern: trace.Pattern, asked: frozenset[int] | None) -> runtime.Compiled:
        started = time.perf_counter_ns()
        usual = trace.is_full(pattern) and live.is_whole and not live.deriver.draws
        if usual and record.backward is not None and not internals.any_autocast_enabled():
            return compile_module(record.backward, pattern, started), tuple(range(len(split.saved_names)))
        with internals.no_dispatch_modes():  # the caller's are not asked about fake tensors
            module, needs = partition.derive_backward(live, split, segment, pattern, asked)
        return compile_module(module, pattern, started), needs

    def compile_module(module: fx.GraphModule, pattern: trace.Pattern, started: int | None = None) -> Boxed:
        started = time.perf_counter_ns() if started is None else started
        context.detailed = observe.listening()
        with torch.no_grad(), internals.disable_autocast():
            compiled, graph = compile.compile_graph(module, "backward", options.backend, live, context, 0, labels)
        if observe.listening():
            defined = tuple(map(bool, pattern))
            observe.emit(
                observe.BackwardCompiled(
                    entry=context.number,
                    pattern=defined,
                    record=compile.BackwardRecord(pattern=defined, graph=graph),
                    duration_ns=time.perf_counter_ns() - started,
                )
            )
        return compiled

    def does_the_same(pattern: trace.Pattern) -> bool:
        with internals.no_dispatch_modes():
            return trace.does_the_same(live.deriver, segment, pattern)

    def make_higher(backward: runtime.Backward) -> Higher:
        return Higher(
            first_level(live, segment),
            split,
            wanted=backward.wanted,
            all_masks=backward.all_masks,
            write=partial(partition.write_backward, live),
            compile=compile_module,
            name=live.call_name,
            exact=options.backend.exact,
            is_first=True,
        )

    made = runtime.Backward(
        live,
        split,
        segment,
        full if live.is_whole else None,
        compile_pattern,
        make_higher,
        live.call_name,
        does_the_same=does_the_same,
        exact=options.backend.exact,
    )
    if not live.is_whole and not config.lazy_backward:
        made.prepare()
    return made


def _parts(
    options: Options,
    call: Call,
    deduped: dedupe.DedupeRecord,
    live: trace.Trace,
    record: partition.PartitionRecord,
    split: partition.Split,
    forward: Boxed,
    backward: Sequence[runtime.Backward],
    settings: internals.SettingsGuard,
    number: int,
) -> runtime.Parts:
    return runtime.Parts(
        call=call,
        dedupe=deduped,
        trace=live,
        partition=record,
        split=split,
        forward=forward,
        backward=backward,
        settings_hold=settings.holds,
        tensors_hold=internals.tensor_guards([call.values[i] for i in deduped.kept]),
        entry=number,
        debug=config.debug_assert,
        repeatable=runtime.can_be_repeated(live, writes_last=options.backend.writes_last),
        exact=options.backend.exact,
    )
