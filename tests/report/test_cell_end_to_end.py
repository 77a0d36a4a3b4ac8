"""Reports of cells that IPython ran under the magic: their first line, tables and page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell

from aotlab.notebook import graphs, traced
from aotlab.notebook.compiled_cell import CompiledCell
from aotlab.notebook.magic import Magic
from aotlab.report import MIME_TYPE, Report
from aotlab.report.counts import count_frame, summary
from aotlab.report.cut import fitting
from aotlab.report.html import fragment
from aotlab.report.mime import bundle
from aotlab.report.text import place
from aotlab.report.verdict import verdict
from tests.notebook.plain_shells import plain_shell

Run = Callable[..., Report]


@pytest.fixture
def shell() -> InteractiveShell:
    """Return a fresh shell."""
    return plain_shell(loaded=False)


@pytest.fixture
def run(shell: Any) -> Iterator[Run]:
    """Return what runs plain cells in a fresh shell, then one under the magic, and returns its report."""
    shell.run_cell("%load_ext aotlab\nimport torch\nx = torch.arange(12.0).view(3, 4)")

    def cell(text: str, *later: str, fails: bool = False, frontend: str = "auto") -> Report:
        result = shell.run_cell(f"%%aotcompile -o report --backend eager --frontend {frontend} --quiet\n{text}")
        assert fails == (not result.success)
        for each in later:
            shell.run_cell(each).raise_error()
        found: Any = shell.user_ns["report"]
        report: Report = found if isinstance(found, Report) else found.report()
        return report

    yield cell
    shell.run_cell("%unload_ext aotlab").raise_error()


def test_slices_are_readable(run: Run) -> None:
    """A view of an input names the notebook's variables, and its slice has no largest integer in it."""
    report = run("x.mul_(2)\ny = x[:, 1:].t()")
    row = next(row for _, row in report.outputs.iterrows() if row["name"] == "y")
    assert row["views"] == "x[:, 1:].t()"
    assert row["relation"] == "view of input x: x[:, 1:].t()"
    assert "<code>x[:, 1:].t()</code>" in fragment(report)


def test_a_cell_without_tensors(run: Run) -> None:
    """The first line says why nothing was compiled, and on which line."""
    assert run("n = 3\nprint(n)").verdict == (
        "Nothing was compiled: no line was handed to the compiler: line 2 (no computation with tensors) and "
        "line 3 (calls print)."
    )


def test_a_cell_that_nobody_can_capture(run: Run) -> None:
    """Dynamo's reason and the line are in the first line, and the line is marked on the page."""
    report = run("x.resize_(4, 3)")
    found = verdict(report)
    assert found.state == "nothing"
    assert found.sentence.startswith("Nothing was compiled: line 2 ran eagerly (")
    assert "resize_" in found.sentence
    assert "<td>eager</td>" in fragment(report)


def test_a_cell_of_which_part_runs_eagerly(run: Run) -> None:
    """Verified graphs do not hide lines that were not compiled."""
    found = verdict(run("y = x + 1\nprint('between')\nx.resize_(4, 3)"))
    assert found.state == "partly"
    assert found.sentence.startswith("Compiled line 2: 1 graph (inference), backend eager, on cpu")
    assert " Line 4 ran eagerly (" in found.sentence


def test_a_graph_break_within_a_line(run: Run) -> None:
    """A part that Dynamo split is not reported as wholly captured."""
    report = run("y = x * 2\nx.t_()", frontend="dynamo")
    found = verdict(report)
    assert found.state == "partly"
    assert found.sentence.startswith("Compiled line 2: 1 graph")
    assert "t_" in found.sentence
    assert "line 3" in found.sentence or "lines 2–3" in found.sentence


def test_a_cell_that_fails(run: Run) -> None:
    """The error is named in the first line and above the cell's lines. Lines that were not reached are marked."""
    report = run("y = x + 1\nprint(y.sum())\nundefined\nz = 1", fails=True)
    assert report.verdict.endswith("The cell ended at line 4 with NameError: name 'undefined' is not defined.")
    assert "<td>not run</td>" in fragment(report)


def test_the_unchanged_cell_again(run: Run) -> None:
    """The second run compiles nothing, says so, and marks the graph as of an earlier run."""
    assert verdict(run("y = x.sin()")).sentence.startswith("Compiled line 2: 1 graph")
    again = run("y = x.sin()")
    found = verdict(again)
    assert found.state == "verified"
    assert found.sentence.startswith(
        "Nothing new was compiled: 1 graph (inference) of an earlier run of the unchanged cell serves again, "
        "backend eager, on cpu; verified: equal to eager on "
    )
    assert [(row["frame"], row["cold"]) for _, row in again.calls.iterrows()] == [("line 2", False)]
    assert "compiled in an earlier run" in fragment(again)


