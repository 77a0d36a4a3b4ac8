"""Record what aotlab does: listen to the engine's events and build a report from them.

A recording receives the events of the whole process, from all threads. When a stage of a compilation finishes, the
recording takes a snapshot at once, while the engine waits, because later stages rewrite graphs in place. When a call
ends, the recording only updates the counters and appends to a bounded list. The report is built when somebody reads it.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from aotlab import config, events
from aotlab._torch.process_groups import timed_collectives
from aotlab.errors import RefusedError, UserLine
from aotlab.report.assemble import Joined, assemble, choices_of, numbered, temporaries
from aotlab.report.collectives import collectives, waited
from aotlab.report.dynamo_breaks import DYNAMO, RESUMED, STEPPED, dynamo_reasons, graph_break
from aotlab.report.environment import environment, switch_value
from aotlab.report.gather import GATHER, exchanged, placed, prepared, written
from aotlab.report.model import (
    Call,
    Calls,
    Choices,
    Frame,
    Graph,
    GraphBreakRow,
    Guard,
    Miss,
    Node,
    Refusal,
    Report,
    Stage,
    Switch,
    TimelineRow,
)
from aotlab.report.recompiles import misses
from aotlab.report.snapshots import Snapshot, backward_snapshot, snapshot
from aotlab.report.spent import Spent
from aotlab.report.text import in_cell, places_in, why_dynamo_stopped
from aotlab.report.timeline import with_moments
from aotlab.report.varying import guard, settled
from aotlab.report.views import Views

#: The number of calls per frame that a report stores one by one; the counters count all calls.
RECENT_CALLS = 1000

#: The activities that the report of a running cell lists, and how many of them.
STEPS = ("dynamo", "upstream", "trace", "partition", "header", "compile", "backward", "verification", "timing")
MOST_STEPS = 100


class _CallNote(NamedTuple):
    """One call. ``entry`` is the number of the entry that served the call; None if the call ran eagerly.

    ``cold`` says whether the call waited for a compilation.
    """

    at_ns: int
    duration_ns: int
    entry: int | None
    cold: bool


@dataclass(slots=True, kw_only=True)
class _EntryLog:
    """The events of one compiled entry."""

    entry: int
    started: events.CompileStarted | None = None
    misses: tuple[tuple[int | None, Miss], ...] = ()
    snapshots: list[Snapshot] = field(default_factory=list)
    finished: events.CompileFinished | None = None
    failed: events.CompileFailed | None = None
    calls: int = 0
    reused: bool = False
    derived: list[tuple[int, int]] = field(default_factory=list)  # the start and the duration of each later backward
    storage_ids: tuple[tuple[int | None, ...], ...] = ()  # the storages of the results of the first call
    # The rows that `assemble` made, in a cache. The first item is a key of the data from which the rows were made. If
    # the key changes, the rows are made again.
    assembled: tuple[object, Joined] | None = None
    joined: tuple[object, Joined] | None = None  # like `assembled`, but storages have their numbers in the report

    choices: tuple[Choices | None] | None = None  # the result of `choices_of`, in a cache
    known: dict[str, tuple[object, tuple[Any, ...]]] = field(default_factory=dict)  # the results of `_made_once`

    def guards(self) -> tuple[Guard, ...]:
        """Return the rows of the guards. They are made once, because an entry can have thousands of guards."""
        return self._made_once("guards", self.finished, lambda: _guards(self.finished))

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes of all snapshots so far, always in the same tuple."""
        snapshots = self.snapshots
        return self._made_once(
            "nodes", len(snapshots), lambda: tuple([node for each in snapshots for node in each.nodes])
        )

    def _made_once(self, name: str, made_of: object, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the result of ``make``, which is called again only if ``made_of`` has changed."""
        if name not in self.known or self.known[name][0] != made_of:
            self.known[name] = made_of, make()
        return self.known[name][1]

    def choices_with(self, joined: Joined) -> Choices | None:
        """Return the choices of saved values. The first call takes a while, so it is made when the report is read."""
        if self.choices is None:
            self.choices = (choices_of(self.snapshots, joined),)
        return self.choices[0]

    def alone(self, stage: Stage, event: events.StageFinished | events.BackwardCompiled) -> Stage:
        """Return ``stage`` without the time of the backwards that were derived while the stage ran.

        Each of these backwards is listed as a separate stage. ``event`` is the event that reported the end of the
        stage.
        """
        began = event.at_ns - event.duration_ns
        inner = sum(took for at_ns, took in self.derived if at_ns >= began)
        if isinstance(event, events.BackwardCompiled):
            self.derived.append((began, event.duration_ns - inner))
        return replace(stage, duration_ns=max(event.duration_ns - inner, 0))


@dataclass(slots=True, kw_only=True)
class _FrameLog:
    """The events of one function."""

    function: str
    entries: dict[int, _EntryLog] = field(default_factory=dict)
    compiled: int = 0
    eager: int = 0
    recent: deque[_CallNote] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))


def _switches() -> tuple[Switch, ...]:
    """Return the present values of aotlab's settings."""
    return tuple([Switch(name=name, value=switch_value(name)) for name in config.__annotations__])


class Recording(Views[Report]):
    """A report that is still being recorded.

    A recording has all attributes and methods of a `Report`: tables, ``verdict``, ``to_html``, ``to_json``, ``save``,
    ``with_timings``, and the fields. During the ``with`` block they describe the events so far, and after the block the
    finished report. ``recording.report()`` returns the plain, frozen `Report`.

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
        self._clock_ns = time.time_ns() - self._begin_ns
        self._spent = Spent(self._begin_ns)
        self._config = _switches()
        # The key is a function's id and name. The id alone is not unique, because Python may reuse the id of a function
        # that was deleted.
        self._frames: dict[tuple[int, str], _FrameLog] = {}
        self._entries: dict[int, _EntryLog] = {}
        self._captured_again: dict[int, tuple[tuple[int | None, Miss], ...]] = {}
        self._breaks: list[GraphBreakRow] = []
        # For each graph break: the files and lines of its stack, outermost frame first, and the reason in a few words.
        self._led_to: list[tuple[list[tuple[str, int]], str]] = []
        self._notes: list[str] = []
        self._waits: list[tuple[str, int, int]] = []  # filled when the block ends
        self._built: Report | None = None

    def __repr__(self) -> str:
        return f"<Recording: {self.report().verdict.splitlines()[0]} .report() is the frozen Report>"

    def report(self) -> Report:
        """Return the report of all events so far."""
        with self._lock:
            if self._built is None or self._end_ns is None:
                self._built = self._build()
            return self._built

    def begin_run(self, began_ns: int, *, again: bool) -> None:
        """Begin a run of the recorded code at ``began_ns``; ``again`` is true for every run but the first.

        In a later run, the recording still has the compiled entries of earlier runs, and marks them as reused. The
        counters of calls begin at 0.
        """
        with self._lock:
            self._begin_ns = began_ns
            self._spent = Spent(began_ns)
            self._end_ns = self._built = None
            self._config = _switches()
            if not again:
                return
            self._created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            # Dynamo reports a graph break only when it captures the code, but Python runs the code at the graph break
            # in each run. So the graph breaks of earlier runs remain in the report.
            self._breaks = [replace(row, at_ns=0) for row in self._breaks]
            self._notes.clear()
            for log in self._frames.values():
                log.compiled = log.eager = 0
                log.recent.clear()
            for entry in self._entries.values():
                entry.calls, entry.reused = 0, True

    def end_run(self) -> None:
        """Fix the time of the run. Later events, such as calls of functions that the run defined, are recorded too."""
        with self._lock:
            self._spent.end(time.perf_counter_ns())

    def began_at(self) -> int:
        """Return the time of the clock at the begin of the run, as `time.time_ns` counts it."""
        return self._begin_ns + self._clock_ns

    def hear(self, event: events.Event) -> None:
        """Record one event; this is the listener that `aotlab.events` calls."""
        if isinstance(event, events.Begun | events.GraphStarted | events.KernelStarted):
            return
        if isinstance(event, events.Called | events.KernelFinished):
            with self._lock:
                if isinstance(event, events.Called):
                    self._called(event)
                else:
                    name = f"{event.name} (from a cache)" if event.cached else event.name
                    self._spent.add_kernel(name, event.at_ns, event.duration_ns, event.entry, event.engine)
            return
        try:
            # Take the snapshot before taking the lock, because converting graphs takes time. The snapshot needs no
            # lock, because one thread compiles an entry.
            stage_snapshot = (
                snapshot(event)
                if isinstance(event, events.StageFinished)
                else backward_snapshot(event)
                if isinstance(event, events.BackwardCompiled)
                else None
            )
        except Exception as error:  # noqa: BLE001  # a bug in the report must not become the user's error
            stage_snapshot = None
            with self._lock:
                self._notes.append(f"{type(event).__name__} could not be recorded: {type(error).__name__}: {error}")
        with self._lock:
            self._note(event, stage_snapshot)
            heard = time.perf_counter_ns()
            self._spent.add("recording", heard, heard - event.at_ns, getattr(event, "entry", None))

    def __getattr__(self, name: str) -> object:
        """Return a field or a method of the report."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.report(), name)

    def _called(self, event: events.Called) -> None:
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
            entry.storage_ids = event.storage_ids or entry.storage_ids
        self._spent.add("eager" if event.entry is None else "compiled", event.at_ns, event.duration_ns, event.entry)

    def _note(self, event: events.Event, stage_snapshot: Snapshot | None) -> None:
        match event:
            case events.CompileStarted():
                again = self._captured_again.pop(event.function_id, ())
                log = _EntryLog(entry=event.entry, started=event, misses=misses(event) or again)
                self._entries[event.entry] = log
                self._frame(event.function_id, event.function).entries[event.entry] = log
            case events.CapturedAgain():
                self._captured_again[event.function_id] = misses(event)
            case events.StageFinished() | events.BackwardCompiled():
                # `entry_log` is None if the compilation began before the recording. Then the stage is not recorded.
                entry_log = self._entries.get(event.entry)
                if entry_log is not None and stage_snapshot is not None:
                    if (
                        isinstance(event, events.StageFinished) and event.stage == "capture"
                    ):  # the stages start again with the bases of views as inputs
                        entry_log.snapshots.clear()
                    entry_log.snapshots.append(
                        replace(stage_snapshot, stage=entry_log.alone(stage_snapshot.stage, event))
                    )
                kind = event.stage if isinstance(event, events.StageFinished) else "backward"
                self._spent.add(kind, event.at_ns, event.duration_ns, event.entry)
            case events.CompileFinished():
                self._spent.add("between", event.at_ns, event.duration_ns, event.entry)
                if event.entry in self._entries:
                    self._entries[event.entry].finished = event
            case events.CompileFailed():
                if event.entry in self._entries and isinstance(event.error, Exception):  # an interrupt is no failure
                    self._entries[event.entry].failed = event
                self._spent.add("between", event.at_ns, event.duration_ns, event.entry)
            case events.Spent():
                self._spent.add(event.kind, event.at_ns, event.duration_ns)
            case events.GraphBreak():
                self._note_break(event)

    def _note_break(self, event: events.GraphBreak) -> None:
        """Record a graph break.

        If the graph break is in a function that other captured functions call, Dynamo reports it several times: once
        for the outermost captured function, then once for each function that is nested in it. Only the first report is
        recorded.
        """
        places = [(each.filename, each.lineno or 0) for each in event.stack]
        reason, stepped = event.reason, event.reason == STEPPED
        for lines, words in self._led_to:
            if places and (stepped or words == why_dynamo_stopped(reason)) and _within(places, lines):
                return
        if stepped:
            reason = next(reversed(dynamo_reasons()), reason)
        frames = [each for each in event.stack if not each.filename.startswith(DYNAMO)] or event.stack
        row = graph_break(frames[-1] if frames else None, reason, event.at_ns - self._begin_ns)
        self._led_to.append((places, why_dynamo_stopped(reason)))
        self._breaks.append(self._in_cell(row, event))

    def _in_cell(self, row: GraphBreakRow, _event: events.GraphBreak) -> GraphBreakRow:
        """Add the line of the notebook cell that ran the code with a graph break.

        A recording of a cell overrides this method. Other recordings leave the row unchanged.
        """
        return row

    def _note_dynamo(self, reasons: Iterable[str]) -> None:
        """Record the reasons why Dynamo skipped a function or failed, because no event reports them.

        ``reasons`` are Dynamo's texts. A reason is left out if a recorded graph break has the same reason.
        """
        with self._lock:
            told = {why_dynamo_stopped(each.reason) for each in self._breaks}
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
        spent = self._spent.rows(end_ns)
        self._join()
        frames = [self._build_frame(*each) for each in self._named_frames()]
        return replace(
            self.head(),
            duration_ns=sum(row.duration_ns for row in spent),
            frames=tuple(frames),
            graph_break_rows=tuple(self._breaks),
            time_rows=spent,
            wait_rows=waited(self._waits),
            timeline_rows=with_moments(self._spent.timeline(self._places()), frames, self._breaks),
            notes=tuple(self._notes),
        )

    def head(self) -> Report:
        """Return a report that has only the name, the identifier, the time and the environment."""
        return Report(
            name=self._name,
            identifier=self.identifier,
            created=self._created,
            environment=environment(self._config),
        )

    def ended_activities(self) -> tuple[TimelineRow, ...]:
        """Return the captures, the longer stages and the comparisons that have ended: the latest `MOST_STEPS`."""
        with self._lock:
            return tuple([row for row in self._spent.timeline(self._places()) if row.stage in STEPS][-MOST_STEPS:])

    def _named_frames(self) -> Iterator[tuple[str, str, _FrameLog]]:
        """Yield the name of each frame in the report, the name of its function, and its events."""
        seen: dict[str, int] = {}
        for log in self._frames.values():
            function = RESUMED.sub(r"\1 after line \2", log.function)
            seen[function] = seen.get(function, 0) + 1
            yield function if seen[function] == 1 else f"{function} #{seen[function]}", function, log

    def _places(self) -> dict[int, tuple[str, int]]:
        """Map the numbers of all entries to the keys of their graphs in the report: frame and index."""
        frames = list(self._named_frames())
        return {entry: (name, index) for name, _, log in frames for index, entry in enumerate(log.entries)}

    def _join(self) -> None:
        """Join the snapshots of each entry, and number the storages for the whole report.

        If several entries use a storage, it has the same number in all of them.
        """
        numbers: dict[object, int] = {}
        before = 0
        for log in self._entries.values():
            made_of = len(log.snapshots), log.storage_ids
            if log.assembled is None or log.assembled[0] != made_of:
                log.assembled = made_of, assemble(log.snapshots, log.storage_ids)
            joined = log.assembled[1]
            keys = {each.number: joined.storage_ids.get(each.number) for each in joined.storages}
            storage_keys = {
                number: numbers.setdefault((log.entry, number) if key is None else key, len(numbers))
                for number, key in keys.items()
            }
            if log.joined is None or log.joined[0] != (made_of, storage_keys, before):
                log.joined = (made_of, storage_keys, before), numbered(joined, storage_keys, before)
            before += temporaries(joined)

    def _build_frame(self, name: str, function: str, log: _FrameLog) -> Frame:
        indices: dict[int | None, int] = {entry: index for index, entry in enumerate(log.entries)}
        graphs = [self._build_graph(indices[entry], each, indices) for entry, each in log.entries.items()]
        captures = [s.capture for each in log.entries.values() for s in each.snapshots if s.capture is not None]
        recent = [
            Call(
                at_ns=note.at_ns - self._begin_ns,
                duration_ns=note.duration_ns,
                # `get`, so that a report can be built even if a bug made an entry of another function serve the call.
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
        nodes = log.nodes()
        return Graph(
            index=index,
            entry=log.entry,
            status="refused" if log.failed else "compiled" if log.finished else "compiling",
            frontend=log.started.frontend,
            backend=log.started.backend,
            misses=tuple(
                [self._settled(replace(miss, graph=indices.get(entry)), entry, log) for entry, miss in log.misses]
            ),
            training=None if trace is None else trace.training,
            grad_mode=None if capture is None else capture.grad_mode,
            at_ns=None if log.reused else log.started.at_ns - self._begin_ns,
            duration_ns=None if ended is None else ended.duration_ns,
            calls=log.calls,
            stages=tuple([each.stage for each in log.snapshots]),
            nodes=nodes,
            collectives=collectives(nodes),
            placeholders=joined.placeholders,
            results=joined.results,
            inputs=joined.inputs,
            outputs=joined.outputs,
            storages=joined.storages,
            steps=joined.steps,
            input_groups=joined.input_groups,
            storage_groups=joined.storage_groups,
            saved=tuple([value for each in log.snapshots for value in each.saved]),
            compiled=tuple([graph for each in log.snapshots for graph in each.compiled]),
            kernels=tuple([kernel for each in log.snapshots for kernel in each.kernels]),
            guards=log.guards(),
            autograd=joined.autograd,
            memory=joined.memory,
            choices=None if log.finished is None else log.choices_with(joined),
            random_ops=() if trace is None else trace.random_ops,
            static_since="" if trace is None else trace.static_since,
            reused=log.reused,
        )

    def _settled(self, miss: Miss, earlier: int | None, log: _EntryLog) -> Miss:
        """Complete the reason for a recompile: say whether the differing size or number is dynamic in the new graph.

        ``earlier`` is the number of the entry whose guard failed, and ``log`` has the events of the new entry.
        """
        earlier_log = None if earlier is None else self._entries.get(earlier)
        trace = next((each.trace for each in log.snapshots if each.trace is not None), None)
        if log.joined is None or trace is None:
            return miss
        return settled(
            miss,
            vary=[each.user_name for each in log.joined[1].placeholders if each.value],
            why=trace.static_since,
            guards=log.guards(),
            caused_by=_lines(log.finished),
            earlier=_lines(None if earlier_log is None else earlier_log.finished),
        )

    def _build_refusal(self, index: int, event: events.CompileFailed) -> Refusal:
        error = event.error
        refused = error if isinstance(error, RefusedError) else None
        return Refusal(
            graph=index,
            error=type(error).__name__,
            reason=refused.reason if refused is not None else type(error).__name__,
            case=refused.case if refused is not None else "",
            message=places_in(str(error)),
            argument=refused.argument if refused is not None else None,
            line=in_cell(refused.line) if refused is not None and isinstance(refused.line, UserLine) else None,
            outcome=event.outcome,
            at_ns=max(0, event.at_ns - self._begin_ns),  # 0 if the refusal happened in an earlier run
        )

    def _finish(self) -> None:
        with self._lock:
            self._end_ns = time.perf_counter_ns()
            self._built = None


def _lines(event: events.CompileFinished | None) -> dict[str, UserLine]:
    """Map the text of each guard on a size to the user line that caused the guard."""
    return {} if event is None else {text: in_cell(line) for text, line in event.lines.items()}


def _guards(event: events.CompileFinished | None) -> tuple[Guard, ...]:
    return () if event is None else tuple([guard(*each, _lines(event)) for each in event.guards])


def _within(part: Sequence[object], whole: Sequence[object]) -> bool:
    """Return whether the items of ``part`` occur in ``whole`` one after another."""
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


@contextmanager
def record(name: str | None = None, ranks: str | Path | None = None, waits: bool = False) -> Iterator[Recording]:
    """Record what aotlab does during a ``with`` block; see `aotlab.report.model.Report.record`."""
    recording = Recording(name)
    folder = None if ranks in (None, GATHER) else prepared(Path(str(ranks)))
    ended = ""
    before = dynamo_reasons()
    if frontend := sys.modules.get("aotlab.frontends.dynamo_frontend"):
        frontend.watch_captures()
    try:
        with timed_collectives(recording._waits) if waits else nullcontext(), events.listen(recording.hear):
            yield recording
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
        raise
    finally:
        recording._note_dynamo([reason for reason, n in dynamo_reasons().items() if n > before.get(reason, 0)])
        recording._finish()
        if ranks is not None:
            report = placed(recording.report(), ended)
            recording._built = exchanged(report) if folder is None else written(report, folder)
