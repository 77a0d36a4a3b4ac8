"""The graphs of a cell: served again, checked against eager, and, where they fail, eager's errors and effects."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("IPython")

import torch
from IPython.core.interactiveshell import InteractiveShell
from torch.utils import _pytree as pytree

import aotlab
from aotlab import events
from aotlab.report.verdict import verdict
from aotlab.runtime import runtime_stage as runtime
from tests.mutants import MUTANTS
from tests.notebook.plain_shells import cell, compiled, execute, failing, printed

SETUP = """
import torch
torch.manual_seed(0)
x = torch.arange(6.0).reshape(2, 3)
w = torch.ones(3, requires_grad=True)
h = w * 1
table = torch.nn.Embedding(4, 2)
"""

#: Where aotlab lies; a checkout or an environment may be called so, too.
PACKAGE = os.path.dirname(aotlab.__file__) + os.sep


def compilations(run: Callable[[], object]) -> int:
    """Count the compilations that begin while ``run`` runs."""
    begun: list[events.Event] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.CompileStarted):
            begun.append(event)

    with events.listen(hear):
        run()
    return len(begun)


# --- again -------------------------------------------------------------------------------------------------------


def test_an_unchanged_cell_compiles_nothing(shell: InteractiveShell) -> None:
    """The second run uses the first run's graphs. The report and the verdict say that they are reused."""
    text = cell("a = x + 1\nprint(end='')\nb = [row.sum() for row in a]\nfor _ in range(40):\n    x.add_(1)")
    first = compilations(lambda: execute(shell, text))
    assert first >= 2
    assert {False} == {graph.reused for frame in shell.user_ns["report"].frames for graph in frame.graphs}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compilations(lambda: execute(shell, text)) == 0
    assert graphs == torch._dynamo.utils.counters["stats"]["unique_graphs"]
    report = shell.user_ns["report"]
    assert {True} == {graph.reused for frame in report.frames for graph in frame.graphs}
    assert report.verdict.startswith("Nothing new was compiled: ")
    assert len(report.recompiles) == 0
    assert shell.user_ns["x"][0, 0].item() == 80.0


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("y = x + 1\n", "--quiet --no-verify"),
        ("y = x + 1\n", "--quiet --name other"),
        ("y = x + 2\n", "--quiet"),
        ("y = x + 1  # a remark\n", "--quiet"),
    ],
)
def test_a_changed_cell_compiles_again(shell: InteractiveShell, body: str, options: str) -> None:
    """A cell with another option or another text is a new cell with a separate report."""
    execute(shell, cell("y = x + 1\n"))
    first = shell.user_ns["report"]
    assert compilations(lambda: execute(shell, cell(body, options))) == 1
    assert first.identifier != shell.user_ns["report"].identifier
    assert [graph.reused for frame in shell.user_ns["report"].frames for graph in frame.graphs] == [False]


def test_other_tensors_are_a_reason_to_compile_again(shell: InteractiveShell) -> None:
    """An unchanged cell with an input of another shape is compiled again, and the report gives the reason."""
    text = cell("y = x + 1\n")
    execute(shell, text)
    execute(shell, "x = torch.ones(5)")
    assert compilations(lambda: execute(shell, text)) == 1
    (reason,) = shell.user_ns["report"].recompiles["reason"]
    assert "x" in reason
    assert shell.user_ns["y"].tolist() == [2.0] * 5
    assert compilations(lambda: execute(shell, text)) == 0