def test_functions_that_nobody_called_yet(run: Run) -> None:
    """A cell of definitions says that its functions were not called yet, and later lists what their calls compiled."""
    cell = "def f(x):\n    return x.sin()\ndef g(x):\n    return x.cos()"
    found = verdict(run(cell))
    assert found.sentence == "Nothing to compile yet: the functions of the cell are compiled when they are called."
    assert found.state == "idle"
    assert run(cell, "y = f(x)").verdict.startswith("Compiled f: 1 graph (inference)")


def test_recompiles_and_calls_of_a_function(run: Run) -> None:
    """Each later graph of a frame has a row with Dynamo's reason; each call a row with the graph that served it."""
    calls = "f(torch.ones(2)); f(torch.ones(3)); f(torch.ones(2)); f(torch.ones(2, requires_grad=True)); 0"
    report = run("def f(v):\n    return v * 2", calls)
    assert [(graph.index, graph.status) for graph in report.frames[0].graphs] == [
        (0, "compiled"),
        (1, "compiled"),
        (2, "compiled"),
    ]
    rows = report.recompiles
    assert sorted(zip(rows["frame"], rows["graph"], rows["earlier"], rows["subject"], strict=True)) == [
        ("f", 1, 0, "v.size(0)"),
        ("f", 2, 0, "v.requires_grad"),
        ("f", 2, 1, "v.requires_grad"),
    ]
    assert list(report.calls["graph"]) == [0, 1, 1, 2]
    assert list(report.calls["cold"]) == [True, True, False, True]
    assert {"f"} == set(report.calls["frame"])
    assert "<code>v.size(0)</code> is 3 where the compiled entry expects 2" in fragment(report)


def test_pieces_that_dynamo_split(run: Run) -> None:
    """Each captured piece is a separate frame with separate calls, and the break between them has a row."""
    report = run("def f(v):\n    v = v * 2\n    print('here')\n    return v + 1", "f(x); f(x); 0")
    assert [frame.calls.total for frame in report.frames] == [2, 2]
    assert len(report.calls) == 4
    assert list(report.recompiles["reason"]) == []
    assert len(report.graph_breaks) == 1


def test_tensors_written_outside_of_the_graphs(run: Run) -> None:
    """The summary lists writes by Python and writes through another name, beside the graphs' mutations."""
    run("v = x[1:]\nw = torch.zeros(2)")
    report = run("x.mul_(2)\nw.numpy()[0] = 1")
    (fact,) = (fact.sentence for fact in summary(report).facts if fact.key == "mutated")
    assert "w (data, outside the graphs)" in fact
    assert "v (data, through x)" in fact
    assert set(report.inputs["name"][report.inputs["mutates_data"].fillna(False)]) == {"x", "v", "w"}


def test_a_compiled_form_that_differs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with another result is named first, and the cell's results are eager's."""
    compare = graphs.compare

    def other(*args: Any, **options: Any) -> Any:
        found = compare(*args, **options)
        row = next(row for row in found.comparisons if row.kind == "value")
        return replace(found, comparisons=(replace(row, equal=False, sentence="`out[0]` is 3, not 4"),))

    monkeypatch.setattr(graphs, "compare", other)
    report = run("y = x + 1", frontend="dynamo")
    found = verdict(report)
    assert found.state == "different"
    assert found.sentence == (
        "Nothing was compiled: NOT equal to eager, so not used: the compiled form of line 2 (`out[0]` is 3, not 4)."
    )
    assert "differs from eager, not used" in fragment(report)


def test_lines_of_other_cells_name_their_cell(run: Run, shell: Any) -> None:
    """The kernel's names of files say nothing; the shell knows which cell each of them is."""
    compiler = pytest.importorskip("ipykernel.compiler")
    shell.compile = compiler.XCachingCompiler()
    shell.run_cell("def added(t):\n    print('a')\n    return t + 1", store_history=True).raise_error()
    number = shell.execution_count - 1
    for _ in range(2):  # a cell that runs again unchanged has another number then, and the same file
        report = run("y = added(x)\nz = y * 2")
        lines = {place(node.line) for frame in report.frames for g in frame.graphs for node in g.nodes if node.line}
        assert f"In [{number}], line 3" in lines
        assert not any("notebook cell" in line for line in lines)
        assert report.graph_break_rows[0].where == f"In [{number}], line 2"
        assert report.cell is not None
        (part,) = report.cell.parts
        assert part.how == "compiled"
        report = run("if (x @ x.t()).sum() > 0:\n    y = x + 1")
        assert report.graph_break_rows[0].where == "line 2"


