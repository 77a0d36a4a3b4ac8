"""The harness of the cell suite can be trusted: a magic that changes nothing passes, each sabotaged one is caught."""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.notebook.cells import CELLS, Cell
from tests.notebook.portrait import REPORT_MIME
from tests.notebook.shells import MAGIC, Notebook, differences, heap_frozen, ours, run


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    with heap_frozen():
        yield


def stand_in(
    change: Callable[[str], str] = str,
    afterwards: Callable[[Notebook], object] | None = None,
    instead: str = "",
) -> Callable[[Notebook], None]:
    """Make a magic that runs the cell unchanged, except for a sabotage.

    ``change`` rewrites the cell's text, ``instead`` is run on the line of the magic, ``afterwards`` runs when the cell
    has ended.
    """

    def install(notebook: Notebook) -> None:
        under_magic = False

        def transform(lines: list[str]) -> list[str]:
            nonlocal under_magic
            if not lines or not lines[0].startswith(MAGIC):
                return lines
            under_magic = True
            if len(lines) > 1 and lines[1].startswith("%%"):
                return lines[1:]
            return change("".join([f"{instead}\n", *lines[1:]])).splitlines(keepends=True)

        def ran(_result: object) -> None:
            nonlocal under_magic
            if under_magic and afterwards is not None:
                afterwards(notebook)
            under_magic = False

        notebook.shell.input_transformer_manager.line_transforms.insert(0, transform)
        notebook.shell.events.register("post_run_cell", ran)

    return install


