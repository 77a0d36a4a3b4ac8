"""Describe the present activity of a running cell in words, from the engine's events."""

from __future__ import annotations

import sys
import threading
import time
from typing import NamedTuple

from aotlab import events
from aotlab.report.model import Running, TimelineRow
from aotlab.report.text import amount, duration

#: For each kind of activity: the place of the cell's work in words. The words say where an interrupt ended the cell.
_PLACES = {
    "dynamo": "in Dynamo",
    "upstream": "in stock torch.compile",
    "trace": "in aotlab's trace",
    "partition": "in the partition",
    "compile": "in the backend",
    "header": "in the backend",
    "verification": "in the comparison with eager",
    "timing": "in the measurement",
}
_BACKENDS = {"inductor": "Inductor", "eager": "The eager backend"}
_TEXTS = {
    "dynamo": "Dynamo captures {}",
    "upstream": "Stock torch.compile compiles {}",
    "verification": "The results of {} are compared with eager",
    "header": "Inductor prepares the header of its C++ kernels",
}
#: The activities in which kernels are compiled, with words about the kernels.
_WITH_KERNELS = {"compile": "", "verification": " (stock torch.compile sets the tolerance)"}


class _Activity(NamedTuple):
    kind: str
    text: str
    since_ns: int


class Progress:
    """The activity of a running cell. All methods are thread-safe.

    Attributes
    ----------
    version
        A number that grows with each change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._lock = threading.Lock()
        self._began_ns: int | None = None
        self._clear(0)

    def _clear(self, began_ns: int) -> None:
        self._subject, self._stopped = "the cell", ""
        self._rest = _Activity("", "The cell begins", began_ns)
        # The activities that have begun and have not ended. The last one is inside of the others.
        self._activities: dict[str, _Activity] = {}
        self._compiling: dict[int, tuple[str, str]] = {}  # the names of function and backend, by the entry's number
        self._kernels = self._done = 0

    def begin(self, began_ns: int) -> None:
        """Begin a run of the cell."""
        with self._lock:
            self._clear(began_ns)
            self._began_ns = began_ns
            self.version += 1

    def end(self) -> None:
        """End the run. Now the cell does nothing."""
        self._began_ns = None

    def runs(self, subject: str) -> None:
        """Note that the cell now runs ``subject``: some of its lines, or a function."""
        if subject != self._subject:
            with self._lock:
                self._subject = subject
                self._rest = _Activity("", f"The cell runs {subject}", time.perf_counter_ns())
                self.version += 1

    def measures(self, text: str) -> None:
        """Note that the cell's graphs are measured now. ``text`` names the graph."""
        with self._lock:
            self._does("timing", text)
            self.version += 1

    def hear(self, event: events.Event) -> None:
        """Note an event about the cell."""
        with self._lock:
            outer = self._activities.keys() & {"verification", "upstream"}
            match event:
                case events.Spent(kind=kind) if not outer or kind in outer:
                    self._ends(kind)
                case events.KernelStarted():
                    self._kernels += 1
                case events.KernelFinished():
                    self._done += 1
                case _ if outer:  # stock torch.compile compiles, perhaps for a comparison
                    return
                case events.Begun():
                    self._kernels = self._done = 0
                    self._does(event.kind, _TEXTS[event.kind].format(event.subject or self._subject))
                case events.CompileStarted():
                    self._compiling[event.entry] = event.function, _BACKENDS.get(event.backend, event.backend)
                    self._does("trace", f"aotlab traces {event.function}")
                case events.StageFinished(stage="trace") if event.entry in self._compiling:
                    self._ends("trace")
                    self._does("partition", f"aotlab divides the graph of {self._compiling[event.entry][0]}")
                case events.GraphStarted() if event.entry in self._compiling:
                    function, backend = self._compiling[event.entry]
                    self._ends("partition")
                    self._kernels = self._done = 0
                    self._does("compile", f"{backend} compiles the {event.graph} graph of {function}")
                case events.CompileFinished() | events.CompileFailed() | events.BackwardCompiled():
                    for stage in ("trace", "partition", "compile"):
                        self._ends(stage)
                case _:
                    return
            self.version += 1

    def _does(self, kind: str, text: str) -> None:
        self._activities.pop(kind, None)
        self._activities[kind] = _Activity(kind, text, time.perf_counter_ns())

    def _ends(self, kind: str) -> None:
        if self._activities.pop(kind, None) and isinstance(sys.exc_info()[1], KeyboardInterrupt):
            self._stopped = self._stopped or _PLACES[kind]

    def _now(self) -> _Activity:
        return next(reversed(self._activities.values()), self._rest)

    def stopped(self) -> str:
        """Say when and in which activity the cell is interrupted: ``"after 12 s, in Dynamo"``."""
        with self._lock:
            took = duration(time.perf_counter_ns() - (self._began_ns or 0))
            place = self._stopped or _PLACES.get(self._now().kind, "")
            return f"after {took}, {place}" if place else f"after {took}"

    def running(self, steps: tuple[TimelineRow, ...]) -> Running | None:
        """Return the present activity; None if the cell does not run. ``steps`` are the activities that have ended."""
        with self._lock:
            began_ns, now = self._began_ns, self._now()
            if began_ns is None:
                return None
            compiles = now.kind in _WITH_KERNELS and self._kernels > 0
            kernels = f"{_WITH_KERNELS.get(now.kind, '')}: {self._done} of {amount(self._kernels, 'kernel')} done"
            return Running(
                text=now.text + kernels * compiles,
                kind=now.kind,
                since_ns=now.since_ns - began_ns,
                elapsed_ns=time.perf_counter_ns() - began_ns,
                kernels=self._kernels if compiles else 0,
                kernels_done=self._done if compiles else 0,
                steps=steps,
            )
