"""The places where the report says that Dynamo stopped.

They are lines of the cell and of functions that it calls, and the reasons are in our words.
"""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell

from aotlab.report import Report
from aotlab.report.counts import summary

SETUP = """\
import torch
x = torch.randn(8, 4, requires_grad=True)
def helper(t):
    print(end="")
    if t.sum() > 1e6:
        t = t + 1
    return t * 2
def outer(t):
    return helper(t + 1).sin()
"""
PRINTED, BRANCHED = "`print()` is called", "a branch depends on the value of a tensor"
IN_HELPER = [("In [1], line 4", PRINTED), ("In [1], line 5", BRANCHED)]


def execute(shell: InteractiveShell, text: str, options: str = "") -> Report:
    """Run a cell, and return its report."""
    shell.run_cell(f"%%aotcompile -o report --backend eager --quiet {options}\n{text}").raise_error()
    return shell.user_ns["report"].report()


CELLS = {
    "a branch": ("y = x * 2\nif (y @ y.t()).sum() > 1e6:\n    y = y + 1\nz = y.cos()", [(3, "line 3", BRANCHED)]),
    "a call before which there is nothing to compile": ("y = helper(x)", [(2, *each) for each in IN_HELPER]),
    "a call of a call": ("y = x.sin()\nz = outer(y)", [(3, *each) for each in IN_HELPER]),
    "the same function at two lines": (
        "y = helper(x)\nz = helper(y.cos())",
        [*((2, *each) for each in IN_HELPER), (3, *IN_HELPER[0])],
    ),
    "a function of the cell": (
        "def own(t):\n    t = t + 1\n    print(end='')\n    return t * 2\n\ny = own(x)",
        [(7, "line 4", PRINTED)],
    ),
    "a block that Dynamo cannot go on with": (
        "with torch.no_grad():\n    y = x * 2\n    z = helper(y)",
        [(4, *each) for each in IN_HELPER],
    ),
}


@pytest.mark.parametrize("name", list(CELLS))
def test_breaks_stand_at_their_lines(shell: InteractiveShell, name: str) -> None:
    """Each break is reported once, however often Dynamo tried, and again if the cell runs unchanged."""
    text, expected = CELLS[name]
    for _ in range(2):
        report = execute(shell, text)
        assert [(row.cell_line, row.where, row.words) for row in report.graph_break_rows] == expected
        line, where, words = expected[0]
        place = f"line {line} ({words}" + ("" if where == f"line {line}" else f", at {where}")
        assert f"{len(expected)} graph break" in report.verdict
        assert f"at {place})" in report.verdict
    assert all(row.line is not None and row.line.code for row in report.graph_break_rows)


def test_inference_mode_is_no_break(shell: InteractiveShell) -> None:
    """The body of an inference-mode block is compiled.

    So are the code after it, and functions that enter inference mode.
    """
    shell.run_cell("@torch.inference_mode()\ndef predict(t):\n    return t.sin() * 2").raise_error()
    report = execute(shell, "with torch.inference_mode():\n    y = x.cos()\nz = y + 1\nw = predict(x)")
    assert [frame.name for frame in report.frames] == ["line 3", "line 4", "line 5"]
    assert report.graph_break_rows == ()
    assert [frame.refusals for frame in report.frames] == [()] * 3
    y, z, w = (shell.user_ns[name] for name in "yzw")
    assert (y.is_inference(), z.is_inference(), w.is_inference()) == (True, False, True)


def test_what_is_left_of_a_function_goes_by_its_name(shell: InteractiveShell) -> None:
    """The rest of a function after a break is called as the function is, not as its caller's lines."""
    report = execute(shell, "y = x.sin()\nz = helper(y)\nv = z + 1")
    assert [frame.name for frame in report.frames] == ["line 2", "helper", "helper (2)", "lines 3–4"]


