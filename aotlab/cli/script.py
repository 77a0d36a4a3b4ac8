"""``aotlab run``: run a script, and record its compilations."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from aotlab.report import Report
from aotlab.report.model import Views
from aotlab.upstream import observe


def run(script: Path, arguments: Sequence[str], *, stock: bool, caches: bool) -> tuple[Views[Report], int]:
    """Run a script as ``python SCRIPT ARGUMENTS`` does, and record its compilations from the first line on.

    Parameters
    ----------
    script, arguments
        The script's file, and its ``sys.argv[1:]``.
    stock
        If True, record the compilations by stock `torch.compile`; if False, those by aotlab.
    caches
        See `aotlab.observe`.

    Returns
    -------
    tuple[Views[Report], int]
        The recording, and the script's exit status. If the script raised an error, its traceback was printed, and the
        exit status is 1; it is 130 after ctrl-C.
    """
    before = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        with observe(script.name, caches=caches) if stock else Report.record(script.name) as recording:
            return recording, _status(script)
    finally:
        sys.argv, sys.path[:] = before


def _status(script: Path) -> int:
    """Run a script, and return its exit status."""
    try:
        runpy.run_path(str(script), run_name="__main__")
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
