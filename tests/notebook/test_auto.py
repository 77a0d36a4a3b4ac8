"""``--frontend auto``: a cell's lines are traced directly. If a line cannot be traced, Dynamo captures it."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from aotlab.frontends.direct import FunctionTarget
from aotlab.notebook import live, measure
from aotlab.report import Report
from aotlab.runtime import runtime_stage as runtime
from tests.notebook.plain_shells import execute, failing, printed
from tests.notebook.portrait import portrait

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
x, w = torch.arange(6.).reshape(2, 3), torch.ones(3, requires_grad=True)
items = [torch.ones(2), torch.zeros(2)]
scale = 2.0
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""

#: Cells that are traced as a whole where they compute, with the number of their graphs.
TRACED = {
    "rebinding": ("x = x * 2\nx = x + 1\nx", 1),
    "adding in place": ("x += 1\ny = x * 2", 1),
    "writes and views": ("row = x[0]\nrow.mul_(3)\nflat = x.view(-1)\nflat[2] = -1\ntotal = (x * w).sum()", 1),
    "other names": ("y = x\nz = x * 2\nu = v = z + 1\nx[0, 0] = 7", 1),
    "numbers and containers": (
        "n, size = 3 * 2, x.shape\npair = [x * n, {'w': w * 2}]\nlast = pair[1]['w'].sum() * scale",
        1,
    ),
    "a loop in the graph": (
        "y = x\nfor item in items:\n    y = y * item.sum()\nfor k in range(2):\n    y = y * k + w.sum()",
        1,
    ),
    "a choice": ("if scale > 1:\n    y = x * 2\nelse:\n    y = x\nz = y + 1", 1),
    "random numbers": ("noise = torch.rand(3)\ny = (x + noise).sum()\nz = torch.randn(2)", 1),
    "a comprehension": ("y = x * 2\nparts = [y * k for k in range(3)]\ns = sum(p.sum() for p in parts)", 1),
    "lists of the notebook": ("items[0].add_(1)\nboth = torch.stack(items)", 1),
    "steps": (
        "losses = []\nfor step in range(3):\n    optimizer.zero_grad()\n    loss = model(x).square().mean()\n"
        "    loss.backward()\n    optimizer.step()\n    losses.append(loss.item())",
        1,
    ),
    "no grad": ("with torch.no_grad():\n    w.mul_(2)\n    y = w.sum()\nz = (w * y).sum()", 1),
    "a function of the cell": ("def f(v):\n    return v * w\ny = f(x)\nz = f(y)", 1),
}
#: Cells of which Dynamo captures something, each with a part of the reason why it is not traced.
CAPTURED = {
    "a function that prints": (
        "def f(v):\n    print('called')\n    return v * 2\ny = f(x)\nz = f(y)",
        "it uses `print`",
    ),
    "a function that writes a file": (
        "import pathlib\ndef f(v):\n    with pathlib.Path(log).open('a') as file:\n        file.write('.')\n"
        "    return v * 2\ny = f(x)\nz = pathlib.Path(log).read_text()",
        "it uses `pathlib`",
    ),
    "a function that reads what is bound": (
        "def f(v):\n    return v * factor\nfactor = w * 3\ny = f(x)",
        "may read a variable that the same lines bind",
    ),
    "a method that counts": (
        "class Counter:\n    calls = 0\n    def __call__(self, v):\n        self.calls += 1\n"
        "        return v * self.calls\ncount = Counter()\ny = count(x)\nz = count(x)",
        "the function changes `count.calls`",
    ),
    "a method that sets a flag": (
        "class Counter:\n    first = True\n    def __call__(self, v):\n        if self.first:\n"
        "            self.first = False\n            return v * 2\n        return v + 1\ncount = Counter()\n"
        "y = count(x)\nz = count(x)",
        "the function changes `count.first`",
    ),
    "a flag of the notebook": (
        "def f(v):\n    global scale\n    if scale == 2.0:\n        scale = None\n        return v * 2\n"
        "    return v + 1\ny = f(x)",
        "the function changes `scale`",
    ),
    "a stored tensor": ("cache = {}\ncache['y'] = x * 2\nz = cache['y'] + 1", "stores a tensor in `cache['y']`"),
    "a value that is needed": ("y = x * 2\nif (y @ y.t()).sum() > 3:\n    y = y + 1", "needs the value"),
    "a new set": ("y = x + 1\nnames = {y.shape[0], 7}\nz = y * 2", "it makes a `set`"),
}


#: The names that are not the cells' own.
OTHERS = frozenset({"torch", "nn", "optimizer", "log", "f", "pathlib", "Counter", "count", "file", "report"})
SHELLS = frozenset({"In", "Out", "exit", "quit", "get_ipython", "open"})


def observed(namespace: dict[str, Any]) -> dict[str, str]:
    """Describe the variables of a cell: values, gradients, aliases, order; and random numbers."""
    own = {name: value for name, value in namespace.items() if not name.startswith("_") and name not in OTHERS | SHELLS}
    facts, _ = portrait(own)
    return facts | {"random": str(torch.get_rng_state().sum())}


def eagerly(cell: str, log: Path, runs: int) -> dict[str, str]:
    """Run a cell eagerly, and describe its variables."""
    namespace = vars(types.ModuleType("__main__"))
    namespace["log"] = str(log)
    exec(SETUP, namespace)
    for _ in range(runs):
        exec(cell, namespace)
    return observed(namespace)


def report_of(shell: InteractiveShell, cell: str, options: str = "") -> Report:
    """Run a cell under the magic and return its report."""
    execute(shell, f"%%aotcompile -o report --backend eager --quiet --frontend auto {options}\n{cell}")
    report: Report = shell.user_ns["report"].report()
    return report


def frontends(report: Report) -> list[str]:
    """Return the frontend of each compiled graph."""
    return [graph.frontend for frame in report.frames for graph in frame.graphs if graph.status == "compiled"]


@pytest.mark.parametrize("name", [*TRACED, *CAPTURED])
def test_a_cell_is_what_it_is_in_eager(shell: InteractiveShell, name: str, tmp_path: Path) -> None:
    """Values, gradients, aliases, effects, random numbers and the order of new names are eager's, at two runs."""
    cell = (TRACED | CAPTURED)[name][0]
    once, twice = eagerly(cell, tmp_path / "once", 1), eagerly(cell, tmp_path / "twice", 2)
    shell.user_ns["log"] = str(tmp_path / "magic")
    execute(shell, SETUP)
    first = report_of(shell, cell)
    assert once == observed(shell.user_ns)
    second = report_of(shell, cell)
    assert twice == observed(shell.user_ns)
    assert "NOT equal" not in first.verdict + second.verdict
    if name in TRACED:
        assert frontends(first) == ["direct"] * TRACED[name][1]
        assert not first.notes
        assert all(graph.reused for frame in second.frames for graph in frame.graphs), "it was traced again"
    else:
        reason = CAPTURED[name][1]
        assert [note for note in first.notes if reason in note and "Dynamo captures it" in note]
        assert not second.notes, "it was tried again"


