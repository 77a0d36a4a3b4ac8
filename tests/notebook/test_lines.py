"""How each line of a cell ran, also inside of functions, and which nodes come from it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("IPython")

from IPython.core.interactiveshell import InteractiveShell

from aotlab.report import Report
from aotlab.report.counts import summary
from aotlab.report.how_lines_ran import CALLS, how_line_ran
from aotlab.report.model import UserLine
from aotlab.report.verdict import verdict
from aotlab.trace import trace_stage as trace
from tests.notebook.plain_shells import cell, execute, failing, interrupted

SETUP = """\
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, t):
        return self.linear(t).relu()

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, t):
        t = self.block(t)
        print(end="")
        return self.block(t)

block, broken, library = Block(), Broken(), nn.Sequential(nn.Linear(4, 4), nn.GELU())
x = torch.randn(3, 4)
data = torch.randn(6, 3, 4)
"""


def run(shell: InteractiveShell, text: str, *later: str, options: str = "--quiet") -> Report:
    """Run a cell, and plain cells after it; return the report of the first."""
    execute(shell, cell(text, options))
    for each in later:
        execute(shell, each)
    report: Report = shell.user_ns["report"].report()
    return report


# --- what comes from a line --------------------------------------------------------------------------------------


def lines_behind(report: Report) -> set[tuple[str, ...]]:
    """Return, for the nodes and saved values of all graphs, the lines that they come from, innermost first."""
    source = [] if report.cell is None else [line.strip() for line in report.cell.source.split("\n")]

    def name(line: UserLine) -> str:
        here = source[line.line - 1 : line.line] == [line.code]
        return f"{'cell' if here else 'notebook'}: {line.code}"

    graphs = [graph for frame in report.frames for graph in frame.graphs]
    lines = [row.line for graph in graphs for row in (*graph.nodes, *graph.saved) if row.line is not None]
    return {tuple(map(name, (line, *line.callers))) for line in lines}


LINEAR = "notebook: return self.linear(t).relu()"


@pytest.mark.parametrize(
    ("text", "later", "options", "expected"),
    [
        ("y = block(x)", (), "", {(LINEAR, "cell: y = block(x)")}),
        ("y = library(x)", (), "", {("cell: y = library(x)",)}),
        # The cell itself defines the module.
        (
            "class Own(nn.Module):\n    def forward(self, t):\n        return t.sin()\nown = Own()\ny = own(x)",
            (),
            "",
            {("cell: return t.sin()", "cell: y = own(x)")},
        ),
        # Dynamo captures the module's code in two pieces.
        (
            "z = x + 1\ny = broken(z)",
            (),
            "",
            {
                ("cell: z = x + 1",),
                (LINEAR, "notebook: t = self.block(t)", "cell: y = broken(z)"),
                (LINEAR, "notebook: return self.block(t)", "cell: y = broken(z)"),
            },
        ),
        *[
            (
                "def own(t):\n    return block(t)",
                ("y = own(x)",),
                options,
                {(LINEAR, "cell: return block(t)", "notebook: y = own(x)")},
            )
            for options in ("", "--frontend direct")
        ],
    ],
)
def test_nodes_know_the_lines_of_the_notebook(
    shell: InteractiveShell, text: str, later: tuple[str, ...], options: str, expected: set[tuple[str, ...]]
) -> None:
    """Nodes, also of the backward, and saved values have the lines of the notebook that called their function."""
    assert expected == lines_behind(run(shell, text, *later, options=f"--quiet {options}"))


# --- how each line ran -------------------------------------------------------------------------------------------


def ways(report: Report) -> dict[str, str]:
    """Return how each line of the cell ran, by its text."""
    assert report.cell is not None
    found = {}
    for part in report.cell.parts:
        for line in range(part.first_line, part.last_line + 1):
            found[report.cell.source.split("\n")[line - 1].strip()] = how_line_ran(part, line)
    return found


@pytest.mark.parametrize("later", [(), ("y = f(x)",)], ids=["in its cell", "from another cell"])
def test_a_line_that_breaks_the_graph_inside_of_a_function(shell: InteractiveShell, later: tuple[str, ...]) -> None:
    """It is compiled in part at most, whatever its function is called by; the lines around it are compiled."""
    text = "def f(t):\n    h = t * 2\n    m = h.max().item()\n    print(end='')\n    return h + m\n"
    found = ways(run(shell, text if later else text + "y = f(x)", *later))
    assert found.pop("y = f(x)", "compiled in part") == "compiled in part"
    assert found == {
        "def f(t):": "compiled",
        "h = t * 2": "compiled",
        "m = h.max().item()": "compiled",
        "print(end='')": "compiled in part",
        "return h + m": "compiled",
    }


def test_a_function_that_python_runs(shell: InteractiveShell) -> None:
    """Its lines are Python's, but for those that call functions of which graphs came."""
    text = """\
def step(t):
    return block(t).sum()
def train():
    total = 0
    for i in range(3):
        print(end='')
        total += step(data[i])
        total += broken(data[i]).sum()
    return total
train()"""
    assert ways(run(shell, text)) == {
        "def step(t):": "compiled",
        "return block(t).sum()": "compiled",
        "def train():": "python",
        "total = 0": "python",
        "for i in range(3):": "python",
        "print(end='')": "eager",
        "total += step(data[i])": CALLS,
        "total += broken(data[i]).sum()": CALLS,
        "return total": "python",
        "train()": "compiled in part",
    }


