"""One compilation at a time, in whichever thread; and an interrupt in it leaves all settings as they were.

A trace puts traced tensors in the place of parameters, and fake tensors keep notes in their mode on the running op:
neither can bear two threads. Nothing is held while a backward or a kernel runs, as autograd's thread may compile.

Dynamo takes KeyboardInterrupt in a guard for "does not hold", and a context manager that is interrupted while it closes
does not close. So an interrupt there, in what is ours or torch's, is put off by a moment, as often as it takes.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import aotlab
from aotlab._torch.dynamo import in_guard

_lock = threading.RLock()
#: Seconds until an interrupt is tried again; a check takes some microseconds, the making of guards some milliseconds.
_MOMENT = 0.002
#: Whose context managers are to open and close as a whole.
_PACKAGES = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (aotlab, torch))


def compiling() -> contextlib.AbstractContextManager[bool]:
    """Trace, differentiate or compile inside of this; what another thread made meanwhile is looked up in it."""
    return _lock


def _forget() -> None:
    """Begin anew in a forked process, where the thread that was compiling is not there to let go."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


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
        if (left := signal.signal(signal.SIGINT, before)) is not interrupted:  # the program's own
            signal.signal(signal.SIGINT, left)
        for timer in waiting:
            if not timer.finished.is_set():
                timer.cancel()
                before(signal.SIGINT, None)


def made_once(table: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return what a table has at ``key``; where there is nothing, one thread makes it."""
    if key not in table:
        with compiling(), never_lost():
            if key not in table:
                table[key] = make()
    return table[key]
