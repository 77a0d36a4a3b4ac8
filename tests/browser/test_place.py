"""aotlab's place in JupyterLab: toolbar, palette, side panel, gutter, and the verdict alone, in one run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.drawn import DRAWN, panel
from tests.browser.lab import THEMES, Lab, Shared, write_notebook
from tests.browser.looks import hard_to_read

pytestmark = pytest.mark.tier("full")

PROGRAM = "%%aotcompile --backend eager\nx.add_(1)\ny = x.t()\ny[0].mul_(2)\n\nprint(y.sum().item())"
CELLS = ["import torch\nx = torch.ones(3, 4)", PROGRAM, "count = 1 + 1", "%aotlab config open=verdict"]
ALIASES, COUNT, SETTING = 1, 2, 3


def marks(lab: Lab, index: int) -> list[tuple[str, str]]:
    """Return the symbol and the title of each mark in a cell's gutter, from top to bottom."""
    found = lab.cell(index).locator(".aotlab-mark")
    pairs: list[list[str]] = found.evaluate_all("marks => marks.map(mark => [mark.textContent, mark.title])")
    return [(symbol, title) for symbol, title in pairs]


def choose(lab: Lab, index: int) -> None:
    """Make a cell the active one."""
    lab.page.evaluate("index => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = index; }", index)


def listed(lab: Lab) -> list[str]:
    """Return the names of the reports in the side panel."""
    names: list[str] = lab.page.locator("#aotlab-reports .al-name").all_inner_texts()
    return names


def compile_cells(lab: Lab) -> None:
    """Compile one cell by the toolbar's button, and one by the palette's command."""
    lab.run_cell(0)
    choose(lab, ALIASES)
    # The kernel has not loaded aotlab's extension yet: the button does.
    lab.notebook.locator(".jp-NotebookPanel-toolbar [data-jp-item-name=aotlab-compile]").click()
    lab.cell(ALIASES).locator(f'{DRAWN}[data-state="verified"][data-live=true]').wait_for(timeout=120_000)
    choose(lab, COUNT)
    lab.command("aotlab:compile-cell")
    lab.cell(COUNT).locator(DRAWN).wait_for()
    source = "() => window.jupyterapp.shell.currentWidget.content.activeCell.model.sharedModel.getSource()"
    assert lab.page.evaluate(source) == f"%%aotcompile\n{CELLS[COUNT]}"


def look_at_marks(lab: Lab) -> None:
    """Each line of a compiled cell has a mark with its facts; other cells have no marks."""
    lab.wait_until("() => document.querySelectorAll('.aotlab-mark').length > 0")
    found = marks(lab, ALIASES)
    assert [symbol for symbol, _ in found] == ["●M", "●", "●M", "○"]
    assert "Mutates: x" in found[0][1]
    assert "Line 2: compiled" in found[0][1]
    assert "Graphs: " in found[1][1]
    assert marks(lab, 0) == []
    for theme in THEMES:
        lab.theme(theme)
        lab.shoot(f"place-gutter-{theme.split()[-1].lower()}")


def look_at_panel(lab: Lab) -> None:
    """Look at the panel: it lists the reports, newest first; a click goes to the cell and opens a tab."""
    lab.command("aotlab:show-reports")
    lab.page.locator("#aotlab-reports button").first.wait_for()
    assert listed(lab) == [CELLS[COUNT], "x.add_(1)"]
    for theme in THEMES:
        lab.theme(theme)
        lab.shoot(f"place-panel-{theme.split()[-1].lower()}")
        assert hard_to_read(lab.page.locator("#aotlab-reports .aotlab-report")) == []
    notebook = lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.id")
    lab.page.locator("#aotlab-reports button").first.press("ArrowDown")
    lab.page.keyboard.press("Enter")
    tab = lab.page.locator(f'.aotlab-tab {DRAWN}[data-state="verified"]')
    tab.wait_for()
    assert tab.locator("[data-action=fold]").count() == 0
    state = "id => [...window.jupyterapp.shell.widgets('main')].find(each => each.id === id).content.activeCellIndex"
    assert lab.page.evaluate(state, notebook) == ALIASES
    lab.command("aotlab:open-newest-report")
    lab.page.locator(f'.aotlab-tab {DRAWN}:not([data-state="verified"])').wait_for()
    lab.shoot("place-tabs")
    lab.page.evaluate(
        """id => {
            const { shell } = window.jupyterapp;
            [...shell.widgets('main')].filter(each => each.id !== id).forEach(each => each.close());
            shell.activateById(id);
        }""",
        notebook,
    )
    lab.wait_until("() => document.querySelectorAll('.aotlab-tab').length === 0")


def look_at_palette(lab: Lab) -> None:
    """Find the commands in the palette."""
    lab.command("apputils:activate-command-palette")
    items = lab.page.locator(".lm-CommandPalette-item[data-command^='aotlab:']")
    items.first.wait_for()
    assert sorted(items.evaluate_all("items => items.map(item => item.dataset.command)")) == [
        "aotlab:compile-cell",
        "aotlab:open-newest-report",
        "aotlab:show-reports",
    ]
    lab.page.keyboard.press("Escape")


def look_at_verdict(lab: Lab) -> Any:
    """Change the setting. A cell that runs again shows only its verdict, and a click shows the report."""
    lab.run_cell(SETTING)
    lab.run_cell(ALIASES)
    report = lab.cell(ALIASES).locator(f"{DRAWN}.al-folded")
    report.wait_for()
    assert report.locator("[role=tablist]").is_hidden()
    for theme in THEMES:
        lab.theme(theme)
        lab.shoot(f"place-verdict-{theme.split()[-1].lower()}", lab.cell(ALIASES))
    assert report.bounding_box()["height"] < 80
    lab.cell(ALIASES).locator("[data-action=fold]").click()
    lab.cell(ALIASES).locator(f"{DRAWN}:not(.al-folded) [role=tablist]").wait_for()


def test_place(lab: Lab, shared: Shared, extension: None) -> None:
    """Toolbar, palette, panel, gutter and verdict work while the kernel runs, and in the notebook that was saved."""
    write_notebook(lab.server.root / "place.ipynb", list(CELLS))
    lab.open("place.ipynb")
    compile_cells(lab)
    look_at_marks(lab)
    look_at_panel(lab)
    look_at_palette(lab)
    look_at_verdict(lab)
    lab.wait_until("() => document.querySelectorAll('.aotlab-mark').length > 0")
    saved = lab.save()
    # An edit removes the marks of the cell.
    choose(lab, ALIASES)
    lab.cell(ALIASES).locator(".cm-content").click()
    lab.page.keyboard.type("#")
    lab.wait_until(
        "index => document.querySelectorAll('.jp-Notebook .jp-Cell')[index].querySelector('.aotlab-mark') === null",
        ALIASES,
    )
    (lab.server.root / "again.ipynb").write_text(json.dumps(saved), encoding="utf-8")
    with shared.page() as again:
        again.open("again.ipynb", kernel=False)
        again.cell(ALIASES).locator(f"{DRAWN}.al-folded[data-live=false]").wait_for()
        again.wait_until("() => document.querySelectorAll('.aotlab-mark').length > 0")
        assert len(marks(again, ALIASES)) == 4
        again.cell(ALIASES).locator("[data-action=fold]").click()
        nodes = panel(again.cell(ALIASES).locator(DRAWN), "stages").locator("details[data-nodes]")
        nodes.locator("summary").click()
        nodes.locator("tr[data-name]").first.wait_for()
    again.raise_complaints()
