"""A program run by eager and by an engine, and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from aotlab.verification.clones import random_state_restored
from aotlab.verification.differential import Candidate, Difference, judge
from aotlab.verification.observables import observe
from aotlab.verification.programs.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a program: ``refusals`` are the reasons, one per refused call; ``differences`` are what failed."""

    status: Literal["ok", "refused", "failed"]
    refusals: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()


def run_program(program: Program, candidate: Candidate) -> Outcome:
    """Run all calls of ``program`` eagerly and by ``candidate(function)``, and compare bit for bit.

    One callable serves all calls, so that entries, guards and recompilations are compared as well. A refusal is
    legitimate if it left no trace on the arguments and their gradients.
    """
    function, makers = program.build()
    compiled = candidate(function)
    refusals: list[str] = []
    differences: list[Difference] = []
    exact = program.exact
    with random_state_restored(), torch.enable_grad():
        for index, make in enumerate(makers):
            observations = []
            for side in (function, compiled):
                torch.default_generator.manual_seed(index)
                observations.append(observe(side, make(), backward=program.backward))
            expected, actual = observations
            failures = [actual.failure, actual.backward_failure, *(step.failure for step in actual.steps)]
            refusals += [failure.refused for failure in failures if failure is not None and failure.refused is not None]
            differences += [
                Difference(
                    kind=row.kind, subject=row.subject, expected=row.expected, actual=row.actual, sentence=row.sentence
                )
                for row in judge(expected, actual, call=index + 1, exact_gradients=exact, terse=True)
                if not row.equal and row.kind != "refused"
            ]
    status: Literal["ok", "refused", "failed"] = "failed" if differences else "refused" if refusals else "ok"
    return Outcome(status=status, refusals=tuple(refusals), differences=tuple(differences))
