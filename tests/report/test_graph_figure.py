"""The figure of a graph: its rows, the saved bytes, mutated inputs, and reports without a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import aotlab
from aotlab.report.model import Report


def texts(figure: Figure) -> list[str]:
    """List the texts of the figure's only panel, without line breaks."""
    (axes,) = figure.axes
    return [text.get_text().replace("\n", ": ") for text in axes.texts]


@pytest.fixture(scope="module")
def layers() -> Report:
    """Record a training step of a network whose second activation is four times as large as the first."""
    network = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = aotlab.compile(network, backend="eager")
    with aotlab.Report.record() as recording:
        model(torch.ones(4, 8)).sum().backward()
    return recording.report()


def test_each_module_has_a_row_with_its_saved_bytes(layers: Report) -> None:
    """The rows are the modules; a line as wide as the saved bytes leads to the module whose backward reads them."""
    figure = layers.plot_graph()
    found = texts(figure)
    assert found[:10:2] == ["0: 2 ops", "1", "2: 2 ops", "3", "4: 2 ops"]
    assert found[-2:] == ["128 B", "512 B"]
    (axes,) = figure.axes
    widths = {tuple(line.get_ydata()): line.get_linewidth() for line in axes.lines}
    # The weights of the next layer need the activations first: rows 2 and 4.
    assert widths.keys() == {(1, 2), (3, 4)}
    assert widths[1, 2] * 4 == widths[3, 4]
    assert axes.get_title(loc="left") == "Sequential: 34 ops, saves 640 B"


def test_ops_of_a_small_program() -> None:
    """A program without modules has a row for each op. A frame and a text mark the new value of a mutated input."""

    def mutate(x: Tensor) -> Tensor:
        x.add_(1)
        y = x.t()
        y[0].mul_(2)
        return y

    with aotlab.Report.record() as report:
        aotlab.compile(mutate, backend="eager")(torch.ones(2, 2))
    found = texts(report.plot_graph())
    assert found[:4] == ["add", "t", "select", "mul"]
    assert sum("writes x" in text for text in found) == 1
    assert "backward ↑" not in found


def test_the_figure_is_vector_and_an_empty_report_says_so(layers: Report, tmp_path: Path) -> None:
    """The figure can be saved as SVG. The figure of a report without nodes has a sentence."""
    layers.plot_graph().savefig(tmp_path / "graph.svg")
    assert "<path" in (tmp_path / "graph.svg").read_text()
    assert texts(Report(environment=layers.environment).plot_graph()) == [
        "There is no graph to draw: the report has no nodes."
    ]