def test_the_report_names_what_dynamos_report_names(shell: InteractiveShell) -> None:
    """The report has the cell's inputs, outputs, writes and lines, and names the frontend of each part."""
    cell = "hidden = x @ model[0].weight.t()\ny = model[1](hidden)\nitems[0].add_(1)\nz = y[0]"
    reports = {}
    for frontend in ("dynamo", "auto"):
        execute(shell, SETUP)
        execute(shell, f"%%aotcompile -o report --backend eager --quiet --frontend {frontend}\n{cell}")
        reports[frontend] = shell.user_ns["report"].report()
    theirs, ours = reports["dynamo"], reports["auto"]
    assert frontends(ours) == ["direct"]
    columns = ["name", "mutates_data", "shape"]
    # The direct frontend lifts all tensors that the lines reach. Dynamo lifts only the tensors that they use.
    assert set(map(str, theirs.inputs[columns].values)) <= set(map(str, ours.inputs[columns].values))
    assert {"hidden", "y", "z"} == set(ours.outputs["name"])
    assert [(part.lines, part.how, part.compared) for part in ours.cell.parts] == [("lines 2–5", "compiled", "python")]
    assert {2, 3, 4} <= set(ours.nodes["line"].dropna()) <= set(theirs.nodes["line"].dropna())
    html = ours._repr_mimebundle_()["text/html"]
    assert "1 call, traced directly" in html


def _hidden(shell: InteractiveShell) -> dict[str, Any]:
    """Return the state that a measurement must not change: names, objects, version counters and attributes."""
    model = shell.user_ns["model"]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": shell.user_ns["x"]}
    return {
        "names": [*shell.user_ns],
        "objects": {name: (id(tensor), tensor._version, vars(tensor)) for name, tensor in tensors.items()},
        "modules": {name: sorted(vars(module)) for name, module in model.named_modules()},
    }


