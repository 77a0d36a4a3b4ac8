"""The first page of the course, run in JupyterLab and looked at: while it is live, and in all the ways afterwards."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pytest

from aotlab.report.mime import CAP
from aotlab.report.model import MIME_TYPE
from tests.browser.drawn import DRAWN, TABS, compared, expected, expected_spans, panel, spans, tables
from tests.browser.lab import THEMES, Lab, Shared
from tests.browser.looks import hard_to_read
from tests.browser.reference import Reference, reference
from tests.browser.server import CHECKOUT

pytestmark = pytest.mark.tier("full")

NOTEBOOK = CHECKOUT / "notebooks" / "00_start.ipynb"


@cache
def compiled_cells(path: Path) -> list[int]:
    """Return the indices of the cells that begin with our magic."""
    cells = nbformat.read(path, as_version=4).cells
    return [index for index, cell in enumerate(cells) if cell.source.startswith("%%aotcompile")]


@cache
def cell_of(name: str) -> int:
    """Return the index of the cell whose report is kept as ``name``."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    (index,) = (i for i, cell in enumerate(cells) if re.match(rf"%%aotcompile .*-o {name}\b", cell.source))
    return index


def report_of(lab: Lab, name: str) -> Any:
    """Return the drawn report of the cell whose report is kept as ``name``."""
    return lab.cell(cell_of(name)).locator(DRAWN)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, shared: Shared) -> Reference:
    """Run the notebook in another process, without a browser, and return the tables of its reports."""
    return reference(NOTEBOOK, tmp_path_factory.mktemp("reference") / "tables.json")


@pytest.fixture(scope="module")
def ran(shared: Shared, extension: None) -> Iterator[Lab]:
    """Run the notebook in JupyterLab once, for all tests of this module; a test hands it on as it found it."""
    shutil.copy(NOTEBOOK, shared.server.root / "start.ipynb")
    with shared.page() as lab:
        lab.open("start.ipynb")
        lab.run_all()
        yield lab


@pytest.fixture(autouse=True)
def _no_complaints(ran: Lab) -> Iterator[None]:
    """Let no test pass while the page complains."""
    yield
    try:
        ran.raise_complaints()
    finally:
        ran.complaints.clear()


def assert_drawn(lab: Lab, truth: Reference, *, live: bool, name: str) -> None:
    """Compare every report that is drawn with the tables of the other process, in both themes."""
    cells = compiled_cells(NOTEBOOK)
    assert sorted(truth) == cells
    for theme in THEMES:
        lab.theme(theme)
        for index in cells:
            report = lab.cell(index).locator(f'{DRAWN}[data-live="{str(live).lower()}"]')
            report.wait_for()
            assert report.count() == 1
            for table in ("inputs", "outputs"):
                assert expected(truth[index][table], table) == compared(tables(report, table), table)
            assert expected_spans(truth[index]["storages"]) == spans(report)
            panel(report, "overview")
            lab.shoot(f"start-{name}-{theme.split()[-1].lower()}-cell{index}", lab.cell(index))


def test_tables_while_live(ran: Lab, truth: Reference) -> None:
    """Each compiled cell shows one live report above the cell's other outputs, and its tables are true."""
    assert_drawn(ran, truth, live=True, name="live")


def test_every_text_can_be_read(ran: Lab) -> None:
    """In every tab of every report, all text has enough contrast with its background, in both themes."""
    unreadable: set[str] = set()
    for theme in THEMES:
        ran.theme(theme)
        for index in compiled_cells(NOTEBOOK):
            report = ran.cell(index).locator(DRAWN)
            for tab in TABS:
                panel(report, tab)
                unreadable |= {f"{theme}, {tab}: {text}" for text in hard_to_read(report)}
                if index == cell_of("step"):
                    ran.shoot(f"start-step-{theme.split()[-1].lower()}-{tab}", report)
    assert "\n".join(sorted(unreadable)) == ""


