"""The course: every notebook runs from top to bottom, and each cell shows the results that the prose describes.

The same is checked for the README's cells, and for the list of the magic's options.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aotlab.report.model import Report
from aotlab.report.packing import unpack
from tests.teach.pages import PAGES

nbclient = pytest.importorskip("nbclient", reason="needs nbclient, of the extra `test`")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat, which nbclient brings")

pytestmark = pytest.mark.tier("full")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REPORT = "application/vnd.aotlab.report.v1+json"
#: How long one cell may take, in seconds: a first compilation by Inductor takes a minute where two cores are shared.
PATIENCE = 280


class Session:
    """A notebook and the kernel that it runs in."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.book = nbformat.read(path, as_version=4)
        self.client = nbclient.NotebookClient(
            self.book, timeout=PATIENCE, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )

    def cell(self, identifier: str) -> Any:
        """Return the cell with this id."""
        return next(cell for cell in self.book.cells if cell.id == identifier)

    def run(self, cell: Any) -> None:
        """Run a cell in the kernel, and raise its error, if any."""
        if cell not in self.book.cells:
            self.book.cells.append(cell)
        self.client.execute_cell(cell, self.book.cells.index(cell))

    def run_all(self) -> None:
        """Run the cells in order; only those tagged ``raises-exception`` may raise."""
        for cell in list(self.book.cells):
            self.run(cell)

    def answer(self, source: str) -> str:
        """Run a line of code that is not a cell of the notebook, and return its printed text."""
        cell = nbformat.v4.new_code_cell(source)
        self.run(cell)
        return printed(cell)

    def table(self, identifier: str) -> list[dict[str, Any]]:
        """Return the rows of the table that a cell of one expression shows."""
        return json.loads(self.answer(f"print(({self.cell(identifier).source}).to_json(orient='records'))"))

    def report(self, identifier: str) -> dict[str, Any]:
        """Return the report that a cell displays, as JSON, and check that it is displayed above the cell's result."""
        outputs = [output for output in self.cell(identifier).outputs if output.output_type != "stream"]
        places = [number for number, output in enumerate(outputs) if REPORT in output.get("data", {})]
        assert places == [0], outputs
        return dict(unpack(outputs[0]["data"][REPORT]))

    def result(self, identifier: str) -> str:
        """Return a cell's ``Out[n]`` as text."""
        (result,) = [output for output in self.cell(identifier).outputs if output.output_type == "execute_result"]
        return result["data"]["text/plain"]


