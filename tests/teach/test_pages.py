"""One page, run cell by cell in this process; tests/notebook/test_notebooks.py runs all of them in kernels."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from aotlab import teach
from aotlab.teach import steps
from aotlab.teach.families import FAMILIES
from tests.teach.pages import EXERCISES, PAGES

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_MINUTES = {"20": "Twenty", "25": "Twenty-five", "90": "Ninety"}


@pytest.mark.tier("quick")
def test_a_page_runs() -> None:
    """The cells of a page need only each other, and their definitions exist at the end."""
    book = json.loads((NOTEBOOKS / "05_outputs_that_share.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "page"}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["w"].grad.tolist() == [11.0, 11.0]


def test_every_page_has_its_exercises_and_checks() -> None:
    """No page of the course is forgotten."""
    pages = sorted(path.name for path in NOTEBOOKS.glob("[01][0-9]_*.ipynb") if path.name != "00_start.ipynb")
    assert pages == sorted(PAGES) == sorted(EXERCISES)


def test_the_index_lists_every_page() -> None:
    """With as many minutes as the page says itself; the start page leads to the index."""
    index = (NOTEBOOKS / "index.ipynb").read_text(encoding="utf-8")
    others = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb") if path.name not in {"index.ipynb", *PAGES})
    assert [page for page in others if f"]({page})" not in index] == []
    minutes = {page: re.search(rf"\]\({page}\).*\| (\d+) \|", index) for page in PAGES}
    said = {page: _MINUTES[found[1]] for page, found in minutes.items() if found}
    told = {page: json.loads((NOTEBOOKS / page).read_text(encoding="utf-8"))["cells"][0]["source"] for page in PAGES}
    assert sorted(said) == sorted(PAGES)
    assert [page for page in PAGES if f"{said[page]} minutes." not in "".join(told[page])] == []
    assert "](index.ipynb)" in (NOTEBOOKS / "00_start.ipynb").read_text(encoding="utf-8")


def compiler_page(answers: dict[str, str]) -> tuple[dict[str, Any], str, str]:
    """Run the page on the compiler with answers in place of blanks.

    Return its names, its code, and its printed text.
    """
    book = json.loads((NOTEBOOKS / "11_be_the_compiler.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "page"}
    cells = {cell["id"]: "".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"}
    for name, answer in answers.items():
        blank, _, take = cells[f"{name}-answer"].partition("\n\n\n")
        assert blank == f"{answer.partition(chr(10))[0]} ..."
        cells[f"{name}-answer"] = f"{answer}\n\n\n{take}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for name, code in cells.items():
            exec(compile(code, name, "exec"), names)
    return names, "\n\n\n".join(cells.values()), printed.getvalue()


STEPS = EXERCISES["11_be_the_compiler.ipynb"]


def test_a_reader_who_answers_all() -> None:
    """Each step is right, the page is the layer that the steps are tried in, and the reader's own code runs."""
    names, code, printed = compiler_page({name: steps.parts()[name] for name in STEPS})
    assert printed.count("Right.\n") == len(STEPS)
    assert printed.count("All right: ") == len(FAMILIES)
    assert [name for name, text in steps.parts().items() if text not in code] == []
    assert all(names[name].__globals__ is names for name in STEPS)
    lines = [line for line in steps.layer_text().splitlines() if line.strip()]
    assert len(lines) < 200


def test_a_reader_whose_answers_are_wrong() -> None:
    """The page continues with the course's own answer, and says so."""
    names, _, printed = compiler_page({"write": steps.parts()["write"].replace("= new", "= whole")})
    assert printed.count("Until the answer is right, the page uses the course's answer") == len(STEPS)
    assert (
        "Not yet: of 19 programs that write to tensors that they computed, this is the smallest that differs" in printed
    )
    assert printed.count("All right: ") == len(FAMILIES)
    assert names["write"] is teach.exercise("write").reference