# --- what is not equal to eager ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mutant", "body"),
    [
        ("epilogue skipped", "x.add_(1)\nloss = (x * w).sum()"),
        ("wrong mutated value", "x.add_(1)\nloss = (x * w).sum()"),
        ("mutation hidden from autograd", "h.mul_(2)\nloss = h.sum()"),
    ],
)
def test_a_broken_engine_changes_no_result(shell: InteractiveShell, mutant: str, body: str) -> None:
    """With a bug in the engine, the cell's results are eager's.

    The report lists the differences and says that the graph is not used.
    """
    (broken,) = (each for each in MUTANTS if each.name == mutant)
    expected: dict[str, Any] = {}
    exec(SETUP + body, expected)
    with broken.installed():
        execute(shell, cell(body))
    for name in ("x", "loss", "h"):
        torch.testing.assert_close(shell.user_ns[name], expected[name], rtol=0, atol=0)
    report = shell.user_ns["report"]
    assert verdict(report.report()).state == "different"
    refusals = [refusal.message for frame in report.frames for refusal in frame.refusals]
    assert any(message.startswith("its compiled form differs from eager") for message in refusals)
    assert report.verdict.startswith(("NOT equal to eager, so not used: ", "Nothing was compiled: "))
    assert not report.verification["equal"].all()


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every compiled form add one to its first result."""
    original = runtime.run

    def sabotaged(*args: Any) -> Any:
        record, run = original(*args)

        def run_wrong(*given: Any) -> Any:
            result = run(*given)
            (first, *rest), structure = pytree.tree_flatten(result)
            return pytree.tree_unflatten([first + 1, *rest], structure) if isinstance(first, torch.Tensor) else result

        return record, run_wrong

    monkeypatch.setattr(runtime, "run", sabotaged)


def test_a_wrong_graph_is_not_used(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong graph is never used, also in later runs and in a loop.

    If other graphs are right, the verdict still begins with the difference.
    """
    execute(shell, cell("fine = x + 1"))
    wrong(monkeypatch)
    text = cell("for _ in range(40):\n    x.add_(1)\n    y = x * 2")
    for run in (1, 2):
        execute(shell, text)
        assert 40.0 * run == shell.user_ns["x"][0, 0].item()
        assert 80.0 * run == shell.user_ns["y"][0, 0].item()
        report = shell.user_ns["report"]
        assert verdict(report.report()).state == "different"
        assert [graph for frame in report.frames for graph in frame.graphs if graph.calls] == []


def test_without_verification_it_is(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without verification, the wrong result reaches the cell, and the verdict says that nothing was compared."""
    wrong(monkeypatch)
    execute(shell, cell("y = x * 2", "--quiet --no-verify"))
    assert shell.user_ns["y"][0, 0].item() == 1.0
    assert "not verified" in shell.user_ns["report"].verdict


# --- errors in compiled code -------------------------------------------------------------------------------------

#: The third round reads a row that does not exist.
LOOP = """\
for index in indices:
    x.add_(1)
    row = table(index)
    x.mul_(2)
    print('round')
    seen.append(row.sum().item())
"""


def test_an_error_in_the_third_round(shell: InteractiveShell) -> None:
    """A graph that served two rounds fails in the third: bindings, tensors, prints and the error are eager's."""
    indices = "indices = [torch.tensor([0]), torch.tensor([1]), torch.tensor([9]), torch.tensor([2])]\nseen = []\n"
    expected: dict[str, Any] = {}
    exec(SETUP + indices, expected)
    with pytest.raises(IndexError) as caught:
        exec(LOOP.replace("print('round')", "pass"), expected)
    execute(shell, indices)
    error = failing(shell, cell(LOOP))
    assert (type(caught.value), str(caught.value)) == (type(error), str(error))
    assert compiled(shell.user_ns["report"])
    assert expected["seen"] == shell.user_ns["seen"]
    for name in ("x", "row", "index"):
        torch.testing.assert_close(shell.user_ns[name], expected[name], rtol=0, atol=0)
    lines = []
    traceback = error.__traceback__
    while traceback is not None:
        lines.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    assert lines[0][1] == 4
    assert [file for file, _ in lines if file.startswith(PACKAGE) or "_dynamo" in file] == []


def test_random_numbers_after_an_error(shell: InteractiveShell) -> None:
    """A failing graph draws its random numbers only once: the later numbers equal eager's."""
    body = "noise = torch.rand(2)\nrow = table(index) + torch.rand(1)"
    execute(shell, "index = torch.tensor([1])")
    execute(shell, cell(body))
    execute(shell, "index = torch.tensor([9])\ntorch.manual_seed(5)")
    failing(shell, cell(body))
    after = torch.rand(3)
    expected: dict[str, Any] = {}
    exec(SETUP + "index = torch.tensor([9])\ntorch.manual_seed(5)", expected)
    with pytest.raises(IndexError):
        exec(body, expected)
    torch.testing.assert_close(after, torch.rand(3), rtol=0, atol=0)
    torch.testing.assert_close(shell.user_ns["noise"], expected["noise"], rtol=0, atol=0)


def test_an_error_of_the_compiled_form_alone(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user does not see an error that only the compiled form raises.

    Eager's result is used, and the report has a note.
    """
    original = runtime.run

    def failing_run(*args: Any) -> Any:
        record, _run = original(*args)

        def fail(*_given: Any) -> Any:
            raise RuntimeError("a kernel is broken")

        return record, fail

    monkeypatch.setattr(runtime, "run", failing_run)
    shown, _ = printed(shell, cell("x.add_(1)\ny = x * 2", "--quiet --no-verify"))
    assert shown == ""
    assert shell.user_ns["y"][0, 0].item() == 2.0
    assert shell.user_ns["x"][0, 0].item() == 1.0
    assert any("a kernel is broken" in note for note in shell.user_ns["report"].notes)
