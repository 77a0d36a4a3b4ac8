"""The notebook of upstream findings: on the version that it names, each is still there, and aotlab has none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import aotlab

pytest.importorskip("ipykernel")

from tests.notebook.plain_shells import execute, plain_shell

pytestmark = pytest.mark.tier("full")

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "upstream_findings.ipynb"
#: The version of PyTorch that the notebook's findings were checked on.
CHECKED = "2.13."
FINDINGS = [
    "a second shape",
    "a value from outside",
    "inputs that begin to overlap",
    "inputs that cease to overlap",
    "a write that is lost",
    "an out= that is not written",
    "random numbers that shift",
    "a gradient that does not exist",
    "a view that cannot be",
    "a write behind dropout",
    "the same in inference mode",
    "a gradient between two outputs",
    "an operator taken for a stranger",
    "one memory, two dtypes",
    "windows that do not overlap",
]


#: Where the report of a cell finds each difference that it finds: in the graph, in Dynamo's capture, or in an error.
NOWHERE, RAISED = "no compared observable differs", "no graph: torch.compile raised an error"
PLACES = {
    "inputs that begin to overlap": NOWHERE,
    "inputs that cease to overlap": NOWHERE,
    "a write that is lost": "python: version (a), value (a)",
    "an out= that is not written": "graph: version (inputs[1]), value (inputs[1])",
    "random numbers that shift": "graph: random state (after the call), value (out[0])",
    "a gradient that does not exist": "graph: exception (backward)",
    "a view that cannot be": "graph: exception (call)",
    "a write behind dropout": "graph: version (inputs[0]), value (inputs[0]), value (out[0])",
    "the same in inference mode": "graph: value (inputs[0]), value (out[0])",
    "a gradient between two outputs": NOWHERE,
    "an operator taken for a stranger": RAISED,
    "one memory, two dtypes": RAISED,
    "windows that do not overlap": RAISED,
}


def run_cells(replaced: dict[str, Any]) -> dict[str, Any]:
    """Run the notebook's code cells in one shell, with some of its engines replaced, and return its namespace."""
    shell = plain_shell(loaded=False)
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            execute(shell, "".join(cell["source"]))
            if cell["id"] == "engines":
                shell.user_ns["engines"].update(replaced)
    return shell.user_ns


def headings(level: str) -> list[str]:
    """Return the notebook's headings of one level."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "markdown" for line in "".join(cell["source"]).split("\n")]
    return [line.removeprefix(level).strip() for line in lines if line.startswith(f"{level} ")]


@pytest.mark.skipif(not torch.__version__.startswith(CHECKED), reason=f"the findings are of torch {CHECKED}*")
def test_upstream_differs_in_every_finding_and_aotlab_in_none(capsys: pytest.CaptureFixture[str]) -> None:
    """The cells assert that aotlab behaves as eager does. Upstream still shows every listed difference."""
    space = run_cells({})
    assert dict.fromkeys(FINDINGS, True) == space["found"]
    assert space["places"] == PLACES
    printed = capsys.readouterr().out
    assert "mended" not in printed
    assert printed.count("graph of each call: [0, 0]\n") == 2
    assert printed.count("ops: 0\n") == 1


@pytest.mark.skipif(not torch.__version__.startswith(CHECKED), reason=f"the findings are of torch {CHECKED}*")
def test_cells_have_eagers_results_if_the_report_finds_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell does not use a graph that differs. If no observable differs, the cell has upstream's wrong result."""
    run_cells({})
    parts = re.split(r"^eager +", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    results = [(part.partition("\n")[0], *re.findall(r"^in a cell (.*)", part, re.MULTILINE)) for part in parts]
    in_cells = dict(zip(FINDINGS, results, strict=True))
    assert {name for name, (eager, *cells) in in_cells.items() if cells not in ([], [eager])} == {
        name for name, where in PLACES.items() if where == NOWHERE
    }
    assert [name for name, (_, *cells) in in_cells.items() if not cells] == FINDINGS[:2]


def test_aotlab_has_none_behind_dynamo() -> None:
    """Behind torch.compile, aotlab behaves as eager does in the same programs; the cells assert it."""
    space = run_cells({"aotlab": lambda program: aotlab.compile(program, frontend="dynamo", backend="eager")})
    assert list(space["found"]) == FINDINGS


def test_a_difference_of_aotlab_fails_the_notebook() -> None:
    """The cells' assertion bites: with a wrong engine in aotlab's place, the first finding fails."""
    with pytest.raises(AssertionError, match=FINDINGS[0]):
        run_cells({"aotlab": lambda program: lambda *tensors: program(*tensors) + 1})


def test_a_mended_upstream_is_reported_and_fails_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """If upstream behaves as eager does, the notebook says so and runs to its end."""
    same: dict[str, Any] = dict.fromkeys(("aot", "compile", "inductor"), lambda program: program)
    assert dict.fromkeys(FINDINGS, False) == run_cells(same)["found"]
    assert capsys.readouterr().out.count("upstream was mended in") == len(FINDINGS)


def test_every_finding_has_its_heading() -> None:
    """The prose has one heading for each row of the table, in the same order."""
    assert [heading.replace("`", "").lower() for heading in headings("###")] == FINDINGS
    assert set(headings("##")) >= {"Silently wrong", "Raises where eager does not", "Refuses"}
