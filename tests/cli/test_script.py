"""``aotlab run``: scripts and notebooks, their output and exit status, and the reports."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotlab import config
from aotlab.cli import main
from aotlab.report import Report
from aotlab.runs import saving, store
from tests.notebook.plain_shells import unloaded_afterwards

pytestmark = pytest.mark.tier("full")  # they compile

MODEL = """
import sys
import torch
import aotlab

def scale(x):
    x.mul_(2)
    return x.t()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x).relu()

def main():
    print("in", __name__, sys.argv[1:], __file__ == sys.argv[0], "get_ipython" in globals())
    scale(x)
    return Net()(x).shape[0]

x = torch.ones(2, 3)

if __name__ == "__main__":
    END
"""
ENDS = {
    "main()": (0, ""),
    "sys.exit(main())": (2, ""),
    "main(); sys.exit('sorry')": (1, "sorry"),
    "main(); 1 / 0": (1, "ZeroDivisionError"),
    "main(); raise KeyboardInterrupt": (130, "KeyboardInterrupt"),
}


@pytest.fixture(autouse=True)
def _unloaded() -> Iterator[None]:
    """Unload the extension after each test."""
    with unloaded_afterwards():
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder, and store the runs in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTLAB_RUNS", str(tmp_path / "runs.sqlite"))
    monkeypatch.setattr(config, "save_runs", True)
    yield tmp_path
    saving.finish()


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str, list[Report]]:
    """Run the command. Return the status, the output, the errors, and the reports."""
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    status = main(["run", "--json", "r.json", *words])
    assert before == (sys.argv, sys.path, sys.modules["__main__"])
    printed = capsys.readouterr()
    data = json.loads(Path("r.json").read_text())
    reports = [Report.from_dict(each) for each in (data if isinstance(data, list) else [data])]
    assert Path("aotlab-report.html").read_text().count('<div class="aotlab-report">') == len(reports)
    return status, printed.out, printed.err, reports


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("options", [(), ("--all", "--options=--backend eager")], ids=["plain", "all"])
def test_a_script_behaves_as_with_python(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], end: str
) -> None:
    """Output, exit status and traceback are the script's; aotlab writes to stderr."""
    script = folder / "work.py"
    script.write_text(MODEL.replace("END", end))
    status, out, err, reports = run(*options, str(script), "--deep", "3", capsys=capsys)
    expected, message = ENDS[end]
    assert (status, out) == (expected, "in __main__ ['--deep', '3'] True False\n")
    assert message in err
    if "Error" in message:
        files = re.findall(r'File "(.*?)", line (\d+)', err)
        assert files == [(str(script), str(len(MODEL.splitlines())))]
    (report,) = reports
    frames = {frame.name for frame in report.frames}
    if options:
        assert frames
        assert report.cell is not None
        assert report.cell.source == script.read_text()
        assert report.verification_rows
        assert (report.cell.error is None) == (expected in (0,))
        assert any(row.mutates_data for frame in report.frames for graph in frame.graphs for row in graph.inputs)
    else:
        assert not frames  # the script compiles nothing
    saving.finish()
    assert [(each.notebook, each.title) for each in store.runs()] == [(str(script), "work.py")]


def test_both_engines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that uses both engines has a report for each; neither has the functions of the other."""
    (folder / "both.py").write_text(
        "import torch, aotlab\n"
        "def f(x): x.mul_(2)\n"
        "def g(x): x.add_(2)\n"
        "def h(x): x.sub_(2)\n"
        "x = torch.ones(2)\n"
        "aotlab.compile(f, backend='eager')(x)\n"
        "torch.compile(g, backend='aot_eager')(x)\n"
        "torch.compile(h, backend='eager')(x)\n"
        "print(x.tolist())\n"
    )
    status, out, _, reports = run("both.py", capsys=capsys)
    assert (status, out) == (0, "[2.0, 2.0]\n")
    assert [[(frame.name, frame.engine) for frame in each.frames] for each in reports] == [
        [("f", "aotlab")],
        [("g", "upstream")],
    ]


CELLS = [
    "%load_ext aotlab\nimport torch\nx = torch.ones(2, 3)",
    "%%aotcompile --backend eager --no-verify\ny = x * 3",
    "def f(x):\n    return x.sin()",
    "z = f(x)\nz.shape",
    "print('end', y.sum().item())\nEND",
    "print('never')",
]


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [("raise SystemExit(7)", 7, ""), ("1 / 0", 1, "ZeroDivisionError"), ("x = (", 1, "SyntaxError")],
)
def test_a_notebook(folder: Path, capsys: pytest.CaptureFixture[str], end: str, status: int, message: str) -> None:
    """Each cell is compiled; the output has the texts and values that the cells print; an error ends the run."""
    notebook(folder / "n.ipynb", end)
    found, out, err, reports = run("--options", "--backend eager", "n.ipynb", capsys=capsys)
    assert found == status
    assert message in err
    assert "\x1b" not in err + out
    printed = ["end 18.0"] if message != "SyntaxError" else []
    assert [line for line in out.splitlines() if line] == ["Out[4]: torch.Size([2, 3])", *printed]
    cells = {each.cell.execution_count: each.cell for each in reports if each.cell is not None}
    assert {1, 2, 4} <= cells.keys()
    assert (cells[2].options, cells[4].options) == ("--backend eager --no-verify", "--backend eager")
    assert cells[4].identifier == "cell-4"
    saving.finish()
    assert {each.notebook for each in store.runs()} == {str(folder / "n.ipynb")}


def test_one_cell(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--cell``, the other cells run as they are."""
    notebook(folder / "n.ipynb", "")
    status, out, _, reports = run("--options", "--backend eager", "--cell", "3", "n.ipynb", capsys=capsys)
    assert (status, "never" in out) == (0, True)
    counts = {each.cell.execution_count: each.frames[0].calls.total for each in reports if each.cell is not None}
    assert counts == {2: 1, 3: 1}  # cell 2 has the magic itself
    for wrong in (["--cell", "9", "n.ipynb"], ["--options=--nonsense", "n.ipynb"], ["r.ipynb"]):
        (folder / "r.ipynb").write_text("[]")
        assert main(["run", *wrong]) == 2


def notebook(path: Path, end: str) -> None:
    """Write the notebook."""
    cells = [
        {"cell_type": "code", "id": f"cell-{number}", "source": text.replace("END", end).splitlines(keepends=True)}
        for number, text in enumerate(CELLS, 1)
    ]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "text"}, *cells], "nbformat": 4}))
