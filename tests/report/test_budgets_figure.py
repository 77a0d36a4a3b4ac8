"""The figure of the memory budgets draws the rows of `report.budgets`, and has a sentence if the table is empty."""

from __future__ import annotations

from dataclasses import replace

import torch
from matplotlib.axes import Axes
from torch import nn

import aotlab
from aotlab.report.model import AppliedChoice, MemoryCurve, Report


def training_step() -> Report:
    """Compile and run a training step whose activations take more memory than its parameters."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Tanh())]
    compiled = aotlab.compile(nn.Sequential(*layers), backend="eager")
    with Report.record() as recording:
        compiled(torch.ones(512, 16)).square().mean().backward()
    return recording.report()


def points(axes: Axes, label: str) -> list[tuple[float, float]]:
    """Return the points of the line with this label, in percent and KiB."""
    line = next(each for each in axes.get_lines() if each.get_label() == label)
    return list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))


def test_the_figure_draws_the_table() -> None:
    """Each row is a point of both lines; the run's choice and a measured choice are marked."""
    report = training_step()
    frame = report.frames[0]
    curve = MemoryCurve(engine="aotlab", forward=(1024,), backward=(4096, 2048))
    applied = AppliedChoice(frame=frame.name, graph=0, partitioner="min-cut", budget=0.0, curve=curve)
    report = Report.from_json(replace(report, applied_rows=(applied,)).to_json())
    budgets = report.budgets.sort_values("recompute_cost")
    (axes,) = report.plot_budgets().axes
    for column, label in (("saved_bytes", "saved for the backward"), ("peak_bytes", "peak of the step")):
        expected = [
            (100 * cost, size / 1024) for cost, size in zip(budgets["recompute_cost"], budgets[column], strict=True)
        ]
        assert points(axes, label) == expected
    assert len(points(axes, "the choice of this run")) == 1
    memory = frame.graphs[0].memory
    assert memory is not None
    ((_, size),) = points(axes, "measured peak")
    assert size == (memory.base_bytes + 4096) / 1024


def test_an_empty_figure_says_so() -> None:
    """Without a graph that saves values, the figure has a sentence."""
    figure = Report(environment=training_step().environment).plot_budgets()
    assert "no graph saves values" in figure.axes[0].texts[0].get_text()