@pytest.mark.parametrize(
    "cell",
    [
        "loss = model(x).square().mean()",
        "x.add_(1)\ny = (x * w).sum()",
        "row = x[0]\nrow.mul_(3)\ntotal = (x * w).sum() + items[1].sum()",
        "with torch.no_grad():\n    y = model(x)",
        "noise = torch.rand(3)\ny = (x + noise).sum()",
    ],
)
@pytest.mark.tier("full")
def test_a_trace_is_timed_and_nothing_changes(shell: InteractiveShell, cell: str) -> None:
    """``--time`` and *Measure* time eager, stock and ours. The tensors, their places and random numbers stay."""
    once = eagerly(cell, Path(), 1)
    shell.user_ns["log"] = "."
    execute(shell, SETUP)
    report = report_of(shell, cell, "--time")
    assert frontends(report) == ["direct"]
    # Before torch 2.13, `locals()` in code that stock compiles lacks some variables. Then a note says that it raises.
    stock = not any("stock torch.compile was not timed: it raises" in note for note in report.notes)
    assert stock or torch.__version__ < "2.13"
    engines = {"eager", "aotlab", *(["upstream"] if stock else [])}
    assert {row.engine for row in report.timing_rows} == engines, report.notes
    differentiable = any(row.requires_grad for row in report.frames[0].graphs[0].outputs)
    assert ("backward" in {row.phase for row in report.timing_rows}) == differentiable
    assert once == observed(shell.user_ns)
    before = _hidden(shell)
    found = live.find(report.identifier)
    assert found is not None
    measured = found.measure(lambda _: None)
    assert {row.engine for row in measured.timing_rows} == engines, measured.notes
    assert measured.memory_curves
    assert once == observed(shell.user_ns)
    assert before == _hidden(shell)


def test_a_function_is_timed(shell: InteractiveShell) -> None:
    """Arguments in containers and keywords reach each form of a traced function as in its call."""
    execute(shell, SETUP)
    execute(
        shell,
        "%%aotcompile -o report --backend eager --quiet\ndef f(pair, *, factor):\n"
        "    return model(pair['x']).sum() * factor + pair['more'][0]",
    )
    execute(shell, "y = f({'x': x, 'more': [w]}, factor=3)\ny.sum().backward()")
    before, gradients = _hidden(shell), [each.grad.clone() for each in shell.user_ns["model"].parameters()]
    measured = shell.user_ns["report"].measure(lambda _: None)
    assert [(row.engine, row.phase) for row in measured.timing_rows if row.phase == "backward"] == [
        ("eager", "backward"),
        ("upstream", "backward"),
        ("aotlab", "backward"),
    ], measured.notes
    assert before == _hidden(shell)
    assert all(map(torch.equal, gradients, (each.grad for each in shell.user_ns["model"].parameters())))


