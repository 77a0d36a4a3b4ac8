"""Draw the time line of a report as a matplotlib figure; see `aotlab.report.figures`."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from aotlab.report.figures import INK, empty_figure, new_figure, own_style, shortened
from aotlab.report.model import Report, TimelineRow
from aotlab.report.timeline import GRAPH_BREAK, RECOMPILE

#: The kinds of work, each with its colour (after Okabe and Ito) and its stages. All other stages are aotlab's own.
_KINDS = {
    "Dynamo": ("#56b4e9", ("dynamo", "guards", "rest of Dynamo")),
    "backend": (
        "#009e73",
        ("compile", "header", "kernel", "rest of the backend", "lowering", "code generation", "compilation of kernels"),
    ),
    "comparison with eager": ("#0072b2", ("verification",)),
    "calls": ("#d55e00", ("compiled", "eager")),
    "stock torch.compile": ("#8c8c8c", ("upstream",)),
    "measurement": ("#f0e442", ("timing",)),
    "the report": ("#999933", ("recording",)),
}
_AOTLAB = "tracing and run-time code", "#cc79a7"


def timeline_figure(report: Report) -> Figure:
    """Draw the activities of a run as nested bars, with one row of bars for each depth in each thread.

    A dotted line marks a graph break, a dashed line a recompile.

    Parameters
    ----------
    report
        A report. If its time line is empty, the figure says so.

    Returns
    -------
    matplotlib.figure.Figure
        A figure that is not registered with pyplot. Display it, or save it with its method ``savefig``.
    """
    moments = [row for row in report.timeline_rows if row.stage in (GRAPH_BREAK, RECOMPILE)]
    rows = [row for row in report.timeline_rows if row.stage not in (GRAPH_BREAK, RECOMPILE)]
    with own_style():
        if not rows:
            return empty_figure("The time line is empty: nothing was compiled or called.")
        lanes = sorted({(row.process, row.thread, row.depth) for row in rows})
        figure = new_figure(1.1 + 0.24 * len(lanes))
        axes = figure.add_subplot()
        kinds: dict[str, str] = {}
        for row in rows:
            kind, colour = _kind(row)
            kinds[kind] = colour
            lane = lanes.index((row.process, row.thread, row.depth))
            axes.barh(lane, row.duration_ns / 1e9, left=row.start_ns / 1e9, height=0.9, color=colour)
        for row in moments:
            style = ":" if row.stage == GRAPH_BREAK else "--"
            axes.axvline(row.start_ns / 1e9, color=INK, linestyle=style, linewidth=1)
        _finish(axes, lanes)
        handles = [Patch(color=colour, label=kind) for kind, colour in kinds.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _kind(row: TimelineRow) -> tuple[str, str]:
    return next(((kind, colour) for kind, (colour, stages) in _KINDS.items() if row.stage in stages), _AOTLAB)


def _finish(axes: Axes, lanes: list[tuple[str, int, int]]) -> None:
    """Name the first row of each process, and draw the first row on top."""
    names = {process: n for n, (process, _, _) in reversed(list(enumerate(lanes)))}
    axes.set_yticks(list(names.values()), [shortened(name) or "this run" for name in names])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlabel("seconds since the recording began")
    axes.patch.set_alpha(0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
