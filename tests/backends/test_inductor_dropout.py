"""Random programs with dropout on Inductor, by `aotlab.verify` and as cells: eager's numbers are drawn, and used."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import aotlab
from aotlab.report.verdict import verdict
from tests.backends.random_dropouts import source
from tests.notebook.cells import Cell
from tests.notebook.shells import run

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.tier("long")) for seed in range(2, 6))]


@pytest.mark.parametrize("seed", SEEDS)
def test_verified(seed):
    """Results, gradients and the generator's state are eager's."""
    space = {"torch": torch, "F": functional}
    exec(source(seed), space)  # the program of a test
    torch.manual_seed(seed)
    x, w = torch.randn(6, 8).requires_grad_(), torch.randn(8, 8).requires_grad_()
    result = aotlab.verify(space["program"], x, w, torch.arange(5, -1, -1), backend="inductor")
    assert result.first is None, f"{source(seed)}\n{result.first}"
    assert result.ran_eagerly == 0


#: The user's cell. The first run has no magic, and other names for the results.
CELL = """
torch.manual_seed(2)
result, sums = program(x, w, index)
result.square().mean().backward()
gradient, w.grad, after = w.grad, None, torch.rand(2)
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_as_a_cell(seed):
    """A cell that trains with the program leaves eager's values, and its report says that it was compared."""
    names = ("result", "sums", "gradient", "after")
    setup = f"""
import torch
from torch.nn import functional as F
{source(seed)}
torch.manual_seed(1)
x, w, index = torch.randn(6, 8), torch.randn(8, 8).requires_grad_(), torch.arange(6)
{CELL}
expected = {", ".join(names)},
"""
    check = f"torch.testing.assert_close(({', '.join(names)}), expected)"
    cell = Cell(name=f"dropout {seed}", setup=(setup,), cell=CELL, after=(check,), options="--backend inductor")
    seen = run(cell, lambda notebook: notebook.shell.run_line_magic("load_ext", "aotlab"))
    assert [moment.facts["reply: status"] for moment in seen.moments] == ["ok", "ok"], seen.moments
    assert seen.report is not None
    told = verdict(seen.report)
    assert told.state == "verified", f"{source(seed)}\n{told.sentence}"
