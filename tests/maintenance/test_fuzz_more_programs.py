"""The other 400 fixed programs, and 200 that are new in every run.

A separate file lets a second test process run them.
"""

from __future__ import annotations

import pytest

from tests.maintenance.fuzz_blocks import COMPILED, FIXED, FRESH, Blocks, check, share

NUMBERS = range(3, 5)


@pytest.fixture(scope="module")
def blocks():
    """Give out the fixed blocks, each of which is run once."""
    made = Blocks(FIXED, NUMBERS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def new():
    """Give out the fresh blocks, each of which is run once."""
    made = Blocks(FRESH, [0])
    yield made
    made.close()


@pytest.mark.parametrize("number", NUMBERS)
def test_fixed_programs(blocks, number):
    """Of 200 programs, the same in every run, none differs from eager in anything observable."""
    check(FIXED, blocks[number])


# The seed must not be a part of the test's name: two processes of one run would not collect the same tests.
def test_fresh_programs(new):
    """The same for 200 programs from a new seed, which a failure names."""
    check(FRESH, new[0])


@pytest.mark.tier("full")  # it runs every block
def test_most_are_compiled(blocks, new):
    """Most are compiled for every call: neither refused nor run eagerly."""
    compiled, reasons = share(blocks.all() + new.all())
    assert compiled >= COMPILED, reasons


def test_all_of_them_are_run():
    """The two files together run every block of both lists."""
    from tests.maintenance import test_fuzz_programs

    assert [*test_fuzz_programs.NUMBERS, *NUMBERS] == [number for number, _ in FIXED.blocks()]
    assert [size for _, size in FRESH.blocks()] == [200]
