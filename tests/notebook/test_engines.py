"""``--engine upstream`` and ``both``: stock `torch.compile` in a cell, in the same report, beside aotlab."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ipykernel")

from IPython.core.interactiveshell import InteractiveShell

from aotlab import _torch as internals
from aotlab.report import Report
from tests.notebook.plain_shells import cell, execute, failing, plain_shell

pytestmark = pytest.mark.tier("full")

OLD = torch.__version__.startswith("2.11.")
_TRACE = logging.getLogger("torch.__trace")
SETUP = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
x, state = torch.ones(4, 8), torch.zeros(3)
"""
BODY = """state.add_(1)
loss = net(x).square().mean() + state.sum()
view = x.t()
loss.backward()
"""


@pytest.fixture
def shell() -> InteractiveShell:
    """Make a shell with a model and two tensors."""
    torch.compiler.reset()
    made = plain_shell()
    execute(made, SETUP)
    return made


def ran(shell: InteractiveShell, body: str, options: str) -> Report:
    """Run a cell and return its report."""
    execute(shell, cell(body, f"{options} --backend eager -o report"))
    report: Any = shell.user_ns["report"]
    return report.report()


@pytest.mark.parametrize("engine", ["upstream", "both"])
def test_the_cell_has_eagers_effects(shell: InteractiveShell, engine: str) -> None:
    """Values, mutations, views and gradients are eager's, once, also if the cell runs again."""
    eager = plain_shell()
    execute(eager, SETUP)
    for run in range(2):
        handlers = list(_TRACE.handlers)
        report = ran(shell, BODY, f"--engine {engine}")
        execute(eager, BODY)
        assert _TRACE.handlers == handlers or not run
        for name in ("loss", "state", "x"):
            assert torch.equal(shell.user_ns[name], eager.user_ns[name]), name
        for ours, theirs in zip(shell.user_ns["net"].parameters(), eager.user_ns["net"].parameters(), strict=True):
            assert ours.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
        assert shell.user_ns["view"]._base is shell.user_ns["x"]
        assert report.verification["equal"].all()


def test_upstream_fills_the_tables(shell: InteractiveShell) -> None:
    """The tables have the facts of stock's graph, with the notebook's names, and its calls are counted."""
    report = ran(shell, BODY, "--engine upstream")
    (frame,) = report.frames
    assert (frame.engine, frame.name, frame.calls.compiled) == ("upstream", "lines 2–4", 1)
    assert set(report.inputs["engine"].dropna()) == {"upstream"}
    mutated = report.inputs[report.inputs["engine"].notna() & report.inputs["mutated"]]
    assert mutated[["name", "mutation_type"]].values.tolist() == [["state", "mutated in graph"]]
    assert {"x", "net.0.weight", "net.2.bias"} <= set(report.inputs["name"])
    outputs = report.outputs[["name", "relation"]].values.tolist()
    assert outputs == [["loss", "memory of its own"], ["view", "view of input x"]]
    assert set(report.nodes["part"]) == {"joint", "forward", "backward"}
    assert set(report.nodes["line"].dropna()) >= {2, 3}
    assert report.saved["nbytes"].sum() == 304
    stages = {"capture", "trace", "partition", "guards", *([] if OLD else ["wrappers"])}  # 2.11 prints no wrappers
    assert stages <= set(report.stages["stage"])
    assert set(report.verification["engine"]) == {"upstream"}
    assert report.verdict.startswith("Stock torch.compile compiled lines 2–4: 1 graph (training), backend aot_eager")
    assert "verified: equal to eager" in report.verdict
    assert report.time.query("kind == 'upstream'")["engine"].tolist() == ["upstream"]
    assert report.engines.empty
    run = report.timeline[report.timeline["process"] == ""]
    assert {"dynamo", "upstream", "verification", "compiled"} <= set(run["stage"])
    phases = report.timeline[report.timeline["process"] == "stock torch.compile"]
    assert set(zip(phases["frame"], phases["graph"], phases["engine"], strict=True)) == {("lines 2–4", 0, "upstream")}
    assert {"capture", "trace"} <= set(phases["stage"])
    around = run[run["stage"] == "upstream"].iloc[0]
    inner = phases[phases["phase"] == "create_aot_dispatcher_function"].iloc[0]
    assert around.start_ns < inner.start_ns < inner.start_ns + inner.duration_ns < around.start_ns + around.duration_ns