@pytest.mark.parametrize("place", ["timed", "memory_curves"])
def test_an_interrupt_of_a_measurement(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The notebook's tensors are in their places again, and the cell's own entry still serves it."""
    execute(shell, SETUP)
    cell = "x.add_(1)\nloss = model(x).square().mean()"
    report = report_of(shell, cell)
    before, values = _hidden(shell), observed(shell.user_ns)
    found = live.find(report.identifier)
    assert found is not None

    def interrupted(*_args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measure._Timer, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            found.measure(lambda _: None)
    assert before == _hidden(shell)
    assert values == observed(shell.user_ns)
    report = report_of(shell, cell)
    assert [graph.reused for frame in report.frames for graph in frame.graphs] == [True]


def test_names_that_were_bound_before_an_error_stay_bound(shell: InteractiveShell) -> None:
    """An error ends the cell where eager ends it; and the next run, with its cause removed, is traced."""
    execute(shell, SETUP)
    cell = "y = x * 2\nz = y @ factor\nu = z + 1"
    shell.user_ns["factor"] = torch.ones(7)
    for _ in range(2):
        error = failing(shell, f"%%aotcompile -o report --backend eager --quiet --frontend auto\n{cell}")
        assert "size mismatch" in str(error)
        assert torch.equal(shell.user_ns.pop("y"), shell.user_ns["x"] * 2)
        assert "z" not in shell.user_ns
    shell.user_ns["factor"] = torch.ones(3)
    assert frontends(report_of(shell, cell)) == ["direct"]
    assert torch.equal(shell.user_ns["u"], shell.user_ns["x"] * 2 @ torch.ones(3) + 1)


def test_an_index_that_only_the_values_make_wrong(shell: InteractiveShell) -> None:
    """The trace succeeds, the compiled form raises, and Python runs the lines up to the error, once."""
    execute(shell, SETUP)
    cell = "x.add_(1)\ny = x * 2\nz = torch.rand(3)[index]"
    shell.user_ns["index"] = torch.tensor([2])
    assert frontends(report_of(shell, cell)) == ["direct"]
    before, state = shell.user_ns["x"].clone(), torch.get_rng_state()
    shell.user_ns["index"] = torch.tensor([5])
    error = failing(shell, f"%%aotcompile -o report --backend eager --quiet --frontend auto\n{cell}")
    assert isinstance(error, IndexError)
    assert torch.equal(shell.user_ns["x"], before + 1)
    assert torch.equal(shell.user_ns["y"], 2 * (before + 1))
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.rand(3)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_an_interrupt_of_a_trace(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves everything as it was, and the same cell can run again."""
    execute(shell, SETUP)
    before = observed(shell.user_ns)

    def interrupted(self: FunctionTarget, *args: Any) -> Any:
        original(self, *args)
        raise KeyboardInterrupt

    original = FunctionTarget.run
    cell = "x.mul_(2)\ny = model(x).sum()"
    with monkeypatch.context() as patch:
        patch.setattr(FunctionTarget, "run", interrupted)
        error = failing(shell, f"%%aotcompile -o report --backend eager --quiet --frontend auto\n{cell}")
    assert isinstance(error, KeyboardInterrupt)
    assert before == observed(shell.user_ns)
    assert frontends(report_of(shell, cell)) == ["direct"]


def test_what_the_namespace_changes_is_noticed(shell: InteractiveShell) -> None:
    """Another number, function, module or size gives another graph; an old graph serves values of an earlier run."""
    execute(shell, SETUP)
    execute(shell, "def f(v):\n    return v + 1")
    cell = "y = f(model(x)) * scale"
    shell.user_ns["model"].eval()
    changes = [
        "",
        "scale = 3.0",
        "def f(v):\n    return v - 1",
        "model = model[0]",
        "x = torch.ones(5, 3)",
        "scale = 3.0",
    ]
    for change, reused in zip(changes, [False] * 5 + [True], strict=True):
        execute(shell, change)
        report = report_of(shell, cell)
        names = shell.user_ns
        assert torch.equal(names["y"], names["f"](names["model"](names["x"])) * names["scale"]), change
        ran = [graph for frame in report.frames for graph in frame.graphs if graph.calls]
        assert [(graph.frontend, graph.reused) for graph in ran] == [("direct", reused)], change


@pytest.mark.parametrize("kind", ["region", "function"])
def test_a_wrong_result_is_not_used(shell: InteractiveShell, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the traced form differs from eager's, the report says so, and the names have eager's values."""
    original = runtime.run

    def wrong(*args: Any) -> Any:
        record, run = original(*args)

        def call(*given: Any) -> Any:
            result = run(*given)
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each + 1, result)

        return record, call

    monkeypatch.setattr(runtime, "run", wrong)
    execute(shell, SETUP)
    if kind == "region":
        execute(shell, "%%aotcompile -o report --backend eager --quiet --frontend auto\ny = x * 2")
    else:
        execute(shell, "%%aotcompile -o report --backend eager --quiet --frontend auto\ndef f(v):\n    return v * 2")
        execute(shell, "y = f(x)")
    assert torch.equal(shell.user_ns["y"], shell.user_ns["x"] * 2)
    assert "NOT equal to eager" in shell.user_ns["report"].verdict


def test_a_function_that_is_declined(shell: InteractiveShell) -> None:
    """A function of a cell prints at each call, because Dynamo captures it; a silent one is traced."""
    execute(shell, SETUP)
    text = "def loud(v):\n    print('!')\n    return v + 1\ndef silent(v):\n    return v * w"
    execute(shell, f"%%aotcompile -o report --backend eager --quiet --frontend auto\n{text}")
    shown, _ = printed(shell, "y, z = loud(x), silent(x)\nz.sum().backward()\ny = loud(x)")
    assert shown == "!\n!\n"
    report = shell.user_ns["report"].report()
    assert {frame.name: {graph.frontend for graph in frame.graphs} for frame in report.frames} == {
        "loud": {"dynamo"},
        "silent": {"direct"},
    }
    assert [note.partition(":")[0] for note in report.notes] == ["loud"]
    assert torch.equal(shell.user_ns["w"].grad, shell.user_ns["x"].sum(0))


def test_without_verification(shell: InteractiveShell) -> None:
    """The results are eager's, and the report says that nothing was compared."""
    execute(shell, SETUP)
    report = report_of(shell, "x.add_(1)\ny = (x * w).sum()", "--no-verify")
    assert "not verified" in report.verdict
    assert frontends(report) == ["direct"]
    assert shell.user_ns["y"].item() == 21


@pytest.mark.parametrize("options", ["--engine upstream", "--engine both"])
def test_stock_torch_compile_traces_nothing(shell: InteractiveShell, options: str) -> None:
    """The option of the frontend is a usage error with another engine, as for ``direct``."""
    error = failing(shell, f"%%aotcompile --frontend auto {options}\ny = x * 2")
    assert "stock torch.compile does not work with --frontend auto" in str(error)