def test_a_line_of_python_that_calls_a_function_of_the_cell(shell: InteractiveShell) -> None:
    """A line that depends on a loop's counter is Python's; the function that it calls is compiled."""
    found = ways(
        run(shell, "def f(t):\n    return t.sin()\nfor i in range(3):\n    y = f(data * i)\n    print(end='')")
    )
    assert (found["y = f(data * i)"], found["return t.sin()"], found["print(end='')"]) == (CALLS, "compiled", "python")


def test_methods_of_a_class(shell: InteractiveShell) -> None:
    """Of a class that the cell defines, the methods are compiled of which graphs hold something."""
    text = """\
class Own(nn.Module):
    size = 4
    def other(self):
        pass
    def forward(self, t):
        if self.training:
            t = t.sin()
        else:
            t = t.cos()
        return t * 2
own = Own()
y = own(x)"""
    assert ways(run(shell, text)) == {
        "class Own(nn.Module):": "python",
        "size = 4": "python",
        "def other(self):": "python",
        "pass": "python",
        "def forward(self, t):": "compiled",
        "if self.training:": "compiled",
        "t = t.sin()": "compiled",
        "else:": "",
        "t = t.cos()": "",
        "return t * 2": "compiled",
        "own = Own()": "python",
        "y = own(x)": "compiled",
    }


@pytest.mark.parametrize("frontend", ["dynamo", "direct"])
def test_a_function_that_only_compiled_functions_call(shell: InteractiveShell, frontend: str) -> None:
    """Its lines are in the graph of its caller."""
    text = "def inner(t):\n    return t * 2\ndef outer(t):\n    return inner(t) + 1"
    report = run(shell, text, "y = outer(x)", options=f"--quiet --frontend {frontend}")
    assert set(ways(report).values()) == {"compiled"}
    assert [frame.name for frame in report.frames] == ["outer"]
    assert verdict(report).state == "verified"


# --- what is no fault --------------------------------------------------------------------------------------------

TRAINING = """\
for i in range(2):
    optimizer.zero_grad()
    loss = library(x).sum()
    loss.backward()
    optimizer.step()
"""
FRAME = "import pandas\ndef load():\n    return pandas.DataFrame({'a': [1.0, 2.0]})\n"


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
def test_an_optimizer_that_runs_eagerly_by_design(shell: InteractiveShell, optimizer: str) -> None:
    """The verdict mentions its line, and all else is as good as without it."""
    execute(shell, f"optimizer = torch.optim.{optimizer}(library.parameters())")
    report = run(shell, TRAINING)
    found = verdict(report)
    assert (found.state, found.status, summary(report).eager_lines) == ("verified", "equal to eager", 0)
    by_design = "which runs eagerly by design: its captured form rounds differently than eager."
    assert found.sentence.endswith(f"Line 6 steps {optimizer}, {by_design}")
    assert ways(report)["optimizer.step()"] == "python"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("def f(t):\n    return t.sin()", "nothing to compile yet"),
        ("import math\nfrom torch import nn", "nothing to compile"),
        ("import math\nclass Own(nn.Module):\n    pass\ndef f(t):\n    return t\nk = 3", "nothing to compile"),
        (f"{FRAME}df = load()\ndf.describe()", "nothing was compiled"),
        ("print('hello')", "nothing was compiled"),
    ],
)
def test_a_cell_without_anything_to_compile(shell: InteractiveShell, text: str, status: str) -> None:
    """A cell that only defines functions, imports, or calls other libraries has no fault."""
    head = summary(run(shell, text))
    assert ("idle", status, 0, 0) == (head.state, head.status, head.breaks, head.eager_lines)


@pytest.mark.parametrize(
    ("text", "library"),
    [
        (f"{FRAME}y = x.sin()\ndf = load()\nd = df.describe()\nz = y.cos()", ["df = load()", "d = df.describe()"]),
        # Within a function of the cell, Dynamo captures the lines around it.
        (
            f"{FRAME}def f(t):\n    t = t.sin()\n    df = load()\n    return t.cos()\nz = f(x)",
            ["df = load()", "return pandas.DataFrame({'a': [1.0, 2.0]})"],
        ),
    ],
)
def test_calls_of_other_libraries_are_no_breaks(shell: InteractiveShell, text: str, library: list[str]) -> None:
    """A call into pandas between computations is Python's line, and the rest is compiled."""
    report = run(shell, text)
    assert (summary(report).state, summary(report).breaks) == ("verified", 0)
    found = ways(report)
    assert {"python"} == {found[line] for line in library[:1]}
    assert found["z = y.cos()" if "z = y.cos()" in found else "return t.cos()"] == "compiled"


