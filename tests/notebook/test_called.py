"""Traces of cells that call functions which other cells have compiled: they read, change and guard what those read."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from aotlab.errors import UsageError
from aotlab.notebook import live
from tests.notebook.plain_shells import execute

SETUP = """
import os
import torch
from torch import nn
x, scale, log, n = torch.arange(6.).reshape(2, 3), 2.0, [], 0
class State: ...
state = State()
state.step, state.buffer = 0, torch.zeros(2)
"""
MAGIC = "%%aotcompile -o report --backend eager --quiet\n"
#: The cells of each program, and the expression that is compared with eager's.
PROGRAMS: dict[str, tuple[list[str], str]] = {
    "a global of a helper": (
        [
            MAGIC + "def helper(v):\n    return v * scale\ndef f(v):\n    return helper(v) + 1",
            "y = f(x)",
            "scale = 3.0",
            "y = f(x)",
        ],
        "y",
    ),
    "a global, read by a region": (
        [MAGIC + "def f(v):\n    return v * scale", MAGIC + "y = f(x) + 1", "scale = 3.0", MAGIC + "y = f(x) + 1"],
        "y",
    ),
    "a counter": (
        [MAGIC + "def f(v):\n    state.step += 1\n    return v * state.step", *[MAGIC + "y = f(x) + 1"] * 3],
        "(y, state.step)",
    ),
    "a counter and a list in the notebook": (
        [
            MAGIC + "def f(v):\n    global n\n    n += 1\n    log.append(n)\n    return v * n",
            *[MAGIC + "y = f(x) + 1"] * 2,
        ],
        "(y, n, log)",
    ),
    "a counter and a buffer": (
        [
            MAGIC + "def f(v):\n    state.step += 1\n    state.buffer.add_(1)\n    return v * state.step",
            *[MAGIC + "y = f(x) + 1"] * 2,
        ],
        "(y, state.step, state.buffer)",
    ),
    "a counter in a decorator": (
        [
            "def counted(f):\n    calls = [0]\n    def g(v):\n        calls[0] += 1\n        return f(v) * calls[0]\n"
            "    g.calls = calls\n    return g",
            MAGIC + "@counted\ndef f(v):\n    return v + 1",
            *[MAGIC + "y = f(x) + 1"] * 2,
        ],
        "(y, f.calls)",
    ),
    "a file": (
        [
            MAGIC + "def f(v):\n    with open(path, 'a') as file:\n        file.write('.')\n    return v * 2",
            *[MAGIC + "y = f(x) + 1"] * 3,
            "size = os.path.getsize(path)",
        ],
        "size",
    ),
    "a module that holds it": (
        [
            MAGIC + "def f(v):\n    return v * scale",
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.act, self.linear = f, nn.Linear(3, 3)\n"
            "    def forward(self, v):\n        return self.act(self.linear(v))",
            "_ = torch.manual_seed(0)\nnet = Net()",
            MAGIC + "loss = net(x).sum()\nloss.backward()",
            "scale = 5.0\nnet.zero_grad()",
            MAGIC + "loss = net(x).sum()\nloss.backward()",
        ],
        "(loss.item(), net.linear.weight.grad)",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_compiled_function_that_a_trace_calls(shell: InteractiveShell, name: str, tmp_path: Path) -> None:
    """Its globals, its state and its effects are eager's, at each run."""
    cells, expression = PROGRAMS[name]
    eager = vars(types.ModuleType("__main__"))
    shell.user_ns["path"], eager["path"] = str(tmp_path / "magic"), str(tmp_path / "eager")
    execute(shell, SETUP)
    exec(SETUP, eager)
    for text in cells:
        execute(shell, text)
        exec(text.removeprefix(MAGIC), eager)
    assert str(eval(expression, shell.user_ns)) == str(eval(expression, eager))


def test_an_item_that_is_gone_is_measured_with_another(shell: InteractiveShell) -> None:
    """If an item of a list no longer exists, the code is not timed, and the list stays."""
    execute(shell, "import torch\nbox = [torch.ones(3), torch.ones(3)]")
    execute(shell, MAGIC + "y = box[0] + box[1]")
    execute(shell, "del box[1]")
    cell = live.find(shell.user_ns["report"].identifier)
    assert cell is not None
    with pytest.raises(UsageError, match="line 2 was not timed: its inputs are gone or have changed"):
        cell.measure(lambda _: None)
    assert [each.tolist() for each in shell.user_ns["box"]] == [torch.ones(3).tolist()]


def test_parameters_of_inference_mode_are_measured(shell: InteractiveShell) -> None:
    """The copies of such parameters are parameters of inference mode, too."""
    setup = "import torch\nwith torch.inference_mode():\n    linear, given = torch.nn.Linear(3, 2), torch.ones(3)"
    execute(shell, setup)
    execute(shell, MAGIC + "with torch.inference_mode():\n    u = linear(given) * 2")
    cell = live.find(shell.user_ns["report"].identifier)
    assert cell is not None
    measured = cell.measure(lambda _: None)
    assert {"eager", "aotlab"} <= {row.engine for row in measured.timing_rows}, measured.notes


_PACKAGES = {
    "writes": """
class Writer:
    def __init__(self, path):
        self.file = open(path, "a")
    def add(self, name, value):
        self.file.write(f"{name} {value};")
        self.file.flush()
def log(data):
    with open("LOG", "a") as file:
        file.write(";")
""",
    "wandb": "sent = []\ndef log(data):\n    sent.append(data)\n",
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the packages, and return the folder in which they write."""
    folder = tmp_path_factory.mktemp("packages")
    installed = folder / "site-packages"
    installed.mkdir()
    for name, text in _PACKAGES.items():
        (installed / f"{name}.py").write_text(text.replace("LOG", str(folder / "log")))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(installed))
        yield folder
    for name in _PACKAGES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("writes.log({'loss': 1})", "open(folder + '/log').read().count(';')"),
        ("writer.add('loss', 1)", "open(folder + '/written').read().count(';')"),
        ("step(x)", "open(folder + '/log').read().count(';')"),
        ("wandb.log({'loss': 1})", "len(wandb.sent)"),
        ("logged(x)", "len(wandb.sent)"),
    ],
)
def test_packages_that_record_do_so_at_each_run(shell: InteractiveShell, line: str, count: str, packages: Path) -> None:
    """What a package writes or sends happens once per run, also for code that is otherwise traced."""
    (packages / "log").write_text("")
    (packages / "written").write_text("")
    shell.user_ns["folder"] = str(packages)
    setup = (
        "import torch, writes, wandb\nx = torch.ones(3)\nwandb.sent.clear()\n"
        "writer = writes.Writer(folder + '/written')\n"
        "def step(v):\n    writes.log({'loss': 1})\n    return v * 2\n"
        "def logged(v):\n    wandb.log({'loss': 1})\n    return v * 2"
    )
    execute(shell, setup)
    for _ in range(3):
        execute(shell, MAGIC + f"y = x * 2\nz = {line}")
    assert eval(count, shell.user_ns) == 3
    assert shell.user_ns["y"].tolist() == [2.0, 2.0, 2.0]
