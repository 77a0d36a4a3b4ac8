"""An interrupt that comes while Dynamo checks guards still ends the cell.

    while True:
        x = x * 1      # before each call, Dynamo asks whether the code that it compiled still holds

Dynamo takes an exception in a guard that is written in Python for "does not hold", KeyboardInterrupt too: it compiles
anew and goes on, and who pressed the button waits for ever; or, when it tries the guards that it has just made, it
raises an AssertionError, or measures them and says nothing. So, while a cell runs, an interrupt that finds Python there
is put off by a moment, as often as it takes.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from aotlab import torch_internals as internals

#: Seconds until an interrupt is tried again; a check takes some microseconds, the making of guards some milliseconds.
_MOMENT = 0.002


@contextmanager
def never_lost() -> Iterator[None]:
    """Let no interrupt get lost in a guard, for the length of a block in the main thread; elsewhere there are none."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[threading.Timer] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        waiting.clear()
        if internals.in_guard(frame):
            waiting.append(threading.Timer(_MOMENT, _thread.interrupt_main, (number,)))
            waiting[0].daemon = True
            waiting[0].start()
        else:
            before(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, before)
        for timer in waiting:
            if not timer.finished.is_set():
                timer.cancel()
                before(signal.SIGINT, None)
