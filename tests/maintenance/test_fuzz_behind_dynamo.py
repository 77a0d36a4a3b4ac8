"""CI's random programs behind Dynamo: the number of differences from eager, and the number of compiled programs."""

from __future__ import annotations

import pytest

from tests.maintenance.fuzz_blocks import BEHIND_DYNAMO, COMPILED_BEHIND_DYNAMO, Blocks, check, share


@pytest.fixture(scope="module")
def blocks():
    """Give out the one block, which is run once."""
    made = Blocks(BEHIND_DYNAMO, [0])
    yield made
    made.close()


def test_fixed_programs(blocks):
    """Next to none differs from eager in anything observable in which Dynamo alone does not."""
    check(BEHIND_DYNAMO, blocks[0])


@pytest.mark.tier("full")  # it runs every block
def test_most_are_compiled(blocks):
    """Most are compiled for every call, rather than run eagerly."""
    compiled, reasons = share(blocks.all())
    assert compiled >= COMPILED_BEHIND_DYNAMO, reasons


def test_dynamos_own_are_few_and_told(blocks):
    """Differences that Dynamo alone causes are few, and each is listed with its reason."""
    own = [row for row in blocks[0].rows if row.status == "dynamo"]
    assert len(own) <= len(blocks[0].rows) // 20
    assert all(row.reasons for row in own)
