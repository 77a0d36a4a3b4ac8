"""The report: a versioned data model, filled from the engine's events and shown as tables, JSON and HTML."""

from __future__ import annotations

from aotlab.report.codec import ReportFormatError
from aotlab.report.collect import Recording, record
from aotlab.report.columns import COLUMNS, describe
from aotlab.report.exported import export, exported_html
from aotlab.report.html import page
from aotlab.report.mime import bundle, plain
from aotlab.report.model import (
    MIME_TYPE,
    Cell,
    Report,
    TimingRow,
    VerificationRow,
    report_schema,
)
from aotlab.report.tables import table
from aotlab.report.timeline import write_perfetto
from aotlab.report.verdict import verdict
from aotlab.report.views import DRAWING, ExportedGraph

__all__ = [
    "COLUMNS",
    "MIME_TYPE",
    "Cell",
    "ExportedGraph",
    "Recording",
    "Report",
    "ReportFormatError",
    "TimingRow",
    "VerificationRow",
    "report_schema",
]


def _figure(report: Report) -> object:
    """Draw the timings; import matplotlib only now, because that takes a while and few users need it."""
    from aotlab.report.figures import timing_figure

    return timing_figure(report)


def _memory_figure(report: Report) -> object:
    """Draw the memory over time; see `_figure`."""
    from aotlab.report.memory_figure import memory_figure

    return memory_figure(report)


def _graph_figure(report: Report) -> object:
    """Draw the largest graph; see `aotlab.report.graph_figure.graph_figure`."""
    from aotlab.report.graph_figure import graph_figure

    return graph_figure(report)


def _budgets_figure(report: Report) -> object:
    """Draw the memory budgets; see `_figure`."""
    from aotlab.report.budgets_figure import budgets_figure

    return budgets_figure(report)


def _timeline_figure(report: Report) -> object:
    """Draw the time line; see `_figure`."""
    from aotlab.report.timeline_figure import timeline_figure

    return timeline_figure(report)


def _storages_figure(report: Report) -> object:
    """Draw the storages; see `_figure`."""
    from aotlab.report.storages_figure import storages_figure

    return storages_figure(report)


DRAWING.update(
    budgets_figure=_budgets_figure,
    figure=_figure,
    graph_figure=_graph_figure,
    memory_figure=_memory_figure,
    storages_figure=_storages_figure,
    timeline_figure=_timeline_figure,
)
DRAWING.update(export=export, exported=exported_html)
DRAWING.update(verdict=verdict, page=page, plain=plain, bundle=bundle, table=table, describe=describe, record=record)
DRAWING.update(perfetto=write_perfetto)
