"""The cell's real Python, run on copies beside the compiled code: its findings, and the cells without this check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

import pytest
import torch

pytest.importorskip("IPython")


from aotlab.notebook import cell_compiler
from aotlab.notebook.cell_compiler import CellCompiler
from aotlab.notebook.eager_run import run_on_copies
from aotlab.report import Report
from aotlab.report.counts import summary
from aotlab.report.html import fragment
from aotlab.report.verdict import compared_sentence
from tests.notebook.plain_shells import execute, plain_shell

SETUP = """
import aotlab
import numpy
import torch
from torch import nn
x = torch.arange(12.0).view(3, 4)
w = torch.ones(4)
seen = []

def scaled(t):
    return t * w

def loud(t):
    print("loud")
    return t + 1

def counted(t):
    seen.append(1)
    return t + 1

def later(t):
    yield t

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
    def forward(self, t):
        return torch.relu(self.norm(self.linear(t)))

class Loud(Net):
    def forward(self, t):
        print("loud")
        return super().forward(t)

class Kept(Net):
    def forward(self, t):
        seen.append(t)
        return super().forward(t)

class Note:
    def write(self, t):
        print("note")

note, logger = Note(), __import__("logging").getLogger("t")
net, noisy, kept = Net(), Loud(), Kept()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scheduled = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(scheduled, 1)
wrapped_step = scheduled.step
hooked = Net()
hooked.register_forward_hook(lambda *given: print("hooked"))
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a fresh shell with some variables, whose module is the main one."""
    shell = plain_shell()
    monkeypatch.setitem(sys.modules, "__main__", shell.user_module)
    execute(shell, SETUP)
    yield shell
    shell.run_line_magic("unload_ext", "aotlab")


def run(shell: Any, text: str, *later: str, options: str = "--backend eager --frontend dynamo") -> Report:
    """Run a cell under the magic, others after it, and return its report."""
    shell.run_cell(f"%%aotcompile -o report {options} --quiet\n{text}").raise_error()
    for each in later:
        shell.run_cell(each).raise_error()
    found = shell.user_ns["report"]
    report: Report = found if isinstance(found, Report) else found.report()
    return report


def compared(report: Report) -> dict[str, str]:
    """Return for each compiled part the kind of run that it was compared with."""
    assert report.cell is not None
    return {f"{part.first_line}-{part.last_line}": part.compared for part in report.cell.parts if part.compared}


def captures_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Dynamo capture an addition of 2 wherever the cell adds 1."""
    capture = CellCompiler._capture

    def wrong(self: Any, graph: torch.fx.GraphModule, inputs: Any, part: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            node.args = tuple(2 if each == 1 and type(each) is int else each for each in node.args)
        graph.recompile()
        return capture(self, graph, inputs, part)

    monkeypatch.setattr(CellCompiler, "_capture", wrong)


def test_a_capture_that_is_not_what_python_does_is_found_and_not_used(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled graph is equal to the captured one; only Python tells that both are wrong, and its result counts."""
    captures_two(monkeypatch)
    shell.user_ns["y"] = torch.full((4,), 5.0)
    report = run(shell, "x.add_(1)\ny = x * y")
    assert shell.user_ns["x"][0, 0] == 1
    assert shell.user_ns["y"][0, 0] == 5
    different = [row for row in report.verification_rows if not row.equal]
    assert different
    assert {row.against for row in different} == {"python"}
    assert "NOT equal to eager" in report.verdict
    assert report.cell is not None
    (part,) = report.cell.parts
    assert part.how == "eager"
    assert part.reason.startswith("its compiled form differs from eager: `x` differs in 12 of 12 elements")


def test_without_python_such_a_capture_is_not_found(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with the captured graph alone is reported as such."""
    captures_two(monkeypatch)
    monkeypatch.setattr(cell_compiler, "run_on_copies", lambda *args, **kwargs: None)
    report = run(shell, "y = x + 1")
    assert all(row.equal for row in report.verification_rows)
    assert compared(report) == {"2-2": "graph"}
    assert "verified: equal to the captured graph on " in report.verdict
    assert compared_sentence(report) == "line 2 compared with the captured graph"


def test_what_was_compared_with_what(shell: Any) -> None:
    """The report tells by lines, in its table, in its first line and on its page."""
    report = run(shell, "y = scaled(x) + torch.rand(4)\nprint(y.shape)\nz = loud(y)")
    assert compared(report) == {"2-2": "python", "4-4": "graph"}
    sentence = "line 2 compared with Python, line 4 with the captured graph"
    assert compared_sentence(report) == sentence
    assert sentence in fragment(report)
    assert "; line 4 to the captured graph" in report.verdict
    assert set(report.verification["against"]) == {"python", "graph"}
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("y = net(x)\nloss = y.sum()", "python"),
        ("loss = net(x).sum()\nopt.step()", "python"),
        ("v = x[0]\nv.mul_(2)", "python"),
        ("parts = [t * 2 for t in x]\ny = torch.stack(parts)", "python"),
        ("y = noisy(x)", "graph"),
        ("y = hooked(x)", "graph"),
        ("y = kept(x)", "graph"),
        ("m = aotlab.compile(net, backend='eager')\ny = m(x)", "python"),
        ("m = aotlab.compile(hooked, backend='eager')\ny = m(x)", "graph"),
        ("m = aotlab.compile(net, backend='eager')\nm.register_forward_hook(print)\ny = m(x)", "graph"),
        ("y = counted(x)", "python"),  # its list is copied
        ("y = loud(x)", "graph"),
    ],
)
def test_python_runs_twice_only_where_that_shows_nowhere(shell: Any, text: str, expected: str) -> None:
    """Torch computations are run on copies. Code that prints, keeps or counts is not run twice."""
    report = run(shell, text)
    assert all(row.equal for row in report.verification_rows)
    assert set(compared(report).values()) == {expected}
    assert len(shell.user_ns["seen"]) == text.count("kept(") + text.count("counted(")