def test_both_engines_are_side_by_side(shell: InteractiveShell, tmp_path: Path) -> None:
    """Each row has a fact for both engines, and the differences are marked."""
    report = ran(shell, BODY, "--engine both")
    assert [(frame.name, frame.engine) for frame in report.frames] == [
        ("lines 2–4", "aotlab"),
        ("lines 2–4 [upstream]", "upstream"),
    ]
    facts = report.engines.set_index(["fact", "subject"])
    assert facts.loc[("mutation", "state"), ["aotlab", "upstream", "same"]].tolist() == [
        "data: mutated out of graph",
        "data: mutated in graph",
        False,
    ]
    assert facts.loc[("output", "view"), ["aotlab", "upstream", "same"]].tolist() == [
        "view of input x: x.t()",
        "view of input x",
        True,
    ]
    ours, theirs = [report.saved[report.saved["engine"] == name] for name in ("aotlab", "upstream")]
    assert facts.loc[("saved", "all values"), "aotlab"] == f"{len(ours)} values, {ours['nbytes'].sum()} B"
    assert facts.loc[("saved", "all values"), "upstream"] == f"{len(theirs)} values, {theirs['nbytes'].sum()} B"
    assert facts.loc[("saved", "float32[4, 8] of input x"), ["aotlab", "upstream"]].tolist() == ["saved", "saved"]
    for part in ("joint", "forward", "backward"):
        for engine in ("aotlab", "upstream"):
            nodes = report.nodes.query("engine == @engine and part == @part and op == 'call_function'")
            nodes = nodes[nodes["stage"] == ("trace" if part == "joint" else "partition")]
            assert facts.loc[("size", f"{part} graph"), engine] == f"{len(nodes)} ops"
    numbers = [set(report.storages[report.storages["engine"] == name]["storage"]) for name in ("aotlab", "upstream")]
    assert all(numbers)
    assert not numbers[0] & numbers[1]
    assert set(report.verification["engine"]) == {"aotlab", "upstream"}
    assert report.frames[0].calls.compiled == 1
    assert report.frames[1].calls.total == 0
    assert "Stock torch.compile's graphs of the same code: equal to eager on" in report.verdict
    assert Report.load(report.save(tmp_path / "report.json")).engines.equals(report.engines)


def test_functions_and_recompiles(shell: InteractiveShell) -> None:
    """A function of a cell is compiled by stock at its calls, and a recompile has its reason."""
    execute(shell, cell("def f(t):\n    return t.mul_(2).sum()", "--engine upstream --backend eager -o report --quiet"))
    execute(shell, "a, b = torch.ones(3), torch.ones(4)\nf(a); f(b); f(a)")
    report = shell.user_ns["report"].report()
    assert shell.user_ns["a"].tolist() == [4.0] * 3
    assert [graph.calls for graph in report.frames[0].graphs] == [1, 2]  # the second one takes any size
    assert report.recompiles["earlier"].tolist() == [0]
    assert "size mismatch at index 0. expected 3, actual 4" in report.recompiles["reason"][0]


