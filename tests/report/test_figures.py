"""The figure of timings: its contents, its appearance, and that matplotlib's settings stay unchanged."""

from __future__ import annotations

from dataclasses import replace

import matplotlib as mpl
import pytest
from matplotlib import colors
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from aotlab.report import figures
from aotlab.report.figures import timing_figure
from aotlab.report.model import Environment, Ratio, Report, TimingRow

HOSTILE = '</svg><script>alert(1)</script>$x$&"\x1b\u202e'


def report(*rows: TimingRow, identifier: str = "abc") -> Report:
    """Make a report of timings."""
    environment = Environment(aotlab="0", torch="2", python="3", platform="x")
    return Report(environment=environment, identifier=identifier, timing_rows=rows)


def row(engine: str, phase: str, median_ns: int, frame: str | None = "step", graph: int | None = 0) -> TimingRow:
    """Make a timing whose spread is known."""
    return TimingRow(
        engine=engine,
        phase=phase,
        median_ns=median_ns,
        min_ns=median_ns // 2,
        p10_ns=median_ns * 3 // 4,
        p90_ns=median_ns * 3 // 2,
        repeats=30,
        frame=frame,
        graph=graph,
    )


STEP = (
    row("eager", "forward", 20_000),
    row("aotlab", "forward", 10_000),
    row("eager", "backward", 40_000),
    row("aotlab", "backward", 60_000),
)


def texts(figure: Figure) -> list[str]:
    """List all texts of a figure's panels but the axis' numbers."""
    found = []
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), *[label.get_text() for label in axes.get_yticklabels()]]
        found += [text.get_text() for text in axes.texts]
    return found


def bars(figure: Figure) -> list[float]:
    """List the lengths of all bars."""
    return [
        patch.get_width()
        for axes in figure.axes
        for container in axes.containers
        if isinstance(container, BarContainer)
        for patch in container
    ]


def test_bars_are_medians_beside_eager() -> None:
    """A bar for each engine and phase, as long as its median, with the ratio to eager's written beside it."""
    forward = replace(STEP[1], ratios=(Ratio(over="eager", median=0.5, p10=0.45, p90=0.75),))
    backward = replace(STEP[3], ratios=(Ratio(over="eager", median=1.5, p10=0.8, p90=2, noise="it changed"),))
    total = replace(row("aotlab", "total", 90_000), incomparable="not comparable: 1 round")
    figure = timing_figure(report(STEP[0], forward, STEP[2], backward, total))
    assert bars(figure) == [20.0, 10.0, 40.0, 60.0, 90.0]
    assert texts(figure) == [
        "step, on cpu, µs",
        "forward",
        "backward",
        "total",
        "eager  20.0 µs",
        "aotlab  10.0 µs; 0.50× eager (0.45–0.75)",
        "eager  40.0 µs",
        "aotlab  60.0 µs; noise: 1.50× eager (0.80–2.00)",
        "aotlab  90.0 µs; not comparable: 1 round",
    ]


def test_whiskers_reach_from_the_tenth_to_the_ninetieth_percentile() -> None:
    """The whisker of a bar is where the percentiles are."""
    (axes,) = timing_figure(report(STEP[0])).axes
    (container,) = [each for each in axes.containers if isinstance(each, BarContainer)]
    (segments,) = container.errorbar.lines[2]
    assert segments.get_segments()[0][:, 0].tolist() == [15.0, 30.0]


def test_a_far_percentile_leaves_the_bars_visible() -> None:
    """On a busy machine a whisker is cut off at twice the longest bar, and an arrow says so."""
    wild = replace(row("aotlab", "forward", 10_000), p90_ns=50_000_000)
    (axes,) = timing_figure(report(row("eager", "forward", 20_000), wild)).axes
    ends = [
        float(line.get_segments()[0][1, 0])
        for container in axes.containers
        if isinstance(container, BarContainer)
        for line in container.errorbar.lines[2]
    ]
    assert ends == [30.0, 40.0]
    assert [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == ">"] == [[40.0]]
    assert axes.get_title(loc="left") == "step, on cpu, µs"


def test_every_graph_has_a_panel() -> None:
    """Graphs are labelled by frame, and by number if a frame has several."""
    rows = [row("eager", "forward", 1_000_000, frame, graph) for frame, graph in (("f", 0), ("f", 1), ("g", 0))]
    figure = timing_figure(report(*rows, row("eager", "total", 2_000_000_000, frame=None, graph=None)))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["f, graph 0, on cpu, ms", "f, graph 1, on cpu, ms", "g, on cpu, ms", "all of it, on cpu, s"]


def test_the_last_measurement_counts() -> None:
    """Who measures again sees the new times, not both."""
    assert bars(timing_figure(report(*STEP, row("eager", "forward", 30_000)))) == [30.0, 10.0, 40.0, 60.0]


def test_many_graphs_are_cut_to_the_slowest() -> None:
    """For a report of a hundred graphs, the figure shows the slowest ones and says how many it omits."""
    rows = [row("eager", "forward", 1000 * (1 + number), f"f{number}") for number in range(100)]
    figure = timing_figure(report(*rows))
    first = 100 - figures.MOST_GRAPHS
    assert [axes.get_title(loc="left").split(",")[0] for axes in figure.axes] == [f"f{n}" for n in range(first, 100)]
    assert figure.get_supxlabel().endswith(f"; the {figures.MOST_GRAPHS} slowest of 100 graphs")


def test_without_timings_it_says_so() -> None:
    """The figure says why it shows nothing, and has axes, without which IPython would not show it."""
    figure = report().plot_timings()
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == [
        "There are no timings: nothing was measured."
    ]


def test_odd_rows_are_drawn() -> None:
    """Engines and phases of later versions, times of zero, spreads that leave the median outside: nothing fails."""
    odd = TimingRow(engine="new", phase="compile", median_ns=0, min_ns=0, p10_ns=5, p90_ns=0, repeats=1)
    assert len(bars(report(odd, *STEP).plot_timings())) == 5


@pytest.mark.parametrize("colour", [*figures._COLOURS.values(), figures._OTHER, figures.INK])
@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_colours_are_seen_on_both_themes(colour: str, background: str) -> None:
    """Every colour has the contrast that WCAG requires for graphics.

    This is 3, on white and on JupyterLab's dark background.
    """

    def luminance(text: str) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colors.to_rgb(text)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    light, dark = sorted((luminance(colour), luminance(background)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3


def test_the_users_matplotlib_stays_as_it_is() -> None:
    """The user's settings neither change nor show: the figure is the same under any, and pyplot has none of it."""
    from matplotlib import pyplot

    plain = texts(report(*STEP).plot_timings())
    with mpl.rc_context({"font.size": 30.0, "text.usetex": True, "axes.facecolor": "red"}):
        before = dict(mpl.rcParams)
        figure = report(*STEP).plot_timings()
        assert texts(figure) == plain
        assert figure.axes[0].get_facecolor()[:3] == (1.0, 1.0, 1.0)
        assert dict(mpl.rcParams) == before
    assert pyplot.get_fignums() == []


def test_notebooks_display_the_figure() -> None:
    """A figure displays itself as a picture, in the size of the page, without pyplot."""
    picture, size = timing_figure(report(*STEP))._repr_png_()
    assert picture.startswith(b"\x89PNG")
    assert size["width"] == 640
