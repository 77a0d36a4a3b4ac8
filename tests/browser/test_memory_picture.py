"""The picture of the memory over time agrees with the report's tables, and works by keyboard."""

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


def training_step() -> Report:
    """Compile and run a training step of a small network."""
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    compiled = aotlab.compile(network, backend="eager", frontend="dynamo")
    with Report.record("training step") as recording:
        compiled(torch.ones(16, 32)).sum().backward()
    return recording.report()


def test_memory_picture(lab: Lab, extension: None) -> None:
    """The stack, the peak's composition and each step that the arrow keys choose agree with the tables."""
    report = training_step()
    write_notebook(lab.server.root / "memory.ipynb", [{"source": "1", "outputs": [report._repr_mimebundle_()]}])
    lab.open("memory.ipynb", kernel=False)
    drawn = lab.cell(0).locator(DRAWN)
    drawn.wait_for()
    content = panel(drawn, "memory")
    content.locator("[data-action=layers]").click()  # from layers to lines and modules
    storages, totals = report.memory, report.memory_curve["total_bytes"].tolist()

    def shown() -> tuple[int, list[int]]:
        step, sizes = content.evaluate(
            """panel => [Number(panel.querySelector('figure').dataset.step),
                [...panel.querySelectorAll('tr[data-bytes]')].map(row => Number(row.dataset.bytes))]"""
        )
        return step, sizes

    peak = totals.index(max(totals))
    step, sizes = shown()
    assert (step, sum(sizes)) == (peak, totals[peak])
    assert sizes == sorted(sizes, reverse=True)
    alive = storages[storages["at_peak"] & (storages["nbytes"] > 0)]
    groups = alive.groupby(["kind", "module", "file", "line"], dropna=False)["nbytes"].sum()
    assert sorted(groups.tolist(), reverse=True) == sizes
    content.locator("[role=slider]").focus()
    for key, expected in (("ArrowRight", peak + 1), ("ArrowLeft", peak), ("Home", 0), ("End", len(totals) - 1)):
        lab.page.keyboard.press(key)
        step, sizes = shown()
        assert (key, step, sum(sizes)) == (key, expected, totals[expected])
    lab.page.keyboard.press("Enter")
    assert shown()[0] == peak
    figure = content.locator("figure.al-memory")
    box = figure.bounding_box()
    assert box is not None
    figure.click(position={"x": box["width"] - 12, "y": 80})
    assert shown()[0] >= len(totals) - 2
    for theme in THEMES:
        lab.theme(theme)
        lab.page.set_viewport_size({"width": 1000, "height": 800})
        kinds = content.locator("svg path[data-kind]")
        assert {"saved", "gradients", "parameters"} <= {each.get_attribute("data-kind") for each in kinds.all()}
        fills = kinds.evaluate_all("paths => paths.map(path => getComputedStyle(path).fill)")
        assert len(set(fills)) == len(fills)
        assert hard_to_read(drawn) == []
        assert content.evaluate("panel => panel.scrollWidth <= panel.clientWidth")
        lab.shoot(f"memory-{theme.split()[-1].lower()}", drawn)
