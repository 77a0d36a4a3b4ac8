"""The random programs notice a broken engine: a test of the tests."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from aotlab import api
from aotlab.verification.mutants import MUTANTS, Mutant
from aotlab.verification.programs import Program, programs, run_program


def compiled(function):
    """Compile for torch's own kernels, so that values are compared bit for bit."""
    return api.compile(function, backend="eager")


@pytest.fixture(scope="module")
def all_programs() -> list[Program]:
    """Give out the programs with which the engine itself is tested, in their order."""
    found: dict[str, Program] = {}

    @settings(
        max_examples=600,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(programs())
    def collect(program: Program) -> None:
        found.setdefault(program.source, program)

    collect()
    return list(found.values())


def fails(program: Program) -> bool:
    """Tell whether the programs' own criterion finds a difference; a crash of the broken engine counts too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run_program(program, compiled).status == "failed"
        except Exception:  # noqa: BLE001  # a mutant may break the engine in any way
            return True


def test_there_are_enough_mutants():
    """At least ten mistakes of different kinds, each with a name and a sentence."""
    assert len(MUTANTS) >= 14
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.breaks.endswith(".") for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_programs_catch_the_mutant(mutant: Mutant, all_programs: list[Program]):
    """One of the programs fails with the mutant installed, and passes again without it."""
    with mutant.installed():
        caught = next((program for program in all_programs if fails(program)), None)
    assert caught is not None, mutant.breaks
    assert not fails(caught)


def test_a_mutant_leaves_nothing_behind():
    """After the block the engine's functions are the same objects as before."""
    for mutant in MUTANTS:
        before = [vars(owner)[name] for owner, name, _ in mutant.changes]
        with mutant.installed():
            during = [vars(owner)[name] for owner, name, _ in mutant.changes]
        assert all(function is not original for function, original in zip(during, before, strict=True))
        assert [vars(owner)[name] for owner, name, _ in mutant.changes] == before
