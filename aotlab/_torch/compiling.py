"""Let one thread compile at a time, and let an interrupt during a compilation leave all settings unchanged.

A trace replaces the parameters of modules by traced tensors, and a fake mode stores state about the op that runs. Two
traces in two threads would disturb each other. The lock is not held while a backward or a kernel runs, because
autograd's thread may need to compile.

Dynamo treats KeyboardInterrupt in a guard as a failed guard, and a context manager that is interrupted while it exits
does not restore its setting. So an interrupt that arrives inside a guard, or while a context manager of aotlab or torch
is entered or left, is postponed by two milliseconds. This is repeated until the interrupt arrives outside of both.
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
from aotlab._torch.dynamo_internals import in_guard

_lock = threading.RLock()
#: Seconds by which an interrupt is postponed. Checking guards takes microseconds, building them takes milliseconds.
_MOMENT = 0.002
#: The packages whose context managers must not be interrupted while they are entered or left.
_PACKAGES = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (aotlab, torch))


def compiling() -> contextlib.AbstractContextManager[bool]:
    """Return the lock under which aotlab traces, differentiates and compiles.

    Code that waited for the lock must look up again what another thread compiled in the meantime.
    """
    return _lock


def _forget() -> None:
    """Create a new lock in a forked process, because the thread that held the old lock does not exist there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _opens_or_closes(frame: FrameType | None) -> bool:
    """Tell whether this frame or one of its callers enters or exits a context manager of aotlab or torch."""
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            # If the manager is a generator, its `__enter__` belongs to contextlib. Then look at the file of the caller.
            is_generator = frame.f_code.co_filename == contextlib.__file__
            owner = frame.f_back if is_generator else frame
            if owner is not None and owner.f_code.co_filename.startswith(_PACKAGES):
                return True
        frame = frame.f_back
    return False


@contextmanager
def never_lost() -> Iterator[None]:
    """Postpone interrupts (Ctrl-C) that would be lost or leave a setting changed, for a block in the main thread.

    Python delivers interrupts to the main thread only, so the block changes nothing in other threads.
    """
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
        # if the program has installed its own handler in the block, keep that handler
        if (left := signal.signal(signal.SIGINT, before)) is not interrupted:
            signal.signal(signal.SIGINT, left)
        for timer in waiting:
            if not timer.finished.is_set():
                timer.cancel()
                before(signal.SIGINT, None)


def made_once(table: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return ``table[key]``. If the key is missing, call ``make`` for the value, under the lock for compilations.

    If several threads need the missing key at the same time, only one of them makes the value.
    """
    if key not in table:
        with compiling(), never_lost():
            if key not in table:
                table[key] = make()
    return table[key]
