"""Draw a report's timings, forward and backward beside eager, as a matplotlib figure.

The figure is made without pyplot, so the notebook's current figure does not change. It is drawn in matplotlib's default
style, so that the notebook's matplotlib settings do not affect it. These settings are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from aotlab.report.markup import clean
from aotlab.report.model import Report, TimingRow
from aotlab.report.text import duration

#: The colour of each engine. Colour-blind readers can distinguish these colours (after Okabe and Ito). Each has a
#: contrast of at least 3 against white and against black. The hatches distinguish engines if the figure is printed
#: without colours.
_COLOURS = {"eager": "#808080", "upstream": "#d55e00", "aotlab": "#0072b2"}
_OTHER = "#a0569a"
_HATCHES = {"upstream": "//", "aotlab": ""}

#: A grey that is readable on white and on black.
INK = "#767675"

_PHASES = ("forward", "backward", "total")

#: The figure shows at most this many graphs, the slowest ones.
MOST_GRAPHS = 12

#: A whisker is at most this many times as long as the longest bar of its panel. A longer whisker ends in an arrow.
_REACH = 2

#: The figure shows at most this many characters of a frame's name.
_MOST_CHARACTERS = 40

_SETTINGS = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.prop_cycle": cycler(color=[INK]),
    "font.size": 10.0,
    "text.color": INK,
    "text.parse_math": False,  # a frame may be called `$x_1$`
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The timings of one graph."""

    label: str
    rows: tuple[TimingRow, ...]

    @property
    def slowest_ns(self) -> int:
        """The longest median."""
        return max(row.median_ns for row in self.rows)


def timing_figure(report: Report) -> Figure:
    """Draw the timings of ``report``.

    There is one panel for each graph, with one bar for each engine and phase. The length of the bar is the median time.
    A whisker reaches from the 10th to the 90th percentile, or ends in an arrow if the 90th percentile is far from the
    median. If a graph was measured several times, the last measurement is drawn.

    Parameters
    ----------
    report
        A report. If it has no timings, the figure says so.

    Returns
    -------
    matplotlib.figure.Figure
        A figure that is not registered with pyplot. Display it, or save it with its method ``savefig``.
    """
    groups = _groups(report.timing_rows)
    with own_style():
        if not groups:
            return empty_figure("There are no timings: nothing was measured.")
        shown = sorted(groups, key=lambda group: -group.slowest_ns)[:MOST_GRAPHS]
        shown = [group for group in groups if group in shown]
        heights = [0.5 + 0.24 * len(group.rows) + 0.12 * len(_phases(group)) for group in shown]
        figure = new_figure(sum(heights) + 0.55)
        panels = figure.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for axes, group in zip(panels[:, 0], shown, strict=True):
            _draw(axes, group)
        left_out = len(groups) - len(shown)
        note = f"; the {len(shown)} slowest of {len(groups)} graphs" if left_out else ""
        figure.supxlabel(f"median time of a call, with 10th to 90th percentile{note}", fontsize=9)
    return figure


class _ShownFigure(Figure):
    """A figure that notebooks display without ``%matplotlib inline``.

    IPython displays other figures only after pyplot was imported.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        file = BytesIO()
        self.savefig(file, format="png", dpi=200)
        width, height = (round(100 * inches) for inches in self.get_size_inches())
        return file.getvalue(), {"width": width, "height": height}


def new_figure(height: float) -> Figure:
    """Return a transparent figure of the given height, in inches. Its width fits a page."""
    figure = _ShownFigure(figsize=(6.4, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    return figure


def empty_figure(sentence: str) -> Figure:
    """Return a figure with a sentence that says why there is nothing to draw."""
    figure = new_figure(1.0)
    axes = figure.add_subplot()  # IPython shows no figure without axes
    axes.set_axis_off()
    axes.text(0.5, 0.5, sentence, ha="center", va="center")
    return figure


# --- drawing -----------------------------------------------------------------------------------------------------


def _draw(axes: Axes, group: _Group) -> None:
    # On a busy machine the slowest tenth of the calls may take a hundred times as long as the median. A whisker of that
    # length would leave no space for the bars.
    reach_ns = min(_REACH * group.slowest_ns, max(max(row.p90_ns, row.median_ns) for row in group.rows))
    unit, factor = _unit(reach_ns)
    longest = reach_ns / factor
    place = 0.0
    ticks: list[tuple[float, str]] = []
    for phase in _phases(group):
        rows = [row for row in group.rows if row.phase == phase]
        ticks.append((place + (len(rows) - 1) / 2, phase))
        for row in rows:
            median, low = row.median_ns / factor, row.p10_ns / factor
            high = min(row.p90_ns / factor, longest)
            if row.p90_ns > reach_ns:
                axes.plot([high], [place], marker=">", markersize=5, color=INK)
            axes.barh(
                place,
                median,
                height=0.8,
                color=_COLOURS.get(row.engine, _OTHER),
                hatch=_HATCHES.get(row.engine),
                xerr=[[max(median - low, 0)], [max(high - median, 0)]],
                error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 3},
            )
            axes.annotate(
                f"{shortened(row.engine)}  {'; '.join([duration(row.median_ns), *row.comparisons[:1]])}",
                (max(high, median), place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            place += 1
        place += 0.5
    axes.set_yticks([position for position, _ in ticks], [phase for _, phase in ticks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.75, -0.75)
    # Leave space for the labels to the right of the bars.
    axes.set_xlim(0, longest * 2 if longest else 1)
    axes.set_title(f"{group.label}, {unit}", loc="left", fontsize=10)
    axes.patch.set_alpha(0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _groups(rows: Sequence[TimingRow]) -> list[_Group]:
    """Collect the timings of each graph, in the order of the report.

    If an engine and a phase were measured several times, the last row is used.
    """
    cells: dict[tuple[str | None, int | None, str], dict[tuple[str, str], TimingRow]] = {}
    for row in rows:
        cells.setdefault((row.frame, row.graph, row.device), {})[row.phase, row.engine] = row
    frames: dict[str | None, set[int | None]] = {}
    for frame, graph, _ in cells:
        frames.setdefault(frame, set()).add(graph)
    groups = []
    for (frame, graph, device), timings in cells.items():
        name = shortened(frame) if frame is not None else "all of it"
        several = f", graph {graph}" if len(frames[frame]) > 1 and graph is not None else ""
        groups.append(_Group(label=f"{name}{several}, on {shortened(device)}", rows=tuple(timings.values())))
    return groups


def _phases(group: _Group) -> list[str]:
    present = dict.fromkeys(row.phase for row in group.rows)
    return [*[phase for phase in _PHASES if phase in present], *[phase for phase in present if phase not in _PHASES]]


def _unit(ns: int) -> tuple[str, float]:
    """Return a suitable unit for a time, and the number of nanoseconds in this unit."""
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= factor:
            return unit, factor
    return "ns", 1.0


def shortened(text: str) -> str:
    """Return the end of a long name."""
    text = clean(text).replace("\n", " ")
    return text if len(text) <= _MOST_CHARACTERS else f"…{text[1 - _MOST_CHARACTERS :]}"


@contextmanager
def own_style() -> Iterator[None]:
    """Use matplotlib's default style with `_SETTINGS`, then restore the notebook's settings."""
    with style.context(_SETTINGS, after_reset=True):
        yield
