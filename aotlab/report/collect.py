"""Record what aotlab does: listen to the engine's events, and make a report of them.

A recording hears the events of the whole process, from every thread. At a compile event it takes a snapshot at once,
while the engine waits, since graphs are rewritten in place by later stages. At a call it counts and appends to a ring,
nothing else. The report is put together when somebody looks at it.
"""

from __future__ import annotations

import datetime
import functools
import platform
import re
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import FrameSummary
from typing import NamedTuple

import torch

from aotlab import __version__, config, observe
from aotlab import _torch as internals
from aotlab.errors import RefusedError, UserLine
from aotlab.report.assemble import Joined, Snapshot, assemble, backward_snapshot, snapshot
from aotlab.report.model import (
    Call,
    Calls,
    Device,
    Environment,
    Frame,
    Graph,
    GraphBreakRow,
    Guard,
    Miss,
    Refusal,
    Report,
    Stage,
    Switch,
)
from aotlab.report.recompiles import misses
from aotlab.report.spent import Spent
from aotlab.report.text import in_cell, place, places_in, why_dynamo_stopped
from aotlab.report.varying import guard, settled
from aotlab.report.views import Views

#: Where Dynamo's own versions of builtin functions are, which are called by a line of the user's.
_DYNAMO = str(Path(torch.__file__).parent / "_dynamo")
#: The reason that Dynamo gives where it goes back to an earlier line, after which it leaves the function to Python.
_STEPPED = "step_unsupported"
_RESUMED = re.compile(rf"^{internals.RESUME_PREFIX}(.+)_at_(\d+)$")

#: How many calls a report remembers one by one, per frame; the counters count all.
RECENT_CALLS = 1000


class _CallNote(NamedTuple):
    at_ns: int
    duration_ns: int
    entry: int | None
    cold: bool


@dataclass(slots=True, kw_only=True)
class _EntryLog:
    """What was heard of one compiled entry."""

    entry: int
    started: observe.CompileStarted | None = None
    misses: tuple[tuple[int | None, Miss], ...] = ()
    snapshots: list[Snapshot] = field(default_factory=list)
    finished: observe.CompileFinished | None = None
    failed: observe.CompileFailed | None = None
    calls: int = 0
    reused: bool = False
    derived: list[tuple[int, int]] = field(default_factory=list)  # when further backwards began, and how long it took
    joined: tuple[tuple[int, int], Joined] | None = None  # of how many snapshots, from which storage on; it takes time

    def alone(self, stage: Stage, event: observe.StageFinished | observe.BackwardCompiled) -> Stage:
        """Take from a stage's time that of the backwards which were derived meanwhile and are stages of their own."""
        began = event.at_ns - event.duration_ns
        inner = sum(took for at_ns, took in self.derived if at_ns >= began)
        if isinstance(event, observe.BackwardCompiled):
            self.derived.append((began, event.duration_ns - inner))
        return replace(stage, duration_ns=max(event.duration_ns - inner, 0))


@dataclass(slots=True, kw_only=True)
class _FrameLog:
    """What was heard of one function."""

    function: str
    entries: dict[int, _EntryLog] = field(default_factory=dict)
    compiled: int = 0
    eager: int = 0
    recent: deque[_CallNote] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))


