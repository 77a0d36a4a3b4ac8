"""The storage map plays a program step by step: the bytes, the words and the keys agree with the report's tables."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotlab
from aotlab.report.model import Report
from tests.browser.drawn import DRAWN, panel
from tests.browser.lab import THEMES, Lab, write_notebook
from tests.browser.looks import hard_to_read

pytestmark = pytest.mark.tier("full")

#: What the player shows: the step's index, its columns, and for each storage the pending bytes and the marks.
SHOWN = """player => ({
    step: player.dataset.step,
    position: player.querySelector('input').value,
    columns: Object.fromEntries([...player.querySelectorAll('[data-column]')].map(
        column => [column.dataset.column, [...column.querySelectorAll('code')].map(code => code.textContent)])),
    tensors: [...player.querySelectorAll('[data-tensor]')].map(row => row.dataset.tensor),
    pending: [...player.querySelectorAll('figure')].map(figure => figure.dataset.pending),
    marks: ['read', 'all', 'some'].map(kind => player.querySelectorAll(`[data-tensor] .al-hatch-${kind}`).length),
})"""


def opened(lab: Lab, report: Report) -> Any:
    """Open a report in a notebook without a kernel, and return its storage map."""
    write_notebook(lab.server.root / "player.ipynb", [{"source": "1", "outputs": [report._repr_mimebundle_()]}])
    lab.open("player.ipynb", kernel=False)
    drawn = lab.cell(0).locator(DRAWN)
    drawn.wait_for()
    return panel(drawn, "storages")


def recorded(function: Any, *args: Tensor) -> Report:
    """Compile and run a function."""
    with Report.record("a program") as recording:
        aotlab.compile(function, backend="eager")(*args)
    return recording.report()


def alias(x: Tensor) -> Tensor:
    """Write an input, and then a part of it through two views."""
    x.add_(1)
    y = x.t()
    y[0].mul_(2)
    return y


def test_the_alias_program_step_by_step(lab: Lab, extension: None) -> None:
    """Each step shows its call, ops and bytes; the caller's memory waits for the copy; keys and buttons move."""
    report = recorded(alias, torch.zeros(3, 4))
    content = opened(lab, report)
    player, keys = content.locator(".al-player"), lab.page.keyboard
    steps = report.steps
    assert player.evaluate(SHOWN)["step"] == ""
    assert content.locator("[data-span]").count() == 2
    player.locator("input").focus()
    programs_tensors = ["x"], ["x", "x.t()"], ["x", "x.t()", "x.t()[0]"], ["x", "x.t()", "x.t()[0]"]
    tensors = *programs_tensors, ["x", "out"], ["x", "out"]
    marks = [1, 1, 0], [0, 0, 0], [0, 0, 0], [3, 3, 0], [0, 0, 0], [0, 1, 0]
    for index, (expected_tensors, expected_marks) in enumerate(zip(tensors, marks, strict=True)):
        keys.press("ArrowRight")
        shown = player.evaluate(SHOWN)
        row = steps.iloc[index]
        column = "the call" if row["kind"] == "call" else "the epilogue"
        assert (shown["step"], shown["position"]) == (str(index), str(index + 1))
        assert shown["columns"][column] == [row["step"]]
        if row["kind"] == "call":
            assert ", ".join(shown["columns"]["the graph"]) == (row["nodes"] if isinstance(row["nodes"], str) else "")
            assert shown["columns"]["your line"] == [row["code"]]
        assert shown["tensors"] == expected_tensors
        assert shown["marks"] == expected_marks
        # The copy is the last step. Until then the caller's memory has the old values.
        assert shown["pending"] == (["0-48"] if index < 5 else [""])
    keys.press("Home")
    assert player.evaluate(SHOWN)["step"] == ""
    keys.press("End")
    assert player.evaluate(SHOWN)["step"] == "5"
    player.get_by_role("button", name="Step back").click()
    assert player.evaluate(SHOWN)["step"] == "4"
    for theme in THEMES:
        lab.theme(theme)
        for width in (1000, 1600):
            lab.page.set_viewport_size({"width": width, "height": 800})
            assert hard_to_read(player) == []
            assert content.evaluate("panel => panel.scrollWidth <= panel.clientWidth")
        lab.shoot(f"player-{theme.split()[-1].lower()}", player)
    keys.press("Home")
    player.get_by_role("button", name="Play").click()
    player.locator("xpath=self::*[@data-step='1']").wait_for()
    player.get_by_role("button", name="Pause").click()
    paused = player.evaluate(SHOWN)["step"]
    assert paused in ("1", "2")
    lab.page.wait_for_timeout(2000)
    assert player.evaluate(SHOWN)["step"] == paused


class Block(nn.Module):
    """A residual block of a UNet: it writes running statistics, and activates in place."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self.norm, self.shortcut = nn.BatchNorm2d(begin), nn.Conv2d(begin, end, 1)
        self.conv = nn.Conv2d(begin, end, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's result to its input."""
        return self.conv(nn.functional.silu(self.norm(x), inplace=True)) + self.shortcut(x)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """A small UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Block(3, 8), Block(8, 8), Block(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Go down and up once."""
        fine = self.down(x)
        coarse = self.middle(nn.functional.avg_pool2d(fine, 2))
        return self.up(torch.cat([fine, nn.functional.interpolate(coarse, scale_factor=2)], 1))  # type: ignore[no-any-return]


def test_a_unet_and_thousands_of_steps(lab: Lab, extension: None) -> None:
    """The player shows the steps with written memory, or all on request; thousands of steps are as fast."""
    report = recorded(UNet(), torch.randn(2, 3, 8, 8))
    ((graph,),) = [frame.graphs for frame in report.frames]
    calls = [step for step in graph.steps if step.kind == "call"]
    rest = [step for step in graph.steps if step.kind != "call"]
    count = 5_000 // len(calls)
    long = replace(graph, steps=(*calls * count, *rest))
    report = replace(report, frames=(replace(report.frames[0], graphs=(long,)),))
    content = opened(lab, report)
    player, keys = content.locator(".al-player"), lab.page.keyboard
    written = {access.storage for step in graph.steps for access in step.writes}

    def touching(steps: Any) -> int:
        return sum(any(each.storage in written for each in (*s.reads, *s.writes, *s.makes)) for s in steps)

    slider = player.locator("input")
    assert int(slider.get_attribute("max")) == count * touching(calls) + touching(rest)
    player.get_by_role("button", name="All steps").click()
    assert int(slider.get_attribute("max")) == len(long.steps)
    slider.focus()
    begin = time.monotonic()
    keys.press("End")
    last = player.evaluate(SHOWN)
    assert time.monotonic() - begin < 2
    assert last["step"] == str(len(long.steps) - 1)
    # After the last copy, the caller's memory has all values.
    assert set(last["pending"]) == {""}
    player.get_by_role("button", name="All steps").click()
    keys.press("Tab")
    slider.focus()
    keys.press("ArrowLeft")
    assert player.evaluate(SHOWN)["columns"]["the epilogue"][0].endswith(")")
