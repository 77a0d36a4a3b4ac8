"""What happened, as a versioned model: recorded from the engine's events, shown as tables, JSON and HTML."""

from __future__ import annotations

from aotlab.report.codec import ReportFormatError
from aotlab.report.collect import Recording
from aotlab.report.model import (
    MIME_TYPE,
    Cell,
    Report,
    TimingRow,
    VerificationRow,
    report_schema,
)
from aotlab.report.tables import COLUMNS

__all__ = [
    "COLUMNS",
    "MIME_TYPE",
    "Cell",
    "Recording",
    "Report",
    "ReportFormatError",
    "TimingRow",
    "VerificationRow",
    "report_schema",
]
