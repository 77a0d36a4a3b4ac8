"""The pipeline: compile a call that no compiled entry serves, stage by stage. Start reading here.

The user calls `aotlab.cache.CompiledFunction`. It tries its entries, and calls `compile_call` if no entry serves the
call.

    capture          record the function, its flat arguments and the settings
    dedupe           merge arguments that are the same tensor into one input
    synthetic_bases  find inputs that share memory
    trace            run the function once on fake tensors; record ops, mutations, aliases and the joint graph
    partition        split the joint graph into a forward and a backward
    compile          compile the graphs to callables
    runtime          generate the function that serves calls with these callables

Every stage returns a frozen record, and the journal emits it as an event of `events`. The stages capture,
synthetic_bases, trace and partition also return live objects (`Call`, `Base`, `Trace`, `Split`) with tensors, which a
record must not contain. The trace stage decides how overlapping inputs are treated, because only the trace knows which
of them are written.

Terms: the *primals* are the inputs of the graph. A *tangent* is the gradient of one of its outputs. The *joint graph*
computes outputs and gradients together. The *prologue* and the *epilogue* are the parts of the run-time function before
and after the graphs. An *entry* is one compiled version of a function, for the calls for which its *guards* hold.
*Kept* inputs are the inputs that remain after dedupe. *Roots* are the forward outputs that can be differentiated. If
the caller can get a tensor from the middle of the autograd graph, the graph is cut into *segments*, whose backwards are
derived when they first run. An *exit* of a segment is an autograd edge along which its backward sends a gradient to an
input of the call or to another segment. The *source* of an autograd edge of the trace says which run-time tensor has
this edge in the caller's autograd graph: an input, a forward output, or a tensor between two segments.

Read the packages in this order: `aotlab.capture`, `aotlab.trace`, `aotlab.partition`, `aotlab.backends`,
`aotlab.runtime`. Then read `aotlab.derivatives.backwards` about running a backward, and `aotlab.guards.call_state`
about the assumptions of an entry.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotlab import _torch as internals
from aotlab import config, events, quirks
from aotlab.backends import compile_stage as compile
from aotlab.backends.base import Backend, EagerBackend
from aotlab.cache import Declined, Entry, Run, StageRecords
from aotlab.capture import call as capture
from aotlab.capture import dedupe, synthetic_bases
from aotlab.capture.call import Call, CaptureRecord, Target
from aotlab.capture.dedupe import DedupeRecord, Strategy
from aotlab.capture.dynamic_sizes import NUMBER, DynamicSizes, choose_dynamic_sizes
from aotlab.capture.signals import EntersInferenceMode, NumbersChange, RunEagerly
from aotlab.capture.synthetic_bases import Base, SyntheticBasesRecord
from aotlab.capture.view_bases import CASES, with_view_bases
from aotlab.derivatives.backwards import Backward
from aotlab.errors import (
    BY_DYNAMO,
    TAKE_DYNAMO,
    DataDependentError,
    HooksError,
    RefusedError,
    UntraceableError,
    UserLine,
)
from aotlab.guards.call_state import CallState
from aotlab.guards.code_names import definition, line_like
from aotlab.guards.conditions import Condition
from aotlab.guards.explain import sentences
from aotlab.guards.reached import codes_in
from aotlab.ir.fx_graphs import check_graph, op_count
from aotlab.ir.size_rules import rules_of
from aotlab.partition import partition_stage as partition
from aotlab.runtime import runtime_stage as runtime
from aotlab.runtime.forward_call import ForwardFailed
from aotlab.trace import trace_stage as trace
from aotlab.trace.surroundings import HeldOutput

#: A function that takes the state of a call and returns the reasons why no existing entry serves the call.
Explain = Callable[[CallState], tuple[events.Miss, ...]]


#: A new entry of a function guards conditions if the function has fewer entries than this.
_ENTRIES_WITH_CONDITIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a compilation.

    ``duplicates`` is the strategy of the dedupe stage. ``static_inputs`` is the number of inputs, from the first one
    on, that have the same address at each call; None means the lifted parameters and buffers. ``by_dynamo`` says that
    Dynamo may capture a call that cannot be compiled. With ``keep_inference_input_mutations``, a graph without a
    backward writes mutated inputs itself, and the epilogue does not; `aotlab.compile` sets this option. ``dynamic`` is
    as in `aotlab.compile`. ``after_node`` adds lines to the generated function after the lines that make an autograd
    node (see `aotlab.runtime.draft.Parts`).
    """

    backend: Backend
    partitioner: partition.Partitioner
    duplicates: Strategy = "drop"
    keep_inference_input_mutations: bool = False
    static_inputs: int | None = None
    dynamic: bool | None = False
    by_dynamo: bool = False
    after_node: Callable[[runtime.Draft, Sequence[int]], None] | None = None