def test_where_the_time_of_a_cell_went(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times in the report add up to the magic's total time. A slow comparison has a separate row."""
    compare, cell, shows = traced.compare, Magic.cell, CompiledCell.show_in
    clock: dict[str, int] = {}

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return compare(*args, **kwargs)

    def timed(*args: Any) -> Any:
        clock["began"] = time.perf_counter_ns()
        return cell(*args)

    def shown(*args: Any) -> None:
        clock["took"] = time.perf_counter_ns() - clock["began"]
        shows(*args)

    monkeypatch.setattr(traced, "compare", slow)
    monkeypatch.setattr(Magic, "cell", timed)
    monkeypatch.setattr(CompiledCell, "show_in", shown)
    report = run("y = (x * 2).sin()\nimport time\ntime.sleep(0.3)")
    found = {row.kind: row.duration_ns for row in report.time_rows}
    assert found["verification"] >= 0.5e9
    assert found["rest"] >= 0.3e9
    assert sum(found.values()) == report.duration_ns
    assert clock["took"] * 0.9 <= report.duration_ns <= clock["took"]


@pytest.mark.parametrize("between", ["", "print()\n"], ids=["one graph", "a graph for each line"])
def test_one_storage_has_one_number_in_the_cell(run: Run, between: str) -> None:
    """A tensor, its view and a write to the view have one number; so have a new tensor and the view of it."""
    lines = ["x.add_(1)", "y = x.t()", "y[0].mul_(2)", "z = x * 2", "w = z.view(-1)", "w.add_(1)"]
    report = run("".join(f"{line}\n{between}" for line in lines))
    assert len(report.frames) == (6 if between else 1)
    rows = {(row["tensor"], row["storage"]) for row in report.storages.to_dict("records")}
    displayed = () if between else (("_", 1),)  # the last line writes `w`, and returns it
    assert rows == {("x", 0), ("y", 0), ("z", 1), ("w", 1), *displayed}


#: A UNet of 40 parameters, as a notebook defines it.
UNET = """
import torch.nn.functional as F
from torch import nn
class Block(nn.Module):
    def __init__(self, given, made):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(4, made)
        self.second, self.norm2 = nn.Conv2d(made, made, 3, padding=1), nn.GroupNorm(4, made)
    def forward(self, x):
        return F.silu(self.norm2(self.second(F.silu(self.norm1(self.first(x))))))
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.below, self.middle, self.above = Block(1, 8), Block(8, 16), Block(16, 16), Block(16, 8)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.attention, self.time, self.head = nn.Linear(16, 16), nn.Linear(1, 16), nn.Conv2d(8, 1, 1)
    def forward(self, x, t):
        skip = self.down(x)
        low = self.middle(self.below(F.max_pool2d(skip, 2)) + self.time(t)[:, :, None, None])
        low = low + self.attention(low.mean((2, 3)))[:, :, None, None]
        return self.head(self.above(torch.cat([skip, self.up(low)], 1)))
net = UNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
image, when = torch.randn(2, 1, 8, 8), torch.rand(2, 1)
"""


def test_a_saved_report_counts_what_there_was_before_it_was_cut(shell: Any, run: Run) -> None:
    """A cut report of a UNet's training step has few rows. Groups, totals and pages still count all 40 parameters."""
    shell.run_cell(UNET).raise_error()
    text = "loss = net(image, when).square().mean()\nloss.backward()\noptimizer.step()"
    whole = run(text, frontend="dynamo")
    parameters = list(shell.user_ns["net"].parameters())
    told = (40, sum(each.nbytes for each in parameters))
    assert len(parameters) == 40
    harsh = fitting(whole, lambda cut: len(cut.to_json()) < 60_000)
    saved = Report.from_dict(json.loads(json.dumps(bundle(whole)[MIME_TYPE])))
    assert len(saved.frames[0].graphs[0].inputs) == 42
    assert len(harsh.frames[0].graphs[0].inputs) < 40
    for cut in (saved, harsh):
        (group, *_) = cut.frames[0].graphs[0].input_groups
        assert (group.title, group.count, group.nbytes) == ("40 parameters of net", *told)
        kept = {row.name for row in cut.frames[0].graphs[0].inputs if row.group is None}
        assert {"image", "when"} <= kept
        assert summary(cut) == summary(whole)
        assert summary(cut).listed == 2
        assert [count_frame(frame) for frame in cut.frames] == [
            count_frame(frame) for frame in whole.frames[: len(cut.frames)]
        ]
