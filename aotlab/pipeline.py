"""The contents page: what happens, stage by stage, to a call that no compiled entry serves.

`aotlab.cache.CompiledFunction` is what the user calls: it tries its entries, and comes here when none serves the call.

    capture          what was called, with which tensors
    dedupe           a tensor that is passed twice becomes one input
    synthetic_bases  inputs that share memory are found
    trace            one run says what is computed, mutated and aliased; the joint graph
    partition        the joint graph becomes a forward and a backward
    compile          the graphs become callables
    runtime          the function that stands between the caller and the callables

Every stage hands on one frozen record, which the journal announces to `observe`; capture, synthetic_bases, trace and
partition hand on live objects beside it (`Call`, `Base`, `Trace`, `Split`), with the tensors that a record must not
hold. What an overlap of inputs means is decided inside trace, where it is known what was written.

Words: the *primals* are the inputs of the graph; a *tangent* is the gradient of one of its outputs; the *joint graph*
computes outputs and gradients together; the *prologue* and *epilogue* are what the run-time function does before and
after the graphs; an *entry* is one compiled form of a function, for the calls that its *guards* hold for. *Kept* inputs
are those that dedupe leaves; *roots* are the forward outputs that can be differentiated. Where the caller can get hold
of its middle, the autograd graph is cut into *segments*; their backwards are derived when they are first run. Gradients
leave a segment by its *exits*; the *source* of an edge is what stands for it at run time.

Read the rooms in this order: `aotlab.capture`, `aotlab.trace`, `aotlab.partition`, `aotlab.backends`, `aotlab.runtime`;
then `aotlab.derivatives.backwards`, how a backward is run, and `aotlab.guards.call_state`, what an entry assumes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotlab import _torch as internals
from aotlab import config, observe, quirks
from aotlab.backends import stage as compile
from aotlab.backends.base import Backend, EagerBackend
from aotlab.cache import Declined, Entry
from aotlab.capture import call as capture
from aotlab.capture import dedupe, synthetic_bases
from aotlab.capture.call import Call, Target
from aotlab.capture.dedupe import Strategy
from aotlab.capture.signals import EntersInferenceMode, RunEagerly
from aotlab.capture.synthetic_bases import Base
from aotlab.capture.varying import NUMBER, Varying, chosen
from aotlab.derivatives.backwards import Backward
from aotlab.errors import BY_DYNAMO, TAKE_DYNAMO, DataDependentError, RefusedError, UntraceableError, UserLine
from aotlab.guards.call_state import CallState
from aotlab.guards.code import definition, line_like
from aotlab.guards.explain import sentences
from aotlab.guards.reached import codes_in
from aotlab.ir.graphs import check_graph, op_count
from aotlab.ir.size_rules import rules_of
from aotlab.partition import stage as partition
from aotlab.runtime import stage as runtime
from aotlab.trace import stage as trace
from aotlab.trace.surroundings import Printed

#: Says why no entry serves a call of this state.
Explain = Callable[[CallState], tuple[observe.Miss, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to compile.

    ``duplicates`` is the dedupe strategy; ``static_inputs`` says how many of the first inputs keep their addresses
    (None: the lifted parameters and buffers). ``by_dynamo``: Dynamo may capture what is declined. Without a backward,
    ``keep_inference_input_mutations`` lets the graph itself write mutated inputs; `aotlab.compile` asks for it.
    """

    backend: Backend
    partitioner: partition.Partitioner
    duplicates: Strategy = "drop"
    keep_inference_input_mutations: bool = False
    static_inputs: int | None = None
    dynamic: bool | None = False
    by_dynamo: bool = False