def compile_call(
    options: Options,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    explain: Explain,
    number: int,
    function_id: int,
    varying: DynamicSizes | None = None,
) -> Entry:
    """Run all stages for one call and return the entry that serves it. Raise `Declined` if it cannot be compiled.

    ``args`` and ``kwargs`` are the arguments of the call. ``explain`` returns the reasons why the existing entries do
    not serve the call. ``number`` is the number of the new entry, and ``function_id`` identifies the function in
    events. ``varying`` maps flat arguments to the dimensions that differed between earlier calls.
    """
    journal = _Journal(options.backend.name, target, explain, number, function_id)
    surroundings = internals.Surroundings()
    target.lifts_numbers = target.lifts_numbers and options.dynamic is not False
    try:
        capture_record, call = capture.run(target, args, kwargs)
        if not options.backend.takes_fakes and any(map(internals.is_fake, call.values)):
            options = replace(options, backend=EagerBackend())  # this backend cannot run on fake tensors
        journal.begin(call.state)
        journal.finish("capture", capture_record)
        capture.check_modes(call.values)
        with internals.fake_mode_set_aside(), _garbage_pause():  # a fake mode of the caller may be active
            return _run_with_view_bases(options, call, capture_record, journal, varying)
    except (RefusedError, RunEagerly, trace.TraceFailed) as error:
        fields: dict[str, Any] = {"raised": isinstance(error, trace.TraceFailed), "printed": journal.printed}
        retained_state = None if isinstance(error, RunEagerly) and error.transient else journal.state
        raise Declined(refusal=refusal_of(error, target, journal.state), state=retained_state, **fields) from error
    except NumbersChange:  # the target now lifts these numbers, so the call is captured again
        pass
    except KeyboardInterrupt:
        surroundings.restore()
        raise
    return compile_call(options, target, args, kwargs, explain, number, function_id, varying)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreparedInputs:
    """The results of the three stages before the trace."""

    captured: CaptureRecord
    deduped: DedupeRecord
    based: SyntheticBasesRecord
    bases: Sequence[Base]


def _run_with_view_bases(
    options: Options, call: Call, captured: CaptureRecord, journal: _Journal, varying: DynamicSizes | None
) -> Entry:
    """Run the stages after capture. If the trace ends for a reason in `CASES`, run them with the bases of views."""
    try:
        return _run_remaining_stages(options, call, captured, journal, varying)
    except RunEagerly as error:
        # `after_node` is set for wrapper subclasses, whose inner tensors are no tensors of the caller.
        may_extend = error.case in CASES and options.duplicates == "drop" and options.after_node is None
        extended = with_view_bases(captured, call) if may_extend else None
        if extended is None:
            raise
    captured, call = extended
    journal.finish("capture", captured)  # the record of this stage has the bases, too
    return _run_remaining_stages(options, call, captured, journal, varying)


