"""The report: a versioned data model, filled from the engine's events and shown as tables, JSON and HTML."""

from __future__ import annotations

from functools import partial
from importlib import import_module

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


#: The functions that draw a report with matplotlib, each with its module.
_FIGURES = {
    "budgets_figure": "aotlab.report.budgets_figure",
    "graph_figure": "aotlab.report.graph_figure",
    "memory_figure": "aotlab.report.memory_figure",
    "storages_figure": "aotlab.report.storages_figure",
    "timeline_figure": "aotlab.report.timeline_figure",
    "timing_figure": "aotlab.report.figures",
}


def _figure(name: str, report: Report) -> object:
    """Draw a figure. Its module imports matplotlib, which takes a while, so it is imported at the first use."""
    return getattr(import_module(_FIGURES[name]), name)(report)


DRAWING.update({name: partial(_figure, name) for name in _FIGURES})
DRAWING.update(export=export, exported=exported_html)
DRAWING.update(verdict=verdict, page=page, plain=plain, bundle=bundle, table=table, describe=describe, record=record)
DRAWING.update(perfetto=write_perfetto)
