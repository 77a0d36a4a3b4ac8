"""`aotlab.disable()`: everything runs eagerly with a notice, and `aotlab.enable()` restores compilation at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("IPython")

import torch
from IPython.core.interactiveshell import InteractiveShell

import aotlab
from aotlab import events
from aotlab.frontends.dynamo_frontend import backend
from aotlab.report.verdict import verdict
from tests.notebook.plain_shells import cell, compiled, execute

FRONTENDS = ["dynamo", "direct"]

SETUP = "import torch, aotlab\nx = torch.ones(3)"


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    yield
    aotlab.enable()


def started() -> tuple[list[events.Event], events.Listener]:
    """Make a listener that keeps the compilations that begin."""
    heard: list[events.Event] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.CompileStarted):
            heard.append(event)

    return heard, hear


def test_a_cell_runs_eagerly_and_says_so(shell: InteractiveShell) -> None:
    """Nothing is compiled, the results are eager's, and verdict and parts name `aotlab.disable`."""
    aotlab.disable()
    heard, hear = started()
    with events.listen(hear):
        execute(shell, cell("y = x * 2\nprint(end='')\nx.add_(1)"))
    assert heard == []
    assert [2.0] * 3 == shell.user_ns["y"].tolist() == shell.user_ns["x"].tolist()
    report = shell.user_ns["report"]
    assert compiled(report) == []
    assert verdict(report.report()).state == "nothing"
    assert report.verdict.startswith("Nothing was compiled: ")
    assert "aotlab.disable()" in report.verdict
    eager = [part for part in report.cell.parts if part.how == "eager"]
    assert [part.first_line for part in eager] == [2, 4]
    assert {"aotlab is switched off: aotlab.disable() was called"} == {part.reason for part in eager}


def test_an_unchanged_cell_compiles_nothing_when_it_is_switched_on_again(shell: InteractiveShell) -> None:
    """After on, off, on, the third run uses the entry that the first run compiled."""
    text = cell("y = x * 2")
    execute(shell, text)
    assert compiled(shell.user_ns["report"]) == ["line 2"]
    aotlab.disable()
    execute(shell, "y = None")
    execute(shell, text)
    assert shell.user_ns["y"].tolist() == [2.0] * 3
    report = shell.user_ns["report"]
    assert report.cell.parts[0].how == "eager"
    assert report.verdict.startswith("Nothing was compiled: ")
    assert "aotlab.disable()" in report.verdict
    aotlab.enable()
    heard, hear = started()
    with events.listen(hear):
        execute(shell, text)
    assert heard == []
    report = shell.user_ns["report"]
    assert [graph.reused for frame in report.frames for graph in frame.graphs] == [True]
    assert report.cell.parts[0].how == "compiled"


def test_a_cell_that_first_ran_while_off_is_compiled_when_on(shell: InteractiveShell) -> None:
    """Having run eagerly once is no reason to do so for ever."""
    text = cell("y = x * 2")
    aotlab.disable()
    execute(shell, text)
    aotlab.enable()
    execute(shell, text)
    assert compiled(shell.user_ns["report"]) == ["line 2"]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_functions_of_a_cell(shell: InteractiveShell, frontend: str) -> None:
    """A compiled function runs eagerly while compilation is off, and its report says so.

    Afterwards its entry is used again without compiling.
    """
    execute(shell, cell("def double(v):\n    return v * 2", f"--quiet --frontend {frontend}"))
    report = shell.user_ns["report"]
    execute(shell, "y = double(x)")
    assert [frame.calls.compiled for frame in report.frames] == [1]
    aotlab.disable()
    execute(shell, "z = double(x), double(torch.ones(7))")
    assert shell.user_ns["z"][1].tolist() == [2.0] * 7
    assert [part.how for part in report.cell.parts] == ["eager"]
    assert "aotlab.disable()" in report.cell.parts[0].reason
    assert [frame.calls.compiled for frame in report.frames] == [1]
    aotlab.enable()
    heard, hear = started()
    with events.listen(hear):
        execute(shell, "z = double(x)")
    assert heard == []
    assert [frame.calls.compiled for frame in report.frames] == [2]
    assert [part.how for part in report.cell.parts] == ["compiled"]


def test_switching_off_within_a_cell(shell: InteractiveShell) -> None:
    """It holds from the next region on."""
    execute(shell, cell("y = x * 2\nprint(aotlab.disable())\nz = y + 1\nprint(aotlab.enable())\nw = z + 1"))
    assert shell.user_ns["w"].tolist() == [4.0] * 3
    how = {part.first_line: part.how for part in shell.user_ns["report"].cell.parts}
    assert (how[2], how[4], how[6]) == ("compiled", "eager", "compiled")


def test_the_magic_does_not_touch_the_switch(shell: InteractiveShell) -> None:
    """A cell neither switches compilation on nor off."""
    aotlab.disable()
    execute(shell, cell("y = x * 2"))
    assert not aotlab.config.enabled


# --- outside of notebooks ----------------------------------------------------------------------------------------


def test_compile() -> None:
    """A function of `aotlab.compile` runs the function itself, and its entries serve again afterwards."""
    plain = aotlab.compile(lambda v: v * 2, backend="eager")
    x = torch.ones(3)
    plain(x)
    (entry,) = plain.entries
    aotlab.disable()
    assert plain(x).tolist() == [2.0] * 3
    assert plain(torch.ones(5)).tolist() == [2.0] * 5
    assert (entry.calls, plain.calls.eager, plain.calls.total) == (1, 2, 3)
    assert (entry,) == plain.entries
    aotlab.enable()
    plain(x)
    assert ((entry,), 2) == (plain.entries, entry.calls)


def test_a_compiled_module() -> None:
    """The same holds for modules, gradients included."""
    module = torch.nn.Linear(3, 2)
    ours = aotlab.compile(module, backend="eager")
    x = torch.ones(4, 3)
    ours(x).sum().backward()
    expected = module.weight.grad
    assert expected is not None
    module.zero_grad()
    aotlab.disable()
    result = ours(x)
    assert "AddmmBackward" in str(result.grad_fn)
    result.sum().backward()
    torch.testing.assert_close(module.weight.grad, expected)
    aotlab.enable()
    assert len(ours.compiled.entries) == 1
    assert ours.compiled.calls.eager == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamos_backend() -> None:
    """``torch.compile(backend="aotlab")``: Dynamo's graphs run eagerly while it is off, and are compiled when on."""
    function = torch.compile(lambda v: v * 2, backend=backend, options={"compiler": "eager"})
    heard, hear = started()
    aotlab.disable()
    with events.listen(hear):
        assert function(torch.ones(3)).tolist() == [2.0] * 3
        assert heard == []
        aotlab.enable()
        assert function(torch.ones(3)).tolist() == [2.0] * 3
        assert len(heard) == 1
        aotlab.disable()
        assert function(torch.ones(3)).tolist() == [2.0] * 3
        aotlab.enable()
        assert function(torch.ones(3)).tolist() == [2.0] * 3
        assert len(heard) == 1