def _run_remaining_stages(
    options: Options, call: Call, captured: CaptureRecord, journal: _Journal, varying: DynamicSizes | None
) -> Entry:
    deduped = dedupe.run(call, options.duplicates)
    journal.finish("dedupe", deduped)

    based, bases = synthetic_bases.run(call, deduped)
    journal.finish("synthetic_bases", based)
    inputs = _PreparedInputs(captured=captured, deduped=deduped, based=based, bases=bases)

    dims = {} if bases or call.view_bases else choose_dynamic_sizes(call, options.dynamic, varying)
    try:
        return _run_from_trace(options, call, journal, inputs, dims)
    except EntersInferenceMode as signal:
        signal.__traceback__ = None  # the frames of the traceback would keep the trace alive
    # The function enters inference mode at its beginning. So compile the call under inference mode, and let the entry
    # switch the mode on.
    with torch.inference_mode():
        call_in_inference_mode = replace(
            call, state=replace(call.state, settings=internals.global_state()), outside=call.state
        )
        entry = _run_from_trace(options, call_in_inference_mode, journal, inputs, dims)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.inference_mode():
            return entry.run(args, kwargs)

    return replace(entry, run=run, settings=internals.SettingsGuard())


def _run_from_trace(
    options: Options,
    call: Call,
    journal: _Journal,
    inputs: _PreparedInputs,
    dims: Mapping[int, Collection[int]],
) -> Entry:
    backend, deduped = options.backend, inputs.deduped
    traced, live = _trace(options, call, deduped, inputs.bases, journal, dims)
    journal.finish("trace", traced, op_count(traced.module.graph))

    if live.training and live.is_whole:
        backend.prepare(traced.module, live.fake_mode)
    divided, split = partition.run(traced, live, options.partitioner)
    journal.finish("partition", divided, divided.op_count)

    context = compile.CompilationContext(journal.number)
    compiled, forward, full_backward = compile.run(traced, divided, live, backend, context)
    journal.finish("compile", compiled)

    settings, numbers = internals.SettingsGuard(), range(len(live.segments))
    parts = runtime.Parts(
        call=call,
        dedupe=deduped,
        trace=live,
        partition=divided,
        split=split,
        forward=forward,
        backward=[Backward(backend, live, divided, split, full_backward, context, n) for n in numbers],
        settings_hold=settings.check,
        tensors_hold=internals.tensor_guards([call.values[i] for i in deduped.kept], live.inputs.fakes),
        entry=journal.number,
        repeatable=runtime.can_be_repeated(live, writes_last=backend.writes_last),
        exact=backend.exact,
        after_node=options.after_node,
    )
    generated, run = runtime.run(parts)
    after_call = call.target.after_call()
    run = run if after_call is None else _followed(run, after_call)
    journal.finish("runtime", generated)

    state = _guarded(call, deduped, live)
    journal.end(state)
    return Entry(
        number=journal.number,
        run=run,
        state=state,
        settings=settings,
        records=StageRecords(
            capture=inputs.captured,
            dedupe=deduped,
            synthetic_bases=inputs.based,
            trace=traced,
            partition=divided,
            compile=compiled,
            runtime=generated,
        ),
        reason=next((miss.sentence for miss in journal.misses), None),
        printed=journal.printed,
    )


def _followed(run: Run, after_call: Callable[[Any], Any]) -> Run:
    """Return a run-time function that calls ``run``, and ``after_call`` with its result if the guards hold.

    In a checkpoint, it raises `ForwardFailed` before it looks at the guards, so that the call runs eagerly. When a
    checkpoint runs its function again, it may stop in the middle, and then ``after_call`` would not be called. The
    first run must be eager, too, because both runs must save the same tensors.
    """

    def followed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() and internals.is_in_checkpoint():
            raise ForwardFailed(
                HooksError("the function sets Python values", why="a checkpoint may end the call early")
            )
        result = run(args, kwargs)
        return result if result is runtime.MISS else after_call(result)

    return followed


