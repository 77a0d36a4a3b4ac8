"""Store reports in the background, and read them again."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from aotlab import config
from aotlab.errors import AotlabError
from aotlab.report import Report
from aotlab.report.compare import compared
from aotlab.report.counts import counted
from aotlab.report.mime import whole
from aotlab.runs import store
from aotlab.runs.store import Run, StoreError

#: A run has at most this many characters of its code, for the search.
_MOST_CODE = 20_000

_worker: ThreadPoolExecutor | None = None
_last: Future[None] | None = None
_warned: set[str] = set()


def keep(report: Report, *, notebook: str = "") -> None:
    """Store a report in the background, unless `aotlab.config.save_runs` is False.

    If a report of the same run is stored already, it is replaced. A problem gives one warning and never an error.

    Parameters
    ----------
    report
        The report.
    notebook
        The path of the notebook or script.
    """
    global _worker, _last
    if not config.save_runs:
        return
    try:
        _worker = _worker or ThreadPoolExecutor(1, thread_name_prefix="aotlab-runs")
        _last = _worker.submit(_save, report, notebook)
    except RuntimeError as error:  # the interpreter ends
        _warn(error)


def finish() -> None:
    """Wait until all reports are stored."""
    if _last is not None:
        _last.result()


def load(number: int | None = None, *, before: int = 0) -> tuple[Run, Report]:
    """Return a stored run and its report.

    Parameters
    ----------
    number
        The run's number; None for the newest run.
    before
        How many runs before the newest one, if ``number`` is None.

    Raises
    ------
    StoreError
        There is no such run.
    ReportFormatError
        The report is damaged.
    """
    finish()
    if number is None:
        stored = store.runs()
        if len(stored) <= before:
            raise StoreError(f"{'only ' * bool(stored)}{len(stored) or 'no'} run is stored")
        number = stored[before].number
    run, text = store.find(number)
    report = Report.from_json(text)
    # Under its own identifier, a page would show the present report of the cell that made it.
    return run, replace(report, identifier=f"run-{run.number}-{report.identifier}")


def difference(before: int | None = None, after: int | None = None) -> Report:
    """Return the report of the run ``after`` with the table that compares it with the run ``before``.

    Without numbers, the two newest runs are compared. It raises the same errors as `load`.
    """
    earlier, later = load(before, before=1), load(after)
    names = [f"run {run.number}" for run, _ in (earlier, later)]
    return compared(earlier[1], later[1], names=(names[0], names[1]))


def _save(report: Report, notebook: str) -> None:
    try:
        text = json.dumps(whole(counted(report)), separators=(",", ":"))
        store.save(f"{report.identifier} {report.created}", _facts(report, notebook, len(text)), text)
    except Exception as error:  # noqa: BLE001  # the user's cell must not fail because its report was not stored
        _warn(error)


def _warn(error: Exception) -> None:
    words = str(error) if isinstance(error, AotlabError) else f"{type(error).__name__}: {error}"
    if words not in _warned:
        _warned.add(words)
        with suppress(RuntimeWarning):  # a filter of the user may turn warnings into errors
            warnings.warn(f"aotlab: this run was not stored: {words}", RuntimeWarning, stacklevel=2)


def _facts(report: Report, notebook: str, nbytes: int) -> Run:
    source = "" if report.cell is None else report.cell.source
    lines = [line.strip() for line in source.splitlines() if not line.startswith("%%")]
    summary = counted(report).summary
    graphs = [graph for frame in report.frames for graph in frame.graphs]
    devices = [node.device.partition(":")[0] for graph in graphs for node in graph.nodes if node.device]
    environment = report.environment
    return Run(
        number=0,
        created=report.created,
        notebook=notebook,
        cell=(report.cell.identifier if report.cell is not None else None) or "",
        execution_count=None if report.cell is None else report.cell.execution_count,
        title=report.name or next((line for line in lines if line and not line.startswith("#")), "")[:200],
        code=source[:_MOST_CODE],
        verdict="" if summary is None else summary.status,
        duration_ns=report.duration_ns,
        aotlab=environment.aotlab,
        torch=environment.torch,
        python=environment.python,
        device=", ".join(sorted(set(devices))),
        backend=", ".join(sorted({graph.backend for graph in graphs if graph.backend})),
        nbytes=nbytes,
    )
