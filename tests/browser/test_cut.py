"""The slider of the memory budget agrees with `report.budgets`, and Apply measures a choice in the live page."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotlab
from aotlab.report.model import Report
from tests.browser.drawn import DRAWN, panel
from tests.browser.lab import THEMES, Lab, write_notebook
from tests.browser.looks import hard_to_read

pytestmark = pytest.mark.tier("full")

SETUP = """%load_ext aotlab
import torch
from torch import nn
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
x = torch.ones(16, 32)"""
CELL = "%%aotcompile --backend eager -o report\nloss = net(x).square().mean()\nloss.backward()"
SHOWN = "words => [words.dataset.held, words.dataset.peak, words.dataset.recomputed].map(Number)"
SLIDE = """(slider, position) => {
    slider.value = position;
    slider.dispatchEvent(new Event('input', { bubbles: true }));
}"""


def test_slider(lab: Lab, extension: None) -> None:
    """Without a kernel, each position has the bytes, the peak and the ops of its row; curve, table and graph follow."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Tanh())]
    compiled = aotlab.compile(nn.Sequential(*layers), backend="eager", frontend="dynamo")
    with Report.record("training step") as recording:
        compiled(torch.ones(512, 16)).square().mean().backward()
    report = recording.report()
    write_notebook(lab.server.root / "cut.ipynb", [{"source": "1", "outputs": [report._repr_mimebundle_()]}])
    lab.open("cut.ipynb", kernel=False)
    drawn = lab.cell(0).locator(DRAWN)
    drawn.wait_for()
    content = panel(drawn, "memory")
    words, slider = content.locator(".al-cut [role=status][data-held]"), content.locator(".al-cut-slider")
    budgets = report.budgets
    peaks = set()
    for position, row in enumerate(budgets.to_dict("records")):
        slider.evaluate(SLIDE, position)
        assert words.evaluate(SHOWN) == [row["saved_bytes"], row["peak_bytes"], row["recomputed_ops"]]
        # the table under the curve lists the storages at the peak
        shown = content.evaluate(
            "panel => [...panel.querySelectorAll('[data-table=memory] tr[data-bytes]')]"
            ".reduce((sum, row) => sum + Number(row.dataset.bytes), 0)"
        )
        assert shown == row["peak_bytes"]
        peaks.add(shown)
    assert len(peaks) > 1
    slider.focus()
    lab.page.keyboard.press("Home")
    assert slider.input_value() == "0"
    assert "--partitioner min-cut --memory-budget 0" in content.locator(".al-cut-actions code").inner_text()
    assert content.locator("figure.al-memory path.al-outline").count() == 1
    held, _, recomputed = words.evaluate(SHOWN)
    content.locator(".al-cut summary[data-key^='fold cut values']").click()
    switch = content.locator("tr[data-saved=false] [data-action=switch]").first
    node = switch.evaluate("button => button.closest('tr').dataset.node")
    switch.click()
    assert content.locator(f"tr[data-node='{node}'][data-saved=true]").count() == 1
    after = words.evaluate(SHOWN)
    assert after[0] > held
    assert after[2] < recomputed
    assert "--save " in content.locator(".al-cut-actions code").inner_text()
    for theme in THEMES:
        lab.theme(theme)
        lab.page.set_viewport_size({"width": 1000, "height": 800})
        assert hard_to_read(drawn) == []
        assert content.evaluate("panel => panel.scrollWidth <= panel.clientWidth")
        lab.shoot(f"cut-{theme.split()[-1].lower()}", drawn)
    graph = panel(drawn, "graph")
    assert "follow the choice" in graph.inner_text()
    content = panel(drawn, "memory")
    content.locator("[data-action=this-run]").click()
    assert content.locator("path.al-outline").count() == 0


def test_apply(lab: Lab, extension: None) -> None:
    """In the live page, Apply compiles and measures the choice, and its point appears beside the modelled one."""
    write_notebook(lab.server.root / "apply.ipynb", [SETUP, CELL])
    lab.open("apply.ipynb")
    lab.run_cell(0)
    lab.run_cell(1)
    drawn = lab.cell(1).locator(f"{DRAWN}[data-live=true]")
    drawn.wait_for()
    content = panel(drawn, "memory")
    content.locator(".al-cut-slider").evaluate(SLIDE, 0)
    content.locator("[data-action=apply]").click()
    measured = content.locator(".al-cut-measured[data-bytes]")
    measured.wait_for()
    assert "the results equal eager" in content.locator(".al-cut [data-held]").inner_text()
    assert content.locator("path.al-curve[data-engine=aotlab]").count() == 1
    lab.shoot("applied", drawn)
