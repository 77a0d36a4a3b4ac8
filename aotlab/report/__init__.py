"""What happened, as a versioned model: recorded from the engine's events, shown as tables, JSON and HTML."""

from __future__ import annotations

from aotlab.report.codec import ReportFormatError
from aotlab.report.collect import Recording, record
from aotlab.report.exported import ExportedGraph, export
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
from aotlab.report.tables import COLUMNS, describe, table
from aotlab.report.verdict import verdict
from aotlab.report.views import DRAWING

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
    """Draw the timings; matplotlib, which takes a while to import, is wanted by few."""
    from aotlab.report.figures import timing_figure

    return timing_figure(report)


DRAWING.update(figure=_figure, export=export)
DRAWING.update(verdict=verdict, page=page, plain=plain, bundle=bundle, table=table, describe=describe, record=record)
