"""One page, run cell by cell in this process; tests/notebook/test_notebooks.py runs all of them in kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.teach.pages import EXERCISES, PAGES

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


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
    """No page of the course is forgotten, and the start page names each."""
    pages = sorted(path.name for path in NOTEBOOKS.glob("[01][0-9]_*.ipynb") if path.name != "00_start.ipynb")
    assert pages == sorted(PAGES) == sorted(EXERCISES)
    start = (NOTEBOOKS / "00_start.ipynb").read_text(encoding="utf-8")
    assert [page for page in pages if f"]({page})" not in start] == []
