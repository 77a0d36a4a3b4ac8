"""Tensor subclasses that wrap tensors: taken apart before the engine, put together behind it.

    x = TwoTensor(a, b)            # has __tensor_flatten__ and __tensor_unflatten__
    aotlab.compile(f)(x, y)        # the engine compiles a function of x.a, x.b and y

A call that the engine refuses because of a subclass is captured once more with all wrappers taken apart. Wrappers made
inside the function take part in the trace by their own ``__torch_dispatch__``, on traced parts.

    parts, edges     how wrappers are taken apart and put together, for values and for gradients
    target, results  the function that the engine compiles, and what its trace found
    around           what is written around the compiled function
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from aotlab import observe, pipeline
from aotlab.cache import CompiledFunction, Declined, Entry
from aotlab.capture.call import Target
from aotlab.capture.signals import RunEagerly
from aotlab.capture.varying import Varying
from aotlab.errors import RefusedError, SubclassError
from aotlab.guards.call_state import CallState
from aotlab.observe import Miss
from aotlab.pipeline import Explain, Options
from aotlab.subclasses import symbols
from aotlab.subclasses.around import write_around
from aotlab.subclasses.edges import Again, Ways
from aotlab.subclasses.target import Unwrapped

__all__ = ["Options", "compile_call", "function_for"]


#: Each trace but the last finds an input of which more is to be known.
_MOST_TRACES = 64


def function_for(target: Target, options: Options, **settings: Any) -> CompiledFunction:
    """Make the function that compiles ``target`` as it is called; ``settings`` are those of `CompiledFunction`."""
    return CompiledFunction(target, partial(compile_call, options), backend_name=options.backend.name, **settings)


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
    """Compile a call as `aotlab.pipeline.compile_call` does; where that meets a wrapper, with all of them apart."""
    rest = explain, number, function_id, varying
    ways: Ways | None = None
    while True:
        try:
            if ways is None:
                return symbols.compile_call(options, target, args, kwargs, rest)
            return _compile_apart(options, target, args, kwargs, rest, ways)
        except Declined as declined:  # no local holds its cause, whose frames hold the trace and the arguments
            if not isinstance(declined.__cause__, Again | SubclassError):
                raise
            is_odd = isinstance(declined.__cause__, SubclassError)
            if ways is None:
                ways = Ways()
            elif ways.traces == _MOST_TRACES or (ways.watches and is_odd):
                if ways.passing:
                    raise _both(target) from declined
                raise
            elif is_odd:
                ways.watches = True  # a plain input may have a wrapper for a gradient
            ways.traces += 1
            declined.__cause__.__traceback__ = declined.__traceback__ = None


def _both(target: Target) -> Declined:
    what = "a tensor subclass is returned, and so is what is computed both of it and of what it is computed of"
    return Declined(pipeline.refusal_of(RunEagerly(what, suggestion="return it detached"), target, None))


def _compile_apart(
    options: Options,
    target: Target,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rest: tuple[Explain, int, int, Varying | None],
    ways: Ways,
) -> Entry:
    try:
        apart = Unwrapped(target, args, kwargs, ways)
        given = apart.taken_apart(args, kwargs)
    except (RefusedError, RunEagerly) as error:
        raise Declined(pipeline.refusal_of(error, target, None)) from error
    explain, number, function_id, varying = rest

    def explain_apart(state: CallState) -> tuple[Miss, ...]:
        return explain(replace(state, structure=apart.structure))

    entry = pipeline.compile_call(options, apart, *given, explain_apart, number, function_id, varying)
    assert apart.results is not None
    made = [*apart.results.outputs, *apart.results.besides]
    if any(each.passes and n not in apart.passing for n, each in enumerate(made)):
        raise _both(target)
    began = time.perf_counter_ns()
    record, run = write_around(apart, entry.run, target.name)
    took = time.perf_counter_ns() - began
    observe.emit(observe.StageFinished(entry=number, stage="subclasses", record=record, duration_ns=took, nodes=None))
    state = replace(entry.state, structure=apart.structure)
    return replace(entry, run=run, state=state, records={**entry.records, "subclasses": record})
