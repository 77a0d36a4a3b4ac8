"""The cell suite: each cell of `tests.notebook.cells`, eagerly and under ``%%aotcompile``, in fresh shells.

Nothing may tell the two apart. What is compared is written in `tests.notebook.shells`; that the comparison can fail is
shown in `tests.notebook.test_shells`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.notebook.cells import CELLS, Cell
from tests.notebook.shells import Notebook, differences, heap_frozen, ours, run

pytest.importorskip("aotlab.notebook.magic", reason="the magic is not there")

#: For the summary: by cell that Dynamo can capture, how many graphs were compiled. Of this process only.
_compiled: dict[str, int] = {}


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    with heap_frozen():
        yield


def aotlab_loaded(notebook: Notebook) -> None:
    """Load the extension, as the first cell of a notebook would; it must say nothing."""
    notebook.shell.run_line_magic("load_ext", "aotlab")
    assert not notebook.messages


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell_is_under_the_magic_what_it_is_in_eager(
    cell: Cell, record_property: Callable[[str, object], None]
) -> None:
    """Nothing that a user can observe tells the two runs apart, and what can be compiled was compiled."""
    eager = run(cell)
    magic = run(cell, aotlab_loaded)

    found = differences(eager, magic)
    assert not found, "\n".join(found)
    assert not [line for moment in magic.moments for line in ours(moment)]

    # The report, where one is to be expected.
    ran = cell.eager is None and "SyntaxError" not in eager.moments[0].facts.get("error: last", "")
    shown = [len(moment.reports) for moment in magic.moments]
    once = 0 if "--quiet" in cell.options or cell.above or not ran else 1
    assert [once] * (1 + cell.again) + [0] * len(cell.after) == (shown if ran else [0] * len(shown))
    if once:
        # It stands above the cell's result.
        kinds = [output[0] for output in magic.moments[0].outputs[: magic.moments[0].reports[0]]]
        assert "execute_result" not in kinds
    if not ran:
        return
    assert magic.report is not None
    graphs = [graph for frame in magic.report.frames for graph in frame.graphs if graph.status == "compiled"]
    if cell.captures:
        _compiled[cell.name] = len(graphs)
        record_property("compiled_graphs", len(graphs))
        assert graphs, str(magic.report.verdict)
    if not graphs:
        assert str(magic.report.verdict).startswith("Nothing was compiled"), str(magic.report.verdict)
    if cell.again:
        assert magic.unique == 0, "Dynamo compiled again for an unchanged cell"
        assert all(graph.reused for graph in graphs), "an unchanged cell compiled again"


def test_the_share_of_cells_that_were_compiled_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the cells that Dynamo can capture, all compile something; the share is printed, for this process."""
    if not _compiled:
        pytest.skip("no cell was run in this process")
    compiled = sum(count > 0 for count in _compiled.values())
    with capsys.disabled():
        print(
            f"\ncells that compiled something: {compiled} of {len(_compiled)} that Dynamo can capture; "
            f"the suite has {len(CELLS)} cells"
        )
    assert len(_compiled) == compiled, sorted(name for name, count in _compiled.items() if not count)
