"""Run a program with eager and with an engine, and compare everything that the caller can observe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from aotlab.verification.clones import random_state_restored
from aotlab.verification.comparisons import Difference
from aotlab.verification.judgement import judge
from aotlab.verification.observables import Candidate, observe
from aotlab.verification.programs.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a program: the reasons of all refusals by the engine, and the ``differences`` from eager."""

    status: Literal["ok", "refused", "failed"]
    refusals: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()


def run_program(program: Program, candidate: Candidate) -> Outcome:
    """Run all calls of ``program`` eagerly and with ``candidate(function)``, and compare bit for bit.

    The function is compiled once and then called with all inputs, so that guards and recompiles are tested too. A
    refusal is not a difference. If the engine changed an argument before it refused, that change is a difference.
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
