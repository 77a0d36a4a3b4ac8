"""An interrupt ends a cell or a compilation also where it comes at a bad moment, and leaves all settings as they were.

    with torch.no_grad():     # an interrupt in ``__exit__`` leaves gradients off in the notebook
        y = x * 2

Dynamo takes an exception in a guard that is written in Python for "does not hold", KeyboardInterrupt too: it compiles
anew and goes on. And a context manager that is interrupted while it closes does not close: traced tensors would stay in
the places of a module's parameters. So an interrupt that finds Python in a guard, or in the opening or closing of a
context manager of ours or torch's, is put off by a moment, as often as it takes.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

import aotlab
from aotlab._torch.dynamo import in_guard

#: Seconds until an interrupt is tried again; a check takes some microseconds, the making of guards some milliseconds.
_MOMENT = 0.002
#: Whose context managers are to open and close as a whole.
_PACKAGES = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (aotlab, torch))


def _opens_or_closes(frame: FrameType | None) -> bool:
    """Tell whether a frame belongs to the opening or closing of a context manager of ours or torch's."""
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            is_generator = frame.f_code.co_filename == contextlib.__file__  # its own frame is the next one
            owner = frame.f_back if is_generator else frame
            if owner is not None and owner.f_code.co_filename.startswith(_PACKAGES):
                return True
        frame = frame.f_back
    return False


@contextmanager
def never_lost() -> Iterator[None]:
    """Let no interrupt get lost or do harm, for the length of a block in the main thread; elsewhere there are none."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[threading.Timer] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        waiting.clear()
        if in_guard(frame) or _opens_or_closes(frame):
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