def compile_call(
    options: Options,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    explain: Explain,
    number: int,
    function_id: int,
    varying: Varying | None = None,
) -> Entry:
    """Take one call through all stages and return the entry that serves it; raise `Declined` if none can."""
    journal = _Journal(options.backend.name, target, explain, number, function_id)
    surroundings = internals.Surroundings()
    try:
        captured, call = capture.run(target, args, kwargs)
        if not options.backend.takes_fakes and any(map(internals.is_fake, call.values)):
            options = replace(options, backend=EagerBackend())  # its graphs are run op by op
        journal.begin(call.state)
        journal.finish("capture", captured)
        capture.check_modes(call.values)
        with internals.fake_mode_set_aside(), _garbage_pause():  # the caller's, if one is on
            return _through_the_others(options, call, journal, varying)
    except (RefusedError, RunEagerly, trace.TraceFailed) as error:
        rest: dict[str, Any] = {"raised": isinstance(error, trace.TraceFailed), "printed": journal.printed}
        again = None if isinstance(error, RunEagerly) and error.passing else journal.state
        raise Declined(refusal=refusal_of(error, target, journal.state), state=again, **rest) from error
    except KeyboardInterrupt:
        surroundings.restore()
        raise


def _through_the_others(options: Options, call: Call, journal: _Journal, varying: Varying | None) -> Entry:
    deduped = dedupe.run(call, options.duplicates)
    journal.finish("dedupe", deduped)

    based, bases = synthetic_bases.run(call, deduped)
    journal.finish("synthetic_bases", based)

    dims = {} if bases else chosen(call, options.dynamic, varying)
    try:
        return _from_trace_on(options, call, journal, deduped, bases, dims)
    except EntersInferenceMode as signal:
        signal.__traceback__ = None  # whose frames hold the trace
    # what is compiled is a call under that mode, which the entry turns on
    with torch.inference_mode():
        inside = replace(call, state=replace(call.state, settings=internals.global_state()), outside=call.state)
        entry = _from_trace_on(options, inside, journal, deduped, bases, dims)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.inference_mode():
            return entry.run(args, kwargs)

    return replace(entry, run=run, settings=internals.SettingsGuard())


def _from_trace_on(
    options: Options,
    call: Call,
    journal: _Journal,
    deduped: dedupe.DedupeRecord,
    bases: Sequence[Base],
    dims: Mapping[int, Collection[int]],
) -> Entry:
    backend = options.backend
    traced, live = _trace(options, call, deduped, bases, journal.printed, dims)
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
    )
    generated, run = runtime.run(parts)
    journal.finish("runtime", generated)

    state = _guarded(call.outside or call.state, deduped, live)
    journal.end(state)
    return Entry(
        number=journal.number,
        run=run,
        state=state,
        settings=settings,
        records=journal.records,
        reason=next((miss.sentence for miss in journal.misses), None),
        printed=journal.printed,
    )


def _trace(
    options: Options,
    call: Call,
    deduped: dedupe.DedupeRecord,
    bases: Sequence[Base],
    printed: Printed,
    dims: Mapping[int, Collection[int]],
    why: str = "",
) -> tuple[trace.TraceRecord, trace.Trace]:
    """Trace the call; once more where random ops turn out to have to take states of generators.

    Where it cannot be traced with sizes that vary, it is traced for the sizes of this call; ``why`` says so then. A
    call that asks for values which depend on sizes is left to Dynamo, if that may capture it.
    """
    decompositions = options.backend.decompositions()
    static = sum(kind != "input" for _, kind in call.target.lifted_names())

    def run(functional: bool) -> tuple[trace.TraceRecord, trace.Trace]:
        with printed:
            return trace.run(
                call,
                deduped,
                decompositions=decompositions,
                keep_input_mutations=options.keep_inference_input_mutations,
                static_inputs=static if options.static_inputs is None else options.static_inputs,
                bases=bases,
                exact=options.backend.exact,
                functional_draws=functional,
                quirks=quirks.chosen(),
                varying=dims,
            )

    functional = config.functionalize_rng_ops or options.backend.needs_states(None)
    try:
        traced, live = run(functional)
    except Exception as error:
        if (
            not dims
            or isinstance(error, EntersInferenceMode)
            or (options.by_dynamo and config.fallback == "dynamo" and isinstance(error, DataDependentError))
        ):
            raise
        return _trace(options, call, deduped, bases, printed, {}, str(error))
    if not functional and options.backend.needs_states(traced.module):
        traced, live = run(True)
    if not options.backend.takes(traced.module):
        dims = {n: d for n, d in dims.items() if NUMBER not in d}
        return _trace(options, call, deduped, bases, printed, dims, "the backend cannot compile it for all numbers")
    if config.debug_assert:
        check_graph(traced.module, "joint", writes_inputs=True)
    return (replace(traced, static_since=why) if why else traced), live


