"""The notebook of upstream findings: on the version that it names, each is still there, and aotlab has none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import aotlab

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


def run_cells(replaced: dict[str, Any]) -> dict[str, Any]:
    """Run the notebook's code cells in one namespace, with some of its engines replaced, and return the namespace."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}:{cell['id']}", "exec"), space)
            if cell["id"] == "engines":
                space["engines"].update(replaced)
    return space


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
    assert "mended" not in capsys.readouterr().out


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
