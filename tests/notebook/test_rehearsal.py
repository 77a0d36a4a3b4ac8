"""The cell's real Python, run on copies beside what was compiled: what it finds, and where it is not done."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell

from aotlab.notebook import compiled_cell
from aotlab.notebook.compiled_cell import CompiledCell
from aotlab.notebook.rehearsal import rehearse
from aotlab.report import Report
from aotlab.report.html import fragment
from aotlab.report.verdict import compared_sentence

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
hooked = Net()
hooked.register_forward_hook(lambda *given: print("hooked"))
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a fresh shell with some variables, whose module is the main one."""
    torch._dynamo.reset()
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    shell.user_module, shell.user_ns = module, vars(module)
    shell.init_user_ns()
    shell.run_cell(f"%load_ext aotlab\n{SETUP}").raise_error()
    yield shell
    shell.run_cell("%unload_ext aotlab").raise_error()


def run(shell: Any, text: str, *later: str, options: str = "--backend eager") -> Report:
    """Run a cell under the magic, others after it, and return its report."""
    shell.run_cell(f"%%aotcompile -o report {options} --quiet\n{text}").raise_error()
    for each in later:
        shell.run_cell(each).raise_error()
    found = shell.user_ns["report"]
    report: Report = found if isinstance(found, Report) else found.report()
    return report


def compared(report: Report) -> dict[str, str]:
    """Return with what each compiled stretch was compared."""
    assert report.cell is not None
    return {f"{part.first_line}-{part.last_line}": part.compared for part in report.cell.parts if part.compared}


def captures_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Dynamo capture an addition of 2 wherever the cell adds 1."""
    capture = CompiledCell._capture

    def wrong(self: Any, graph: torch.fx.GraphModule, part: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            node.args = tuple(2 if each == 1 and type(each) is int else each for each in node.args)
        graph.recompile()
        return capture(self, graph, part)

    monkeypatch.setattr(CompiledCell, "_capture", wrong)


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
    """What the captured graph alone can show is said to be no more than that."""
    captures_two(monkeypatch)
    monkeypatch.setattr(compiled_cell, "rehearse", lambda *args, **kwargs: None)
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
    """Computations of torch's are run on copies; what prints, keeps or counts is not."""
    report = run(shell, text)
    assert all(row.equal for row in report.verification_rows)
    assert set(compared(report).values()) == {expected}
    assert len(shell.user_ns["seen"]) == text.count("kept(") + text.count("counted(")


def test_gradients_are_compared_with_the_captured_graph(shell: Any) -> None:
    """Python's run ends before the backward, so the report says of the gradients what they were compared with."""
    report = run(shell, "loss = net(x).sum()", "loss.backward()")
    assert compared_sentence(report) == "line 2 compared with Python, gradients with the captured graph"
    assert {row.against for row in report.verification_rows if row.kind == "gradient"} == {"graph"}
    report = run(
        shell, "def f(t):\n    return t.sin()", "f(x.requires_grad_())", options="--backend eager --frontend direct"
    )
    assert compared_sentence(report) == "lines 2–3 compared with Python"
    assert {row.against for row in report.verification_rows if row.kind == "gradient"} == {"python"}


def test_nothing_is_compared_where_nobody_asks(shell: Any) -> None:
    """Without verification the lines say so."""
    report = run(shell, "y = x + 1", options="--backend eager --no-verify")
    assert compared(report) == {"2-2": "nothing"}
    assert compared_sentence(report) == "line 2 compared with nothing"


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


def rehearsed(shell: Any, text: str, head: str = "t") -> object:
    """Rehearse a function that returns what ``text`` is."""
    namespace = shell.user_ns
    exec(f"def outside({head}):\n    return {text}", namespace)
    function = namespace.pop("outside")
    return rehearse(function, namespace, (torch.ones(4, 4, requires_grad=True),), grad_mode=True, exact=True)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("print(t)", "t"), ("t + len(input())", "t"), ("[open('/dev/null'), t]", "t"), ("globals()", "t"),
        ("t.sum().backward()", "t"), ("torch.manual_seed(0)", "t"), ("torch.set_grad_enabled(True)", "t"),
        ("t.register_hook(len)", "t"), ("logger.warning('t')", "t"), ("note.write(t)", "t"),
        ("torch.sys.stdout.write('t')", "t"), ("seen.append(t)", "t, seen=seen"), ("loud(t)", "t"),
        ("noisy(t)", "t"), ("hooked(t)", "t"), ("kept(t)", "t"), ("(yield t)", "t"), ("Net()", "t"),
        ("setattr(net, 'a', 1)", "t"), ("numpy.ones(3)", "t"),
    ],
)  # fmt: skip
def test_code_that_shows_that_it_runs_twice(
    shell: Any, text: str, head: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever prints, reads, keeps, sets something or makes objects of the user's is not run on copies."""
    monkeypatch.setattr("builtins.input", lambda: "")
    capsys.readouterr()
    assert rehearsed(shell, text, head) is None
    assert not shell.user_ns["seen"]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("text", ["net(t)", "scaled(t)", "counted(t)", "torch.stack([t, t]).sum(0)", "net.norm(t) + w"])
def test_code_that_does_not(shell: Any, text: str) -> None:
    """The same with computations of torch's only, and with what is copied."""
    assert rehearsed(shell, text) is not None
    assert not shell.user_ns["seen"]
