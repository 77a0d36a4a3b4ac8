"""Traces of cells that call functions which other cells have compiled: they read, change and guard what those read."""

from __future__ import annotations

import types
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