def _guarded(state: CallState, deduped: dedupe.DedupeRecord, live: trace.Trace) -> CallState:
    """Return what is guarded: the state of the call, with what the trace says of overlap, offsets and sizes."""
    writes = any(info.mutates_data for info in live.metadata.input_info)
    offsets = tuple(deduped.kept[k] for k in live.inputs.offsets_read)
    rules = rules_of(live.recorder.sizes, state.names, dict(zip(deduped.kept, live.inputs.fakes, strict=True)))
    return replace(state, watches_overlap=writes, offsets=offsets, rules=rules)


def _definition(target: Target) -> UserLine | None:
    """Return the line where a function begins, for errors that know no better one."""
    function = getattr(target, "function", None)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return target.line if code is None or target.frontend == "dynamo" else definition(code)


def refusal_of(
    error: RefusedError | RunEagerly | trace.TraceFailed, target: Target, state: CallState | None
) -> RefusedError:
    """Make of what ended a compilation the error that says so, with the line of the user's program."""
    suggestion = "" if isinstance(error, trace.TraceFailed) else error.suggestion
    if target.frontend == "dynamo":
        suggestion = suggestion.replace(f", or {BY_DYNAMO}", "").replace(f", or {TAKE_DYNAMO}", "")
    if isinstance(error, RefusedError):
        if error.line is None:
            line = None
            if error.pattern is not None and state is not None:  # it cannot name the line, but describe it
                line = line_like(codes_in(state.reached), error.pattern)
            error.reword(line=line or _definition(target))
        error.reword(suggestion=suggestion)
        return error
    if isinstance(error, trace.TraceFailed):
        return UntraceableError(str(error))
    has_line = ", at " in str(error) or "registered at " in str(error)
    return RefusedError(str(error), suggestion=suggestion, line=None if has_line else _definition(target))


@contextmanager
def _garbage_pause() -> Iterator[None]:
    """Let Python's cyclic collector come seldom: what a trace makes lives as long as that, and is freed without it.

    To go through all of torch's objects costs a tenth of a second or more. Compilers leave garbage, so it does come.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0] and 100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Journal:
    """Keeps the records of one compilation, times its stages and announces them."""

    def __init__(self, backend_name: str, target: Target, explain: Explain, number: int, function_id: int) -> None:
        self._backend_name = backend_name
        self._target = target
        self._explain = explain
        self._function_id = function_id
        self.number = number
        self.state: CallState | None = None
        self.misses: tuple[observe.Miss, ...] = ()
        self.records: dict[str, Any] = {}
        self.printed = Printed()
        self._started = self._since = time.perf_counter_ns()

    def begin(self, state: CallState) -> None:
        """Note what was called, and announce why it is compiled."""
        self.state = state
        self.misses = self._explain(state)
        observe.emit(
            observe.CompileStarted(
                function=self._target.name,
                function_id=self._function_id,
                entry=self.number,
                frontend=self._target.frontend,
                backend=self._backend_name,
                misses=self.misses,
            )
        )

    def finish(self, stage: str, record: object, nodes: int | None = None) -> None:
        """Keep what a stage handed on, and announce it; the next stage begins."""
        self.records[stage] = record
        if observe.listening():
            took = time.perf_counter_ns() - self._since
            event = observe.StageFinished(entry=self.number, stage=stage, record=record, duration_ns=took, nodes=nodes)
            observe.emit(event)
        self._since = time.perf_counter_ns()

    def end(self, state: CallState) -> None:
        """Announce that the entry is ready, with its guards."""
        if observe.listening():
            duration, guards = time.perf_counter_ns() - self._started, sentences(state)
            lines = {} if state.rules is None else state.rules.lines
            observe.emit(observe.CompileFinished(entry=self.number, duration_ns=duration, guards=guards, lines=lines))
