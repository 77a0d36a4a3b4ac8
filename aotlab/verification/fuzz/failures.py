"""Failures: what they are called, so that one mistake is one failure, and how they become small.

A failure has two names. The coarse one says what differs (``"wrong: gradient of leaf"``,
``"raises: RuntimeError …"``); shrinking keeps it, so that one mistake does not slip into another. The fine one adds
the ops of the smallest program, and what bears the same fine name is saved once.
"""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass, replace
from typing import Literal

from aotlab import config, observe
from aotlab.verification.differential import Difference
from aotlab.verification.fuzz import drawing
from aotlab.verification.fuzz.engines import DynamoAlone, Watch, watch
from aotlab.verification.fuzz.plan import Plan
from aotlab.verification.observables import INTERNAL_ASSERTION
from aotlab.verification.programs import Outcome, Program, run_program

#: What a failure is named after, if it has several differences.
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
    """Shrinking has had its time; no ``Exception``, which Hypothesis would take for a failure of the test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The smallest program found that fails as the first one did, and the first sentence about it."""

    program: Program
    signature: str
    sentence: str


def run(plan: Plan, program: Program) -> tuple[Outcome, Watch]:
    """Run a program on the engine of the plan and compare; nothing of its warnings is shown.

    What differs also with Dynamo alone is left out of the outcome, and noted in the watch; so is what differs where
    eager itself ends in an internal assertion, which is a mistake of torch's and says nothing about what is right.
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
        kept = tuple(each for each in outcome.differences if _told(each) not in by_itself)
        if not kept:
            return replace(outcome, differences=(), status="refused" if outcome.refusals else "ok"), watched
        outcome = replace(outcome, differences=kept)
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
    except Exception:  # noqa: BLE001  # the comparison broke: then nothing is known of Dynamo
        return ()


def _told(difference: Difference) -> tuple[str, ...]:
    """Return by what the same difference is known again; what an error says may name objects of a run."""
    if difference.kind == "exception":
        return difference.kind, difference.subject, _plain(difference.expected), _plain(difference.actual)
    return difference.kind, difference.subject, difference.sentence


def why_eager(plan: Plan, program: Program) -> str:
    """Run a program once more and listen why calls of it ran eagerly; no text depends on the program's lines."""
    reasons: set[str] = set()

    def hear(event: observe.Event) -> None:
        if isinstance(event, observe.CompileFailed) and event.outcome == "ran eagerly":
            text = str(event.error).splitlines()[0] if str(event.error) else type(event.error).__name__
            text = re.sub(r"^`[^`]*` was not compiled and ran eagerly: (tracing it raised )?", "", text)
            reasons.add(_plain(re.split(r",(?: at)? <", text)[0]))

    with observe.listen(hear):
        run(plan, program)
    return "; ".join(sorted(reasons)) or "unknown"


def kind(differences: tuple[Difference, ...]) -> Literal["wrong", "error", "raises"]:
    """Sort a failure: ``"raises"`` where eager does not, another ``"error"`` or none, or a ``"wrong"`` result."""
    kinds = {difference.kind for difference in differences}
    if "exception" in kinds:
        expected = next(difference.expected for difference in differences if difference.kind == "exception")
        return "raises" if expected == "none" else "error"
    return "wrong"


def coarse(differences: tuple[Difference, ...]) -> str:
    """Name what differs, without numbers and names, by the worst of the differences."""
    worst = _worst(differences)
    if worst.kind == "exception":
        theirs = _plain(worst.expected) if worst.expected != "none" else "nothing"
        return f"{kind(differences)}: {_plain(worst.actual)} in the {worst.subject}, eager {theirs}"
    subject = "an output" if worst.subject.startswith("out") else "an input"
    return f"{kind(differences)}: {worst.kind} of {subject}"


def _worst(differences: tuple[Difference, ...]) -> Difference:
    return min(differences, key=lambda each: _WORST.index(each.kind) if each.kind in _WORST else len(_WORST))


def ops(source: str) -> tuple[str, ...]:
    """List what a program's function does, each op once."""
    function = source[source.index("def program(") :].partition("\n\n\ndef inputs_0")[0]
    found = set(re.findall(r"\.(\w+)\(", function)) | set(re.findall(r"(\w+)\.apply", function)) - {"apply"}
    found |= {"setitem" for _ in re.finditer(r"\] [-+*/]?= ", function)}
    found |= {sign for sign in ("+=", "*=", "@") if f" {sign} " in function}
    return tuple(sorted(found))


def shrink(plan: Plan, drawn: drawing.Drawn, name: str, first: Small, seconds: float) -> Small:
    """Let Hypothesis look for the smallest program that fails under the coarse ``name``, for so many seconds."""
    deadline = time.monotonic() + seconds
    best = first
    known: dict[str, bool] = {}

    def fails(program: Program) -> bool:
        nonlocal best
        if time.monotonic() > deadline:
            raise TimeIsUp
        # Many decisions come to nothing, so that Hypothesis asks about the same program again and again.
        if program.source not in known:
            outcome, _ = run(plan, program)
            known[program.source] = outcome.status == "failed" and coarse(outcome.differences) == name
            if known[program.source] and _size(program) < _size(best.program):
                best = small(program, outcome.differences)
        return known[program.source]

    try:
        drawing.shrink(plan, drawn.decisions, fails)
    except TimeIsUp:
        pass
    except Exception:  # noqa: BLE001  # what is not the same every time, Hypothesis reports as an error of its own
        pass
    return best


def small(program: Program, differences: tuple[Difference, ...]) -> Small:
    """Name a failing program."""
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
