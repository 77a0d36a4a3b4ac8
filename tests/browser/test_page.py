"""A page of its own, as `report.to_html` writes it, in a browser without Jupyter: drawn, accessible, not cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.drawn import DRAWN, TABS, compared, expected, panel, records, tables, unfold
from tests.browser.samples import training_step

pytestmark = pytest.mark.tier("full")


@pytest.fixture(params=[(640, "dark"), (1600, "light")], ids=lambda each: f"{each[0]}-{each[1]}")
def page(request: pytest.FixtureRequest, browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Open the sample report's page, in a window of a width and in a colour scheme."""
    width, scheme = request.param
    path = training_step().to_html(tmp_path / "report.html")
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.goto(path.as_uri())
    yield opened
    opened.close()


def test_tables_and_totals(page: Any) -> None:
    """The page's tables hold what the report's do."""
    report = training_step()
    drawn = page.locator(DRAWN)
    for name in ("inputs", "outputs"):
        assert expected(records(report._table(name)), name) == compared(tables(drawn, name), name)


def test_nothing_is_inaccessible_or_cut(page: Any) -> None:
    """With all folds open, axe finds nothing serious in any tab, and nothing reaches beyond the window's right edge."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    for tab in TABS:
        unfold(panel(page.locator(DRAWN), tab))
        found = axe.run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
        serious = [
            (tab, each["id"], [node["html"][:120] for node in each["nodes"][:3]])
            for each in found.response["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == []
        beyond = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert (tab, beyond) == (tab, 0)