def test_functions_that_call_each_other(shell: InteractiveShell) -> None:
    """If one compiled function calls another after a break, Dynamo captures none of our own code."""
    first = "def first(t):\n    t = second(t + 1)\n    return t.sin()\n\n"
    text = f"{first}def second(t):\n    print(end='')\n    return t * 2"
    shell.run_cell(f"%%aotcompile -o report --backend eager --quiet\n{text}").raise_error()
    shell.run_cell("y = first(x)").raise_error()
    report = shell.user_ns["report"].report()
    assert [(row.cell_line, row.where, row.words) for row in report.graph_break_rows] == [(3, "line 7", PRINTED)]
    assert [frame.name for frame in report.frames] == ["first", "second", "first (2)"]
    assert [frame.refusals for frame in report.frames] == [()] * 3
    assert torch.equal(shell.user_ns["y"], ((shell.user_ns["x"] + 1) * 2).sin())


def test_breaks_outside_of_cells(shell: InteractiveShell) -> None:
    """A recording of `torch.compile` reports the same breaks, and gives the rest of a function the function's name."""
    shell.run_cell(
        "from aotlab.report import Report\n"
        "with Report.record() as report:\n"
        "    torch.compile(outer, backend='aotlab', options={'compiler': 'eager'})(x)"
    ).raise_error()
    report = shell.user_ns["report"].report()
    assert [(row.where, row.words) for row in report.graph_break_rows] == IN_HELPER
    assert [frame.name for frame in report.frames] == [
        "outer",
        "helper after line 4",
        "helper after line 5",
        "outer after line 9",
    ]


OPTIMIZER = """\
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
"""
ROUNDS = """\
for i in range({}):
    model(x).sum().backward()
    optimizer.step()
    schedule.step()
"""


def test_calls_past_the_recompile_limit_are_eager_calls(shell: InteractiveShell) -> None:
    """Such calls are counted, the report names the limit and a remedy, and later cells are not affected."""
    shell.run_cell(OPTIMIZER).raise_error()
    limit = torch._dynamo.config.recompile_limit
    report = execute(shell, ROUNDS.format(limit + 3), "--frontend dynamo")
    calls = {frame.name: (frame.calls.total, frame.calls.compiled, frame.calls.eager) for frame in report.frames}
    assert calls["line 4"] == (limit + 3, limit, 3)
    assert f"3 of {limit + 3} calls of line 4 ran eagerly, past Dynamo's recompile limit." in report.verdict
    (told,) = [fact.sentence for fact in summary(report).facts if fact.key == "limit"]
    assert "pass it as a tensor" in told
    assert "--dynamic" in told
    assert "torch._dynamo.reset()" in told
    shell.run_cell(OPTIMIZER).raise_error()
    execute(shell, ROUNDS.format(4), "--frontend dynamo --dynamic")
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        frame = next(each for each in shell.user_ns["report"].report().frames if each.name == "line 4")
        assert (len(frame.graphs), frame.calls.compiled, frame.calls.eager) == (1, 4, 0)  # the advice, followed
        shell.run_cell(OPTIMIZER).raise_error()
        report = execute(shell, ROUNDS.format(4), "--frontend dynamo")
        assert {frame.name: frame.calls.compiled for frame in report.frames}["line 4"] == 4


def test_a_function_of_the_cell_past_the_limit(shell: InteractiveShell) -> None:
    """The calls of such a function are counted separately as well."""
    text = "def f(t, mode):\n    return t.sin() if mode != 'a' else t.cos()"
    report = execute(shell, text)
    shell.run_cell("for mode in 'abcdefghijkl':\n    y = f(x, mode)").raise_error()
    frames = shell.user_ns["report"].report().frames
    assert [(frame.calls.total, frame.calls.compiled) for frame in frames] == [(8, 8), (4, 4)]  # traced, then captured
    report = execute(shell, text, "--frontend dynamo")
    shell.run_cell("for mode in 'abcdefghijkl':\n    y = f(x, mode)").raise_error()
    calls = shell.user_ns["report"].report().frames[0].calls
    assert (report.frames, calls.total, calls.compiled, calls.eager) == ((), 12, 8, 4)
