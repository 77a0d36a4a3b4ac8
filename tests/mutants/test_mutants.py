"""The random programs notice a broken engine: a test of the tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from aotlab.frontends import api
from aotlab.verification.programs import Program, program_of, run_program
from tests.mutants import MUTANTS, Mutant

pytestmark = pytest.mark.tier("quick")

#: Within how many programs each mutant has to be caught.
MOST = 4000

#: The number of the program that catches each mutant, counted from 0: the first of all that does.
CAUGHT_BY = {
    "epilogue skipped": 5,
    "mutation hidden from autograd": 12,
    "wrong mutated value": 5,
    "swapped outputs": 2,
    "requires_grad lost": 4,
    "identity lost": 1,
    "view returned as a copy": 1,
    "wrong offset": 60,
    "grad mode forgotten": 1,
    "views of the graph's own": 125,
    "uncounted write counted": 28,
    "writes uncounted": 5,
    "hidden write made visible": 9,
    "grad mode of a view forgotten": 1,
    "outputs before writes": 46,
    "multi-output view made singly": 1451,
    "strides lost": 165,
    "aliases of an intermediate come apart": 46,
    "flag returned as a number": 30,
    "list returned as a tuple": 1,
    "stale tensor guard": 20,
    "stale identity guard": 27,
    "stale value guard": 161,
    "missing dedupe": 47,
    "stale flag guard": 686,
    "stale text guard": 3479,
    "stale settings guard": 4,
    "stale overlap guard": 424,
    "stale offset guard": 858,
    "dropped tangent": 29,
    "swapped gradients": 28,
    "retain_graph ignored": 8,
    "never released": 1512,
    "released for all outputs": 19,
    "versions unchecked": 661,
    "saved values in reverse": 66,
    "written inputs unmoved": 5,
    "every write visible": 45,
    "one window written": 1978,
    "no synthetic base": 424,
}


def compiled(function):
    """Compile for torch's own kernels, so that values are compared bit for bit."""
    return api.compile(function, backend="eager")


def fails(program: Program) -> bool:
    """Return whether the programs' own criterion finds a difference. A crash of the broken engine counts, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run_program(program, compiled).status == "failed"
        except Exception:  # noqa: BLE001  # a mutant may break the engine in any way
            return True


def likely_first(mutant: Mutant) -> Iterator[Program]:
    """Give the program that is known to catch the mutant, and all the others in case that it no longer does."""
    known = CAUGHT_BY[mutant.name]
    yield program_of(known)
    yield from (program_of(number) for number in range(MOST) if number != known)


def test_there_are_enough_mutants():
    """The seventeen of the skeleton and at least twenty more, each with a name and a sentence."""
    assert len(MUTANTS) >= 37
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.breaks.endswith(".") for mutant in MUTANTS)
    assert set(CAUGHT_BY) == {mutant.name for mutant in MUTANTS}
    assert max(CAUGHT_BY.values()) < MOST


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_programs_catch_the_mutant(mutant: Mutant):
    """One of the programs fails with the mutant installed, and passes again without it."""
    for program in likely_first(mutant):
        with mutant.installed():
            caught = fails(program)
        # A program that fails in any case says nothing about the mutant.
        if caught and not fails(program):
            return
    raise AssertionError(mutant.breaks)


def test_a_mutant_leaves_nothing_behind():
    """After the block the engine's functions are the same objects as before."""
    for mutant in MUTANTS:
        before = [vars(owner)[name] for owner, name, _ in mutant.changes]
        with mutant.installed():
            during = [vars(owner)[name] for owner, name, _ in mutant.changes]
        assert all(function is not original for function, original in zip(during, before, strict=True))
        assert [vars(owner)[name] for owner, name, _ in mutant.changes] == before
