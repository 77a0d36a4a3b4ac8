"""A report in a saved notebook, drawn by our renderer from its JSON alone."""

from __future__ import annotations

import pytest

from aotlab.report.mime import MIME_TYPE
from tests.browser.drawn import DRAWN, TABS, compared, expected, expected_spans, panel, records, spans, tables, unfold
from tests.browser.lab import THEMES, Lab, write_notebook
from tests.browser.looks import hard_to_read
from tests.browser.samples import hostile, training_step

pytestmark = pytest.mark.tier("full")


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
def test_report_without_a_kernel(lab: Lab, trusted: bool, extension: None) -> None:
    """Opened without a kernel, trusted or not, a report shows its tables, in both themes."""
    report = training_step()
    write_notebook(lab.server.root / "saved.ipynb", [{"source": "1", "outputs": [report._repr_mimebundle_()]}])
    if trusted:
        lab.server.trust("saved.ipynb")
    lab.open("saved.ipynb", kernel=False)
    drawn = lab.cell(0).locator(DRAWN)
    drawn.wait_for()
    unreadable: set[str] = set()
    for theme in THEMES:
        lab.theme(theme)
        assert drawn.get_attribute("data-live") == "false"
        assert drawn.get_attribute("data-state") == "unverified"
        assert drawn.get_attribute("data-identifier") == report.identifier
        for name in ("inputs", "outputs"):
            assert expected(records(report._table(name)), name) == compared(tables(drawn, name), name)
        assert expected_spans(records(report.storages)) == spans(drawn)
        for tab in TABS:
            panel(drawn, tab)
            lab.shoot(f"static-{'trusted' if trusted else 'untrusted'}-{theme.split()[-1].lower()}-{tab}", drawn)
            unreadable |= {f"{theme}, {tab}: {text}" for text in hard_to_read(drawn)}
    assert "\n".join(sorted(unreadable)) == ""


@pytest.mark.tier("quick")
def test_tabs_by_keyboard(lab: Lab, extension: None) -> None:
    """The tabs are one stop of the Tab key; arrows, Home and End move among them and show the panel."""
    write_notebook(lab.server.root / "keys.ipynb", [{"source": "1", "outputs": [training_step()._repr_mimebundle_()]}])
    lab.open("keys.ipynb", kernel=False)
    drawn = lab.cell(0).locator(DRAWN)
    drawn.locator("[role=tab][data-tab=overview]").focus()
    keys = ["ArrowRight"] * len(TABS) + ["ArrowLeft", "Home", "End", "ArrowLeft"]
    wanted = [*TABS[1:], TABS[0], TABS[-1], TABS[0], TABS[-1], TABS[-2]]
    reached = []
    for key in keys:
        lab.page.keyboard.press(key)
        reached.append(
            lab.page.evaluate("() => document.activeElement.dataset.tab ?? document.activeElement.outerHTML")
        )
        state = drawn.evaluate(
            """report => ({
                selected: [...report.querySelectorAll('[role=tab][aria-selected=true]')].map(tab => tab.dataset.tab),
                stops: [...report.querySelectorAll('[role=tab]')].filter(tab => tab.tabIndex === 0).length,
                shown: [...report.querySelectorAll('[role=tabpanel]')]
                    .filter(panel => panel.checkVisibility()).map(panel => panel.dataset.panel),
                labelled: [...report.querySelectorAll('[role=tab]')].every(tab =>
                    document.getElementById(tab.getAttribute('aria-controls'))?.dataset.panel === tab.dataset.tab),
            })"""
        )
        assert state == {"selected": [reached[-1]], "stops": 1, "shown": [reached[-1]], "labelled": True}
    assert wanted == reached


@pytest.mark.parametrize("trusted", [True, False], ids=["trusted", "untrusted"])
@pytest.mark.parametrize("also_chosen", [True, False], ids=["all", "free"])
def test_hostile_words_stay_words(lab: Lab, extension: None, trusted: bool, also_chosen: bool) -> None:
    """Whatever a report's strings hold, nothing of it becomes markup or runs, in any tab."""
    report = hostile(also_chosen=also_chosen)
    bundle = {MIME_TYPE: report.to_dict(), "text/html": "<p>"}  # not cut, as it would be in a notebook
    write_notebook(lab.server.root / "hostile.ipynb", [{"source": "1", "outputs": [bundle]}])
    if trusted:
        lab.server.trust("hostile.ipynb")
    lab.open("hostile.ipynb", kernel=False)
    drawn = lab.cell(0).locator(DRAWN)
    drawn.wait_for()
    for tab in TABS:
        content = panel(drawn, tab)
        unfold(content)
        assert drawn.locator("img, script, a, svg[onload]").count() == 0
        if tab in ("inputs", "outputs", "stages"):
            assert "window.hacked='img'" in content.inner_text()
    assert "window.hacked='script'" in drawn.inner_text()
    assert lab.page.evaluate("() => window.hacked ?? null") is None


def test_damaged_report_says_so(lab: Lab, extension: None) -> None:
    """A malformed report, or one of a future version, gives a message and does not break the rest of the page."""
    good = training_step()._repr_mimebundle_()
    kind = next(name for name in good if name.endswith("json"))
    whole = training_step().to_dict()
    damaged = [{}, [], {**whole, "version": 99}, {**whole, "frames": "none"}]
    cells = [{"source": str(i), "outputs": [{kind: data}]} for i, data in enumerate(damaged)]
    write_notebook(lab.server.root / "damaged.ipynb", [*cells, {"source": "good", "outputs": [good]}])
    lab.open("damaged.ipynb", kernel=False)
    lab.cell(len(damaged)).locator(f"{DRAWN}[data-state=unverified]").wait_for()
    for index in range(len(damaged)):
        said = lab.cell(index).locator(f"{DRAWN}[data-state=unreadable]").inner_text()
        assert "report" in said
        assert ("99" in said) == (index == 2)
    lab.shoot("damaged")
