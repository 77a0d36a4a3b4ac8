"""The progress bar of a run: the number of finished programs, the speed, and the number of failures.

On a terminal it is one line that is redrawn. In a file or pipe it is a new line every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24


class Progress:
    """Draws a progress bar on ``out``.

    Parameters
    ----------
    total, done
        How many programs the run has, and how many of them were run before.
    out
        Usually stderr. On a terminal the line is redrawn; otherwise a line is written every five seconds.
    shown
        Whether the bar is shown; None shows it on a terminal only.
    """

    def __init__(
        self,
        total: int,
        done: int,
        out: TextIO,
        shown: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = out.isatty()
        self._shown = self._terminal if shown is None else shown
        self._total, self._done, self._before = total, done, done
        self._failed = 0
        self._out = out
        self._clock = clock
        self._started = clock()
        self._last = self._started - (1.0 if self._terminal else 0.0)

    @property
    def rate(self) -> float:
        """Programs per second so far, without the programs of earlier runs."""
        return (self._done - self._before) / max(1e-9, self._clock() - self._started)

    def ran(self, failed: bool) -> None:
        """Count a program that has been run, and redraw the bar."""
        self._done += 1
        self._failed += failed
        self._draw()

    def close(self) -> None:
        """Draw the last state and end the line."""
        if self._shown:
            self._draw(now=True)
            if self._terminal:
                self._out.write("\n")
            self._out.flush()

    def _draw(self, now: bool = False) -> None:
        moment = self._clock()
        if not self._shown or (not now and moment - self._last < (0.2 if self._terminal else 5.0)):
            return
        self._last = moment
        share = min(1.0, self._done / max(1, self._total))
        bar = "█" * round(share * _WIDTH)
        left = (self._total - self._done) / self.rate if self.rate > 0 else 0.0
        text = (
            f"{bar:░<{_WIDTH}} {self._done}/{self._total} programs, {self.rate:.0f}/s, "
            f"{int(left) // 60}:{int(left) % 60:02d} left, {self._failed} failed"
        )
        # The escape sequence clears the rest of a longer, earlier line.
        self._out.write(f"\r{text}\x1b[K" if self._terminal else f"{text}\n")
        self._out.flush()
