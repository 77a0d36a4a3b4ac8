"""``%aotlab runs``, ``show``, ``diff``, ``export`` and ``clear``, and ``aotlab runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from aotlab.cli import main
from aotlab.errors import UsageError
from aotlab.report import Report
from aotlab.runs import listing, saving, store
from tests.notebook.plain_shells import cell, execute, failing, plain_shell, printed

BEFORE = "y = (x * 2).relu()\nloss = y.sum()\nloss.backward()"
AFTER = "y = (x * 2).sin()\nloss = y.sum()\nloss.backward()"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a shell of a notebook, in which two versions of a cell have run."""
    monkeypatch.setenv("JPY_SESSION_NAME", "/work/train.ipynb")
    made = plain_shell()
    execute(made, "import torch\nx = torch.ones(3, requires_grad=True)")
    execute(made, cell(BEFORE))
    execute(made, cell(AFTER))
    yield made
    made.run_line_magic("unload_ext", "aotlab")


def test_the_runs_of_a_notebook(shell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run of a cell is listed, shown and compared, in the notebook and on the command line."""
    runs = execute(shell, "%aotlab runs")
    assert runs[["notebook", "title", "result", "backend", "device"]].values.tolist() == [
        ["train.ipynb", first, "equal to eager", "eager", "cpu"]
        for first in (AFTER.splitlines()[0], BEFORE.splitlines()[0])
    ]
    shown = execute(shell, "%aotlab show 1")
    first = saving.load(1)[1]
    assert shown == first
    assert first.cell is not None
    assert first.cell.source.endswith(f"{BEFORE}\n")
    assert shell.user_ns["report"].report().frames[0].graphs[0].nodes == saving.load(2)[1].frames[0].graphs[0].nodes
    changed = execute(shell, "%aotlab diff").runs
    nodes = changed[(changed.fact == "node") & changed.change.isin(["added", "removed"])]
    assert nodes[["part", "before", "after"]].values.tolist()[:2] == [
        ["forward graph", "aten.relu(mul) float32[3]", ""],
        ["forward graph", "", "aten.sin(mul) float32[3]"],
    ]
    capsys.readouterr()
    assert main(["runs", "diff", "1", "2", "--html", str(tmp_path / "d.html"), "--json", str(tmp_path / "d.json")]) == 0
    printed_lines = capsys.readouterr().out.splitlines()
    assert printed_lines[0].startswith("run 1 and run 2: ")
    assert "  code line 2: removed: y = (x * 2).relu()" in printed_lines
    assert Report.load(tmp_path / "d.json").run_names == ("run 1", "run 2")
    assert main(["runs", "list", "sin()"]) == 0
    assert "relu" not in capsys.readouterr().out
    text, _ = printed(shell, "%aotlab clear")
    assert text == "2 stored runs are deleted\n"
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == f"there are no stored runs in {store.path()}\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("show 7", "there is no stored run 7"),
        ("show x", "x is not the number of a run"),
        ("diff 1", "use %aotlab config"),
        ("clear all", "use %aotlab config"),
    ],
)
def test_wrong_commands(shell: Any, line: str, reason: str) -> None:
    """The error names the problem."""
    assert reason in str(failing(shell, f"%aotlab {line}"))
    saving.finish()
    assert len(store.runs()) == 2


def test_a_cell_that_ran_twice_and_its_functions(shell: Any) -> None:
    """A cell that defines a function is one run, with the calls of other cells; each repetition is a run."""
    execute(shell, cell("def f(x):\n    return x * 3"))
    execute(shell, "f(x)")
    execute(shell, "f(x)")
    runs = execute(shell, "%aotlab runs")
    assert runs.title.tolist()[0] == "def f(x):"
    assert len(runs) == 3
    assert execute(shell, "%aotlab show").frames[0].calls.total == 2


def test_parquet(shell: Any, tmp_path: Path) -> None:
    """Each table is a file, and the column ``run`` has the number of the run."""
    pytest.importorskip("pyarrow")
    listing.export(tmp_path / "out")
    assert pd.read_parquet(tmp_path / "out" / "runs.parquet").number.tolist() == [1, 2]
    inputs = pd.read_parquet(tmp_path / "out" / "inputs.parquet")
    expected = [len(saving.load(number)[1].inputs) for number in (1, 2)]
    assert inputs.groupby("run").size().tolist() == expected


def test_parquet_without_pyarrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error names the package, and nothing is written."""
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"need pyarrow: pip install 'aotlab\[parquet\]'"):
        listing.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
