"""Short programs about two inputs that share something: `aotlab fuzz --related`."""

from __future__ import annotations

import re

from aotlab.maintenance.fuzz.drawing import draw, shrink
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.verification.programs.related import _RELATIONS, _STEPS, _USES
from tests.maintenance.fuzz_blocks import RELATED, Blocks, check


def test_fixed_programs():
    """Of 200 programs, the same in every run, none differs from eager in anything observable."""
    blocks = Blocks(RELATED, [0])
    try:
        check(RELATED, blocks[0])
    finally:
        blocks.close()


def test_every_part_is_drawn():
    """All relations, steps and uses turn up, and the same program for the same place."""
    drawn = [draw(Plan(related=True), 0, index).program for index in range(600)]
    assert drawn[:5] == [draw(Plan(related=True), 0, index).program for index in range(5)]
    assert {program.setups[0].lines[:-1] for program in drawn} == set(_RELATIONS)

    def is_of(form, line):
        return re.fullmatch(re.escape(form).replace(re.escape("{t}"), r"\w"), line.strip())

    lines = {line for program in drawn for line in program.body}
    results = {program.result.removeprefix("(").removesuffix(",)") for program in drawn}
    assert [step for step in _STEPS if not any(is_of(step, line) for line in lines)] == []
    assert [use for use in _USES if not any(is_of(use, result) for result in results)] == []


def test_dynamo_is_spared_what_it_cannot_trace():
    """Behind Dynamo, no program sets `requires_grad` or other memory midway, because Dynamo cannot trace that."""
    drawn = [draw(Plan(related=True, dynamo=True), 0, index).program for index in range(150)]
    assert not any(name in line for program in drawn for line in program.body for name in ("requires_grad_", "set_("))


def test_failures_shrink_within_their_kind():
    """Hypothesis shrinks such a program to a smaller one of the same kind."""
    plan = Plan(related=True)
    found = next(each for each in (draw(plan, 1, n) for n in range(200)) if "mul_" in each.program.source)
    seen = []

    def fails(program):
        seen.append(program)
        return "mul_" in "\n".join((*program.body, *program.before))

    if fails(found.program):
        shrink(plan, found.decisions, fails)
    smallest = min(seen, key=lambda program: len(program.source))
    assert len(smallest.source) <= len(found.program.source)
    assert all(program.setups[0].lines[:-1] in _RELATIONS for program in seen)
