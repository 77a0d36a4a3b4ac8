"""Stored runs in a notebook: the table, an earlier report, and two runs side by side, also without a kernel."""

from __future__ import annotations

import pytest

from tests.browser.drawn import DRAWN
from tests.browser.lab import THEMES, Lab, write_notebook

pytestmark = pytest.mark.tier("full")

SETUP = """import os
os.environ['AOTLAB_RUNS'] = 'runs.sqlite'
%load_ext aotlab
import torch
x = torch.ones(3, 4, requires_grad=True)"""
BEFORE, AFTER = (f"%%aotcompile --backend eager\ny = (x * 2).{op}()\ny.sum().backward()" for op in ("relu", "sin"))


def test_runs(lab: Lab, extension: None) -> None:
    """The page of two runs opens with their differences. The saved notebook shows the same without its kernel."""
    cells = [SETUP, BEFORE, AFTER, "%aotlab runs", "%aotlab show 1", "%aotlab diff 1 2"]
    write_notebook(lab.server.root / "runs.ipynb", cells)
    lab.open("runs.ipynb")
    lab.run_all()
    listed = lab.cell(3).locator("table tbody tr")
    assert [row.split("\t")[0] for row in listed.all_inner_texts()] == ["2", "1"]
    assert "runs.ipynb" in listed.first.inner_text()
    shown = lab.cell(4).locator(DRAWN)
    shown.locator("[data-chip=stages]").wait_for()
    assert shown.get_attribute("data-live") == "false"
    assert "relu" in shown.inner_text()

    def differences() -> list[str]:
        compared = lab.cell(5).locator(DRAWN)
        compared.locator("[role=tab][aria-selected=true]", has_text="Two runs").wait_for()
        return [text for text in compared.locator("[data-panel=runs] tbody tr").all_inner_texts() if "added" in text]

    found = differences()
    assert any("aten.sin(mul)" in text for text in found)
    for theme in THEMES:
        lab.theme(theme)
        lab.cell(5).scroll_into_view_if_needed()
        lab.shoot(f"two-runs-{theme}", lab.cell(5))
    lab.save()
    lab.close()
    lab.open("runs.ipynb", kernel=False)
    assert found == differences()
