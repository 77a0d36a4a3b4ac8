"""Run eager and an engine side by side, each on its own arguments, and compare everything observable.

`verify` is the public function and compares an engine. `compare` compares any function that turns the program into a
callable; the test suite uses it. `aotlab.verification.judgement.judge` compares two observations that exist already.

Tolerance. On backends that run torch's own kernels, values must be equal bit for bit. NaN equals NaN, and -0.0 is not
0.0. The sign of a zero in a gradient is an exception: autograd sometimes adds a zero to a sum, which turns -0.0 into
0.0, so this sign is not compared. On Inductor, a value must pass ``torch.testing.assert_close`` with its default
tolerances, or have a small error against a float64 run (see `aotlab.verification.float64`). Each comparison names the
rule that decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from aotlab import _torch as torch_internals
from aotlab.errors import UsageError
from aotlab.verification.clones import Cloner, random_state_restored, restored
from aotlab.verification.comparisons import Comparison, Verification
from aotlab.verification.float64 import Float64Appeal
from aotlab.verification.judgement import Tolerance, judge
from aotlab.verification.observables import Backward, Candidate, Observation, eager, observe

Engine = Literal["aotlab", "upstream"]


def verify(
    fn: Callable[..., Any],
    *args: Any,
    engine: Engine = "aotlab",
    backend: Any = "inductor",
    backward: Backward = "all",
    calls: int = 2,
    **kwargs: Any,
) -> Verification:
    """Compare an engine with eager on everything that a caller of ``fn(*args, **kwargs)`` can observe.

    Nothing that is passed in is changed. Every call gets copies that alias each other as the originals do. A module is
    copied. Tensors that a plain function captures are restored afterwards, and so is the random state. Other state that
    it changes (a counter in a captured dictionary, for example) is not restored, so the calls differ. Pass this state
    as an argument.

    Parameters
    ----------
    fn
        A function or an ``nn.Module``.
    engine
        ``"aotlab"``, or ``"upstream"`` for stock ``torch.compile``.
    backend
        ``"eager"`` runs the traced graph with torch's own kernels and is compared bit for bit. ``"inductor"`` and any
        other backend are compared within the tolerance of this module. During the comparison, code that Inductor
        compiles draws the random numbers that eager draws, even if ``torch._inductor.config.fallback_random`` is not
        set.
    backward
        Which outputs are differentiated: ``"all"`` at once, only the ``"first"``, ``"each"`` separately, or None.
    calls
        How often the call is repeated. The second call tests the cached entry.

    Returns
    -------
    Verification
        True if everything is equal. ``first`` describes the first difference. A refusal by the engine is a difference.

    Raises
    ------
    UsageError
        If the arguments cannot be copied faithfully.

    Examples
    --------
    >>> import torch
    >>> verify(lambda x: x.mul_(2), torch.ones(3), backend="eager").ok
    True
    """
    make = _engine(engine, backend)
    compiled: list[Any] = []

    def candidate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(make(function))
        return compiled[-1]  # type: ignore[no-any-return]  # Any, because its counters are read below

    yardstick = eager if engine == "upstream" else partial(torch.compile, dynamic=False)
    with nullcontext() if backend == "eager" else torch_internals.eager_draws_by_inductor():
        verification = compare(
            fn,
            args,
            kwargs,
            candidate=candidate,
            backward=backward,
            calls=calls,
            tolerance="exact" if backend == "eager" else "close",
            yardstick=yardstick,
            subject=f"{_name(fn)} ({engine}, {_name(backend)})",
        )
    # A compiled module stores its compiled function in `compiled`. The result of stock torch.compile has no `calls`, so
    # its eager calls are not counted.
    log = getattr(getattr(compiled[0], "compiled", compiled[0]), "calls", None)
    return replace(verification, ran_eagerly=log.eager) if log is not None else verification


def compare(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    candidate: Candidate,
    reference: Candidate = eager,
    backward: Backward = "all",
    calls: int = 2,
    tolerance: Tolerance = "exact",
    yardstick: Candidate | None = None,
    messages: bool = False,
    subject: str | None = None,
) -> Verification:
    """Compare ``candidate(fn)`` with ``reference(fn)`` on everything observable.

    Parameters
    ----------
    candidate, reference
        Functions that turn ``fn`` into the callable that is observed, as a compiler does. Each is called once. If
        ``fn`` is a module, each receives its own copy.
    backward, calls
        As in `verify`.
    tolerance
        ``"exact"``, ``"rounded"`` or ``"close"``, as in `aotlab.verification.judgement.judge`.
    yardstick
        Another function that turns ``fn`` into a callable. It is used only with ``tolerance="close"``. The error of the
        candidate against a float64 run may be twice the error of the callable that ``yardstick`` makes.
    messages
        Compare the first lines of the exceptions' messages too, not only their types.
    subject
        The name of the function in the result.
    """
    keywords = kwargs or {}

    def run(make: Candidate, dtype: torch.dtype | None = None) -> list[Observation]:
        cloner = Cloner(fn, dtype=dtype)
        with random_state_restored(), restored(cloner.captured):
            function = make(cloner.function)
            return [observe(function, cloner.call(args, keywords), backward=backward) for _ in range(calls)]

    expected = run(reference)
    actual = run(candidate)
    higher = Float64Appeal(run, reference, yardstick) if yardstick is not None and tolerance == "close" else None
    rows: list[Comparison] = []
    for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
        appeal = higher.appeal(index, left) if higher is not None else None
        rows += judge(left, right, call=index + 1, tolerance=tolerance, appeal=appeal, messages=messages)
    return Verification(
        subject=subject or _name(fn),
        comparisons=tuple(rows),
        refused=next((row.sentence for row in rows if row.kind == "refused"), None),
    )


def _name(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def _engine(engine: Engine, backend: Any) -> Candidate:
    """Return the function that compiles with ``engine`` for ``backend``."""
    if engine == "aotlab":
        from aotlab.frontends import api

        return lambda function: api.compile(function, backend=backend)
    if engine == "upstream":
        upstream = "aot_eager" if backend == "eager" else backend
        return lambda function: torch.compile(function, backend=upstream)
    raise UsageError(f"engine {engine!r} is neither 'aotlab' nor 'upstream'")
