"""Programs that are compiled once for all sizes and called with several: `aotlab fuzz --sizes`."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
import torch

from aotlab.maintenance.fuzz import failures
from aotlab.maintenance.fuzz.drawing import draw
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.maintenance.fuzz.run import run
from aotlab.verification.programs.statements import NEW_USING_SIZES, NUMBERS, VIEWS_USING_SIZES, WRITES_USING_SIZES
from tests.maintenance.fuzz_blocks import SIZES, Blocks, check


def test_fixed_programs(tmp_path):
    """Of 60 fixed programs, none differs, and the number that reused an entry for other sizes is printed."""
    out = io.StringIO()
    assert run(replace(SIZES, programs=60), save=tmp_path, out=out, err=io.StringIO(), shrink=0.0) == 0, out.getvalue()
    found = re.search(r"(\d+) calls made (\d+) entries; (\d+) of them", out.getvalue())
    calls, entries, others = map(int, found.groups())
    assert calls > 150
    assert entries < calls / 2
    assert others > calls / 5


@pytest.mark.tier("full")
def test_more_fixed_programs():
    """Of 200 programs none differs from eager in anything observable, whichever sizes it is called with."""
    blocks = Blocks(SIZES, [1])
    try:
        check(SIZES, blocks[1])
    finally:
        blocks.close()


def test_sizes_vary():
    """Later calls have other sizes, including 0, 1, or another dimension's size. Nearly all parts are drawn."""
    drawn = [draw(SIZES, 1, index).program for index in range(400)]
    assert drawn[:5] == [draw(SIZES, 1, index).program for index in range(5)]
    shapes = set()
    for program in drawn:
        _, makers = program.build()
        calls = [tuple(tuple(tensor.shape) for _, tensor in make().inputs) for make in makers]
        assert len(calls) > 1
        shapes |= {shape for call in calls[1:] for shape in call}
    assert {0, 1, 2, 3, 4, 5} <= {size for shape in shapes for size in shape}
    assert any(len(shape) == 2 and shape[0] == shape[1] > 1 for shape in shapes)
    assert any("channels_last" in line for program in drawn for setup in program.setups for line in setup.lines)
    lines = "\n".join(line for program in drawn for line in program.body)
    templates = [
        each
        for table in (NUMBERS, NEW_USING_SIZES, VIEWS_USING_SIZES, WRITES_USING_SIZES)
        for each in sum(table.values(), ())
    ]
    seen = [each for each in templates if re.search(re.sub(r"\\{\w+\\}", r"[\\w., ]+", re.escape(each)), lines)]
    assert len(seen) > 0.8 * len(templates)


def test_a_wrong_size_is_found(monkeypatch):
    """An engine that takes the traced size for every call's fails, and its failure is named."""
    monkeypatch.setattr("aotlab.runtime.output_expressions.internals.size_text", lambda value: repr(value.node.hint))
    outcomes = []
    for n in range(400):
        program = draw(Plan(sizes=True), 0, n).program
        if re.search(r"\.shape|\.size|numel", program.result):
            outcomes.append(failures.run(Plan(sizes=True), program)[0])
            if outcomes[-1].status == "failed":
                break
    assert outcomes[-1].status == "failed"
    assert torch.is_grad_enabled()
