"""Run each call of one variant with eager and with an engine, compare everything observable, and classify the result.

The graphs run with torch's own kernels (`aotlab.nop`), so values, strides, aliasing, mutated inputs and gradients have
to be equal bit for bit. Eager and the engine start from the same random state. Some ops return uninitialized memory in
eager. If two runs of eager differ from each other, everything except the values is compared.
"""

from __future__ import annotations

import enum
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from aotlab import _torch as torch_internals
from aotlab import config, events
from aotlab.errors import RefusedError, UsageError
from aotlab.maintenance.op_database.engines import BehindDynamo, Direct, DynamoAlone, Engine
from aotlab.maintenance.op_database.variants import CASES, Case, Variant, cases_of
from aotlab.verification.clones import Cloner, random_state_restored, restored
from aotlab.verification.comparisons import Comparison
from aotlab.verification.judgement import Tolerance, judge
from aotlab.verification.observables import Candidate, Observation, eager, observe


class Outcome(enum.Enum):
    """The outcome of a variant, in the order of the table: correct outcomes first, mistakes last."""

    EQUAL = "equal"
    ROUNDED = "equal but for rounding: eager runs another kernel when it writes into existing memory"
    SHAPES = "equal but for values that eager does not determine"
    RAISES = "eager raises, and so does aotlab"
    UNCAPTURED = "Dynamo's own: it captures nothing, so there is nothing to compile"
    EAGERLY = "ran eagerly"
    REFUSED = "refused"
    NOT_COMPARED = "not compared"
    DYNAMOS = "Dynamo's own: different from eager without aotlab as well"
    OUT_OF_TIME = "out of time"
    CRASHED = "crashed"
    DIFFERENT = "different"

    @property
    def is_wrong(self) -> bool:
        """Whether this outcome is a failure of aotlab."""
        return self in (Outcome.OUT_OF_TIME, Outcome.CRASHED, Outcome.DIFFERENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one variant: the worst outcome of its calls.

    ``cases`` is the number of its calls. ``compiled`` is the number of calls that were compiled and agree with eager.
    ``reason`` describes the first call with the worst outcome; it is empty if all calls are equal. ``seconds`` is the
    time that the variant took.
    """

    name: str
    outcome: Outcome
    reason: str
    cases: int
    compiled: int
    seconds: float


#: Operators that return uninitialized memory, so that eager does not determine the values.
_UNWRITTEN = frozenset(
    (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    )
)

#: The reason why a variant has no calls, by the form of the variant.
_NO_CASES = {"out": "its results are not dense tensors, so there is no `out` to be made for them"}

#: The kinds of observables that depend on the values of tensors.
_VALUES = frozenset(("value", "gradient", "random state"))

#: How often each function is called. The second call uses the entry that the first call made.
_CALLS = 2


def judge_variant(
    variant: Variant, *, limit: int | None = CASES, seconds: float | None = None, make: Callable[[], Engine] = Direct
) -> Result:
    """Run one variant and return its outcome.

    Parameters
    ----------
    limit
        The largest number of samples; None for all of them.
    seconds
        After this many seconds, no further call starts.
    make
        Makes the engine for each call. If the engine is `BehindDynamo`, a call that differs from eager is repeated with
        `DynamoAlone`. If the same observables are wrong there, the outcome of the call is `Outcome.DYNAMOS`.
    """
    started = time.perf_counter()
    outcomes: list[tuple[Outcome, str]] = []
    cases = cases_of(variant, limit=limit)
    while True:
        try:
            case = next(cases)
        except StopIteration:
            break
        except Exception as error:  # noqa: BLE001  # torch's code makes the samples, and may raise
            outcomes.append((Outcome.NOT_COMPARED, f"torch cannot make its samples: {_first_line(error)}"))
            break
        outcome, reason = _judge_case(case, variant.entry, make())
        outcomes.append((outcome, f"{case.label}: {reason}" if reason else ""))
        if seconds is not None and time.perf_counter() - started > seconds:
            break
    return result_of(variant, outcomes, started, nothing=_NO_CASES.get(variant.form, "torch has no samples for it"))


def result_of(variant: Variant, outcomes: list[tuple[Outcome, str]], started: float, *, nothing: str) -> Result:
    """Combine the outcomes of a variant's calls, each with its reason, to the result of the variant.

    ``started`` is the time at which the variant started. ``nothing`` is the reason if there were no calls.
    """
    outcome, reason = _worst(outcomes)
    if not outcomes:
        reason = nothing
    return Result(
        name=variant.name,
        outcome=outcome,
        reason=reason,
        cases=len(outcomes),
        compiled=sum(each in (Outcome.EQUAL, Outcome.ROUNDED, Outcome.SHAPES) for each, _ in outcomes),
        seconds=round(time.perf_counter() - started, 3),
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _worst(outcomes: list[tuple[Outcome, str]]) -> tuple[Outcome, str]:
    if not outcomes:
        return Outcome.NOT_COMPARED, ""
    order = list(Outcome)
    # Ignore the samples for which eager raises, unless eager raises for all samples.
    telling = [each for each in outcomes if each[0] is not Outcome.RAISES] or outcomes
    worst = max(telling, key=lambda each: order.index(each[0]))
    if worst[0] is Outcome.EQUAL:
        return worst[0], ""
    same = sum(each is worst[0] for each, _ in outcomes)
    count = f" ({same} of {len(outcomes)} calls)" if same < len(outcomes) else ""
    return worst[0], worst[1] + count


def _judge_case(case: Case, entry: str, engine: Engine) -> tuple[Outcome, str]:
    values = entry not in _UNWRITTEN
    # The debug assertions check that the graphs return the strides and aliases that the trace recorded. They are off
    # for the ``unsafe_`` ops, because torch's schemas do not say that the results of these ops alias the input.
    checks = config.patch(debug_assert=not entry.startswith("unsafe_"))
    with warnings.catch_warnings(), torch_internals.samples_do_not_seed(), checks:
        warnings.simplefilter("ignore")  # `ran_eagerly` below tells whether a call ran eagerly
        if isinstance(case.function, nn.Module) and any(is_lazy(held) for held in case.function.parameters()):
            return _judge_lazy(case, engine) if isinstance(engine, Direct) else (Outcome.NOT_COMPARED, "a lazy module")
        try:
            expected = _observe(case, eager)
            actual = _observe_by(case, engine)
        except UsageError as error:
            return Outcome.NOT_COMPARED, str(error)
        rows = _compare(expected, actual)
        wrong = [row for row in rows if not row.equal]
        unstable = False
        rounded = ""
        if wrong and all(row.kind in _VALUES for row in wrong):
            unstable = not values or not _agrees_with_itself(case, expected)
            if unstable:
                wrong = []
            elif all(row.equal for row in _compare(expected, actual, tolerance="rounded")):
                wrong, rounded = [], wrong[0].sentence
        refused = next((row for row in wrong if row.kind == "refused"), None)
        written = next((row for row in wrong if row.kind == "mutated before refusal"), None)
        if written is not None or (wrong and refused is None):
            mistake = written or wrong[0]
            if isinstance(engine, BehindDynamo) and _is_dynamos(case, expected, wrong):
                return Outcome.DYNAMOS, mistake.sentence
            return Outcome.DIFFERENT, mistake.sentence
        if refused is not None:
            return Outcome.REFUSED, _without_line(refused.actual)
        failure = expected[0].failure
        if failure is not None:
            return Outcome.RAISES, str(failure)
        if isinstance(engine, BehindDynamo) and not engine.captured():
            return Outcome.UNCAPTURED, _why_nothing(case, engine)
        if engine.ran_eagerly():
            return Outcome.EAGERLY, _without_line(_why_eagerly(case, engine))
    if not values or unstable:
        return Outcome.SHAPES, "eager returns memory that nobody wrote" if not values else "eager is not deterministic"
    if rounded:
        return Outcome.ROUNDED, rounded
    return Outcome.EQUAL, ""


def _is_dynamos(case: Case, expected: list[Observation], wrong: list[Comparison]) -> bool:
    """Tell whether each observable that is wrong is also wrong if Dynamo alone runs the call.

    ``expected`` are the observations of eager, and ``wrong`` are the differences of aotlab behind Dynamo.
    """
    alone = _compare(expected, _observe_by(case, DynamoAlone()))
    of_dynamo = {(row.call, row.kind, row.subject) for row in alone if not row.equal}
    return of_dynamo >= {(row.call, row.kind, row.subject) for row in wrong}


def _without_line(text: str) -> str:
    # Remove the user line. It would be the same line of this package for every call.
    return re.sub(r", at \S+/aotlab/(?:maintenance|verification)/\S+\.py:\d+( \(.*?\)(?=:|;|$))?", "", text)


def _judge_lazy(case: Case, engine: Direct) -> tuple[Outcome, str]:
    """Check that aotlab runs the first call of a lazy module, which creates the parameters, eagerly."""
    with _failures() as heard:
        engine.candidate(case.function)(*case.args, **case.kwargs)
    if engine.ran_eagerly() and heard:
        return Outcome.EAGERLY, str(heard[0])
    return Outcome.DIFFERENT, "a lazy module was compiled before it had its parameters"


def _observe(case: Case, make: Candidate) -> list[Observation]:
    backward = "all" if case.differentiated else None
    cloner = Cloner(case.function)
    with random_state_restored(), restored(cloner.captured):
        function = make(cloner.function)
        return [
            observe(function, cloner.call(case.args, case.kwargs), backward=backward)  # type: ignore[arg-type]  # mypy widens the literal
            for _ in range(_CALLS)
        ]


def _observe_by(case: Case, engine: Engine) -> list[Observation]:
    try:
        return _observe(case, engine.candidate)
    finally:
        engine.close()


def _compare(
    expected: list[Observation], actual: list[Observation], *, tolerance: Tolerance = "exact"
) -> list[Comparison]:
    numbered = enumerate(zip(expected, actual, strict=True), start=1)
    pages = [
        judge(left, right, call=number, messages=True, exact_gradients=False, tolerance=tolerance)
        for number, (left, right) in numbered
    ]
    return list(itertools.chain.from_iterable(pages))


def _agrees_with_itself(case: Case, expected: list[Observation]) -> bool:
    return all(row.equal for row in _compare(expected, _observe(case, eager)))


def _why_eagerly(case: Case, engine: Engine) -> str:
    """Run the call again, listen to aotlab's events, and return the reason why the call is not compiled."""
    with _failures() as heard:
        _observe_by(case, engine)
    if not heard:
        return "aotlab gave no reason"
    return str(heard[0]) if type(heard[0]) is RefusedError else f"{type(heard[0]).__name__}: {heard[0]}"


def _why_nothing(case: Case, engine: Engine) -> str:
    """Run the call again and return the first reason for a graph break that Dynamo gives."""
    before = torch_internals.dynamo_reasons()
    _observe_by(case, engine)
    new = [text for text, count in torch_internals.dynamo_reasons().items() if count > before.get(text, 0)]
    return " ".join(new[0].split("Hint:")[0].split()) if new else "Dynamo gave no reason"


@contextmanager
def _failures() -> Iterator[list[BaseException]]:
    heard: list[BaseException] = []

    def note(event: object) -> None:
        if isinstance(event, events.CompileFailed):
            heard.append(event.error)

    with events.listen(note):
        yield heard
