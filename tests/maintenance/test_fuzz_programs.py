"""The first 600 of CI's random programs: how many differ from eager, and how many are compiled."""

from __future__ import annotations

import pytest

from tests.maintenance.fuzz_blocks import COMPILED, FIXED, Blocks, check, share

NUMBERS = range(3)


@pytest.fixture(scope="module")
def blocks():
    """Give out the blocks, each of which is run once."""
    made = Blocks(FIXED, NUMBERS)
    yield made
    made.close()


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.tier("quick")), *NUMBERS[1:]])
def test_fixed_programs(blocks, number):
    """Of 200 programs, the same in every run, none differs from eager in anything observable."""
    check(FIXED, blocks[number])


@pytest.mark.tier("full")  # it runs every block
def test_most_are_compiled(blocks):
    """Most are compiled for every call."""
    compiled, reasons = share(blocks.all())
    assert compiled >= COMPILED, reasons