def test_an_interrupt_is_no_refusal(shell: InteractiveShell) -> None:
    """A cell that the user interrupts while it is compiled was interrupted; nothing was refused."""
    with interrupted(trace, "run"):
        failing(shell, cell("y = block(x)"))
    report: Report = shell.user_ns["report"].report()
    head = summary(report)
    assert (head.state, head.status, head.refused) == ("idle", "interrupted", 0)
    words = r"Nothing was compiled: the cell was interrupted at line 2 after .*, in aotlab's trace\."
    assert re.fullmatch(words, head.sentence)


# --- loops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "for i in range(20):\n    y = block(data[i % 6])",
            "Nothing was compiled: line 3 ran eagerly (depends on `i`, which has another value in each round; "
            "loop over the items of `data` instead of their indices).",
        ),
        (
            "with torch.no_grad():\n    for i in range(20):\n        y = x * i",
            "Nothing was compiled: line 4 ran eagerly (depends on `i`, which has another value in each round; "
            "make `i` a tensor by `torch.tensor(i)`).",
        ),
        (
            "found = []\nwith torch.no_grad():\n    for t in loader:\n        found.append(block(t).sum().item())",
            "Nothing was compiled: line 5 ran eagerly (calls .item(); compute the tensors on a line of their own).",
        ),
    ],
)
def test_lines_of_a_loop_that_stay_eager(shell: InteractiveShell, text: str, sentence: str) -> None:
    """The verdict names the line, the reason, and what would let it compile."""
    execute(shell, "loader = torch.utils.data.DataLoader(data)")
    head = summary(run(shell, text))
    assert (head.sentence, head.state, head.eager_lines) == (sentence, "nothing", 1)


@pytest.mark.parametrize(
    "text",
    [
        "for t in data:\n    y = block(t)",
        "for i in range(6):\n    k = torch.tensor(i)\n    y = x * k",
        "total = 0.0\nwith torch.no_grad():\n    for t in loader:\n        total += block(t).sum().item()",
        "found = []\nfor t in loader:\n    s = block(t).sum()\n    found.append(s.item())",
    ],
)
def test_the_advice_helps(shell: InteractiveShell, text: str) -> None:
    """A loop that follows the advice has its computation compiled, once for all rounds."""
    execute(shell, "loader = torch.utils.data.DataLoader(data)")
    report = run(shell, text)
    assert (verdict(report).state, summary(report).graphs) == ("verified", 1)


def unrolled(report: Report) -> list[str]:
    """Return the sentences about loops that were unrolled."""
    return [fact.sentence for fact in summary(report).facts if fact.key == "unrolled"]


STEPS = "def steps(t, n):\n    for _ in {}:\n        t = t * 2 + t.sin()\n    return t\n"
MODEL = """\
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
    def forward(self, t):
        for layer in self.layers:
            t = layer(t).relu()
        return t
deep = Deep()
y = deep(x)"""


@pytest.mark.parametrize(
    ("text", "later", "options", "expected"),
    [
        (f"{STEPS.format('range(50)')}y = steps(x, 0)", (), "", ["line 3 was unrolled: 50 steps"]),
        (f"{STEPS.format('range(n)')}y = steps(x, 50)", (), "", ["line 3 was unrolled: 50 steps"]),
        (
            f"{STEPS.format('range(n)')}y = steps(x, 9)\nz = steps(x, 50)",
            (),
            "",
            ["line 3 was unrolled: 9 and 50 steps"],
        ),
        *[
            (STEPS.format("range(n)"), ("y = steps(x, 50)",), options, ["line 3 was unrolled: 50 steps"])
            for options in ("", "--frontend direct")
        ],
        ("y = x\nfor k in range(5):\n    y = y * k", (), "", ["line 3 was unrolled: 5 steps"]),
        (MODEL, (), "", ["line 7 was unrolled: 6 steps"]),
        # The first step differs from the others.
        (
            "def f(t, n):\n    h = None\n    while n:\n        h = t * 2 if h is None else h * t * 2\n"
            "        n -= 1\n    return h\ny = f(x, 4)",
            (),
            "",
            ["line 4 was unrolled: all of its steps are"],
        ),
        # Python runs the loop, or it has a single step.
        ("def f(t):\n    return t * 2 * 2\nfor k in range(50):\n    y = f(data)\n    print(end='')", (), "", []),
        (f"{STEPS.format('range(1)')}y = steps(x, 0)", (), "", []),
        (f"{STEPS.format('range(n)')}y = steps(x, 1)", (), "", []),
    ],
)
def test_loops_that_were_unrolled(
    shell: InteractiveShell, text: str, later: tuple[str, ...], options: str, expected: list[str]
) -> None:
    """The page says how many steps of a loop are in one graph."""
    found = unrolled(run(shell, text, *later, options=f"--quiet {options}"))
    assert [f"the loop in {each} in one graph" for each in expected] == found
