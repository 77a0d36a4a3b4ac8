"""Draw the memory over time of a report's graphs as a matplotlib figure; see `aotlab.report.figures`."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aotlab.report.figures import INK, empty_figure, new_figure, own_style, shortened
from aotlab.report.model import MEMORY_KINDS, Memory, MemoryCurve, Report
from aotlab.report.text import data_size

#: The colour of each kind of memory (after Okabe and Ito), in the order in which the kinds are stacked.
_COLOURS = dict(zip(MEMORY_KINDS, ("#8c8c8c", "#a0569a", "#56b4e9", "#0072b2", "#e69f00", "#009e73"), strict=True))
_LINES = {"eager": ":", "upstream": "--", "aotlab": "-"}

#: The figure shows at most this many graphs, those with the highest peaks.
_MOST_GRAPHS = 6


def memory_figure(report: Report) -> Figure:
    """Draw the modelled memory of each graph, stacked by kind, and the measured curves as lines.

    Parameters
    ----------
    report
        A report. If the memory of no graph is known, the figure says so.

    Returns
    -------
    matplotlib.figure.Figure
        A figure that is not registered with pyplot. Display it, or save it with its method ``savefig``.
    """
    graphs = [
        (f, graph, graph.memory) for f in report.frames for graph in f.graphs if graph.memory and graph.memory.names
    ]
    graphs = sorted(graphs, key=lambda each: -max(each[2].totals()))[:_MOST_GRAPHS]
    with own_style():
        if not graphs:
            return empty_figure("The memory over time is unknown: the report has no graphs.")
        figure = new_figure(2.8 * len(graphs))
        panels = figure.subplots(len(graphs), 1, squeeze=False)[:, 0]
        for axes, (frame, graph, memory) in zip(panels, graphs, strict=True):
            number = f", graph {graph.index}" if len(frame.graphs) > 1 else ""
            peak = memory.totals()[memory.peak]
            axes.set_title(f"{shortened(frame.name)}{number}: peak {data_size(peak)}", loc="left", fontsize=10)
            measured = [each for each in report.memory_curves if (each.frame, each.graph) == (frame.name, graph.index)]
            _draw(axes, memory, measured)
        handles = {
            label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def _draw(axes: Axes, memory: Memory, measured: Sequence[MemoryCurve]) -> None:
    factor = 2**20 if max(memory.totals()) >= 2**20 else 2**10
    curves = {kind: each for kind, each in memory.curves().items() if any(each)}
    layers = [[nbytes / factor for nbytes in each] for each in curves.values()]
    colours = [_COLOURS[kind] for kind in curves]
    axes.stackplot(range(memory.steps), layers, labels=list(curves), colors=colours, step="post", linewidth=0)
    for curve in measured:
        values = [(memory.base_bytes + nbytes) / factor for nbytes in (*curve.forward, *curve.backward)]
        places = [
            *_spread(0, memory.forward_steps - 1, len(curve.forward)),
            *_spread(memory.forward_steps, memory.steps - 1, len(curve.backward)),
        ]
        label = f"{curve.engine}, measured"
        axes.plot(places, values, color="#d55e00", linestyle=_LINES.get(curve.engine, "-."), linewidth=1.2, label=label)
    peak = memory.peak
    axes.plot([peak], [memory.totals()[peak] / factor], marker="v", color=INK, label="peak", linestyle="")
    if memory.forward_steps < memory.steps:
        axes.axvline(memory.forward_steps - 0.5, color=INK, linewidth=1, linestyle="--")
    axes.set_xlabel("op that allocates memory: forward | backward" if memory.forward_steps < memory.steps else "op")
    axes.set_ylabel("MiB" if factor == 2**20 else "KiB")
    axes.set_xlim(0, max(memory.steps - 1, 1))
    axes.set_ylim(bottom=0)
    axes.patch.set_alpha(0.0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _spread(first: float, last: float, count: int) -> list[float]:
    """Return ``count`` places at equal distances from ``first`` to ``last``."""
    return [first + (last - first) * n / max(count - 1, 1) for n in range(count)]