def test_gradients_are_compared_with_the_captured_graph(shell: Any) -> None:
    """Python's run ends before the backward, so the report says which run the gradients were compared with."""
    report = run(shell, "loss = net(x).sum()", "loss.backward()")
    assert compared_sentence(report) == "line 2 compared with Python, gradients with the captured graph"
    assert {row.against for row in report.verification_rows if row.kind == "gradient"} == {"graph"}
    report = run(shell, "loss = net(x).sum()", "loss.backward()", options="--backend eager")
    assert compared_sentence(report) == "line 2 compared with Python"
    assert {row.against for row in report.verification_rows if row.kind == "gradient"} == {"python"}
    report = run(
        shell, "def f(t):\n    return t.sin()", "f(x.requires_grad_())", options="--backend eager --frontend direct"
    )
    assert compared_sentence(report) == "lines 2–3 compared with Python"
    assert {row.against for row in report.verification_rows if row.kind == "gradient"} == {"python"}


def test_nothing_is_compared_where_nobody_asks(shell: Any) -> None:
    """Without verification, the lines say that nothing was compared."""
    report = run(shell, "y = x + 1", options="--backend eager --no-verify")
    assert compared(report) == {"2-2": "nothing"}
    assert compared_sentence(report) == "line 2 compared with nothing"


def test_the_report_tells_the_tolerance_and_the_largest_difference(shell: Any) -> None:
    """On the eager backend, values are equal bit for bit.

    On Inductor, the report gives the tolerance and the largest difference.
    """
    report = run(shell, "y = x.sin()")
    assert summary(report).tolerance == "tolerance: bit for bit"
    shell.run_cell("images = torch.rand(2, 3, 32, 32)\nstack = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))")
    report = run(shell, "loss = stack(images).square().mean()\nloss.backward()", options="")
    told = summary(report).tolerance
    assert told.startswith("tolerance: assert_close's defaults")
    assert "; largest difference " in told
    assert told in unescape(fragment(report))
    values = report.verification[report.verification["tolerance"] != ""]
    assert set(values["kind"]) >= {"value", "gradient"}
    assert 0 < values["absolute"].max() < 1e-4
    assert Report.from_json(report.to_json()) == report


def test_functions_are_compared_call_by_call(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function's call that is compiled is compared with its Python, and a wrong one returns Python's result."""
    report = run(shell, "def f(t, s=1.0):\n    return t * s", "f(x)\nf(x, 2.0)")
    assert compared(report) == {"2-3": "python"}
    captures_two(monkeypatch)
    report = run(shell, "def g(t):\n    return t + 1", "y = g(x)\nz = g(x)")
    assert shell.user_ns["y"][0, 0] == shell.user_ns["z"][0, 0] == 1
    assert "NOT equal to eager" in report.verdict


def test_what_is_rounded_otherwise_is_no_difference(shell: Any) -> None:
    """Of Inductor's values those count as equal that its graphs' comparison lets pass."""
    report = run(shell, "y = net(x).exp().softmax(-1)\ntotal = float(y.sum())", options="--backend inductor")
    assert all(row.equal for row in report.verification_rows)
    assert "python" in compared(report).values()


def eager_run_of(shell: Any, text: str, head: str = "t") -> object:
    """Rehearse a function that returns the expression ``text``."""
    namespace = shell.user_ns
    exec(f"def outside({head}):\n    return {text}", namespace)
    function = namespace.pop("outside")
    return run_on_copies(function, namespace, (torch.ones(4, 4, requires_grad=True),), grad_mode=True, exact=True)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("print(t)", "t"), ("t + len(input())", "t"), ("[open('/dev/null'), t]", "t"), ("globals()", "t"),
        ("t.sum().backward()", "t"), ("torch.manual_seed(0)", "t"), ("torch.set_grad_enabled(True)", "t"),
        ("t.register_hook(len)", "t"), ("logger.warning('t')", "t"), ("note.write(t)", "t"),
        ("torch.sys.stdout.write('t')", "t"), ("seen.append(t)", "t, seen=seen"), ("loud(t)", "t"),
        ("noisy(t)", "t"), ("hooked(t)", "t"), ("kept(t)", "t"), ("(yield t)", "t"), ("Net()", "t"),
        ("setattr(net, 'a', 1)", "t"), ("numpy.ones(3)", "t"), ("wrapped_step()", "t"),
    ],
)  # fmt: skip
def test_code_that_shows_that_it_runs_twice(
    shell: Any, text: str, head: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever prints, reads, keeps, sets something or makes objects of the user's is not run on copies."""
    monkeypatch.setattr("builtins.input", lambda: "")
    capsys.readouterr()
    assert eager_run_of(shell, text, head) is None
    assert not shell.user_ns["seen"]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("text", ["net(t)", "scaled(t)", "counted(t)", "torch.stack([t, t]).sum(0)", "net.norm(t) + w"])
def test_code_that_does_not(shell: Any, text: str) -> None:
    """Code that only computes with torch and only changes copied objects is run on copies.

    The user's objects stay as they are.
    """
    assert eager_run_of(shell, text) is not None
    assert not shell.user_ns["seen"]