def test_known_answers(ran: Lab) -> None:
    """The tables show the results that the page's prose states for its cells."""
    first = tables(report_of(ran, "first"), "inputs")
    assert [[(row["name"], row["marks"][0]) for row in rows] for rows in first.values()] == [[("x", "data mutated")]]
    (outputs,) = tables(report_of(ran, "first"), "outputs").values()
    said = {row["name"]: row["relation"] for row in outputs}
    assert set(said) == {"row", "doubled"}
    assert said["row"].startswith("view of input x: ")
    assert said["doubled"] == "memory of its own"
    step = tables(report_of(ran, "step"), "inputs")
    written = {row["name"] for rows in step.values() for row in rows if "data mutated" in row["marks"]}
    assert {"model.weight", "model.bias"} == written
    states = {name: report_of(ran, name).get_attribute("data-state") for name in ("first", "step", "refused")}
    assert states == {"first": "verified", "step": "verified", "refused": "nothing"}


def test_report_stands_above_the_result(ran: Lab) -> None:
    """A cell shows one report, and below it the cell's other outputs."""
    for index in compiled_cells(NOTEBOOK):
        outputs = ran.outputs(index)
        ours = [place for place, output in enumerate(outputs) if MIME_TYPE in output.get("data", {})]
        assert len(ours) == 1
        results = [place for place, output in enumerate(outputs) if output["output_type"] == "execute_result"]
        assert all(place > ours[0] for place in results)
    (result,) = ran.cell(cell_of("first")).locator(".jp-OutputArea-executeResult").all()
    above = report_of(ran, "first").bounding_box()
    below = result.bounding_box()
    assert "2., 2., 2." in result.inner_text()
    assert above["y"] + above["height"] <= below["y"]


def test_measure(ran: Lab) -> None:
    """The button measures the cell's graphs beside eager, now: rows for each engine and phase."""
    report = report_of(ran, "step")
    timing = panel(report, "timing")
    timing.locator("button", has_text="Measure").click()
    timing.locator("table[data-table=timings]").first.wait_for(timeout=120_000)
    found = timing.evaluate(
        """panel => [...panel.querySelectorAll('table[data-table=timings]')].map(table => [
            table.dataset.phase, [...table.querySelectorAll('tr[data-name]')].map(row => row.dataset.name),
        ])"""
    )
    assert {"forward", "backward"} <= {phase for phase, _ in found}
    assert all({"eager", "aotlab"} <= set(engines) for _, engines in found)
    for theme in THEMES:
        ran.theme(theme)
        ran.shoot(f"start-measured-{theme.split()[-1].lower()}", report)
        assert "\n".join(hard_to_read(report)) == ""


def test_tables_after_a_reload(ran: Lab, truth: Reference) -> None:
    """When the page is loaded again, the reports are drawn again, and are live since the kernel is."""
    ran.save()
    ran.reload()
    assert_drawn(ran, truth, live=True, name="reloaded")


def test_saved_notebook(ran: Lab) -> None:
    """The file stores each report as JSON, page and text, without a widget and without progress messages."""
    saved = ran.save()
    assert "widgets" not in saved["metadata"]
    for index, cell in enumerate(saved["cells"]):
        if index in compiled_cells(NOTEBOOK):
            kinds = [set(output.get("data", {})) for output in cell["outputs"] if output["output_type"] != "stream"]
            assert {MIME_TYPE, "text/html", "text/plain"} in kinds
            assert [output for output in cell["outputs"] if output["output_type"] == "stream"] == []
            assert len(kinds) <= 2
            assert len(json.dumps(cell["outputs"])) < CAP + 20_000
    assert "widget-view" not in json.dumps(saved)


def test_tables_after_shutdown(ran: Lab, truth: Reference) -> None:
    """When the kernel is shut down, the reports stay as they were, and say that they are not live."""
    ran.save()
    ran.shut_down_kernel()
    assert_drawn(ran, truth, live=False, name="shutdown")


@pytest.mark.parametrize("how", ["no-kernel", "fresh-kernel", "untrusted"])
def test_tables_reopened(ran: Lab, shared: Shared, truth: Reference, how: str) -> None:
    """Opened again without a kernel, with a new one, or by somebody who does not trust it, it shows the same tables."""
    saved = ran.save()
    if how == "untrusted":
        # Another content than the one that was signed when it was saved.
        saved["metadata"]["from"] = "somebody else"
    path = shared.server.root / f"{how}.ipynb"
    path.write_text(json.dumps(saved), encoding="utf-8")
    with shared.page() as lab:
        lab.open(path.name, kernel=how == "fresh-kernel")
        trusted = lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.widgets[5].model.trusted")
        assert (how != "untrusted") == trusted
        assert_drawn(lab, truth, live=False, name=how)
    lab.raise_complaints()
