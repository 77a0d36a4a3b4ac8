"""A function that reads the clock runs eagerly: a trace would hold the time at which it was made.

    def f(x):
        return x * (time.time() - START)

Only what is called through the module `time` is noticed, not ``from time import time`` and not `datetime`.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aotlab.recorder.places import user_line
from aotlab.recorder.signals import LeftToPython

_CLOCKS = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
    "process_time_ns", "thread_time", "thread_time_ns",
)  # fmt: skip
_LIBRARIES = (sys.stdlib_module_names - {"__main__"}) | {"torch", "numpy", "aotlab"}


@contextmanager
def clocks_watched() -> Iterator[None]:
    """Leave it to eager, in a ``with`` block of this thread, when something else than a library reads a clock."""
    thread = threading.get_ident()
    before = {name: getattr(time, name) for name in _CLOCKS if hasattr(time, name)}

    def watched(name: str, original: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(original)
        def read() -> Any:
            module = str(sys._getframe(1).f_globals.get("__name__", ""))
            if threading.get_ident() == thread and module.split(".", 1)[0] not in _LIBRARIES:
                raise LeftToPython(
                    f"it reads the clock by `time.{name}`, which is another time at each call, at {user_line()}",
                    suggestion="pass the time as an argument",
                )
            return original()

        return read

    try:
        for name, original in before.items():
            setattr(time, name, watched(name, original))
        yield
    finally:
        for name, original in before.items():
            setattr(time, name, original)