def _trace(
    options: Options,
    call: Call,
    deduped: DedupeRecord,
    bases: Sequence[Base],
    journal: _Journal,
    dims: Mapping[int, Collection[int]],
    static_because: str = "",
    *,
    sizes_from_values: bool = False,
) -> tuple[trace.TraceRecord, trace.Trace]:
    """Trace the call; ``dims`` are the dynamic dimensions by flat argument.

    If an op needs the values of a tensor for a size or a number, the call is traced again with ``sizes_from_values``.

    The call is traced a second time if the first graph shows that, for this backend, random ops must take the states
    of random generators as inputs.

    If the trace fails with dynamic sizes, the call is traced for its own sizes, and ``static_because`` is the reason.
    There is one exception: if the function reads a value that depends on sizes and Dynamo may capture the call, the
    error is raised.
    """
    decompositions = options.backend.decompositions()
    static = sum(kind != "input" for _, kind in call.target.lifted_names())

    def run(functional: bool) -> tuple[trace.TraceRecord, trace.Trace]:
        with journal.printed:
            record_and_trace = trace.run(
                call,
                deduped,
                decompositions=decompositions,
                keep_input_mutations=options.keep_inference_input_mutations,
                static_inputs=static if options.static_inputs is None else options.static_inputs,
                bases=bases,
                exact=options.backend.exact,
                exact_draws=options.backend.exact_draws,
                functional_draws=functional,
                quirks=quirks.chosen(),
                varying=dims,
                sizes_from_values=sizes_from_values,
                guards_conditions=_guards_conditions(options, call, journal),
            )
            call.target.end_trace()
            _check_printed(record_and_trace[1].inputs.conditions, journal.printed)
            return record_and_trace

    functional = config.functionalize_rng_ops or options.backend.needs_states(None)
    try:
        traced, live = run(functional)
    except (RefusedError, RunEagerly, trace.TraceFailed) as error:
        if isinstance(error, DataDependentError) and not sizes_from_values:
            with suppress(RefusedError, RunEagerly, trace.TraceFailed, internals.GuardOnDataDependentSymNode):
                return _trace(options, call, deduped, bases, journal, dims, static_because, sizes_from_values=True)
        if (
            not dims
            or sizes_from_values
            or (options.by_dynamo and config.fallback == "dynamo" and isinstance(error, DataDependentError))
        ):
            raise
        return _trace(options, call, deduped, bases, journal, {}, str(error))
    if not functional and options.backend.needs_states(traced.module):
        traced, live = run(True)
    if not options.backend.takes(traced.module):
        dims = {n: d for n, d in dims.items() if NUMBER not in d}
        return _trace(
            options,
            call,
            deduped,
            bases,
            journal,
            dims,
            "the backend cannot compile it for all numbers",
            sizes_from_values=sizes_from_values,
        )
    if config.debug_assert:
        check_graph(traced.module, "joint", writes_inputs=True)
    return (replace(traced, static_since=static_because) if static_because else traced), live


def _guards_conditions(options: Options, call: Call, journal: _Journal) -> bool:
    """Tell whether the entry may guard conditions.

    Each combination of answers needs an entry. Dynamo serves a function with several entries better, because it divides
    the function at each condition.
    """
    is_usual = call.target.frontend != "dynamo" and options.after_node is None
    return is_usual and len(journal.misses) < _ENTRIES_WITH_CONDITIONS


def _check_printed(conditions: Sequence[Condition], printed: HeldOutput) -> None:
    """Raise `DataDependentError` if a traced function asked for conditions and printed text.

    A compiled call prints nothing, and the text often depends on the condition: ``if bad.any(): print("bad values")``.
    """
    if conditions and printed:
        raise DataDependentError(
            "the function prints text, perhaps because of a condition",
            line=conditions[0].line,
            why="a compiled call prints nothing",
            suggestion=f"print outside of the compiled function, or {BY_DYNAMO}",
        )


