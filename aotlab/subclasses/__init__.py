"""Tensor subclasses that wrap tensors: calls are unwrapped before the engine and wrapped again after it.

    x = TwoTensor(a, b)            # has __tensor_flatten__ and __tensor_unflatten__
    aotlab.compile(f)(x, y)        # the engine compiles a function of x.a, x.b and y

If the engine refuses a call because of a subclass, the call is captured again with all wrappers unwrapped. A wrapper
that the function creates takes part in the trace through its own ``__torch_dispatch__``, with traced tensors as parts.

The files of this room:

    parts, edges     unwrap and wrap: values (parts), and the autograd nodes for gradients (edges)
    target, results  the function that the engine compiles, and how its traced result is unwrapped
    rewrap           returned wrappers from which other results are computed
    mode             the modes that are active while wrappers are traced
    sparse           sparse gradients, which are wrappers in a trace
    symbols          fake tensors of the caller whose sizes are symbols
    around           writes the run-time code before and after the compiled function
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from aotlab import events, pipeline
from aotlab.cache import CompiledFunction, Declined, Entry
from aotlab.capture.call import Target
from aotlab.capture.dynamic_sizes import DynamicSizes
from aotlab.capture.signals import RetraceNeeded, RunEagerly
from aotlab.errors import RefusedError, SubclassError
from aotlab.events import Miss
from aotlab.guards.call_state import CallState
from aotlab.pipeline import Explain, Options
from aotlab.subclasses import symbols
from aotlab.subclasses.around import write_around
from aotlab.subclasses.edges import TraceFindings
from aotlab.subclasses.target import UnwrappedTarget

__all__ = ["Options", "compile_call", "function_for"]


#: Upper limit on the traces of one call after its first trace. The first trace may find inputs to copy and calls whose
#: results are wrapped again. The second may fail because the gradient of a plain input is a wrapper. Then the third
#: finds such gradients.
_MOST_RETRACES = 3


def function_for(target: Target, options: Options, **settings: Any) -> CompiledFunction:
    """Make the function that compiles ``target`` when it is called; ``settings`` are passed to `CompiledFunction`."""
    return CompiledFunction(target, partial(compile_call, options), backend_name=options.backend.name, **settings)


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
    """Compile a call as `aotlab.pipeline.compile_call` does; if that fails on a wrapper, unwrap all wrappers."""
    rest = explain, number, function_id, varying
    try:
        return symbols.compile_call(options, target, args, kwargs, rest)
    # The cause of `Declined` must not become a local variable, because its traceback refers to the frames of the trace,
    # and so keeps the arguments alive.
    except Declined as declined:
        if not isinstance(declined.__cause__, SubclassError):
            raise
        declined.__cause__.__traceback__ = declined.__traceback__ = None
    findings, target.lifts_numbers, target.repeats_changes = TraceFindings(), False, False
    for _ in range(1 + _MOST_RETRACES):
        findings.has_news, checks_plain_inputs = False, findings.checks_plain_inputs
        try:
            return _compile_unwrapped(options, target, args, kwargs, rest, findings)
        except RetraceNeeded as signal:
            signal.__traceback__ = None
        except Declined as declined:
            is_about_subclass = isinstance(declined.__cause__, SubclassError)
            if is_about_subclass and not checks_plain_inputs:
                findings.checks_plain_inputs = True  # trace again: perhaps the gradient of a plain input is a wrapper
            elif not findings.has_news:
                if is_about_subclass and findings.rewrapped_calls:
                    break
                raise
            declined.__cause__ = declined.__traceback__ = None
    if findings.rewrapped_calls:
        raise _declined(target, "subclass-beside-what-it-computes", name="a result")
    raise _declined(target, "subclass-traced-too-often")


def _declined(target: Target, case: str, **facts: Any) -> Declined:
    return Declined(pipeline.refusal_of(RunEagerly(case, **facts), target, None))


def _compile_unwrapped(
    options: Options,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rest: tuple[Explain, int, int, DynamicSizes | None],
    findings: TraceFindings,
) -> Entry:
    try:
        unwrapped = UnwrappedTarget(target, args, kwargs, findings)
        arguments = unwrapped.unwrap(args, kwargs)
    except (RefusedError, RunEagerly) as error:
        raise Declined(pipeline.refusal_of(error, target, None)) from error
    explain, number, function_id, varying = rest

    def explain_apart(state: CallState) -> tuple[Miss, ...]:
        return explain(replace(state, structure=unwrapped.structure))

    options = replace(options, after_node=unwrapped.after_node)
    entry = pipeline.compile_call(options, unwrapped, *arguments, explain_apart, number, function_id, varying)
    assert unwrapped.results is not None
    results = [*unwrapped.results.outputs, *unwrapped.results.extra_bases]
    if any(each.is_rewrapped and n not in unwrapped.rewrapped_outputs for n, each in enumerate(results)):
        raise _declined(target, "subclass-beside-what-it-computes", name="a result")
    began = time.perf_counter_ns()
    record, run = write_around(unwrapped, entry.run, target.name)
    took = time.perf_counter_ns() - began
    events.emit(events.StageFinished(entry=number, stage="subclasses", record=record, duration_ns=took, nodes=None))
    state = replace(entry.state, structure=unwrapped.structure)
    return replace(entry, run=run, state=state, records=replace(entry.records, subclasses=record))
