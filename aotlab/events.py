"""Events that the engine emits while it works, and the listeners that receive them.

A listener is a callable that takes one event. Without listeners, an event costs only a test whether there are
listeners.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import FrameSummary
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base class of all events. ``at_ns`` is the time of its creation by `time.perf_counter_ns`."""

    at_ns: int = field(default_factory=time.perf_counter_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """The reason why the entry with the number ``entry`` did not serve a call, as a sentence."""

    entry: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileStarted(Event):
    """The compilation of an entry started.

    ``entry`` is the entry's number, unique in the process. ``function`` is the function's qualified name, and
    ``function_id`` distinguishes functions of the same name. ``misses`` give the reasons why no earlier entry served
    the call; the entry with the smallest difference comes first. ``frontend`` is ``"direct"`` or ``"dynamo"``.
    """

    function: str
    function_id: int
    entry: int
    frontend: str
    backend: str
    misses: tuple[Miss, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFinished(Event):
    """A stage of the compilation of entry ``entry`` has finished.

    ``record`` is the frozen record of the stage, and ``nodes`` the number of op calls in its graphs. ``nodes`` is None
    for a stage without graphs.
    """

    entry: int
    stage: str
    record: object
    duration_ns: int
    nodes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFinished(Event):
    """Entry ``entry`` is ready.

    ``guards`` are the entry's guards, each as (kind, subject, sentence). ``lines`` maps the text of a guard on sizes to
    the user line that caused it.
    """

    entry: int
    duration_ns: int
    guards: tuple[tuple[str, str, str], ...]
    lines: Mapping[str, Any] = field(default_factory=dict)


Instead = Literal["raised", "ran eagerly", "captured by Dynamo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFailed(Event):
    """The compilation of entry ``entry`` was refused or failed with ``error``.

    ``outcome`` says what happened to the call: the error was raised, or the call ran eagerly, or Dynamo captured it.
    """

    entry: int
    duration_ns: int
    error: BaseException
    outcome: Instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Event):
    """A call was served by the entry with the number ``entry``, or ran eagerly if ``entry`` is None.

    ``compiled`` says that the entry was compiled for this call. For such a call, ``storage_ids`` has one tuple per leaf
    of the result. The tuple has the storage ids of the tensors that the leaf consists of (several for a wrapper
    subclass), or None for a tensor without a storage.
    """

    function: str
    function_id: int
    entry: int | None
    duration_ns: int
    compiled: bool
    storage_ids: tuple[tuple[int | None, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCompiled(Event):
    """A backward of entry ``entry`` was compiled for a ``pattern`` of defined tangents, one bool per tangent.

    ``record`` is a `BackwardRecord`.
    """

    entry: int
    pattern: tuple[bool, ...]
    record: object
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStarted(Event):
    """The backend begins to compile a graph of entry ``entry``: ``"forward"``, ``"backward"`` or ``"inference"``."""

    entry: int
    graph: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStarted(Event):
    """The kernel ``name`` of entry ``entry`` is wanted. Inductor begins to compile it, or to load it.

    ``engine`` is ``"upstream"`` for the kernels of the stock `torch.compile` with which the entry is compared.
    """

    entry: int
    name: str
    engine: str = "aotlab"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFinished(Event):
    """The kernel ``name`` of entry ``entry`` is ready. ``cached`` says that it was compiled before, and only loaded.

    Any thread may emit this event, also after the stage ``compile`` was interrupted. ``engine`` is as in
    `KernelStarted`.
    """

    entry: int
    name: str
    duration_ns: int
    cached: bool
    engine: str = "aotlab"


#: Kinds of work outside of the pipeline's stages. ``"header"``: Inductor prepares the header of its C++ kernels.
Work = Literal["dynamo", "upstream", "verification", "timing", "header"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Event):
    """Work outside of the pipeline's stages begins, for example a capture by Dynamo or a comparison with eager.

    ``subject`` is the name of the code that the work is about, if it is known.
    """

    kind: Work
    subject: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent(Event):
    """Work outside of the pipeline's stages has ended, for example a capture by Dynamo or a comparison with eager."""

    kind: Work
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak(Event):
    """Dynamo had a graph break at the last line of ``stack``. ``reason`` is Dynamo's text."""

    stack: tuple[FrameSummary, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedAgain(Event):
    """Dynamo captured code of function ``function_id`` again, because a guard of each earlier capture failed.

    ``failed`` has one tuple per earlier capture, the latest first. The tuple has the number of the entry that was
    compiled from the capture (or None), the text of the first guard that fails, as Dynamo writes it, and the number of
    guarded values that differ. ``scope`` maps ``"L"`` and ``"G"`` to the present local and global variables of the
    code, which the texts of the guards mention. ``file`` is the file of the code.
    """

    function_id: int
    file: str
    failed: tuple[tuple[int | None, str, int], ...]
    scope: Mapping[str, Any]


Listener = Callable[[Event], None]
_listeners: tuple[Listener, ...] = ()
_entries = itertools.count()


def listening() -> bool:
    """Tell whether there are listeners."""
    return bool(_listeners)


def emit(event: Event) -> None:
    """Pass ``event`` to every listener, in the order in which they were added."""
    for listener in _listeners:
        listener(event)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Pass all events of the process to ``listener`` for the duration of a ``with`` block."""
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        remaining = list(_listeners)
        remaining.remove(listener)
        _listeners = tuple(remaining)


def next_entry() -> int:
    """Return the number of a new entry, unique in the process."""
    return next(_entries)
