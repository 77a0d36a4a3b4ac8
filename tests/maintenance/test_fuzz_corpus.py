"""The fuzzer's failing programs, one by one, and the number of programs that it has run.

The folder ``corpus`` contains the cells of mended failures (``*.txt``, as ``aotlab fuzz`` saves them, because a doctest
run imports ``.py`` files), and ``counts.json``, to which ``aotlab fuzz --corpus`` adds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aotlab.maintenance.fuzz import corpus

pytestmark = pytest.mark.tier("quick")

FOLDER = Path(__file__).parent / "corpus"
CELLS = sorted(FOLDER.glob("*.txt"))


#: The compile call for the program of a cell, by kind.
DIRECT = 'aotlab.compile(program, backend="eager")'
BEHIND_DYNAMO = 'aotlab.compile(program, frontend="dynamo", backend="eager")'
DYNAMO_ALONE = 'torch.compile(program, backend="eager")'

#: Dynamo breaks the graph here, and the second half would have to see the error that eager leaks in the first.
LEAKED_BY_EAGER = {"error-e4eaceb4.txt"}

FOUND_DIRECTLY = [cell for cell in CELLS if DIRECT in cell.read_text(encoding="utf-8")]


def differs(cell, text):
    """Run a cell, and return whether it shows a difference."""
    torch.compiler.reset()
    try:
        exec(compile(text, str(cell), "exec"), {"__name__": "__main__"})
    except AssertionError as error:
        assert str(error) == "no difference: it is mended"  # noqa: PT017  # the cell raises it, and only at its end
        return False
    return True


@pytest.mark.parametrize("cell", CELLS, ids=[cell.stem for cell in CELLS])
@pytest.mark.usefixtures("fresh_dynamo")
def test_it_stays_mended(cell, capsys):
    """A program that once differed from eager does not any more."""
    if differs(cell, cell.read_text(encoding="utf-8")):
        pytest.fail(capsys.readouterr().out)


@pytest.mark.parametrize("cell", FOUND_DIRECTLY, ids=[cell.stem for cell in FOUND_DIRECTLY])
@pytest.mark.usefixtures("fresh_dynamo")
def test_it_is_right_behind_dynamo_too(cell, capsys):
    """A program that was found without Dynamo does not differ behind Dynamo either, unless Dynamo alone does."""
    text = cell.read_text(encoding="utf-8")
    if differs(cell, text.replace(DIRECT, BEHIND_DYNAMO)):
        told = capsys.readouterr().out
        assert cell.name in LEAKED_BY_EAGER or differs(cell, text.replace(DIRECT, DYNAMO_ALONE)), told


def test_every_cell_compiles_in_a_known_way():
    """A cell names one of the two frontends in the words that the test above replaces."""
    for cell in CELLS:
        text = cell.read_text(encoding="utf-8")
        assert (DIRECT in text) != (BEHIND_DYNAMO in text), cell.name


def test_the_counts_are_whole():
    """The file of counts can be read, and names runs of our engine; the cells are there."""
    entries = corpus.load(FOLDER / "counts.json")
    assert corpus.carried(entries)[0] > 0
    assert CELLS
