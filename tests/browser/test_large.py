"""A report of ten thousand nodes as a separate page: the page and each of its tabs appear at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotlab.report.model import GraphBreakRow
from tests.browser.drawn import TABS
from tests.browser.samples import large

pytestmark = pytest.mark.tier("full")

NODES = 10_000
#: In milliseconds, and in elements.
AT_ONCE, FEW = 1000, 5000
#: The benchmark is of aotlab, not of what else the machine does: the best of so many.
TRIES = 3

# Two frames later, the browser has painted the effect of a click.
_CLICK = """element => new Promise(done => {
    const begin = performance.now();
    element.click();
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begin)));
})"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page."""
    path = large(NODES).to_html(tmp_path_factory.mktemp("large") / "large.html")
    if 'class="aotlab-page"' not in path.read_text(encoding="utf-8"):
        pytest.skip("the extension is not built here: `cd extension && npm run build:widget`")
    return path


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open an empty page."""
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    yield context.new_page()
    context.close()


def elements(page: Any) -> int:
    """Count the elements of the page."""
    counted: int = page.evaluate("() => document.querySelectorAll('*').length")
    return counted


def opened(page: Any) -> Any:
    """Open the fold with the nodes, and return it."""
    page.locator("[data-tab=stages]").click()
    fold = page.locator("details[data-nodes]")
    fold.locator("summary").click()
    fold.locator("tr[data-name]").first.wait_for()
    return fold


def test_the_first_picture_is_there_at_once(page: Any, file: Path) -> None:
    """From the navigation to the first picture takes less than a second."""
    times = []
    for _ in range(TRIES):
        page.goto(file.as_uri())
        times.append(
            page.evaluate(
                """() => new Promise(done => new PerformanceObserver(entries => done(entries.getEntries()[0].startTime))
                    .observe({type: 'largest-contentful-paint', buffered: true}))"""
            )
        )
        # It is a picture of the report: nothing else is on the page.
        assert page.locator("[role=tab]").count() == len(TABS)
    assert min(times) < AT_ONCE, times


def test_each_tab_is_there_at_once(page: Any, file: Path) -> None:
    """A click on a tab shows it in less than a second, and puts few elements on the page."""
    page.goto(file.as_uri())
    for tab in reversed(TABS):
        times = []
        for _ in range(TRIES):
            page.locator("[data-tab=overview]").click()
            times.append(page.locator(f"[data-tab={tab}]").evaluate(_CLICK))
        assert page.locator(f"[data-panel={tab}]").is_visible()
        assert min(times) < AT_ONCE, (tab, times)
        assert elements(page) < FEW, tab


def test_nodes_scroll_sort_and_search(page: Any, file: Path) -> None:
    """All nodes can be reached, although the page contains only a few of them at a time."""
    page.goto(file.as_uri())
    fold = opened(page)
    rows, first = fold.locator("tr[data-name]"), fold.locator("tr[data-name]").first
    assert rows.count() < 100
    assert elements(page) < FEW
    box = fold.locator(".al-scroll")
    box.evaluate("box => { box.scrollTop = box.scrollHeight; }")
    last = fold.locator(f"tr[data-name=add_{NODES - 1}]")
    last.wait_for()
    assert last.get_attribute("aria-rowindex") == fold.locator("table").get_attribute("aria-rowcount") == str(NODES + 1)
    drawn, shown = last.bounding_box(), box.bounding_box()
    assert shown["y"] < drawn["y"] < drawn["y"] + drawn["height"] <= shown["y"] + shown["height"]
    # By number: as text, 999 would come before 1,000.
    for _ in range(2):
        fold.locator("th[data-sort=nbytes] button").click()
    assert fold.locator("th[data-sort=nbytes]").get_attribute("aria-sort") == "descending"
    box.evaluate("box => { box.scrollTop = 0; }")
    fold.locator(f"tr[data-name=add_{NODES - 1}]").wait_for()
    assert first.get_attribute("data-name") == f"add_{NODES - 1}"
    fold.locator("input").fill("add_99 model.py:100")
    assert fold.locator("[role=status]").inner_text() == "3 of 10,000"
    assert rows.evaluate_all("rows => rows.map(row => row.dataset.name)") == ["add_9999", "add_999", "add_99"]
    assert elements(page) < FEW


def test_code_is_there_at_once(page: Any, file: Path) -> None:
    """Ten thousand lines of code are put on the page when their fold is opened, within a second."""
    times = []
    for _ in range(TRIES):
        page.goto(file.as_uri())
        page.locator("[data-tab=stages]").click()
        fold = page.locator("details[data-code]").first
        assert fold.locator(".al-codebox").count() == 0
        times.append(fold.locator("summary").evaluate(_CLICK))
        code = fold.locator(".al-scroller")
        assert "add_1 " in code.inner_text()
        code.evaluate("each => each.scrollTo(0, each.scrollHeight)")
        code.get_by_text(f"add_{NODES - 1} ").first.wait_for()
    assert min(times) < AT_ONCE, times


def test_a_fold_in_a_long_table_opens_above_the_rows(page: Any, tmp_path: Path) -> None:
    """Rows of a long table have one line each. An opened fold shows its whole content within the table's width."""
    breaks = [
        GraphBreakRow(frame=f"step_{at}", words="it prints " * 30, reason="in other words " * 30, at_ns=at)
        for at in range(300)
    ]
    path = replace(large(10), graph_break_rows=tuple(breaks)).to_html(tmp_path / "breaks.html")
    page.goto(path.as_uri())
    page.locator("[data-tab=breaks]").click()
    table = page.locator("table[data-table=graph_breaks]")
    summary = table.locator("summary").nth(2)
    box, top = summary.bounding_box(), "([x, y]) => document.elementFromPoint(x, y)?.closest('summary') !== null"
    assert page.evaluate(top, [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2])
    summary.click()
    inside = table.locator("details[open] pre")
    box, around = inside.bounding_box(), table.locator("xpath=..").bounding_box()
    assert around["x"] <= box["x"]
    assert box["x"] + box["width"] <= around["x"] + around["width"]
    assert box["height"] > 30
    points = [(box["x"] + 9, box["y"] + at * box["height"]) for at in (0.1, 0.5, 0.9)]
    seen = "([x, y]) => document.elementFromPoint(x, y)?.closest('details[open] pre') !== null"
    assert all(page.evaluate(seen, list(point)) for point in points)
