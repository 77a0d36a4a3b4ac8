"""What the engine says while it works: events, and who listens.

A listener is a callable that takes one event. Without listeners an event costs one truth test.
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
    """Base of all events; ``at_ns`` is `time.perf_counter_ns` when it was made."""

    at_ns: int = field(default_factory=time.perf_counter_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why entry ``entry`` did not serve a call, in a sentence."""

    entry: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileStarted(Event):
    """An entry, unique in the process, begins to be compiled.

    ``function`` is a qualified name, ``function_id`` tells apart those of one name; ``misses`` say why no earlier entry
    served, the nearest first; ``frontend`` is ``"direct"`` or ``"dynamo"``.
    """

    function: str
    function_id: int
    entry: int
    frontend: str
    backend: str
    misses: tuple[Miss, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFinished(Event):
    """A stage of entry ``entry`` has finished; ``record`` is its frozen record, ``nodes`` the size of its graph."""

    entry: int
    stage: str
    record: object
    duration_ns: int
    nodes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFinished(Event):
    """Entry ``entry`` is ready; it assumes ``guards``: (kind, subject, sentence); ``lines`` made those of sizes."""

    entry: int
    duration_ns: int
    guards: tuple[tuple[str, str, str], ...]
    lines: Mapping[str, Any] = field(default_factory=dict)


Instead = Literal["raised", "ran eagerly", "captured by Dynamo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFailed(Event):
    """Entry ``entry`` was refused or failed with ``error``; ``outcome`` says what happens instead."""

    entry: int
    duration_ns: int
    error: BaseException
    outcome: Instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Event):
    """A call was served by ``entry`` (None: eagerly), which it waited for if ``compiled``. Only for listeners."""

    function: str
    function_id: int
    entry: int | None
    duration_ns: int
    compiled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardCompiled(Event):
    """A backward was compiled, a `BackwardRecord`, for a ``pattern`` that has one bool per tangent."""

    entry: int
    pattern: tuple[bool, ...]
    record: object
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent(Event):
    """Something that no other event tells of has ended: a capture by Dynamo, a comparison with eager, measurements."""

    kind: Literal["dynamo", "verification", "timing"]
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreak(Event):
    """Dynamo broke a capture off at the last line of ``stack``; ``reason`` as Dynamo words it."""

    stack: tuple[FrameSummary, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedAgain(Event):
    """Dynamo captured code of function ``function_id`` once more, since a guard of each earlier capture failed.

    ``failed`` holds the entry made of each capture (None: none was) and the guard as Dynamo words it, latest first;
    ``scope`` Dynamo's variables, local (``L``) and global (``G``), as they are at this moment; the code is in ``file``.
    """

    function_id: int
    file: str
    failed: tuple[tuple[int | None, str], ...]
    scope: Mapping[str, Any]


Listener = Callable[[Event], None]
_listeners: tuple[Listener, ...] = ()
_entries = itertools.count()


def listening() -> bool:
    """Tell whether anybody would hear an event."""
    return bool(_listeners)


def emit(event: Event) -> None:
    """Hand ``event`` to every listener, in the order in which they came."""
    for listener in _listeners:
        listener(event)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Hear all events of the process for the length of a ``with`` block."""
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        remaining = list(_listeners)
        remaining.remove(listener)
        _listeners = tuple(remaining)


def next_entry() -> int:
    """Give out the number of a new entry, unique in the process."""
    return next(_entries)