def printed(cell: Any) -> str:
    """Return the text that a cell wrote to stdout."""
    return "".join(o["text"] for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


@contextmanager
def session(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Start a kernel for a notebook in an empty folder, with no configuration but ours; end it afterwards."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        (folder / ".jupyter" / name.lower()).mkdir(parents=True)
        monkeypatch.setenv(name, str(folder / ".jupyter" / name.lower()))
    monkeypatch.setenv("AOTLAB_PROGRESS", str(folder / ".jupyter" / "progress.json"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    made = Session(path, folder)
    with made.client.setup_kernel():
        yield made


def names(rows: list[dict[str, Any]], *, mutated: bool) -> set[str]:
    """Return the names of the rows that are mutated, or of those that are not."""
    return {row["name"] for row in rows if row["mutated"] is mutated}


def promises_of_start(run: Session) -> None:
    """Check the sentences of 00_start.ipynb, one after the other, and that its file stays small."""
    assert len(nbformat.writes(run.book).encode()) <= 250_000

    # Which tensors does a cell change?
    assert run.report("mutation-cell")["frames"] != []
    assert "verified: equal to eager" in run.answer("print(first.verdict)")
    assert run.table("mutation-table") == [{"name": "x", "mutated": True, "mutates_data": True}]
    assert run.result("mutation-cell") == "tensor([[2., 2., 2.],\n        [0., 0., 0.]])"

    # Who shares memory with whom?
    outputs = {row["name"]: row for row in run.table("alias-table")}
    assert outputs["row"]["relation"].startswith("view of input x")
    assert outputs["doubled"]["relation"] == "memory of its own"
    storages = {row["tensor"]: row for row in run.table("storage-table")}
    assert [(storages[name]["start"], storages[name]["stop"]) for name in ("x", "row")] == [(0, 24), (0, 12)]
    assert storages["x"]["storage"] == storages["row"]["storage"] == outputs["row"]["storage"]
    assert storages["doubled"]["storage"] == outputs["doubled"]["storage"] != storages["x"]["storage"]
    assert storages["x"]["mutated"] is True
    assert run.answer("row.add_(1); print(x[0].tolist(), doubled[0].tolist())").strip() == (
        "[2.0, 2.0, 2.0] [2.0, 2.0, 2.0]"
    )

    # A training step
    rows = run.table("step-table")
    assert names(rows, mutated=True) == {"model.weight", "model.bias"}
    assert names(rows, mutated=False) >= {"features", "targets"}
    first, outside = dict.fromkeys(row["frame"] for row in rows)
    found = {row["name"] for row in rows if row["frame"] == outside}
    assert found == {"model.weight", "model.bias", "model.weight.grad", "model.bias.grad"}
    assert names([row for row in rows if row["frame"] == first], mutated=True) == set()
    saved = json.loads(run.answer("print(step.saved[['is_input', 'reason']].to_json(orient='records'))"))
    assert printed(run.cell("saved-table")).splitlines() == [row["reason"] for row in saved]
    assert [re.match("the input `(.*?)`|computed", row["reason"])[1] for row in saved] == ["features", "targets", None]
    assert [row["is_input"] for row in saved] == [True, True, False]

    # Why was it compiled again?
    assert len(run.report("recompile-cell")["frames"][0]["graphs"]) == 2
    (again,) = printed(run.cell("recompile-table")).splitlines()
    assert re.search(r"\bt\b.*\b5\b.*\b3\b.*compiled for all sizes", again), again
    calls = json.loads(run.answer("print(calls.calls[['compiled', 'cold']].to_json(orient='records'))"))
    assert [call["cold"] for call in calls] == [True, True, False]
    assert [call["compiled"] for call in calls] == [True, True, True]

    served = json.loads(run.answer("print(calls.calls['graph'].to_json(orient='records'))"))
    assert served == [0, 1, 1]

    assert run.answer("print(calls.inputs['shape'].tolist())").strip() == "['[3]', '[t.size(0)=5]']"
    expected = "tensor([-1.3887, -0.9258, -0.4629,  0.0000,  0.4629,  0.9258,  1.3887])"
    assert run.result("recompile-calls") == expected

    # Is it faster?
    timings = run.table("time-table")
    assert {(row["engine"], row["phase"]) for row in timings} >= {("eager", "forward"), ("aotlab", "forward")}
    assert all(row["median_ns"] > 0 and row["repeats"] > 1 for row in timings)
    kernels = json.loads(run.answer("print(timed.kernels[['language', 'source']].to_json(orient='records'))"))
    assert len(kernels) == 1
    assert all(word in kernels[0]["source"] for word in ("sin", "cos", "tanh"))

    # Nothing was mutated that no sentence speaks of.
    outside = "print([[row.name for row in report.cell.mutated_outside] for report in (first, step, timed, refused)])"
    step = ["model.weight", "model.bias", "model.weight.grad", "model.bias.grad"]
    assert run.answer(outside).strip() == f"[[], {step}, [], ['table', 'column']]"

    # What if it cannot be compiled?
    assert run.answer("print(refused.verdict)").startswith("Nothing was compiled: ")
    assert run.result("refused-cell").replace(" ", "").split() == ["tensor([1.,1.,1.])"]
    assert "draws random numbers into a tensor that is not contiguous" in run.answer("print(refused.verdict)")
    (refusal,) = run.report("refused-cell")["frames"][0]["refusals"]
    assert "not contiguous" in refusal["message"]
    assert run.table("refused-table") == [{"error": "RefusedError", "argument": None, "outcome": "ran eagerly"}]

    # Now you: not before the exercises are done.
    checks = ("one-check", "two-check", "three-check")
    assert [printed(run.cell(check))[:7] for check in checks] == ["not yet"] * 3
    for check, wrong, right in zip(checks, WRONG_ANSWERS, RIGHT_ANSWERS, strict=True):
        cell = run.cell(check.replace("check", "answer"))
        for source, expected in ((wrong, "not yet"), (right, "right")):
            cell.source = source
            run.run(cell)
            run.run(run.cell(check))
            assert printed(run.cell(check)).startswith(expected), (source, printed(run.cell(check)))


#: Answers to the three exercises that look right at first sight, and answers that are right.
WRONG_ANSWERS = (
    "%%aotcompile -o one --backend eager\nstate.fill_diagonal_(1)",
    """\
%%aotcompile -o two --backend eager
optimizer.zero_grad()
loss = torch.nn.functional.mse_loss(model(features), targets)
loss.backward()
optimizer.step()""",
    "normalize(torch.arange(3.0) - 1)",
)
RIGHT_ANSWERS = (
    "%%aotcompile -o one --backend eager\ndiagonal = state.diagonal()\ndiagonal.fill_(1)",
    WRONG_ANSWERS[1].replace("\n", "\nmodel.bias.requires_grad_(False)\n", 1),
    "normalize(torch.arange(3.0, dtype=torch.float64))",
)


def promises_of_upstream_findings(run: Session) -> None:
    """Check the parts of upstream_findings.ipynb that hold on every version.

    test_upstream_findings.py has the differences.
    """
    rows = printed(run.cell("table-print")).splitlines()[1:]
    states = [line for line in rows if line.startswith(("differs ", "mended "))]
    assert len(rows) == len(states) == int(run.answer("print(len(found))"))
    results = printed(run.cell("neither-shows")).splitlines()
    assert results[0] == "[12.0]"
    assert [results[1].partition(":")[0], results[2]] == ["RuntimeError", "[12.0]"]


def promises_of_differences(run: Session) -> None:
    """Check that each pair of differences.ipynb still differs.

    A pair that no longer differs must be removed from the notebook.
    """
    pairs = [cell.id for cell in run.book.cells if cell.id.endswith("-pair")]
    shown = {pair: ast.literal_eval(run.result(pair)) for pair in pairs}
    assert len(shown) > 8
    assert [pair for pair, (eager, ours) in shown.items() if eager == ours] == []


def promises_of_index(run: Session) -> None:
    """Check the example of index.ipynb: one answer is right, one is wrong, and the progress lists all topics."""
    verdicts = [line for line in run.result("how-predict").splitlines() if line.startswith(("writes ", "shares "))]
    assert ["miss" in line for line in verdicts] == [False, False, True]
    assert {"storages", "wild"} <= {line.split()[0] for line in run.result("done-cell").splitlines()}
    assert run.answer("help(teach.exercises)").count("- One factor is `x`.") == 1


def promises_of_what_runs_eagerly(run: Session) -> None:
    """Check that the notebook prints a row of the catalogue."""
    assert printed(run.cell("setup")).startswith("changes-sizes-of-leaf\n")


#: Notebook → what to check after it ran.
def promises_of_gallery(run: Session) -> None:
    """Each method of a report that draws has one example, which displays a picture; the last one is empty."""
    examples = ("graph", "memory", "budgets", "storages", "timeline", "timings")
    methods = [run.cell(identifier).source.partition("plot_")[2] for identifier in examples]
    assert sorted(methods) == sorted(f"{name[5:]}()" for name in dir(Report) if name.startswith("plot_"))
    for identifier in (*examples, "empty"):
        (output,) = run.cell(identifier).outputs
        assert output.data["image/png"]
    assert run.answer("print(open('memory.pdf', 'rb').read(5))").strip() == "b'%PDF-'"
    assert run.answer("print(x[0].tolist(), x[1].tolist())").strip() == "[2.0, 2.0, 3.0] [8.0, 5.0, 6.0]"
    axes = "print([text.get_text() for text in writes.plot_timings().axes[0].texts])"
    assert run.answer(axes).strip() == "['There are no timings: nothing was measured.']"


PROMISES: dict[str, Callable[[Session], None]] = {
    "00_start.ipynb": promises_of_start,
    **PAGES,
    "differences.ipynb": promises_of_differences,
    "gallery.ipynb": promises_of_gallery,
    "index.ipynb": promises_of_index,
    "upstream_findings.ipynb": promises_of_upstream_findings,
    "what_runs_eagerly.ipynb": promises_of_what_runs_eagerly,
}


@pytest.mark.tier("full")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs_and_keeps_its_promises(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only cells with the tag for errors raise, and the tables contain the values that the prose promises."""
    with session(path, tmp_path, monkeypatch) as run:
        run.run_all()
        PROMISES[path.name](run)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_committed_notebooks_are_clean(path: Path) -> None:
    """A notebook in the repository has no outputs, no counts, named cells, and a kernel that every Jupyter has."""
    book = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count is not None] == []
    assert [cell.id for cell in book.cells if not re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id)] == []


def statements(source: str) -> list[ast.stmt]:
    """Return the statements of a cell that are no definitions and no imports."""
    left_out = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return [node for node in ast.parse(source).body if not isinstance(node, left_out)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_cells_are_short(path: Path) -> None:
    """One idea a cell: at most six lines of code, without the magic's own, and six statements beside definitions."""
    book = nbformat.read(path, as_version=4)
    code = {
        cell.id: [line for line in cell.source.splitlines() if not line.startswith("%%")]
        for cell in book.cells
        if cell.cell_type == "code"
    }
    if path.name == "11_be_the_compiler.ipynb":
        code = {identifier: statements("\n".join(lines)) for identifier, lines in code.items()}
    assert {identifier: len(lines) for identifier, lines in code.items() if len(lines) > 6} == {}


def test_every_notebook_has_promises() -> None:
    """No notebook is only executed: each has a function here that reads its tables."""
    assert sorted(PROMISES) == [path.name for path in NOTEBOOKS]


def test_a_cell_that_raises_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is no rubber stamp: an exception in a cell fails it, unless the cell is tagged for it."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})])
    nbformat.write(book, tmp_path / "book.ipynb")
    with session(tmp_path / "book.ipynb", tmp_path, monkeypatch) as run:
        run.run_all()
        with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
            run.answer("1 / 0")


def readme() -> str:
    """Return the README's section on the notebook."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text[text.index("\n## In a notebook\n") : text.index("\n## Use it\n")]


@pytest.mark.tier("quick")
def test_readme_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's cells run, and the second cell mutates the tensors that the README names."""
    sources = re.findall(r"^```ipython\n(.*?)\n```$", readme(), re.MULTILINE | re.DOTALL)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbformat.write(book, tmp_path / "readme.ipynb")
    with session(tmp_path / "readme.ipynb", tmp_path, monkeypatch) as run:
        run.run_all()
        rows = json.loads(run.answer("print(report.inputs.to_json(orient='records'))"))
        compiled = run.answer("print('CompiledBackward' in repr([loss.grad_fn, *loss.grad_fn.next_functions]))").strip()
        # Gradients between two results of a graph, and gradients of gradients.
        run.run(nbformat.v4.new_code_cell("%%aotcompile --backend eager --quiet\ny = model(x)\nz = (y * y).sum()"))
        between = "print(torch.equal(torch.autograd.grad(z, y, torch.ones_like(z), retain_graph=True)[0], 2 * y))"
        assert run.answer(between).strip() == "True"
        again = "print(torch.autograd.grad(z, model.weight, create_graph=True)[0].requires_grad)"
        assert run.answer(again).strip() == "True"
        # Switched off, the same cell runs eagerly.
        verdicts = []
        for switch in ("disable", "enable"):
            run.answer(f"import aotlab; aotlab.{switch}()")
            run.run(nbformat.v4.new_code_cell("%%aotcompile -o off --backend eager --quiet\nw = x * 2"))
            verdicts.append(run.answer("print(off.verdict)").partition(":")[0])
        assert verdicts == ["Nothing was compiled", "Compiled line 2"]
    named = re.search(r"mutated \(here `(\S+)` and\s`(\S+)`\)", readme())
    assert named is not None
    assert (names(rows, mutated=True), compiled) == (set(named.groups()), "True")


def test_readme_options() -> None:
    """The list has the magic's options, all of them and no others, with the choices that they have."""
    magic = pytest.importorskip("aotlab.notebook.magic")
    options = (ROOT / "aotlab" / "notebook" / "README.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`-.*?) \|", options, re.MULTILINE)
    words = [re.split(r"[ ,]+", cell.replace("`", "").replace(" or ", " ")) for cell in cells]
    flags = {word for row in words for word in row if word.startswith("-")}
    assert flags == {"-o", *magic.FLAGS} - {"--output"}
    choices = {row[0]: {word.partition(":")[0] for word in row[1:]} for row in words if row[0] in magic.CHOICES}
    assert choices == {flag: set(values) for flag, values in magic.CHOICES.items()}
