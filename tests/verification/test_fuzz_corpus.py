"""What the fuzzer found in the engine, program by program, and how much it has run.

The folder ``corpus`` holds the cells of failures that are mended (``*.txt``, as ``aotlab fuzz`` saves them: a doctest
run imports what is called ``.py``), and ``counts.json``, to which ``aotlab fuzz --corpus`` adds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aotlab.verification.fuzz import corpus

FOLDER = Path(__file__).parent / "corpus"
CELLS = sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("cell", CELLS, ids=[cell.stem for cell in CELLS])
@pytest.mark.usefixtures("fresh_dynamo")
def test_it_stays_mended(cell, capsys):
    """A program that once differed from eager does not any more."""
    code = compile(cell.read_text(encoding="utf-8"), str(cell), "exec")
    try:
        exec(code, {"__name__": "__main__"})
    except AssertionError as error:
        assert str(error) == "no difference: it is mended"  # noqa: PT017  # the cell raises it, and only at its end
    else:
        pytest.fail(capsys.readouterr().out)


def test_the_counts_are_whole():
    """The file of counts can be read, and names runs of our engine; the cells are there."""
    entries = corpus.load(FOLDER / "counts.json")
    assert corpus.carried(entries)[0] > 0
    assert CELLS
