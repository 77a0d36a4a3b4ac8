"""Compile calls with fake tensors of the caller whose sizes are symbols.

The function is traced for all sizes. The graph then runs op by op on the caller's fake tensors.

The checks of a compiled entry add no guards to the caller's shape environment. The program's own questions about sizes,
and its ops, add guards there as in eager.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from aotlab import _torch as internals
from aotlab import pipeline
from aotlab.backends.base import Backend, Boxed, CompileRequest, EagerBackend, boxed
from aotlab.cache import Declined, Entry
from aotlab.capture import nesting
from aotlab.capture.call import Target
from aotlab.capture.signals import RunEagerly
from aotlab.errors import SubclassError
from aotlab.pipeline import Options
from aotlab.runtime.draft import MISS

#: ``_running.quiet`` is an `ExitStack`. While it is open (during the checks of an entry), no guards are added to the
#: caller's shape environment.
_running = threading.local()


def compile_call(options: Options, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], rest: Any) -> Entry:
    """Compile a call as `aotlab.pipeline.compile_call` does, even if fake tensors of the caller have symbolic sizes.

    ``rest`` are the remaining arguments of `aotlab.pipeline.compile_call`.
    """
    symbols: dict[int, set[int]] = {}
    try:
        entry = pipeline.compile_call(options, target, args, kwargs, *rest)
        if all(leaf.type is not internals.FakeTensor for leaf in entry.state.leaves):
            return entry
    except Declined as declined:
        if isinstance(declined.__cause__, SubclassError):
            values, symbols = _symbols_of(target.lifter()(), args, kwargs)
        if not symbols:
            raise
    if symbols:
        entry = _compile_for_all(options, target, (args, kwargs, *rest), values, symbols)
    lifter, run = target.lifter(), entry.run

    def guarded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values, symbols_now = _symbols_of(lifter(), args, kwargs)
        if symbols_now and symbols_now != symbols:
            return MISS
        with ExitStack() as _running.quiet:
            for n in symbols_now:
                _running.quiet.enter_context(values[n].fake_mode.shape_env.suppress_guards())
            return run(args, kwargs)

    return replace(entry, run=guarded)


def _symbols_of(lifted: Sequence[Any], args: Any, kwargs: Any) -> tuple[list[Any], dict[int, set[int]]]:
    """Return the flat values of a call, and the symbolic dimensions of the fakes among them, by position."""
    values = [*lifted, *nesting.flatten((args, kwargs))[0]]
    fakes = {n: value for n, value in enumerate(values) if isinstance(value, internals.FakeTensor)}
    return values, {n: internals.symbolic_dims(fake) for n, fake in fakes.items() if internals.is_symbolic(fake)}


def _compile_for_all(
    options: Options, target: Target, call: tuple[Any, ...], values: list[Any], symbols: dict[int, set[int]]
) -> Entry:
    """Compile a call for all values of its symbolic sizes; raise `Declined` if that is impossible.

    ``call`` are the arguments of `aotlab.pipeline.compile_call` after the target. ``values`` are the flat values of the
    call. ``symbols`` maps positions among them to the symbolic dimensions of the fake tensors there.
    """
    call = (*call[:-1], {**(call[-1] or {}), **symbols})
    backend = _asking(options.backend if options.backend.takes_fakes else EagerBackend())
    options, why = replace(options, dynamic=None, backend=backend), _why_not(values, [values[n] for n in symbols])
    admitted = internals.ADMITTED.set(True)
    try:
        if not why:
            entry = pipeline.compile_call(options, target, *call)
            traced = entry.records.trace
            with internals.fake_mode_set_aside():
                why = traced.static_since or internals.error_for_symbols(traced.module)
    finally:
        internals.ADMITTED.reset(admitted)
    if why:
        error = RunEagerly("fake-tensors-with-symbols", why=why)
        raise Declined(pipeline.refusal_of(error, target, None)) from error
    return entry


def _why_not(values: list[Any], symbolic: list[Any]) -> str:
    """Return the reason why the fake tensors among some values cannot be traced for all sizes, or an empty text."""
    hints: list[Any] = [each.node.hint for fake in symbolic for each in fake.shape if internals.is_symbolic(each)]
    storages = {id(each): internals.storage_key(each) for each in values if isinstance(each, internals.FakeTensor)}
    if len({*storages.values()}) < len(storages):
        return "arguments share memory"
    if any(hint is None or hint < 2 for hint in hints):
        return "a size is 0 or 1, or is unknown"
    if any(not internals.symbols_among(each.stride()) <= internals.symbols_among(each.shape) for each in symbolic):
        return "a stride depends on more than the sizes"
    return "a size is marked as static" if any(internals.marked_dims(each)[1] for each in symbolic) else ""


def _asking(backend: Backend) -> Backend:
    """Return a copy of a backend whose compiled forwards let the caller's shape environment add guards again.

    The checks of an entry run before its forward, and must not add guards. The forward first evaluates the comparisons
    of sizes that the program itself makes, so that the shape environment adds their guards as in eager.
    """

    def compile(request: CompileRequest) -> Boxed:
        compiled = boxed(backend.compile(request))
        if request.kind == "backward":
            return compiled
        ask = internals.guards_of_program(request.module)

        def call(inputs: list[Any]) -> Any:
            _running.quiet.close()
            ask(inputs)
            return compiled(inputs)

        call._boxed_call = True  # type: ignore[attr-defined]  # upstream recognizes a boxed callable by this attribute
        return call

    asking = copy.copy(backend)
    asking.compile = compile  # type: ignore[method-assign]  # whatever its class
    return asking
