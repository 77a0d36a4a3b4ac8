"""A separate page, as `report.to_html` writes it, in a browser without Jupyter: drawn, accessible, not cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.browser.drawn import DRAWN, TABS, compared, expected, panel, records, tables, unfold
from tests.browser.samples import large, training_step

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
    """The page's tables have the same content as the report's tables."""
    report = training_step()
    drawn = page.locator(DRAWN)
    for name in ("inputs", "outputs"):
        assert expected(records(report._table(name)), name) == compared(tables(drawn, name), name)


@pytest.mark.parametrize("rows", [5, 250])
@pytest.mark.parametrize("width", [620, 1000])
def test_names_and_their_fate_are_in_sight(browser: Any, tmp_path: Path, width: int, rows: int) -> None:
    """In a table of inputs, short or long, no name is cut, and the last column is seen without a scroll."""
    report = large(nodes=1, rows=rows)
    graph = report.frames[0].graphs[0]
    name = "opt.state[net.h.11.mlp.fc.weight]['momentum_buffer']"
    # each belongs to another variable: those of one would share a row
    fate = {"mutation_under_no_grad": True, "mutation_type": "mutated in graph"}
    inputs = tuple([replace(each, name=f"v{i}.{name}", **fate) for i, each in enumerate(graph.inputs)])
    graph = replace(graph, inputs=inputs)
    report = replace(report, frames=(replace(report.frames[0], graphs=(graph, replace(graph, index=1))),))
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(report.to_html(tmp_path / "names.html").as_uri())
    found = panel(page.locator(DRAWN), "inputs").evaluate(
        """panel => {
            const box = panel.querySelector('.al-scroll');
            const cells = [...box.querySelectorAll('tr[data-name] > td:first-child')];
            const isCut = each => each.scrollWidth > each.clientWidth + 1 || each.scrollHeight > each.clientHeight + 1;
            return {
                names: cells.length,
                cut: cells.flatMap(cell => [cell, ...cell.querySelectorAll('div')]).filter(isCut).length,
                hidden: box.scrollWidth - box.clientWidth,
                last: [...box.querySelectorAll('th')].at(-1).dataset.sort,
            };
        }"""
    )
    page.close()
    assert found.pop("names") >= 5
    assert found == {"cut": 0, "hidden": 0, "last": "happened"}


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
