"""One page, run cell by cell in this process; tests/notebook/test_notebooks.py runs all of them in kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.teach.pages import EXERCISES, PAGES

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_MINUTES = {"20": "Twenty", "25": "Twenty-five", "30": "Thirty"}


@pytest.mark.tier("quick")
def test_a_page_runs() -> None:
    """Its cells need nothing but each other, and what they define is there at the end."""
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