@pytest.mark.parametrize("engine", ["upstream", "both"])
def test_a_wrong_graph_is_found_and_not_used(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """If stock's graph differs from eager, the cell keeps eager's result, and the verdict says so."""

    def wrong(_name: str) -> Any:
        return lambda graph, _inputs: lambda *args: [each + 1 for each in graph.forward(*args)]

    monkeypatch.setattr(internals, "stock_backend", wrong)
    report = ran(shell, "y = x * 2", f"--engine {engine}")
    assert shell.user_ns["y"][0, 0] == 2
    different = report.verification[~report.verification["equal"]]
    assert set(different["engine"]) == {"upstream"}
    if engine == "upstream":
        assert "NOT equal to eager" in report.verdict
    else:
        assert report.verdict.startswith("Compiled line 2: 1 graph")
        assert "Stock torch.compile's form of line 2: its compiled form differs from eager" in report.verdict


#: A function that stock `torch.compile` compiles wrongly, a call of it, the backend, and the observables that differ.
WRONG = {
    "a draw that is dropped": (
        "def f(t):\n    torch.rand(3)\n    return t * torch.rand(())",
        "f(torch.ones(1))",
        "eager",
        {("graph", "random state"), ("graph", "value")},
    ),
    "a number that is not written": (
        "def f(t):\n    t.mul_(2)",
        "f(torch.tensor(0.5, dtype=torch.float64))",
        "eager",
        {("python", "version"), ("python", "value")},
    ),
    "a value of a kernel": (
        "def f(t):\n    torch.dropout(t, 0.5, train=False).relu_()\n    return t * 1",
        "f(torch.tensor([-1.0, 1.0]))",
        "inductor",
        {("graph", "version"), ("graph", "value")},
    ),
}


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the wrong results are those of torch 2.13.*")
@pytest.mark.parametrize(("function", "call", "backend", "differing"), WRONG.values(), ids=WRONG)
def test_wrong_results_of_torch_are_found(
    shell: InteractiveShell, function: str, call: str, backend: str, differing: set[tuple[str, str]]
) -> None:
    """The comparison finds the results that differ from eager, and the cell has eager's results."""
    results = []
    for code in (function, cell(function, f"--engine upstream --backend {backend} -o report --quiet")):
        execute(shell, code)
        execute(shell, "torch.manual_seed(0)")
        results.append(execute(shell, call))
    assert results[0] is results[1] or torch.equal(*results)
    report = shell.user_ns["report"].report()
    rows = report.verification[~report.verification["equal"]]
    assert set(zip(rows["against"], rows["kind"], strict=True)) == differing
    assert "NOT equal to eager" in report.verdict


def test_a_second_capture(shell: InteractiveShell) -> None:
    """If torch's backend asks Dynamo to capture the code again, the report has the graph of the second capture."""
    function = "def f(t):\n    return t * 2"
    execute(shell, cell(function, "--engine upstream --backend eager -o report --quiet"))
    result = execute(shell, "f(torch.tensor(0.5, dtype=torch.float64))")
    assert result.item() == 1
    (frame,) = shell.user_ns["report"].report().frames
    assert [graph.status for graph in frame.graphs] == ["compiled"]
    assert frame.refusals == ()


@pytest.mark.parametrize("engine", ["upstream", "both"])
def test_a_crash_of_stock(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """If stock's backend raises, the cell runs, and the report has the error and what was recorded before it."""

    def crashing(_name: str) -> Any:
        def backend(_graph: Any, _inputs: Any) -> Any:
            raise ValueError("no such kernel\nand more")

        return backend

    monkeypatch.setattr(internals, "stock_backend", crashing)
    report = ran(shell, "y = x * 2", f"--engine {engine}")
    assert shell.user_ns["y"][0, 0] == 2
    messages = report.refusals[report.refusals["engine"] == "upstream"]["message"].tolist()
    assert messages
    assert set(messages) == {"stock torch.compile raised ValueError: no such kernel"}
    stages = [each.stages for frame in report.frames for each in frame.graphs if frame.engine == "upstream"]
    names = [stage.name for stage in stages[0] if not stage.name.startswith("rest of")]
    assert names == ["capture", "guards", "other records"]


@pytest.mark.parametrize("engine", ["upstream", "both"])
def test_an_optimizer(shell: InteractiveShell, engine: str) -> None:
    """Stock's step has the notebook's names. That it does not count its writes is reported, and it is used."""
    execute(shell, "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\nnet(x).sum().backward()")
    before = shell.user_ns["net"][0].weight.detach().clone()
    report = ran(shell, "optimizer.step()", f"--engine {engine}")
    weight = shell.user_ns["net"][0].weight
    torch.testing.assert_close(weight.detach(), before - 0.1 * weight.grad)  # once; its last bits are stock's
    names = {f"net.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    inputs = report.inputs[report.inputs["engine"] == "upstream"]
    assert set(inputs["name"]) == names | {f"{name}.grad" for name in names}
    assert set(inputs[inputs["mutated"]]["name"]) == names
    different = report.verification[~report.verification["equal"]]
    # With torch 2.11, the captured step of SGD rounds differently than eager's.
    assert set(different["kind"]) <= {"version", *(["value"] if OLD else [])}
    assert set(different["subject"]) <= names
    assert report.refusals.empty
    if engine == "both":
        assert report.engines.query("fact == 'mutation'")["same"].tolist() == [True] * 4
        assert ("NOT equal to eager on 4 of" in report.verdict) == (len(different) == 4)


def test_timing(shell: InteractiveShell) -> None:
    """``--time`` times stock's graph beside eager, and with both engines all three."""
    report = ran(shell, "y = (x * 2).sum()", "--engine upstream --time")
    assert report.timings["engine"].tolist() == ["eager", "upstream"]
    assert report.frames[0].calls.total == 1
    report = ran(shell, "y = (x * 3).sum()", "--engine both --time")
    assert report.timings["engine"].tolist() == ["eager", "upstream", "aotlab"]


def test_what_does_not_go_together(shell: InteractiveShell) -> None:
    """Stock works with neither the direct frontend nor a rehearsal."""
    for options in ("--frontend direct", "--rehearse h100"):
        error = failing(shell, cell("y = x", f"--engine both {options}"))
        assert "stock torch.compile does not work with" in str(error)
