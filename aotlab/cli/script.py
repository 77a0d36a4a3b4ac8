"""``aotlab run``: run a script or a notebook, and report its compilations."""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TextIO

from aotlab._torch.process_groups import timed_collectives
from aotlab.report import Report
from aotlab.report.collectives import waited
from aotlab.report.gather import STOCK, placed, prepared, written
from aotlab.report.html import page
from aotlab.runs import saving
from aotlab.upstream import observe

#: The variables of the scripts that ended. Python frees the variables of a script when the process ends. If a DDP model
#: is freed earlier, after its process group, torch may wait for ever for a thread of gloo.
_finished: list[dict[str, object]] = []


def run(
    script: Path, arguments: Sequence[str], *, stock: bool, caches: bool, ranks: Path | None = None, waits: bool = False
) -> tuple[list[Report], int]:
    """Run a script as ``python SCRIPT ARGUMENTS`` does, and record its compilations from the first line on.

    Parameters
    ----------
    script, arguments
        The script's file, and its ``sys.argv[1:]``.
    stock
        If True, record only the compilations by stock `torch.compile`; if False, also those by aotlab.
    caches
        See `aotlab.observe`.
    ranks
        The folder into which each process of a distributed job writes its reports. Then none are returned.
    waits
        As in `Report.record`.

    Returns
    -------
    tuple[list[Report], int]
        A report for each engine that compiled something (if none did, one report), and the script's exit status. If
        the script raised an error, its traceback was printed, and the exit status is 1; it is 130 after ctrl-C.
    """
    folders = [] if ranks is None else [prepared(each) for each in (ranks, ranks / STOCK)]
    spans: list[tuple[str, int, int]] = []
    with (
        _as_main(script, arguments),
        timed_collectives(spans) if waits else nullcontext(),
        nullcontext() if stock else Report.record(script.name) as ours,
        observe(script.name, caches=caches) as theirs,
    ):
        status = _status(script, lambda: _finished.append(runpy.run_path(str(script), run_name="__main__")))
    reports: list[Report] = []
    for recording in (ours, theirs):
        if recording is not None:
            report = recording.report()
            # A frame that torch.compile gave to another backend, such as aotlab's, has no nodes.
            frames = [each for each in report.frames if not reports or any(graph.nodes for graph in each.graphs)]
            reports.append(replace(report, frames=tuple(frames), wait_rows=waited(spans)))
    if ranks is not None:
        ended = f"exit status {status}" if status else ""
        for report, folder in zip(reports, folders[-len(reports) :], strict=True):
            written(placed(report, ended), folder)
        return [], status
    reports = [each for each in reports if each.frames] or reports[:1]
    for report in reports:
        saving.keep(report, notebook=str(script.resolve()))
    return reports, status


def run_cells(
    program: Path, arguments: Sequence[str], options: str, *, cell: int | None = None
) -> tuple[list[Report], int]:
    """Run a notebook's cells, or a script as one cell, with the cell magic. The result is as in `run`.

    Parameters
    ----------
    program, arguments
        The file of the script or notebook, and its ``sys.argv[1:]``.
    options
        The options of ``%%aotcompile``.
    cell
        The only cell that gets the magic, counted from 1; None for all cells.

    Raises
    ------
    UsageError
        The options are wrong, or the notebook has no such cell.
    """
    from IPython.core.error import UsageError as ShellUsageError

    from aotlab.errors import UsageError
    from aotlab.notebook.programs import Program

    with _as_main(program, arguments):
        try:
            running = Program(program, options)
        except ShellUsageError as error:
            raise UsageError(f"--options: {error}") from None
        if program.suffix == ".ipynb":
            status = running.run_notebook(cell)
        else:
            status = _status(program, running.run_script)
    return running.reports, status


def write(reports: Sequence[Report], json_path: Path | None, html_path: Path, out: TextIO) -> None:
    """Write the reports as one page and one JSON file, and a summary to ``out``.

    The JSON file has a list of reports if there are several.
    """
    for report in reports:
        print(report, file=out)
    if json_path is not None:
        values = [report.to_dict() for report in reports]
        json_path.write_text(json.dumps(values[0] if len(values) == 1 else values, allow_nan=False), encoding="utf-8")
        print(f"JSON: {json_path}", file=out)
    html_path.write_text(page(*reports), encoding="utf-8")
    print(f"HTML: {html_path}", file=out)


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set the arguments, the path and the main module as Python does for a script."""
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


def _status(script: Path, work: Callable[[], object]) -> int:
    """Run a script by calling ``work``, and return its exit status."""
    try:
        work()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  # the script's error; the report has the compilations before it
        traceback.print_exception(type(error), error, _of_script(error.__traceback__, str(script)))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _of_script(found: TracebackType | None, script: str) -> TracebackType | None:
    """Return the part of a traceback that begins in the script, as Python prints it without aotlab."""
    whole = found
    while found is not None and found.tb_frame.f_code.co_filename != script:
        found = found.tb_next
    return found or whole
