"""One compilation at a time, in whichever thread.

A trace puts traced tensors in the place of a module's parameters, and torch's fake tensors keep notes in their mode on
the op that is running: neither can bear two threads. A backward that is compiled when it is first asked for is compiled
from the trace of the forward, in the thread of the backward; on a GPU that is autograd's own. So nothing is held here
while a backward or a kernel runs: autograd's thread may be the one that is waiting.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def compiling() -> Iterator[None]:
    """Trace, differentiate or compile inside of this; what another thread may have made meanwhile is looked up in it.

    Examples
    --------
    >>> with compiling(), compiling():  # a compilation may lead to another one, in the same thread
    ...     pass
    """
    lock = _lock
    with lock:
        yield


def _forget() -> None:
    """Begin anew in a forked process, where the thread that was compiling is not there to let go."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
