"""The cell suite: each cell of `tests.notebook.cells`, eagerly and under ``%%aotcompile``, in fresh shells.

No difference may be observable. `tests.notebook.shells` lists the compared facts; `tests.notebook.test_shells` shows
that the comparison can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import aotlab
from tests.notebook.cells import CELLS, Cell
from tests.notebook.shells import Notebook, Run, differences, heap_frozen, ours, run

pytest.importorskip("aotlab.notebook.magic", reason="the magic is not there")

#: For the summary: by cell that Dynamo can capture, how many graphs were compiled. Of this process only.
_compiled: dict[str, int] = {}


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    with heap_frozen():
        yield


def aotlab_loaded(notebook: Notebook) -> None:
    """Load the extension, as the first cell of a notebook would. It must print nothing."""
    notebook.shell.run_line_magic("load_ext", "aotlab")
    assert not notebook.messages


def aotlab_off(notebook: Notebook) -> None:
    """Load the extension and switch compilation off."""
    aotlab_loaded(notebook)
    aotlab.disable()


def _params(cells: Sequence[Cell]) -> list[Any]:
    marks = {cell.name: pytest.mark.xfail(strict=True, reason=cell.known) for cell in cells if cell.known}
    return [pytest.param(cell, id=cell.name, marks=marks.get(cell.name, ())) for cell in cells]


@pytest.mark.parametrize("cell", _params(CELLS))
def test_a_cell_is_under_the_magic_what_it_is_in_eager(
    cell: Cell, record_property: Callable[[str, object], None]
) -> None:
    """A user observes no difference between the two runs, and all code that can be compiled was compiled."""
    eager, magic = run(cell), run(cell, aotlab_loaded)
    graphs = _compiled_graphs(magic)
    if cell.captures:
        _compiled[cell.name] = len(graphs)
        record_property("compiled_graphs", len(graphs))
    _assert_the_same(eager, magic)
    _assert_reports_are_shown(cell, eager, magic)
    if magic.report is None:
        assert not cell.captures
        return
    verdict = str(magic.report.verdict)
    assert "NOT equal to eager: " not in verdict
    if not graphs:
        assert verdict.startswith(("Nothing was compiled", "Nothing to compile")), verdict
    if cell.captures:
        assert bool(graphs) == (not cell.refused), verdict
    if cell.again:
        assert magic.unique == 0, "Dynamo compiled again for an unchanged cell"
        assert all(graph.reused for graph in graphs), "an unchanged cell was compiled again"


@pytest.mark.parametrize("cell", _params([cell for cell in CELLS if not cell.known][::4]))
def test_a_notebook_of_nothing_but_magic_cells_is_what_it_is_in_eager(cell: Cell) -> None:
    """Cells under the magic meet each other's functions, classes, hooks and graphs; nothing tells the runs apart."""
    _assert_the_same(run(cell), run(cell, aotlab_loaded, everywhere=True))


@pytest.mark.parametrize(
    "cell", _params([cell for cell in CELLS if not (cell.known or "engine" in cell.options)][2::6])
)
def test_a_cell_that_is_traced_directly_is_what_it_is_in_eager(cell: Cell) -> None:
    """With ``--frontend auto``, too, a user observes no difference from eager."""
    magic = run(replace(cell, options=f"{cell.options} --frontend auto".strip()), aotlab_loaded)
    _assert_the_same(run(cell), magic)
    assert magic.report is None or "NOT equal to eager: " not in str(magic.report.verdict)


@pytest.mark.parametrize("cell", _params([cell for cell in CELLS if not cell.known][1::16]))
def test_switched_off_nothing_is_compiled_and_all_is_the_same(cell: Cell) -> None:
    """After `aotlab.disable` a cell runs as in eager, and its report says that nothing was compiled."""
    try:
        eager, magic = run(cell), run(cell, aotlab_off)
    finally:
        aotlab.enable()
    _assert_the_same(eager, magic)
    if magic.report is not None:
        assert not _compiled_graphs(magic)
        assert str(magic.report.verdict).startswith(("Nothing was compiled", "Nothing to compile"))


def test_the_share_of_cells_that_were_compiled_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell that Dynamo can capture compiles something, except the refused cells.

    The test prints this process's share.
    """
    if not _compiled:
        pytest.skip("no cell was run in this process")
    refused = {cell.name: cell.refused for cell in CELLS if cell.refused and cell.name in _compiled}
    compiled = sum(count > 0 for count in _compiled.values())
    with capsys.disabled():
        print(
            f"\ncells that compiled something: {compiled} of {len(_compiled)} that Dynamo can capture "
            f"(refused: {', '.join(refused) or 'none'}); the suite has {len(CELLS)} cells"
        )
    assert compiled == len(_compiled) - len(refused), sorted(name for name, count in _compiled.items() if not count)


def _assert_the_same(eager: Run, magic: Run) -> None:
    found = differences(eager, magic)
    assert not found, "\n".join(found)
    assert not [line for moment in magic.moments for line in ours(moment)]


def _assert_reports_are_shown(cell: Cell, eager: Run, magic: Run) -> None:
    """Assert that the report is displayed once for each run of the cell, above its result, and in no other cell."""
    syntax_error = "SyntaxError" in eager.moments[0].facts.get("error: last", "")
    if syntax_error or "IndentationError" in eager.moments[0].facts.get("error: last", "") or cell.eager is not None:
        return  # it did not run
    runs = 1 + cell.again
    once = not cell.above and "--quiet" not in cell.options
    for moment in magic.moments[:runs]:
        assert len(moment.reports) == once
        for place in moment.reports:
            assert "execute_result" not in [output[0] for output in moment.outputs[:place]]
    for moment in magic.moments[runs:]:
        assert not moment.reports


def _compiled_graphs(magic: Run) -> list[Any]:
    frames = () if magic.report is None else magic.report.frames
    return [graph for frame in frames for graph in frame.graphs if graph.status == "compiled"]
