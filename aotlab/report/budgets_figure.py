"""Draw the memory budgets of a report's graphs as a matplotlib figure; see `aotlab.report.figures`."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aotlab.report.figures import INK, empty_figure, new_figure, own_style, shortened
from aotlab.report.model import Report
from aotlab.report.tables import table

#: The colours (after Okabe and Ito) and the labels of the lines.
_LINES = {"saved_bytes": ("#0072b2", "saved for the backward"), "peak_bytes": ("#d55e00", "peak of the step")}

#: The figure shows at most this many graphs, those with the most saved bytes.
_MOST_GRAPHS = 6


def budgets_figure(report: Report) -> Figure:
    """Draw for each graph the saved bytes and the peak of each memory budget against the work that it adds.

    Parameters
    ----------
    report
        A report. If it has no graph that saves values, the figure says so.

    Returns
    -------
    matplotlib.figure.Figure
        A figure that is not registered with pyplot. Display it, or save it with its method ``savefig``.
    """
    budgets = table(report, "budgets")
    groups = [(key, rows) for key, rows in budgets.groupby(["frame", "graph"], sort=False) if len(rows)]
    groups = sorted(groups, key=lambda group: -int(group[1]["saved_bytes"].max()))[:_MOST_GRAPHS]
    with own_style():
        if not groups:
            return empty_figure("There are no memory budgets: no graph saves values for a backward.")
        figure = new_figure(2.8 * len(groups))
        for axes, (key, rows) in zip(figure.subplots(len(groups), 1, squeeze=False)[:, 0], groups, strict=True):
            axes.set_title(f"{shortened(str(key[0]))}, graph {key[1]}", loc="left", fontsize=10)
            _draw(axes, rows)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False
        )
    return figure


def _draw(axes: Axes, rows: pd.DataFrame) -> None:
    modelled = rows.dropna(subset=["saved_bytes"]).sort_values("recompute_cost")
    factor = 2**20 if int(modelled["peak_bytes"].max()) >= 2**20 else 2**10
    cost = 100 * modelled["recompute_cost"].astype(float)
    for column, (colour, label) in _LINES.items():
        sizes = modelled[column].astype(float) / factor
        axes.plot(cost, sizes, marker="o", markersize=4, color=colour, label=label)
        chosen = modelled["current"].astype(bool)
        label = "" if column == "saved_bytes" else "the choice of this run"
        axes.plot(cost[chosen], sizes[chosen], "o", markersize=9, markerfacecolor="none", color=INK, label=label)
    measured = modelled.dropna(subset=["measured_peak_bytes"])
    axes.plot(
        100 * measured["recompute_cost"].astype(float),
        measured["measured_peak_bytes"].astype(float) / factor,
        "D",
        markersize=6,
        color=INK,
        label="measured peak",
    )
    axes.set_xlabel("work that the backward does again, in % of forward and backward (estimated)")
    axes.set_ylabel("MiB" if factor == 2**20 else "KiB")
    axes.set_ylim(bottom=0)
    axes.patch.set_alpha(0.0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
