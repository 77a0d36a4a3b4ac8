"""The report itself: reading, writing, and its tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TypeVar

from aotlab.errors import UsageError
from aotlab.report.codec import ReportFormatError, decode, encode, schema
from aotlab.report.model.calls import Frame
from aotlab.report.model.cells import Cell, GraphBreakRow, Running
from aotlab.report.model.choices import AppliedChoice
from aotlab.report.model.environment import Environment
from aotlab.report.model.measured import (
    EngineRow,
    RankRow,
    RunRow,
    Summary,
    TimelineRow,
    TimeRow,
    TimingRow,
    VerificationRow,
    WaitRow,
)
from aotlab.report.model.memory import MemoryCurve
from aotlab.report.packing import unpack
from aotlab.report.views import DRAWING, Views

VERSION = 1


MIME_TYPE = "application/vnd.aotlab.report.v1+json"


SCHEMA_ID = "urn:aotlab:report:v1"


R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Views["Report"]):
    """The record of everything that happened while something was compiled and run.

    `Report.record` and `Report.load` return reports. The tables (``report.inputs`` and so on) are pandas DataFrames,
    computed when they are read; `describe` documents their columns.

    Attributes
    ----------
    version
        The version of this model: 1.
    name
        The title that was given to `Report.record`.
    identifier
        A unique id from the process that recorded the report. The page in a notebook requests the report from the
        kernel by this id.
    created
        When the recording began, as ISO 8601 with the offset from UTC.
    duration_ns
        How long the recording took.
    cell
        The notebook cell; None if the report is not about a cell.
    running
        The present activity of the cell; None if it does not run.
    environment
        The versions, the devices and the settings.
    frames
        The functions that were compiled or called.
    graph_break_rows, time_rows, timeline_rows, timing_rows, verification_rows, engine_rows, run_rows
        The rows of the tables ``graph_breaks``, ``time``, ``timeline``, ``timings``, ``verification``, ``engines`` and
        ``runs``.
    run_names
        The names of the two runs that the table ``runs`` compares: the earlier run, and the run of this report. Empty
        for a report of one run.
    rank, world_size
        The number of the process in its distributed job, and the number of processes; None and 1 if the reports of the
        processes are not gathered.
    ended
        The error that ended the block or script, in a gathered report; empty if there was no error.
    rank_reports
        The reports of the other ranks. Each table has their rows, too, with the number of the rank in a column.
    rank_rows, wait_rows
        The rows of the tables ``ranks`` and ``waits``.
    memory_curves
        The measured memory over time of the engines.
    applied_rows
        The choices of saved values that were compiled and measured.
    notes
        Sentences about the report itself: events that could not be recorded, rows that were cut.
    summary
        The head of the page, computed from the report before it was cut. Reports that are embedded in a notebook's
        output or in an HTML page have it; it is None in all others.

    Examples
    --------
    >>> import aotlab, torch
    >>> @aotlab.compile(backend="eager")
    ... def double_(x):
    ...     return x.mul_(2)
    >>> with aotlab.Report.record() as report:
    ...     _ = double_(torch.ones(3))
    >>> report.inputs[["name", "mutates_data"]].values.tolist()
    [['x', True]]
    """

    version: int = VERSION
    name: str = ""
    identifier: str = ""
    created: str = ""
    duration_ns: int = 0
    cell: Cell | None = None
    running: Running | None = None
    environment: Environment
    frames: tuple[Frame, ...] = ()
    graph_break_rows: tuple[GraphBreakRow, ...] = ()
    time_rows: tuple[TimeRow, ...] = ()
    timeline_rows: tuple[TimelineRow, ...] = ()
    timing_rows: tuple[TimingRow, ...] = ()
    memory_curves: tuple[MemoryCurve, ...] = ()
    applied_rows: tuple[AppliedChoice, ...] = ()
    verification_rows: tuple[VerificationRow, ...] = ()
    engine_rows: tuple[EngineRow, ...] = ()
    run_names: tuple[str, ...] = ()
    run_rows: tuple[RunRow, ...] = ()
    rank: int | None = None
    world_size: int = 1
    ended: str = ""
    rank_reports: tuple[Report, ...] = ()
    rank_rows: tuple[RankRow, ...] = ()
    wait_rows: tuple[WaitRow, ...] = ()
    notes: tuple[str, ...] = ()
    summary: Summary | None = None

    def report(self) -> Report:
        """Return this report. `Recording.report` returns a report too, so code can call ``report()`` on either."""
        return self

    @staticmethod
    def record(
        name: str | None = None, *, ranks: str | Path | None = None, waits: bool = False
    ) -> AbstractContextManager[Views[Report]]:
        """Record what aotlab does during a ``with`` block, in all threads.

        Parameters
        ----------
        name
            A title for the report.
        ranks
            ``"gather"`` gathers the reports of all processes of a `torch.distributed` job when the block ends. Each
            rank must enter the block. Rank 0's report then has the reports of the other ranks, and every table has a
            column ``rank``. If a rank does not arrive within the timeout of the process group, rank 0's report names
            the rank. A path names a folder into which each rank writes its report when the block ends; ``aotlab report
            FOLDER`` reads it.
        waits
            Whether to measure the time that this process spends in collectives, for the table ``waits``. The rank that
            spends least time there is often the slow one. Torch's profiler measures it, for gloo and NCCL, also for the
            collectives of DDP and FSDP2. It costs time and memory, above all on a GPU, where it records each kernel. If
            the block uses `torch.profiler` itself, there are no times, and a warning says so.

        Returns
        -------
        AbstractContextManager
            A context manager that returns a `Recording`. During the block and after it, a recording has all attributes
            and methods of a report. ``recording.report()`` returns the report as a frozen `Report`.

        Raises
        ------
        UsageError
            ``waits`` is true, and torch's profiler is on already.
        """
        recording: AbstractContextManager[Views[Report]] = DRAWING["record"](name, ranks, waits)
        return recording

    def with_timings(self, rows: Iterable[object]) -> Report:
        """Return a copy with ``rows`` added to the timings.

        Parameters
        ----------
        rows
            `TimingRow` objects, mappings with its keys, or other objects with its attributes.

        Raises
        ------
        UsageError
            A row lacks a field, or a field has a wrong type.
        """
        return replace(self, timing_rows=(*self.timing_rows, *[_row(TimingRow, row) for row in rows]))

    def with_memory_curves(self, curves: Iterable[MemoryCurve]) -> Report:
        """Return a copy with ``curves`` added to the measured memory curves; see `aotlab.bench.memory_curve`."""
        return replace(self, memory_curves=(*self.memory_curves, *curves))

    def with_verification(self, rows: Iterable[object], *, engine: str = "aotlab", frame: str | None = None) -> Report:
        """Return a copy with ``rows`` added to the verification.

        Parameters
        ----------
        rows
            `VerificationRow` objects, mappings with its keys, or other objects with its attributes, such as the
            ``comparisons`` of the result of `aotlab.verify`.
        engine, frame
            The engine and the frame of rows that do not have these fields.

        Raises
        ------
        UsageError
            A row lacks a field, or a field has a wrong type.
        """
        defaults = {"engine": engine, "frame": frame}
        added = [_row(VerificationRow, row, defaults) for row in rows]
        return replace(self, verification_rows=(*self.verification_rows, *added))

    def with_cell(self, cell: Cell) -> Report:
        """Return a copy of the report that is about the notebook cell ``cell``."""
        return replace(self, cell=cell)

    def to_dict(self, *, sparse: bool = False) -> dict[str, object]:
        """Return the report as dicts, lists and plain values, in the form that `to_json` writes.

        If ``sparse`` is true, fields that have their default value are left out, as in a notebook's output. `from_dict`
        reads both forms.
        """
        encoded = encode(self, sparse=sparse)
        assert isinstance(encoded, dict)
        return {"version": self.version, **encoded}

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the report as JSON text (ASCII)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read a report from JSON text.

        Nothing in the text is executed. Unknown fields are ignored.

        Raises
        ------
        ReportFormatError
            The text is not JSON, is not a report, is damaged, or has another version.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportFormatError(f"this is not an aotlab report: it is not JSON ({error})") from None
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls, value: object) -> Report:
        """Read a report from a value that `json.loads` returned; see `from_json`.

        The value may be the compressed form that a notebook stores.
        """
        if not isinstance(value, dict) or "version" not in value or "environment" not in value:
            raise ReportFormatError("this is not an aotlab report: it has no fields 'version' and 'environment'")
        version = value["version"]
        if version != VERSION or type(version) is not int:
            raise ReportFormatError(
                f"the report has version {version!r}; this aotlab reads version {VERSION}. "
                "Read it with the aotlab that wrote it, or a newer one"
            )
        return decode(cls, unpack(value))

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON to ``path``, and return the path."""
        path = Path(path)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that `save` wrote; `from_json` explains which checks are made.

        Raises
        ------
        ReportFormatError
            The file is not a report of this version; the message names the file.
        OSError
            The file cannot be read.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except ReportFormatError as error:
            raise ReportFormatError(f"{path}: {error}") from None


def report_schema() -> dict[str, object]:
    """Build the JSON Schema of `Report`, which is stored in ``schema/report.v1.json``."""
    return schema(Report, title="aotlab report, version 1", identifier=SCHEMA_ID)


def _row(kind: type[R], row: object, defaults: Mapping[str, object] | None = None) -> R:
    """Convert ``row`` to a record of the class ``kind``, and check the types of its fields.

    ``defaults`` has values for fields that the row lacks.
    """
    if isinstance(row, kind):
        return row
    values = {**(defaults or {}), **(row if isinstance(row, Mapping) else _attributes(row))}
    for name, value in values.items():
        if name.endswith("_ns") and isinstance(value, float):
            values[name] = round(value)
    try:
        return decode(kind, values, kind.__name__)
    except ReportFormatError as error:
        raise UsageError(str(error).replace("the report is damaged", "this row cannot be added to a report")) from None


def _attributes(row: object) -> dict[str, object]:
    if is_dataclass(row):
        return {field.name: getattr(row, field.name) for field in fields(row)}
    return dict(vars(row)) if hasattr(row, "__dict__") else {}
