"""The report's mutated tensors of a training step are the tensors that the eager run mutates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell

from aotlab.report import Report
from aotlab.report.counts import summary
from tests.notebook.plain_shells import execute, plain_shell

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
x, y = torch.rand(16, 4), torch.rand(16, 1)
untouched = torch.zeros(3)
"""

STEP = """\
optimizer.zero_grad()
loss = nn.functional.mse_loss(model(x), y)
loss.backward()
optimizer.step()
"""

OPTIMIZERS = {
    "SGD": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "SGD with momentum": "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "Adam": "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)",
    "AdamW, one by one": "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)",
    "a frozen parameter": (
        "model[0].weight.requires_grad_(False)\n"
        "optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)"
    ),
    "a frozen parameter that the optimizer knows": (
        "model[0].weight.requires_grad_(False)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    ),
}

CELLS = {
    "a step": STEP,
    "gradients that are kept": STEP.replace("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),
    "gradients that add up": STEP.replace("optimizer.zero_grad()\n", ""),
    "three steps in a loop": "for step in range(3):\n" + "".join(f"    {line}\n" for line in STEP.splitlines()),
    "a step in Python's hands": STEP
    + "with torch.no_grad():\n    model[3].bias.data[0] = 1.0\n    untouched.add_(1)\n",
}


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    """Make a shell with the extension and an empty namespace."""
    made = plain_shell()
    yield made
    made.run_line_magic("unload_ext", "aotlab")


def tensors(namespace: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Name every tensor that lives before the step, by hand."""
    model, optimizer = namespace["model"], namespace["optimizer"]
    found = {name: namespace[name] for name in ("x", "y", "untouched")}
    names = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        found[f"model.{name}"] = value
        names[value] = f"model.{name}"
        if value.grad is not None:
            found[f"model.{name}.grad"] = value.grad
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.state[{names[parameter]}][{key!r}]"] = value
    return found


def mutated_in_eager(optimizer: str, cell: str) -> set[str]:
    """Run the cell eagerly and see which tensors have other values, or another version, afterwards."""
    namespace: dict[str, Any] = {}
    exec(SETUP + optimizer + "\n" + STEP, namespace)
    before = tensors(namespace)
    values = {name: (tensor.detach().clone(), tensor._version) for name, tensor in before.items()}
    exec(cell, namespace)
    changed = {name for name, (value, _) in values.items() if not torch.equal(value, before[name])}
    moved = {name for name, (_, version) in values.items() if version != before[name]._version}
    return changed | moved


@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_step_mutates_what_eager_mutates(shell: InteractiveShell, optimizer: str, cell: str) -> None:
    """``report.inputs`` names exactly the tensors whose values and versions eager's run of the cell moves."""
    expected = mutated_in_eager(OPTIMIZERS[optimizer], CELLS[cell])
    execute(shell, SETUP + OPTIMIZERS[optimizer] + "\n" + STEP)
    before = set(tensors(shell.user_ns))
    execute(shell, "%%aotcompile -o report --backend eager --quiet\n" + CELLS[cell])
    inputs = shell.user_ns["report"].inputs
    named = set(inputs[inputs["mutates_data"].fillna(False).astype(bool)]["name"])
    assert named & before == expected & before
    assert {name for name in named if name in before} == expected
    # all other names in the table did not exist before the cell
    assert all(name not in before for name in named - expected)


def test_the_step_is_compiled(shell: InteractiveShell) -> None:
    """With Dynamo, the forward and the optimizer's step are graphs, so the table covers compiled code too."""
    execute(shell, SETUP + OPTIMIZERS["SGD with momentum"] + "\n" + STEP)
    execute(shell, "%%aotcompile -o report --backend eager --frontend dynamo --quiet\n" + STEP)
    report = shell.user_ns["report"]
    assert [frame.name for frame in report.frames] == ["line 3", "line 5"]
    graphs = report.inputs[report.inputs["graph"].notna() & report.inputs["mutates_data"].fillna(False).astype(bool)]
    weights = set(graphs[graphs["frame"] == "line 5"]["name"])
    assert {"model.0.weight", "optimizer.state[model.0.weight]['momentum_buffer']"} <= weights
    assert {"model.1.running_mean"} <= set(graphs[graphs["frame"] == "line 3"]["name"])


TRAINING = {
    "a loop": """
optimizer = {optimizer}
for step in range(3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
""",
    "an attribute and a scheduler": """
class Trainer: ...
trainer = Trainer()
trainer.steps = {optimizer}
schedule = torch.optim.lr_scheduler.StepLR(trainer.steps, 2)
for step in range(3):
    trainer.steps.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    trainer.steps.step()
    schedule.step()
""",
    "a function of the cell": """
def train(steps):
    steps.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    steps.step()
    return loss
optimizer = {optimizer}
for step in range(3):
    loss = train(optimizer)
""",
    "a function of an earlier cell": """
optimizer = {optimizer}
losses = [train_earlier(optimizer) for step in range(3)]
loss = losses[-1]
""",
}

STEPS = {
    "Adam": "torch.optim.Adam(model.parameters(), lr=0.01)",
    "AdamW, for each": "torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)",
    "RMSprop": "torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)",
    "Adadelta": "torch.optim.Adadelta(model.parameters())",
    "a subclass": "type('Mine', (torch.optim.NAdam,), {})(model.parameters(), lr=0.01)",
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
    "SGD with a rate in a tensor": "torch.optim.SGD(model.parameters(), lr=torch.tensor(0.03), weight_decay=0.1)",
}


@pytest.mark.parametrize(
    ("training", "steps"),
    [*(("a loop", steps) for steps in STEPS), *((training, "Adam") for training in TRAINING if training != "a loop")],
)
def test_training_is_eagers_bit_for_bit(shell: InteractiveShell, training: str, steps: str) -> None:
    """However a step is reached, the eager backend keeps no result of it that is rounded otherwise."""
    head, _, _ = TRAINING["a function of the cell"].rpartition("optimizer =")
    setup = SETUP + head.replace("train(", "train_earlier(")
    cell = TRAINING[training].format(optimizer=STEPS[steps])
    eager: dict[str, Any] = {}
    exec(setup + cell, eager)
    execute(shell, setup)
    frontend = "dynamo" if training == "a loop" else "auto"
    execute(shell, f"%%aotcompile -o report --backend eager --frontend {frontend} --quiet{cell}")
    for name, value in eager["model"].state_dict().items():
        assert torch.equal(value, shell.user_ns["model"].state_dict()[name]), name
    assert torch.equal(eager["loss"], shell.user_ns["loss"])
    report = shell.user_ns["report"]
    assert all(row.equal for row in report.verification_rows)
    if training == "a loop" and "SGD" not in steps:
        assert ", which runs eagerly by design: its captured form rounds differently than eager" in report.verdict


@pytest.mark.parametrize("reached", ["optimizer", "trainer.steps"])
def test_an_unchanged_cell_tells_of_the_optimizer_that_it_steps(shell: InteractiveShell, reached: str) -> None:
    """With an optimizer of another class the report has nothing left of the earlier one, and the other way round."""
    execute(shell, SETUP + "class Trainer: ...\ntrainer = Trainer()")
    verdicts = []
    for kind in ("Adam", "SGD", "Adam"):
        execute(shell, f"{reached} = torch.optim.{kind}(model.parameters(), lr=0.01)")
        options = "-o report --backend eager --frontend dynamo --quiet"
        execute(shell, f"%%aotcompile {options}\n" + STEP.replace("optimizer", reached))
        verdicts.append(shell.user_ns["report"].verdict)
    adam, sgd, again = (verdict.partition("verified: ")[2] for verdict in verdicts)
    assert "steps Adam, which runs eagerly by design" in adam
    assert "Adam" not in sgd
    assert "ran eagerly" not in sgd
    assert adam == again
    assert verdicts[2].startswith("Nothing new was compiled")


LOOP = """\
def loss_of(x, scale=1.0):
    return (x * w).sum() * scale

for n in (4, 8, 16):
    loss = loss_of(torch.ones(n, 8) * 3)
    loss.backward()
    other = loss_of(w, n)
"""


def test_a_function_that_a_loop_calls_is_compiled(shell: InteractiveShell) -> None:
    """It is, although the lines around it are not, and served again; not for a number that is another in each round."""
    execute(shell, "import torch\nw = torch.ones(8, requires_grad=True)")
    for reused in (False, True):
        execute(shell, "%%aotcompile -o report --backend eager --quiet\n" + LOOP)
        report = shell.user_ns["report"]
        assert [(frame.name, frame.calls.compiled, frame.calls.eager) for frame in report.frames] == [("loss_of", 3, 0)]
        graphs = report.frames[0].graphs
        assert [graph.reused for graph in graphs] == [reused] * 2  # for the first size, and for all
        assert [[miss.subject for miss in graph.misses] for graph in graphs] == [[], ["x.size(0)"]]
        ways = [(part.first_line, part.how) for part in report.cell.parts]
        assert ways == [(2, "compiled"), (5, "python"), (6, "python"), (7, "python"), (8, "eager")]
    assert torch.equal(shell.user_ns["w"].grad, torch.full((8,), 2 * 3.0 * (4 + 8 + 16)))
    assert shell.user_ns["other"].item() == 8 * 16


def reported(shell: InteractiveShell, setup: str, cell: str, frontend: str = "auto") -> Report:
    """Run two cells, the second under the magic, whether it raises or not, and return its report."""
    execute(shell, setup)
    shell.run_cell(f"%%aotcompile -o report --backend eager --frontend {frontend} --quiet\n{cell}")
    return shell.user_ns["report"].report()


def test_new_gradients_are_changes(shell: InteractiveShell) -> None:
    """Those that there were are written, those that there were not are new; both are in the table and in the facts."""
    setup = "import torch\na, b = (torch.ones(2, requires_grad=True) for _ in 'ab')\nb.sum().backward()"
    report = reported(shell, setup, "loss = (a * b).sum()\nloss.backward()")
    table = report.inputs[report.inputs["graph"].isna()]
    assert table[["name", "kind", "mutates_data"]].values.tolist() == [
        ["b.grad", "outside", True],
        ["a.grad", "new", False],
    ]
    facts = {fact.key: fact.sentence for fact in summary(report).facts}
    assert (facts["mutated"], facts["new"]) == ("b.grad (data, outside the graphs)", "a.grad")
    head = summary(report)
    assert (head.mutated, head.new, head.outside) == (1, 1, 2)


def test_a_further_name_of_an_input_is_an_output(shell: InteractiveShell) -> None:
    """Also where the line that makes it computes nothing."""
    report = reported(shell, "import torch\nx = torch.ones(2)", "other = x\ny = other * 2\nsame = x")
    table = report.outputs[["name", "output_type", "base"]].fillna("").values.tolist()
    assert table == [["y", "non-alias", ""], ["other", "is input", "x"], ["same", "is input", "x"]]


ERRORS = {
    "in a compiled line": ("y = x * 2\nz = x @ torch.ones(3)\nv = x + 1", 3, [(2, 3, "eager"), (4, 4, "not run")]),
    "in a line of Python": (
        "y = x * 2\nraise ValueError\nz = x + 1",
        3,
        [(2, 2, "compiled"), (3, 3, "python"), (4, 4, "not run")],
    ),
    "in a function that a compiled line calls": (
        "def f(t):\n    return t @ torch.ones(3)\n\ny = x * 2\nz = f(y)\nv = y + 1",
        6,
        [(2, 3, "python"), (5, 6, "eager"), (7, 7, "not run")],
    ),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_the_line_of_an_error(shell: InteractiveShell, name: str) -> None:
    """The report names the line of the error and the parts that ran before it. Later statements did not run."""
    cell, line, parts = ERRORS[name]
    report = reported(shell, "import torch\nx = torch.ones(2)", cell)
    assert report.cell is not None
    assert report.cell.error_line == line
    assert f"The cell ended at line {line} with " in report.verdict
    assert [(part.first_line, part.last_line, part.how) for part in report.cell.parts] == parts


def test_an_interrupt_is_one_line(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an interrupt in a compiler nothing but a line is shown; of one in the user's code, where that was."""
    scope: dict[str, Any] = {}
    exec(compile("def interrupted(*_, **__):\n    raise KeyboardInterrupt", "<aotlab compiler>", "exec"), scope)
    monkeypatch.setattr("aotlab.notebook.traced.compare", scope["interrupted"])
    reported(shell, "import torch\nx = torch.ones(2)", "y = x * 2\nz = y + 1")
    assert capsys.readouterr().out == "KeyboardInterrupt: while aotlab compiled, or compiled code ran, at line 2\n"
    shell.run_cell("%%aotcompile --backend eager --quiet\nraise KeyboardInterrupt")
    shown = capsys.readouterr().out
    assert "raise" in shown
    assert "while aotlab compiled" not in shown


@pytest.mark.parametrize(
    ("cell", "told", "row"),
    [
        ("t.add_(1)\nt.unsqueeze_(0)", "t (data; metadata, outside the graphs)", [None, True, False]),
        ("u = t.t_() * 2", "t (metadata, outside the graphs)", [None, True, False]),
        ("t.data = other * 3\nu = t + 1", "t (storage, outside the graphs)", [None, False, True]),
    ],
)
def test_layout_and_memory_that_change_beside_the_data(
    shell: InteractiveShell, cell: str, told: str, row: list[bool | None]
) -> None:
    """Python's change to a tensor's sizes is reported even if a graph wrote its values. New memory is not a write."""
    setup = "import torch\nt, other = torch.zeros(2, 3), torch.ones(2, 3)"
    report = reported(shell, setup, cell, "dynamo")
    assert {fact.key: fact.sentence for fact in summary(report).facts}["mutated"] == told
    (outside,) = report.cell.mutated_outside
    assert [outside.mutates_data, outside.mutates_metadata, outside.mutates_storage] == row


def test_new_gradients_that_graphs_write_are_new_alone(shell: InteractiveShell) -> None:
    """Clipping writes gradients that the cell has made: they are no mutated tensors of the model."""
    setup = SETUP + OPTIMIZERS["SGD"]
    cell = STEP.replace("optimizer.step()", "nn.utils.clip_grad_norm_(model.parameters(), 1.0)\noptimizer.step()")
    report = reported(shell, setup, cell)
    head = summary(report)
    facts = {fact.key: fact.sentence for fact in head.facts}
    assert (head.mutated, head.new) == (9, 6)  # six parameters, and three statistics of the batch norm
    assert "grad" not in facts["mutated"]
    assert facts["new"] == "6 gradients of model"


REPLACED = {
    "a method of a class": ("y = net(x)", "Net.scale = lambda self, x: -x"),
    "the code of a method": ("y = net(x)", "Net.scale.__code__ = (lambda self, x: -x).__code__"),
    "the class of a module": ("y = net[0](x) + 1", "net[0].__class__ = nn.Tanh"),
    "a function of a library": ("y = nn.functional.gelu(x)", "nn.functional.gelu = lambda x: -x"),
    "a function that a module calls": ("y = gelu(x) + 1", "nn.functional.gelu = lambda x, **_: -x"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_an_unchanged_cell_sees_what_was_replaced(
    name: str, shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell is compiled again if a function that it calls was replaced between two runs."""
    cell, change = REPLACED[name]
    monkeypatch.setattr(torch.nn.functional, "gelu", torch.nn.functional.gelu)  # and put back after the test
    execute(
        shell,
        """
import torch
from torch import nn
class Net(nn.Sequential):
    def forward(self, x):
        return self.scale(x)
    def scale(self, x):
        return x * 2
net, gelu, x = Net(nn.Identity()), nn.GELU(), torch.randn(3)
""",
    )
    magic = "%%aotcompile -o report --backend eager --quiet\n" + cell
    for _ in range(2):
        execute(shell, magic)
    before = shell.user_ns["y"]
    execute(shell, change)
    for _ in range(2):
        execute(shell, magic)
        actual = shell.user_ns["y"]
        execute(shell, cell)
        assert torch.equal(shell.user_ns["y"], actual)
        assert not torch.equal(before, actual)
        assert len(shell.user_ns["report"].stages)


def test_another_rounding_is_no_reason_to_refuse(shell: InteractiveShell) -> None:
    """A GRU cell rounds differently in dense memory. aotlab uses its compiled form and counts the rounded values."""
    execute(shell, SETUP + "gru, tokens, state = nn.GRUCell(4, 7), torch.randn(100, 4), torch.randn(100, 7)")
    execute(shell, "%%aotcompile -o report --backend eager --quiet\nstate = gru(tokens, state)\n")
    report = shell.user_ns["report"]
    assert "verified: equal to eager on " in report.verdict
    rounded = int(report.verification["tolerance"].eq("up to rounding").sum())
    assert (f" ({rounded} up to rounding)" in report.verdict) == (rounded > 0)
