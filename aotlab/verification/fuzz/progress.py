"""The bar: how far a run is, how fast, and what it found, on one line that is drawn anew, or on a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24


class Progress:
    """Draws on ``out``.

    Parameters
    ----------
    total, done
        How many programs the run has, and how many of them were run before.
    out
        Usually stderr. On a terminal the line is drawn anew, else a line is written every five seconds.
    shown
        None shows the bar on a terminal only.
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
        """Programs per second so far, those of earlier runs not counted."""
        return (self._done - self._before) / max(1e-9, self._clock() - self._started)

    def ran(self, failed: bool) -> None:
        """Count a program."""
        self._done += 1
        self._failed += failed
        self._draw()

    def back(self, programs: int) -> None:
        """Take back programs of a block that was broken off."""
        self._done -= programs

    def close(self) -> None:
        """Leave the last state on the screen."""
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
        # What was longer a moment ago is wiped out.
        self._out.write(f"\r{text}\x1b[K" if self._terminal else f"{text}\n")
        self._out.flush()
