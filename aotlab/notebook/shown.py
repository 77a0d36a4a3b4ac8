"""Show a cell's activity in its output while it runs, and then the report in the same place."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from aotlab.notebook.live import INTERVAL, SHARE
from aotlab.report import Report
from aotlab.report.mime import bundle, running_bundle

#: The seconds after which a thread shows a report, so that the kernel can first say that the cell has ended.
_LATER = 0.05


class RunningCell(Protocol):
    """A cell that can describe its present activity. Any thread may ask it."""

    @property
    def version(self) -> int:
        """A number that grows with each change."""

    def running_report(self) -> Report | None:
        """Return a small report of the running cell; None if the cell does not run."""


class Shown:
    """The display of one cell's report.

    In a notebook the display appears when the cell starts, and shows the cell's activity. It is updated at most four
    times a second, and the updates take at most one percent of the time. At the end it shows the report. If a display
    cannot be updated (in a terminal, or under ``%%capture``), only the report is shown.

    Parameters
    ----------
    shell
        The IPython shell.
    quiet
        Whether to show nothing.
    """

    def __init__(self, shell: Any, *, quiet: bool) -> None:
        self.quiet = quiet
        self._publisher = shell.display_pub
        replaceable = hasattr(shell, "kernel") and type(self._publisher).__name__ != "CapturingDisplayPublisher"
        self._replaceable = replaceable and not quiet
        self._identifier: str | None = None
        self._lock = threading.Lock()
        self._reported = False
        self._latest: Report | None = None

    @contextmanager
    def following(self, cell: RunningCell) -> Iterator[None]:
        """Show the activity of ``cell`` at once, and follow it during a block, in which the cell runs."""
        if not self._replaceable:
            yield
            return
        ended = threading.Event()
        self._show_running(cell, ended)
        # ipykernel reads the cell that is running from the context, and a new thread has an empty context.
        follow = partial(contextvars.copy_context().run, self._follow, cell, ended)
        thread = threading.Thread(target=follow, name="aotlab-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _follow(self, cell: RunningCell, ended: threading.Event) -> None:
        shown, wait = cell.version, INTERVAL
        while not ended.wait(wait):
            began = time.perf_counter()
            if cell.version != shown:
                shown = cell.version
                self._show_running(cell, ended)
            wait = max(INTERVAL, (time.perf_counter() - began) * (1 / SHARE - 1))

    def _show_running(self, cell: RunningCell, ended: threading.Event) -> None:
        with suppress(Exception), self._lock:  # an error in the display must not become an error of the user's cell
            report = cell.running_report()
            if report is not None and not ended.is_set():
                self._publish(running_bundle(report))

    def report(self, report: Report, *, later: bool = False) -> None:
        """Show ``report`` in place of the activity, or of an earlier report.

        If displays cannot be replaced, only the first report is shown. With ``later``, a thread shows a report that
        replaces another display, so that the caller does not wait for it.
        """
        if self.quiet or (self._reported and not self._replaceable):
            return
        self._reported = True
        self._latest = report
        if later and self._replaceable:
            threading.Timer(_LATER, contextvars.copy_context().run, (self._show, report)).start()
        else:
            self._show(report)

    def _show(self, report: Report) -> None:
        data = bundle(report)
        with self._lock:
            if self._latest is report:  # if not, a newer report is shown already, or will be
                self._publish(data)

    def _publish(self, data: dict[str, Any]) -> None:
        if not self._replaceable:
            self._publisher.publish(data)
            return
        update = self._identifier is not None
        if self._identifier is None:
            self._identifier = f"aotlab-{id(self):x}-{next(_numbers)}"
        self._publisher.publish(data, transient={"display_id": self._identifier}, update=update)


_numbers = iter(range(1 << 62))