class Recording(Views):
    """A report in the making.

    It answers to everything that a `Report` answers to: tables, ``verdict``, ``to_html``, ``to_json``, ``save``,
    ``with_timings``, the fields. Each answer is about the report as it stands at that moment, and after the ``with``
    block about the finished one. ``recording.report()`` is that plain, frozen `Report`.

    Parameters
    ----------
    name
        A title for the report.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or ""
        self.identifier = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self._begin_ns = time.perf_counter_ns()
        self._end_ns: int | None = None
        self._spent = Spent(self._begin_ns)
        self._config = tuple([Switch(name=name, value=_switch_value(name)) for name in config.__annotations__])
        # By name as well: an id may be given to another function when its first owner is gone.
        self._frames: dict[tuple[int, str], _FrameLog] = {}
        self._entries: dict[int, _EntryLog] = {}
        self._captured_again: dict[int, tuple[tuple[int | None, Miss], ...]] = {}
        self._breaks: list[GraphBreakRow] = []
        self._led_to: list[tuple[list[tuple[str, int]], str]] = []  # each break's lines, outermost first, and words
        self._notes: list[str] = []
        self._built: Report | None = None

    def __repr__(self) -> str:
        return f"<Recording: {self.report().verdict.splitlines()[0]} .report() is the frozen Report>"

    def report(self) -> Report:
        """Return the report of what was heard so far."""
        with self._lock:
            if self._built is None or self._end_ns is None:
                self._built = self._build()
            return self._built

    def begin_run(self, began_ns: int, *, again: bool) -> None:
        """Begin a run of the code that was recorded, ``again`` or for the first time, at ``began_ns``.

        What was compiled stays, and counts as reused; the calls begin at 0.
        """
        with self._lock:
            self._begin_ns = began_ns
            self._spent = Spent(began_ns)
            self._end_ns = self._built = None
            if not again:
                return
            self._created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            self._breaks = [replace(row, at_ns=0) for row in self._breaks]  # a captured frame breaks off in each run
            self._notes.clear()
            for log in self._frames.values():
                log.compiled = log.eager = 0
                log.recent.clear()
            for entry in self._entries.values():
                entry.calls, entry.reused = 0, True

    def end_run(self) -> None:
        """End the run; what its functions do later is recorded all the same."""
        with self._lock:
            self._spent.end(time.perf_counter_ns())

    def hear(self, event: observe.Event) -> None:
        """Take note of one event; this is what listens to `aotlab.observe`."""
        if type(event) is observe.Called:
            with self._lock:
                self._called(event)
            return
        try:
            # The conversion of graphs takes time and needs no lock: an entry is compiled by one thread.
            made = (
                snapshot(event)
                if isinstance(event, observe.StageFinished)
                else backward_snapshot(event)
                if isinstance(event, observe.BackwardCompiled)
                else None
            )
        except Exception as error:  # noqa: BLE001  # what we cannot describe must not become the user's error
            made = None
            with self._lock:
                self._notes.append(f"{type(event).__name__} could not be recorded: {type(error).__name__}: {error}")
        with self._lock:
            self._note(event, made)
            heard = time.perf_counter_ns()
            self._spent.add("recording", heard, heard - event.at_ns)

    def __getattr__(self, name: str) -> object:
        """Answer with the report's fields and methods."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.report(), name)

    def _called(self, event: observe.Called) -> None:
        log = self._frame(event.function_id, event.function)
        if event.entry is None:
            log.eager += 1
        else:
            log.compiled += 1
        log.recent.append(_CallNote(event.at_ns, event.duration_ns, event.entry, event.compiled))
        if event.entry is not None:
            entry = self._entries.get(event.entry)
            if entry is None:  # compiled before the recording began
                entry = self._entries[event.entry] = log.entries[event.entry] = _EntryLog(entry=event.entry)
            entry.calls += 1
        self._spent.add("eager" if event.entry is None else "compiled", event.at_ns, event.duration_ns)

    def _note(self, event: observe.Event, made: Snapshot | None) -> None:
        match event:
            case observe.CompileStarted():
                again = self._captured_again.pop(event.function_id, ())
                log = _EntryLog(entry=event.entry, started=event, misses=misses(event) or again)
                self._entries[event.entry] = log
                self._frame(event.function_id, event.function).entries[event.entry] = log
            case observe.CapturedAgain():
                self._captured_again[event.function_id] = misses(event)
            case observe.StageFinished() | observe.BackwardCompiled():
                # None: an entry that began before the recording did; its earlier stages are lost.
                known = self._entries.get(event.entry)
                if known is not None and made is not None:
                    known.snapshots.append(replace(made, stage=known.alone(made.stage, event)))
                kind = event.stage if isinstance(event, observe.StageFinished) else "backward"
                self._spent.add(kind, event.at_ns, event.duration_ns)
            case observe.CompileFinished():
                self._spent.add("between", event.at_ns, event.duration_ns)
                if event.entry in self._entries:
                    self._entries[event.entry].finished = event
            case observe.CompileFailed():
                if event.entry in self._entries:
                    self._entries[event.entry].failed = event
                self._spent.add("between", event.at_ns, event.duration_ns)
            case observe.Spent():
                self._spent.add(event.kind, event.at_ns, event.duration_ns)
            case observe.GraphBreak():
                self._note_break(event)

    def _note_break(self, event: observe.GraphBreak) -> None:
        """Take note of a graph break; what led to it is told by the outermost frame, which Dynamo captured first."""
        places = [(each.filename, each.lineno or 0) for each in event.stack]
        reason, stepped = event.reason, event.reason == _STEPPED
        for known, words in self._led_to:
            if places and (stepped or words == why_dynamo_stopped(reason)) and _within(places, known):
                return
        if stepped:
            reason = next(reversed(_dynamo_reasons()), reason)
        own = [each for each in event.stack if not each.filename.startswith(_DYNAMO)] or event.stack
        row = graph_break(own[-1] if own else None, reason, event.at_ns - self._begin_ns)
        self._led_to.append((places, row.words))
        self._breaks.append(self._in_cell(row, event))

    def _in_cell(self, row: GraphBreakRow, _event: observe.GraphBreak) -> GraphBreakRow:
        """Tell where in the cell a graph break is, if the recording is one of a cell."""
        return row

    def _note_dynamo(self, reasons: Iterable[str]) -> None:
        """Take note of why Dynamo handed over nothing, which no graph tells: it skipped a frame, or failed at it."""
        with self._lock:
            told = {each.words for each in self._breaks}
            at_ns = time.perf_counter_ns() - self._begin_ns
            for words, reason in {why_dynamo_stopped(reason): reason for reason in reasons}.items():
                if words not in told:
                    self._breaks.append(graph_break(None, reason, at_ns))

    def _frame(self, function_id: int, function: str) -> _FrameLog:
        key = (function_id, function)
        log = self._frames.get(key)
        if log is None:
            log = self._frames[key] = _FrameLog(function=function)
        return log

    def _build(self) -> Report:
        end_ns = self._end_ns if self._end_ns is not None else time.perf_counter_ns()
        seen: dict[str, int] = {}
        spent = self._spent.rows(end_ns)
        self._join()
        frames = []
        for log in self._frames.values():
            function = _RESUMED.sub(r"\1 after line \2", log.function)
            seen[function] = seen.get(function, 0) + 1
            name = function if seen[function] == 1 else f"{function} #{seen[function]}"
            frames.append(self._build_frame(name, function, log))
        return Report(
            name=self._name,
            identifier=self.identifier,
            created=self._created,
            duration_ns=sum(row.duration_ns for row in spent),
            environment=_environment(self._config),
            frames=tuple(frames),
            graph_break_rows=tuple(self._breaks),
            time_rows=spent,
            notes=tuple(self._notes),
        )

    def _join(self) -> None:
        """Join what was heard of each entry; the storages are numbered through the report."""
        first = 0
        for log in self._entries.values():
            made_of = len(log.snapshots), first
            if log.joined is None or log.joined[0] != made_of:
                log.joined = made_of, assemble(log.snapshots, first)
            first = max((each.number + 1 for each in log.joined[1].storages), default=first)

    def _build_frame(self, name: str, function: str, log: _FrameLog) -> Frame:
        indices: dict[int | None, int] = {entry: index for index, entry in enumerate(log.entries)}
        graphs = [self._build_graph(indices[entry], each, indices) for entry, each in log.entries.items()]
        captures = [s.capture for each in log.entries.values() for s in each.snapshots if s.capture is not None]
        recent = [
            Call(
                at_ns=note.at_ns - self._begin_ns,
                duration_ns=note.duration_ns,
                # An entry may serve calls of another function's log only by a bug; then the call counts as unknown.
                graph=None if note.entry is None else indices.get(note.entry),
                compiled=note.entry is not None,
                cold=note.cold,
            )
            for note in log.recent
        ]
        return Frame(
            name=name,
            function=function,
            line=in_cell(captures[0].line) if captures and captures[0].line is not None else None,
            graphs=tuple(graphs),
            refusals=tuple([self._build_refusal(indices[e.entry], e.failed) for e in log.entries.values() if e.failed]),
            calls=Calls(total=log.compiled + log.eager, compiled=log.compiled, eager=log.eager, recent=tuple(recent)),
        )

    def _build_graph(self, index: int, log: _EntryLog, indices: Mapping[int | None, int]) -> Graph:
        if log.started is None:
            return Graph(index=index, entry=log.entry, status="earlier", calls=log.calls)
        joined = Joined() if log.joined is None else log.joined[1]
        ended = log.finished or log.failed
        trace = next((each.trace for each in log.snapshots if each.trace is not None), None)
        capture = next((each.capture for each in log.snapshots if each.capture is not None), None)
        return Graph(
            index=index,
            entry=log.entry,
            status="refused" if log.failed else "compiled" if log.finished else "compiling",
            frontend=log.started.frontend,
            backend=log.started.backend,
            tracer=None if trace is None else trace.tracer,
            misses=tuple(
                [self._settled(replace(miss, graph=indices.get(entry)), entry, log) for entry, miss in log.misses]
            ),
            training=None if trace is None else trace.training,
            grad_mode=None if capture is None else capture.grad_mode,
            at_ns=None if log.reused else log.started.at_ns - self._begin_ns,
            duration_ns=None if ended is None else ended.duration_ns,
            calls=log.calls,
            stages=tuple([each.stage for each in log.snapshots]),
            nodes=tuple([node for each in log.snapshots for node in each.nodes]),
            placeholders=joined.placeholders,
            results=joined.results,
            inputs=joined.inputs,
            outputs=joined.outputs,
            storages=joined.storages,
            saved=tuple([value for each in log.snapshots for value in each.saved]),
            compiled=tuple([graph for each in log.snapshots for graph in each.compiled]),
            kernels=tuple([kernel for each in log.snapshots for kernel in each.kernels]),
            guards=_guards(log.finished),
            autograd=joined.autograd,
            random_ops=() if trace is None else trace.random_ops,
            static_since="" if trace is None else trace.static_since,
            reused=log.reused,
        )

    def _settled(self, miss: Miss, earlier: int | None, log: _EntryLog) -> Miss:
        """Say of a miss what was made of it."""
        known = None if earlier is None else self._entries.get(earlier)
        trace = next((each.trace for each in log.snapshots if each.trace is not None), None)
        if log.joined is None or trace is None:
            return miss
        return settled(
            miss,
            vary=[each.user_name for each in log.joined[1].placeholders if each.value],
            why=trace.static_since,
            guards=_guards(log.finished),
            own=_lines(log.finished),
            earlier=_lines(None if known is None else known.finished),
        )

    def _build_refusal(self, index: int, event: observe.CompileFailed) -> Refusal:
        error = event.error
        refused = error if isinstance(error, RefusedError) else None
        return Refusal(
            graph=index,
            error=type(error).__name__,
            reason=refused.reason if refused is not None else type(error).__name__,
            message=places_in(str(error)),
            argument=refused.argument if refused is not None else None,
            line=in_cell(refused.line) if refused is not None and refused.line is not None else None,
            outcome=event.outcome,
            at_ns=max(0, event.at_ns - self._begin_ns),  # of an earlier run: before this one began
        )

    def _finish(self) -> None:
        with self._lock:
            self._end_ns = time.perf_counter_ns()
            self._built = None