@pytest.mark.parametrize("cell", CELLS[::8], ids=lambda cell: cell.name)
def test_a_magic_that_only_runs_the_cell_passes(cell: Cell) -> None:
    """Two plain runs of one cell agree in all compared facts.

    So every difference that the suite finds is caused by the magic.
    """
    found = differences(run(cell), run(cell, stand_in()))
    assert not found, "\n".join(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """A magic that does one thing wrong: the cell that shows it, how, and the place at which it must be noticed."""

    name: str
    noticed: str
    cell: str
    setup: str = "import torch\nx = torch.arange(6.).reshape(2, 3)\nalias = x\nw = torch.ones(3, requires_grad=True)"
    after: str = ""
    change: Callable[[str], str] = str
    instead: str = ""
    afterwards: Callable[[Notebook], object] | None = None


def _replaced(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


def _set(name: str, value: Callable[[dict[str, Any]], object]) -> Callable[[Notebook], object]:
    return lambda notebook: notebook.shell.user_ns.update({name: value(notebook.shell.user_ns)})


def _twice(notebook: Notebook) -> None:
    notebook.messages.extend([message for message in notebook.messages if message["type"] == "stream"])


def _error_hidden(notebook: Notebook) -> None:
    notebook.messages[:] = [message for message in notebook.messages if message["type"] != "error"]


def _frame_added(notebook: Notebook) -> None:
    for message in notebook.messages:
        if message["type"] == "error":
            message["traceback"].insert(2, "File /site-packages/torch/_dynamo/eval_frame.py:1, in call(f)\n----> 1 f()")


_FAILING = "y = x * 2\nz = y @ y\nw2 = 1"
_TRAINING = """
import torch
w = torch.ones(3, requires_grad=True)
opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)
w.sum().backward()
"""

SABOTAGES = (
    Sabotage(name="binds a name too many", cell="y = x * 2", instead="__stray = 1", noticed="names"),
    Sabotage(name="binds in another order", cell="y = x * 2\nz = 1", instead="z = 0", noticed="names in order"),
    Sabotage(name="loses a name", cell="y = x * 2\nz = 1", change=_replaced("z = 1", "pass"), noticed="names"),
    Sabotage(name="loses an in-place alias", cell="x.add_(1)", instead="x = x.clone()", noticed="alias"),
    Sabotage(
        name="makes a view a copy", cell="v = x[0]", change=_replaced("x[0]", "x[0].clone()"), noticed="v: storage of"
    ),
    Sabotage(
        name="makes one object two",
        cell="a = b = x + 1",
        change=_replaced("a = b = x + 1", "a = x + 1; b = a.clone()"),
        noticed="b:",
    ),
    Sabotage(
        name="wrong value in the last bit",
        cell="y = x * 2",
        afterwards=lambda n: n.shell.user_ns["y"][1, 2].mul_(1 + 2**-23),
        noticed="y: value",
    ),
    Sabotage(name="negative zero", cell="y = x * 0", change=_replaced("x * 0", "x * -0."), noticed="y: value"),
    Sabotage(
        name="wrong stride",
        cell="y = x * 2",
        change=_replaced("x * 2", "(x.t().contiguous().t() * 2)"),
        noticed="y: stride",
    ),
    Sabotage(name="wrong dtype of a number", cell="n = 1", change=_replaced("n = 1", "n = True"), noticed="n"),
    Sabotage(name="float for an int", cell="n = 1", change=_replaced("n = 1", "n = 1.0"), noticed="n"),
    Sabotage(
        name="loses requires_grad",
        cell="y = w * 2",
        change=_replaced("w * 2", "(w * 2).detach()"),
        noticed="y: requires_grad",
    ),
    Sabotage(
        name="cuts the graph so that a later backward finds nothing",
        cell="y = w * 2",
        change=_replaced("w * 2", "(w * 2).detach().requires_grad_()"),
        noticed="y: is_leaf",
    ),
    Sabotage(
        name="loses a gradient",
        cell="(w * 2).sum().backward()",
        afterwards=lambda n: setattr(n.shell.user_ns["w"], "grad", None),
        noticed="w.grad",
    ),
    Sabotage(
        name="backwards twice",
        cell="y = (w * 2).sum()\ny.backward(retain_graph=True)",
        change=_replaced("y.backward(", "y.backward(retain_graph=True); y.backward("),
        noticed="w.grad: value",
    ),
    Sabotage(
        name="wrong gradient only later",
        cell="y = (w * 2).sum()",
        after="y.backward()",
        afterwards=lambda n: n.shell.user_ns["y"].register_hook(lambda g: g * 3),
        noticed="follow-up 1, w.grad: value",
    ),
    Sabotage(
        name="loses the momentum",
        setup=_TRAINING,
        cell="opt.step()",
        afterwards=lambda n: n.shell.user_ns["opt"].state.clear(),
        noticed="opt.state",
    ),
    Sabotage(
        name="changes the momentum",
        setup=_TRAINING,
        cell="opt.step()",
        afterwards=lambda n: next(iter(n.shell.user_ns["opt"].state.values()))["momentum_buffer"].mul_(2),
        noticed="momentum_buffer",
    ),
    Sabotage(name="moves a version counter", cell="y = x * 2", instead="x.add_(0)", noticed="alias: version moved"),
    Sabotage(
        name="keeps a version counter still",
        cell="x.add_(1)",
        change=_replaced("x.add_(1)", "x.data.add_(1)"),
        noticed="alias: version moved",
    ),
    Sabotage(
        name="breaks the sharing with numpy",
        setup="import torch, numpy as np\na = np.arange(4.)",
        cell="t = torch.from_numpy(a)",
        change=_replaced("from_numpy(a)", "from_numpy(a.copy())"),
        noticed="t: memory of",
    ),
    Sabotage(
        name="shares with the array at another offset",
        setup="import torch, numpy as np\na = np.arange(4.)",
        cell="t = torch.from_numpy(a)[:2]",
        change=_replaced("[:2]", "[1:3]"),
        noticed="t: memory of",
    ),
    Sabotage(
        name="leaves an attribute on a module",
        setup="import torch\nm = torch.nn.Linear(1, 1)",
        cell="y = m(torch.ones(1))",
        afterwards=lambda n: setattr(n.shell.user_ns["m"], "_compiled_call", 1),
        noticed="m._compiled_call",
    ),
    Sabotage(
        name="leaves an attribute on a tensor",
        cell="y = x * 2",
        afterwards=lambda n: setattr(n.shell.user_ns["x"], "_dynamo_dynamic_indices", {0}),
        noticed="_dynamo_dynamic_indices",
    ),
    Sabotage(
        name="keeps a deleted tensor alive",
        setup="import torch, weakref\nx = torch.ones(2)\nr = weakref.ref(x)",
        cell="del x",
        instead="_kept = x; import builtins; builtins.kept_here = x; del _kept",
        noticed="r: dead",
    ),
    Sabotage(
        name="a function's name",
        cell="def f(v):\n    return v",
        afterwards=lambda n: setattr(n.shell.user_ns["f"], "__name__", "wrapper"),
        noticed="f: __name__",
    ),
    Sabotage(
        name="a function's docstring",
        cell='def f(v):\n    "Doc."',
        afterwards=lambda n: setattr(n.shell.user_ns["f"], "__doc__", None),
        noticed="f: __doc__",
    ),
    Sabotage(
        name="a function's module",
        cell="def f(v):\n    return v",
        afterwards=lambda n: setattr(n.shell.user_ns["f"], "__module__", "aotlab"),
        noticed="f: __module__",
    ),
    Sabotage(
        name="a function's defaults",
        cell="def f(v=x):\n    return v",
        afterwards=lambda n: setattr(n.shell.user_ns["f"], "__defaults__", (n.shell.user_ns["x"].clone(),)),
        noticed="f.__defaults__",
    ),
    Sabotage(
        name="a function's source lines",
        cell="def f(v):\n    return v",
        change=lambda text: text.replace("\n", "\n\n", 1),
        noticed="f: code",
    ),
    Sabotage(
        name="an object in place of a function",
        cell="def f(v):\n    return v",
        afterwards=_set("f", lambda ns: torch.no_grad()(ns["f"]).__get__(1)),
        noticed="f",
    ),
    Sabotage(
        name="a closure's value",
        cell="def make(s):\n    return lambda v: v * s\nf = make(2)",
        change=_replaced("make(2)", "make(3)"),
        noticed="f.<s>",
    ),
    Sabotage(
        name="a class attribute",
        cell="class C:\n    n = 1",
        afterwards=lambda n: setattr(n.shell.user_ns["C"], "n", 2),
        noticed="C.n",
    ),
    Sabotage(
        name="a class's qualified name",
        cell="class C:\n    n = 1",
        change=_replaced(
            "class C:\n    n = 1", "def region():\n    class C:\n        n = 1\n    return C\nC = region()\ndel region"
        ),
        noticed="C: class",
    ),
    Sabotage(name="prints twice", cell="print('once')", afterwards=_twice, noticed="outputs"),
    Sabotage(name="prints nothing", cell="print('once')", change=_replaced("print('once')", "pass"), noticed="outputs"),
    Sabotage(
        name="prints late",
        cell="print('a')\nx.sum()",
        change=_replaced("print('a')\nx.sum()", "display(x.sum())\nprint('a')"),
        noticed="outputs",
    ),
    Sabotage(
        name="warns twice",
        setup="import warnings",
        cell="warnings.warn('careful')",
        instead="import warnings; warnings.warn('careful')",
        noticed="outputs",
    ),
    Sabotage(
        name="a warning in a wrong line",
        setup="import warnings",
        cell="warnings.warn('careful')",
        change=lambda text: text.replace("\n", "\n\n", 1),
        noticed="outputs",
    ),
    Sabotage(
        name="swallows output to standard error",
        setup="import sys",
        cell="print('bad', file=sys.stderr)",
        change=_replaced("sys.stderr", "sys.stdout"),
        noticed="outputs",
    ),
    Sabotage(
        name="leaves progress in the output", cell="y = x * 2", instead="display('compiling...')", noticed="outputs"
    ),
    Sabotage(name="drops the result", cell="x.sum()", change=lambda text: text.rstrip() + ";\n", noticed="outputs"),
    Sabotage(name="shows a suppressed result", cell="x.sum();", change=_replaced(";", ""), noticed="outputs"),
    Sabotage(
        name="displays where it should return",
        cell="x.sum()",
        change=_replaced("x.sum()", "display(x.sum())"),
        noticed="outputs",
    ),
    Sabotage(name="returns a copy of the result", cell="x", change=_replaced("\nx", "\nx.clone()"), noticed="alias"),
    Sabotage(
        name="shifts a line of an error",
        cell=_FAILING,
        change=lambda text: text.replace("\n", "\n\n", 1),
        noticed="outputs",
    ),
    Sabotage(
        name="another message",
        cell="1 / 0",
        change=_replaced("1 / 0", "raise ZeroDivisionError('oh')"),
        noticed="reply: evalue",
    ),
    Sabotage(
        name="another type of error", cell="{}[1]", change=_replaced("{}[1]", "raise LookupError(1)"), noticed="error"
    ),
    Sabotage(
        name="swallows an error",
        cell=_FAILING,
        change=_replaced("z = y @ y\nw2 = 1", "get_ipython().showtraceback(None) if 0 else None"),
        noticed="reply: status",
    ),
    Sabotage(name="does not show an error", cell=_FAILING, afterwards=_error_hidden, noticed="outputs"),
    Sabotage(name="shows a frame of its own", cell=_FAILING, afterwards=_frame_added, noticed="outputs"),
    Sabotage(
        name="chains an error",
        cell="1 / 0",
        change=_replaced("1 / 0", "try: 1 / 0\nexcept Exception as e: raise ZeroDivisionError('division by zero')"),
        noticed="error.context",
    ),
    Sabotage(
        name="adds a note to an error",
        cell="raise KeyError(1)",
        change=_replaced("raise KeyError(1)", "e = KeyError(1); e.add_note('while compiling'); raise e"),
        noticed="notes",
    ),
    Sabotage(
        name="runs on after an error",
        cell="x.add_(1)\n1 / 0\nx.add_(1)",
        afterwards=lambda n: n.shell.user_ns["x"].add_(1),
        noticed="alias: value",
    ),
    Sabotage(
        name="undoes what was before an error",
        cell="x.add_(1)\n1 / 0",
        change=_replaced("x.add_(1)\n", "\n"),
        noticed="alias: value",
    ),
    Sabotage(
        name="loses a step of the random stream",
        cell="y = torch.rand(2)",
        instead="_s = torch.get_rng_state()",
        afterwards=lambda n: torch.set_rng_state(n.shell.user_ns.pop("_s")),
        noticed="torch random state",
    ),
    Sabotage(
        name="draws from the random stream",
        cell="y = x * 2",
        afterwards=lambda n: torch.rand(1),
        noticed="torch random state",
    ),
    Sabotage(
        name="draws from numpy's random stream",
        setup="import numpy as np",
        cell="y = 1",
        afterwards=lambda n: n.shell.user_ns["np"].random.rand(),
        noticed="numpy random state",
    ),
    Sabotage(
        name="draws from Python's random stream",
        setup="import random",
        cell="y = 1",
        afterwards=lambda n: n.shell.user_ns["random"].random(),
        noticed="python random state",
    ),
    Sabotage(
        name="leaves grad mode off",
        cell="y = x * 2",
        afterwards=lambda n: torch.set_grad_enabled(False),
        noticed="grad mode",
    ),
    Sabotage(
        name="leaves the default dtype",
        cell="y = x * 2",
        afterwards=lambda n: torch.set_default_dtype(torch.float64),
        noticed="default dtype",
    ),
    Sabotage(
        name="leaves the default device",
        cell="y = x * 2",
        afterwards=lambda n: torch.set_default_device("meta"),
        noticed="default device",
    ),
    Sabotage(
        name="leaves determinism on",
        cell="y = x * 2",
        afterwards=lambda n: torch.use_deterministic_algorithms(True),
        noticed="deterministic",
    ),
    Sabotage(
        name="leaves another number of threads",
        cell="y = x * 2",
        afterwards=lambda n: torch.set_num_threads(torch.get_num_threads() + 1),
        noticed="torch threads",
    ),
    Sabotage(
        name="leaves Dynamo's configuration changed",
        cell="y = x * 2",
        afterwards=lambda n: setattr(torch._dynamo.config, "verbose", not torch._dynamo.config.verbose),
        noticed="dynamo configuration",
    ),
    Sabotage(
        name="leaves a warnings filter",
        cell="y = x * 2",
        afterwards=lambda n: warnings.filterwarnings("ignore", message="made up"),
        noticed="warning filters",
    ),
    Sabotage(
        name="leaves an exception hook",
        cell="y = x * 2",
        afterwards=lambda n: setattr(sys, "excepthook", print),
        noticed="hooks",
    ),
    Sabotage(
        name="leaves a builtin",
        cell="y = x * 2",
        afterwards=lambda n: setattr(builtins, "aotlab_left_this", 1),
        noticed="builtins",
    ),
    Sabotage(
        name="leaves an environment variable",
        cell="y = x * 2",
        afterwards=lambda n: os.environ.update(AOTLAB_LEFT="1"),
        noticed="environment",
    ),
    Sabotage(
        name="leaves an AST transformer",
        cell="y = x * 2",
        afterwards=lambda n: n.shell.ast_transformers.append(object()),
        noticed="ast transformers",
    ),
    Sabotage(
        name="counts the cell twice",
        cell="y = x * 2",
        afterwards=lambda n: setattr(n.shell, "execution_count", n.shell.execution_count + 1),
        noticed="execution count",
    ),
)


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.name)
def test_a_sabotaged_magic_is_caught(sabotage: Sabotage) -> None:
    """Each mistake that a magic could make is noticed where it happens."""
    cell = Cell(
        name=sabotage.name, cell=sabotage.cell, setup=(sabotage.setup,), after=(sabotage.after,) * bool(sabotage.after)
    )
    verbose = torch._dynamo.config.verbose
    try:
        eager = run(cell)
        found = differences(eager, run(cell, stand_in(sabotage.change, sabotage.afterwards, sabotage.instead)))
    finally:
        torch._dynamo.config.verbose = verbose
        for name in ("aotlab_left_this", "kept_here"):
            vars(builtins).pop(name, None)
    assert not differences(eager, run(cell, stand_in()))
    assert any(sabotage.noticed in difference.splitlines()[0] for difference in found), "\n".join(found)


def test_frames_of_ours_are_seen() -> None:
    """A traceback with a frame of Dynamo differs from one without."""
    cell = Cell(name="fails", cell="1 / 0")
    assert not ours(run(cell).moments[0])
    assert ours(run(cell, stand_in(afterwards=_frame_added)).moments[0])


def test_the_report_is_not_compared_but_found() -> None:
    """A report in the output is no difference, and its place among the outputs is known."""
    cell = Cell(name="shows", cell="print('a')\n1")
    publish = "from IPython.display import publish_display_data as p; p({" + repr(REPORT_MIME) + ": {}}); del p"
    eager, magic = run(cell), run(cell, stand_in(instead=publish))
    assert not differences(eager, magic)
    assert eager.moments[0].reports == ()
    assert magic.moments[0].reports == (0,)
