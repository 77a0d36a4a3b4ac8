"""Name the failures, so that programs that fail for the same reason have the same name, and shrink them.

A failure has two names. The coarse name describes the difference (``"wrong: gradient of an input"``, ``"raises:
RuntimeError …"``). Shrinking keeps the coarse name, so that the smaller program does not fail for another reason. The
fine name (the signature) adds the ops of the smallest program. Only one failure of each fine name is saved.
"""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass, replace
from typing import Literal

from aotlab import config, events
from aotlab.maintenance.fuzz import drawing
from aotlab.maintenance.fuzz.engines import DynamoAlone, Watch, watch
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.verification.comparisons import Difference
from aotlab.verification.observables import INTERNAL_ASSERTION
from aotlab.verification.programs import Outcome, Program, run_program

#: If a failure has several differences, the difference whose kind comes first in this list gives the failure its name.
_WORST = (
    "mutated before refusal",
    "exception",
    "value",
    "gradient",
    "random state",
    "python value",
    "storage",
    "identity",
)


class TimeIsUp(BaseException):
    """Raised to end the search of Hypothesis when the time for shrinking is over.

    This is a ``BaseException``, because Hypothesis would treat an ``Exception`` as a failure of the test.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The smallest program found with the same coarse name, its fine name, and its worst difference as a sentence."""

    program: Program
    signature: str
    sentence: str


def run(plan: Plan, program: Program) -> tuple[Outcome, Watch]:
    """Run a program on the engine of the plan and compare it with eager; suppress all warnings.

    Differences that also occur with Dynamo alone are removed from the outcome and stored in ``dynamos`` of the watch.
    If eager itself fails an internal assertion, all differences are removed and stored in ``asserts`` of the watch. The
    assertion is a bug in torch, so the right result is unknown.
    """
    watched = watch(plan)
    with config.patch(quirks=plan.quirks):
        outcome = _run(watched, program)
    if any(INTERNAL_ASSERTION in difference.expected for difference in outcome.differences):
        watched.asserts = outcome.differences
        return replace(outcome, differences=(), status="ok"), watched
    if plan.dynamo and outcome.differences:
        by_itself = {_told(difference) for difference in _of_dynamo_alone(plan, program)}
        watched.dynamos = tuple(each for each in outcome.differences if _told(each) in by_itself)
        differences = tuple(each for each in outcome.differences if _told(each) not in by_itself)
        if not differences:
            return replace(outcome, differences=(), status="refused" if outcome.refusals else "ok"), watched
        outcome = replace(outcome, differences=differences)
    return outcome, watched


def _run(watched: Watch, program: Program) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run_program(program, watched.candidate)
        finally:
            watched.close()


def _of_dynamo_alone(plan: Plan, program: Program) -> tuple[Difference, ...]:
    try:
        return _run(DynamoAlone(sizes=plan.sizes), program).differences
    except Exception:  # noqa: BLE001  # the comparison failed, so no difference is attributed to Dynamo
        return ()


def _told(difference: Difference) -> tuple[str, ...]:
    """Return a key of a difference. The same difference has the same key in every run.

    Messages of exceptions may contain names and addresses of objects, so these are removed.
    """
    if difference.kind == "exception":
        return difference.kind, difference.subject, _plain(difference.expected), _plain(difference.actual)
    return difference.kind, difference.subject, difference.sentence


def why_eager(plan: Plan, program: Program) -> str:
    """Run a program again, listen to aotlab's events, and return why its calls ran eagerly.

    Line numbers and names of the program are removed, so that programs with the same reason are counted together.
    """
    reasons: set[str] = set()

    def hear(event: events.Event) -> None:
        if isinstance(event, events.CompileFailed) and event.outcome == "ran eagerly":
            text = str(event.error).splitlines()[0] if str(event.error) else type(event.error).__name__
            text = text.removeprefix("tracing the function raised an error that eager does not raise: ")
            reasons.add(_plain(re.split(r",(?: at)? <", text)[0]))

    with events.listen(hear):
        run(plan, program)
    return "; ".join(sorted(reasons)) or "unknown"


def kind(differences: tuple[Difference, ...]) -> Literal["wrong", "error", "raises"]:
    """Classify a failure by its exceptions.

    ``"raises"``: the engine raises and eager does not. ``"error"``: eager raises, and the engine raises another error
    or none. ``"wrong"``: a result differs.
    """
    kinds = {difference.kind for difference in differences}
    if "exception" in kinds:
        expected = next(difference.expected for difference in differences if difference.kind == "exception")
        return "raises" if expected == "none" else "error"
    return "wrong"


def coarse(differences: tuple[Difference, ...]) -> str:
    """Return the coarse name of a failure: its worst difference in words, without numbers and names of the program."""
    worst = _worst(differences)
    if worst.kind == "exception":
        theirs = _plain(worst.expected) if worst.expected != "none" else "nothing"
        return f"{kind(differences)}: {_plain(worst.actual)} in the {worst.subject}, eager {theirs}"
    subject = "an output" if worst.subject.startswith("out") else "an input"
    return f"{kind(differences)}: {worst.kind} of {subject}"


def _worst(differences: tuple[Difference, ...]) -> Difference:
    return min(differences, key=lambda each: _WORST.index(each.kind) if each.kind in _WORST else len(_WORST))


def ops(source: str) -> tuple[str, ...]:
    """Search the text of a program's function and list the names of the ops that it calls, each name once."""
    function = source[source.index("def program(") :].partition("\n\n\ndef inputs_0")[0]
    names = set(re.findall(r"\.(\w+)\(", function)) | set(re.findall(r"(\w+)\.apply", function)) - {"apply"}
    names |= {"setitem" for _ in re.finditer(r"\] [-+*/]?= ", function)}
    names |= {sign for sign in ("+=", "*=", "@") if f" {sign} " in function}
    return tuple(sorted(names))


def shrink(plan: Plan, drawn: drawing.Drawn, name: str, first: Small, seconds: float) -> Small:
    """Let Hypothesis search for the smallest program that fails with the coarse ``name``, for at most ``seconds``.

    ``first`` is the record of the program as it was drawn. It is returned if no smaller program fails.
    """
    deadline = time.monotonic() + seconds
    best = first
    failing: dict[str, bool] = {}

    def fails(program: Program) -> bool:
        nonlocal best
        if time.monotonic() > deadline:
            raise TimeIsUp
        # Many decisions do not change the program, so Hypothesis tries the same program many times.
        if program.source not in failing:
            outcome, _ = run(plan, program)
            failing[program.source] = outcome.status == "failed" and coarse(outcome.differences) == name
            if failing[program.source] and _size(program) < _size(best.program):
                best = small(program, outcome.differences)
        return failing[program.source]

    try:
        drawing.shrink(plan, drawn.decisions, fails)
    except TimeIsUp:
        pass
    except Exception:  # noqa: BLE001  # Hypothesis raises an error if a failure is not reproducible
        pass
    return best


def small(program: Program, differences: tuple[Difference, ...]) -> Small:
    """Return the record of a failing program, with its fine name and the sentence of its worst difference."""
    return Small(
        program=program,
        signature=f"{coarse(differences)} [{' '.join(ops(program.source))}]",
        sentence=_worst(differences).sentence,
    )


def _size(program: Program) -> tuple[int, int, str]:
    source = program.source
    return source.count("\n"), len(source), source


def _plain(text: str) -> str:
    return re.sub(r"\d+", "0", re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'…'", text))[:120]
