"""Show the report in a cell's output: progress while the cell runs, then the report in the same place."""

from __future__ import annotations

import html
from typing import Any

from aotlab.report import Report
from aotlab.report.mime import bundle


class Shown:
    """The display of one cell's report.

    In a notebook the display appears when the cell starts, shows progress, and is then replaced by the report. If a
    display cannot be replaced (in a terminal, or under ``%%capture``), only the report is shown.

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
        self._last = ""
        self._reported = False

    def progress(self, text: str) -> None:
        """Show a progress message."""
        if not self._replaceable or text == self._last:
            return
        self._last = text
        line = f"aotlab: {text} …"
        self._publish({"text/plain": line, "text/html": f"<i>{html.escape(line)}</i>"})

    def report(self, report: Report) -> None:
        """Show ``report`` in place of the progress message, or of an earlier report.

        If displays cannot be replaced, only the first report is shown.
        """
        if not self.quiet and (self._replaceable or not self._reported):
            self._reported = True
            self._publish(bundle(report))

    def _publish(self, data: dict[str, Any]) -> None:
        if not self._replaceable:
            self._publisher.publish(data)
            return
        update = self._identifier is not None
        if self._identifier is None:
            self._identifier = f"aotlab-{id(self):x}-{next(_numbers)}"
        self._publisher.publish(data, transient={"display_id": self._identifier}, update=update)


_numbers = iter(range(1 << 62))