def _guarded(call: Call, deduped: DedupeRecord, live: trace.Trace) -> CallState:
    """Return the state that the entry guards: the state of the call, with the guards that only the trace could find.

    These guards concern memory that inputs share, the bases of views, storage offsets, sizes, and conditions.
    """
    state = call.outside or call.own or call.state
    writes = bool(live.deriver.live) or any(info.mutates_data for info in live.metadata.input_info)
    offsets = tuple(deduped.kept[k] for k in live.inputs.offsets_read)
    rules = rules_of(live.recorder.sizes, state.names, dict(zip(deduped.kept, live.inputs.fakes, strict=True)))
    offsets = tuple(position for position in offsets if position < len(state.leaves))
    return replace(
        state,
        watches_overlap=writes,
        offsets=offsets,
        rules=rules,
        watches_bases=tuple(call.view_bases),
        conditions=tuple(live.inputs.conditions),
    )


def _definition(target: Target) -> UserLine | None:
    """Return the line with the ``def`` of the compiled function, for errors without a user line."""
    function = getattr(target, "function", None)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return target.line if code is None or target.frontend == "dynamo" else definition(code)


def refusal_of(
    error: RefusedError | RunEagerly | trace.TraceFailed, target: Target, state: CallState | None
) -> RefusedError:
    """Convert an exception that ended a compilation into a `RefusedError` with the user line."""
    suggestion = "" if isinstance(error, trace.TraceFailed) else error.suggestion
    if target.frontend == "dynamo":
        suggestion = suggestion.replace(f", or {BY_DYNAMO}", "").replace(f", or {TAKE_DYNAMO}", "")
    if isinstance(error, RefusedError):
        if error.line is None:
            line = None
            if error.pattern is not None and state is not None:  # search the user's code for a line with this pattern
                line = line_like(codes_in(state.reached), error.pattern)
            error.reword(line=line or _definition(target))
        error.reword(suggestion=suggestion)
        return error
    if isinstance(error, trace.TraceFailed):
        return UntraceableError(str(error))
    place = _definition(target) if error.at is None else error.at
    return RefusedError(error.sentence, suggestion=suggestion, line=place, case=error.case)


@contextmanager
def _garbage_pause() -> Iterator[None]:
    """Make Python's cyclic garbage collector run rarely while the context is open.

    One collection takes a tenth of a second or more, because torch has many objects. A collection would free little,
    because the objects of a trace live until the trace ends, and reference counts free them then. The collector is not
    switched off, because compilers leave garbage.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0] and 100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Journal:
    """Measures the time of the stages of one compilation and emits their events."""

    def __init__(self, backend_name: str, target: Target, explain: Explain, number: int, function_id: int) -> None:
        self._backend_name = backend_name
        self._target = target
        self._explain = explain
        self._function_id = function_id
        self.number = number
        self.state: CallState | None = None
        self.misses: tuple[events.Miss, ...] = ()
        self.printed = HeldOutput()
        self._started = self._since = time.perf_counter_ns()

    def begin(self, state: CallState) -> None:
        """Store the state of the call, and emit the event that its compilation starts.

        The event has the reasons why the existing entries do not serve the call.
        """
        self.state = state
        self.misses = self._explain(state)
        events.emit(
            events.CompileStarted(
                function=self._target.name,
                function_id=self._function_id,
                entry=self.number,
                frontend=self._target.frontend,
                backend=self._backend_name,
                misses=self.misses,
            )
        )

    def finish(self, stage: str, record: object, nodes: int | None = None) -> None:
        """Emit the event that a stage has finished. The time of the next stage is measured from here.

        ``record`` is the result of the stage, and ``nodes`` the number of op calls in it, if the stage has a graph.
        """
        if events.listening():
            took = time.perf_counter_ns() - self._since
            event = events.StageFinished(entry=self.number, stage=stage, record=record, duration_ns=took, nodes=nodes)
            events.emit(event)
        self._since = time.perf_counter_ns()

    def end(self, state: CallState) -> None:
        """Emit the event that the entry is ready, with its guards."""
        if events.listening():
            duration, guards = time.perf_counter_ns() - self._started, sentences(state)
            lines = {each.sentence(): each.line for each in state.conditions if each.line is not None}
            lines.update({} if state.rules is None else state.rules.lines)
            events.emit(events.CompileFinished(entry=self.number, duration_ns=duration, guards=guards, lines=lines))