def graph_break(at: FrameSummary | None, reason: str, at_ns: int) -> GraphBreakRow:
    """Describe a graph break at a line, which Dynamo explains in ``reason``."""
    words = why_dynamo_stopped(reason)
    if at is None:
        return GraphBreakRow(frame="", words=words, reason=reason, at_ns=at_ns)
    line = in_cell(UserLine(file=at.filename, line=at.lineno or 0, function=function_of(at.name), code=at.line or ""))
    frame = f"{line.file}:{line.line}"
    return GraphBreakRow(frame=frame, where=place(line), line=line, words=words, reason=reason, at_ns=at_ns)


def function_of(name: str) -> str:
    """Return the name of a function without what Dynamo puts around it in the name of its rest after a graph break."""
    return _RESUMED.sub(r"\1", name)


def _lines(event: observe.CompileFinished | None) -> dict[str, UserLine]:
    """Return the lines of what an entry assumes of sizes, by the expressions."""
    return {} if event is None else {text: in_cell(line) for text, line in event.lines.items()}


def _guards(event: observe.CompileFinished | None) -> tuple[Guard, ...]:
    return () if event is None else tuple([guard(*each, _lines(event)) for each in event.guards])


def _within(part: Sequence[object], whole: Sequence[object]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


@contextmanager
def record(name: str | None = None) -> Iterator[Recording]:
    """Record what aotlab does during a ``with`` block; see `aotlab.report.model.Report.record`."""
    recording = Recording(name)
    before = _dynamo_reasons()
    if frontend := sys.modules.get("aotlab.frontends.dynamo"):
        frontend.watch_captures()
    try:
        with observe.listen(recording.hear):
            yield recording
    finally:
        recording._note_dynamo([reason for reason, n in _dynamo_reasons().items() if n > before.get(reason, 0)])
        recording._finish()


def _dynamo_reasons() -> dict[str, int]:
    """Return what Dynamo has counted of the reasons for which it did not go on, if it is loaded."""
    return internals.dynamo_reasons() if "torch._dynamo.utils" in sys.modules else {}


def _switch_value(name: str) -> bool | int | str | None:
    value: object = getattr(config, name)
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


def _environment(switches: tuple[Switch, ...]) -> Environment:
    devices = [Device(kind="cpu", name=_processor())]
    # Asking for a GPU's name would initialize CUDA; a process that has not done so did not use it.
    if torch.cuda.is_initialized():
        devices += [
            Device(kind="cuda", index=index, name=torch.cuda.get_device_name(index))
            for index in range(torch.cuda.device_count())
        ]
    return Environment(
        aotlab=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        threads=torch.get_num_threads(),
        devices=tuple(devices),
        config=switches,
    )


@functools.cache
def _processor() -> str:
    """Name the processor as the vendor does, where the system tells."""
    if sys.platform == "linux":
        try:
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine()
