"""Reports that still change, and who looks at them.

A saved report is drawn from its JSON alone. While the kernel that made it lives, a front end may ask for more: the
report as it stands now, and a measurement of forward and backward beside eager. It opens a comm for that (the target is
`TARGET`), with ``{"identifier": "…"}``; widgets are told through `watch`.

    kernel → front end   {"kind": "report", "report": {…}}                              at once, and after each change
                         {"kind": "progress", "text": "…"}                              while measuring
                         {"kind": "error", "message": "…"}                              a measurement failed; it is over
                         {"kind": "unknown"}                                            no such report; the comm closes
                         {"kind": "graph", "frame": "…", "graph": {…}}                  one graph as a whole
                         {"kind": "nodes", "frame": "…", "index": 0, "nodes": […]}      the nodes of one graph
                         {"kind": "verification", "rows": […]}                          all rows
                         {"kind": "outside", "rows": […]}                               all that changed outside
    front end → kernel   {"kind": "measure"}
                         {"kind": "graph", "frame": "…", "index": 0}
                         {"kind": "nodes", "frame": "…", "index": 0}
                         {"kind": "verification"}, {"kind": "outside"}
                         {"kind": "leave"}                                              nobody looks; the comm closes

It is the kernel that closes a comm: JupyterLab ends the comm's thread in the kernel as soon as it has sent a close of
its own, and what the thread has not read by then is a traceback in the notebook.

A report or an error ends what ``progress`` said. A report message is never larger than what a
cell's output may embed; what was cut from it the front end asks for when it is looked at.

*Threads.* ipykernel 7 answers a comm of the front end's on a thread of its own, at once, while a cell runs. There
happens only what any thread may do: look up, count, send a report (`LiveReport.report` must bear that). What runs user
code, that is measuring, is handed to the thread that runs the cells, and waits there until no cell is running: a
measurement *waits* for the running cell, and a cell that is sent meanwhile waits for the measurement. That way neither
sees the other's grad mode, random state or half-made tensors, and the times are not of two programs at once. The
kernel's interrupt ends a measurement. While one waits or runs, another is refused.

*Pushes.* `changed` marks a report and is cheap. What is marked is sent when the cell ends, or after a quarter of a
second from a thread of its own, if a cell is long; the more a report takes to write, the rarer that is.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import signal
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from aotlab.errors import UsageError
from aotlab.report.codec import encode
from aotlab.report.cut import cleaned, fitting
from aotlab.report.mime import CAP
from aotlab.report.model import Report

#: The name under which front ends open their comms.
TARGET = "aotlab.report"

#: The parts of a report that a front end may ask for.
PARTS = ("graph", "nodes", "outside", "verification")

#: How many live reports are kept; the oldest goes first, and is then as dead as those of other kernels.
MOST_REPORTS = 64

#: How many comms may look at one report; a page that was reloaded leaves its comms behind without a word.
_MOST_VIEWERS = 16

#: A report that keeps changing is sent at most so often, in seconds.
_INTERVAL = 0.25

#: A push may take this share of the time: one that takes 100 ms is followed by 900 ms without.
_SHARE = 0.1

Message = dict[str, object]
Viewer = Callable[[Message], None]


class LiveReport(Protocol):
    """What makes a report that can still change.

    `report` may be called by any thread at any time. `measure` is called on the thread that runs the cells, while none
    runs; what it has measured belongs to `report` from then on. ``identifier`` is that of its reports.
    """

    @property
    def identifier(self) -> str:
        """What front ends ask for it by."""

    def report(self) -> Report:
        """Return the report as it stands now."""

    def measure(self, progress: Callable[[str], None]) -> Report:
        """Time forward and backward beside eager now, and return the report with these timings."""


# --- reports and viewers -----------------------------------------------------------------------------------------


class _Registry:
    """The live reports of the process, and who looks at which; every method may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reports: OrderedDict[str, LiveReport] = OrderedDict()
        self._viewers: dict[str, list[Viewer]] = {}
        self._sent: dict[str, Report] = {}

    def add(self, report: LiveReport) -> None:
        with self._lock:
            self._reports[report.identifier] = report
            self._reports.move_to_end(report.identifier)
            while len(self._reports) > MOST_REPORTS:
                gone, _ = self._reports.popitem(last=False)
                self._viewers.pop(gone, None)
                self._sent.pop(gone, None)

    def find(self, identifier: str) -> LiveReport | None:
        with self._lock:
            return self._reports.get(identifier)

    def look(self, identifier: str, viewer: Viewer) -> None:
        with self._lock:
            viewers = self._viewers.setdefault(identifier, [])
            viewers.append(viewer)
            del viewers[:-_MOST_VIEWERS]

    def look_away(self, identifier: str, viewer: Viewer) -> None:
        with self._lock:
            viewers = self._viewers.get(identifier, [])
            if viewer in viewers:
                viewers.remove(viewer)
            if not viewers:
                self._viewers.pop(identifier, None)
                self._sent.pop(identifier, None)

    def viewers(self, identifier: str) -> tuple[Viewer, ...]:
        with self._lock:
            return tuple(self._viewers.get(identifier, ()))

    def is_news(self, report: Report, identifier: str) -> bool:
        """Tell whether ``report`` is not the one that was sent last, and take it for sent."""
        with self._lock:
            before = self._sent.get(identifier)
            self._sent[identifier] = report
        return before is not report and before != report


_registry = _Registry()


def register(report: LiveReport) -> None:
    """Let front ends ask for ``report``; of more than `MOST_REPORTS` the oldest is forgotten."""
    _registry.add(report)


def find(identifier: str) -> LiveReport | None:
    """Return the live report of this identifier, None if there is none (any more)."""
    return _registry.find(identifier)


def watch(identifier: str, viewer: Viewer) -> Callable[[], None]:
    """Call ``viewer`` with every message about a report, from any thread, until the returned function is called."""
    _registry.look(identifier, viewer)
    return lambda: _registry.look_away(identifier, viewer)


def changed(identifier: str) -> None:
    """Note that a report has changed: whoever looks at it will be sent the new one, soon. Cheap, from any thread."""
    if _registry.viewers(identifier):
        _pushes.mark(identifier)


# --- messages ----------------------------------------------------------------------------------------------------


def report_message(report: Report) -> Message:
    """Write the message that shows ``report``, cut to what fits."""
    small = fitting(report, lambda candidate: len(json.dumps(candidate.to_dict(sparse=True))) <= CAP, CAP)
    return {"kind": "report", "report": small.to_dict(sparse=True)}


def part_message(report: Report, asked: object) -> Message | None:
    """Write the message with the part of ``report`` that a front end asked for; None if there is no such part."""
    fields = asked if isinstance(asked, dict) else {}
    if fields.get("kind") == "verification":
        return {"kind": "verification", "rows": [encode(cleaned(row)) for row in report.verification_rows]}
    if fields.get("kind") == "outside":
        outside = () if report.cell is None else report.cell.mutated_outside
        return {"kind": "outside", "rows": [encode(cleaned(row)) for row in outside]}
    for frame in report.frames:
        for graph in frame.graphs:
            if (frame.name, graph.index) == (fields.get("frame"), fields.get("index")):
                if fields.get("kind") == "nodes":
                    nodes = [encode(cleaned(node), sparse=True) for node in graph.nodes]
                    return {"kind": "nodes", "frame": frame.name, "index": graph.index, "nodes": nodes}
                return {"kind": "graph", "frame": frame.name, "graph": encode(cleaned(graph))}
    return None


def send_part(identifier: str, asked: object, viewer: Viewer) -> None:
    """Send one viewer a part of the report as a whole, if there is such a part."""
    live = find(identifier)
    try:
        message = None if live is None else part_message(live.report(), asked)
    except Exception as error:  # noqa: BLE001  # as for whole reports
        message = _error("that part of the report cannot be made", error)
    if message is not None:
        viewer(message)


def send_report(identifier: str, viewer: Viewer) -> None:
    """Send one viewer the report as it stands."""
    live = find(identifier)
    if live is None:
        viewer({"kind": "unknown"})
        return
    try:
        viewer(report_message(live.report()))
    except Exception as error:  # noqa: BLE001  # a report that cannot be made must not end the kernel's thread
        viewer(_error("the report cannot be made", error))


def request_measurement(identifier: str, viewer: Viewer) -> None:
    """Measure as soon as no cell runs. Everybody who looks is sent what comes of it, ``viewer`` why nothing will."""
    if find(identifier) is None:
        viewer({"kind": "unknown"})
    elif not _measuring.acquire(blocking=False):
        viewer({"kind": "error", "message": "a measurement is waiting or running already"})
    else:
        if _idle.busy:
            _tell(identifier, {"kind": "progress", "text": "waiting for the running cell to end"})
        try:
            _when_idle(lambda: _measure(identifier))
        except BaseException:
            _measuring.release()
            raise


_measuring = threading.Lock()


def _measure(identifier: str) -> None:
    """Measure, on the thread that runs the cells."""
    try:
        live = find(identifier)
        if live is None:
            _tell(identifier, {"kind": "unknown"})
            return
        try:
            with _interruptible():
                report = live.measure(lambda text: _tell(identifier, {"kind": "progress", "text": str(text)}))
        except KeyboardInterrupt:
            _tell(identifier, {"kind": "error", "message": "the measurement was interrupted"})
        except UsageError as error:
            _tell(identifier, {"kind": "error", "message": str(error)})
        except Exception as error:  # noqa: BLE001  # the user's graphs may raise anything
            _tell(identifier, _error("the measurement failed", error))
        else:
            _registry.is_news(report, identifier)
            _tell(identifier, report_message(report))
    finally:
        _measuring.release()


def _push(identifier: str) -> None:
    """Send everybody the report, if there is news in it."""
    live = find(identifier)
    if live is None or not _registry.viewers(identifier):
        return
    try:
        report = live.report()
        if not _registry.is_news(report, identifier):
            return
        message = report_message(report)
    except Exception as error:  # noqa: BLE001  # as above: this may be a thread of ours, or a hook of IPython's
        _tell(identifier, _error("the report cannot be made", error))
        return
    _tell(identifier, message)


def _tell(identifier: str, message: Message) -> None:
    for viewer in _registry.viewers(identifier):
        viewer(message)


def _error(what: str, error: BaseException) -> Message:
    lines = str(error).strip().splitlines()
    return {"kind": "error", "message": f"{what}: {type(error).__name__}{f': {lines[0]}' if lines else ''}"}


# --- when to push ------------------------------------------------------------------------------------------------


class _Pushes:
    """The reports that have changed since they were sent; `flush` sends them, at the end of a cell or from a timer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._marked: dict[str, None] = {}
        self._timer: threading.Timer | None = None
        self._not_before = 0.0

    def mark(self, identifier: str) -> None:
        """Have a report sent before long."""
        with self._lock:
            self._marked[identifier] = None
            if self._timer is None:
                wait = max(_INTERVAL, self._not_before - time.monotonic())
                self._timer = threading.Timer(wait, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Send what is marked, now."""
        # One at a time, so that an older form of a report does not overtake a newer one.
        with self._sending:
            with self._lock:
                marked, self._marked = self._marked, {}
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
            begin = time.monotonic()
            for identifier in marked:
                _push(identifier)
            end = time.monotonic()
            with self._lock:
                self._not_before = end + (end - begin) * (1 / _SHARE - 1)


_pushes = _Pushes()


# --- the thread that runs the cells ------------------------------------------------------------------------------


class _Idle:
    """Jobs for the thread that runs the cells, done one by one while no cell runs.

    Without a kernel there is no such thread, and a job is done at once by whoever brings it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._cells: list[object] = []
        self.schedule: Callable[[Callable[[], None]], object] | None = None

    @property
    def busy(self) -> bool:
        """Whether a cell is running, as far as is known."""
        return bool(self._cells)

    def submit(self, job: Callable[[], None]) -> None:
        """Do ``job`` as soon as no cell runs; from any thread."""
        schedule = self.schedule
        if schedule is None:
            job()
            return
        with self._lock:
            self._jobs.append(job)
        schedule(self.work)

    def work(self) -> None:
        """Do the jobs that are there; called by the kernel's loop, which calls nothing while a cell computes.

        It does while a cell awaits something. Then the jobs stay, and the end of the cell schedules them again.
        """
        while not self.busy:
            with self._lock:
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except (Exception, KeyboardInterrupt):  # noqa: BLE001  # it would end the kernel's loop, and the kernel with it
                # Jobs tell the viewers themselves.
                continue

    def forget_cells(self) -> None:
        """Take it that no cell runs."""
        self._cells = []
        if self.schedule is not None:
            self.schedule(self.work)

    def began(self, info: object) -> None:
        """Note that a cell runs; IPython's ``pre_run_cell``."""
        self._cells.append(info)

    def ended(self, result: object) -> None:
        """Note that it has ended; IPython's ``post_run_cell``. Not every end has a beginning that we heard."""
        info = getattr(result, "info", None)
        # A cancelled cell has no result, and no other cell can be running around it.
        self._cells = [] if result is None else [each for each in self._cells if each is not info]
        with self._lock:
            left = bool(self._jobs)
        if left and not self.busy and self.schedule is not None:
            self.schedule(self.work)


_idle = _Idle()


def _when_idle(job: Callable[[], None]) -> None:
    _idle.submit(job)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let the kernel's interrupt raise KeyboardInterrupt here; between cells, ipykernel ignores it."""
    before = signal.getsignal(signal.SIGINT)
    # Signals are the main thread's, and a handler that was set outside of Python cannot be put back.
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- the shell ---------------------------------------------------------------------------------------------------


class _Connection:
    """What one shell was given: a comm target, and hooks."""

    def __init__(self, shell: Any, kernel: Any) -> None:
        self._shell = weakref.ref(shell)
        self._kernel = kernel

    def connect(self) -> None:
        loop = getattr(self._kernel, "io_loop", None)
        _idle.schedule = None if loop is None else loop.add_callback
        self._kernel.comm_manager.register_target(TARGET, _opened)
        shell = self._shell()
        if shell is not None:
            shell.events.register("pre_run_cell", _idle.began)
            shell.events.register("post_run_cell", _cell_ended)

    def disconnect(self) -> None:
        self._kernel.comm_manager.unregister_target(TARGET, _opened)
        shell = self._shell()
        if shell is not None:
            # Somebody may have taken our hooks away together with all others.
            with contextlib.suppress(ValueError):
                shell.events.unregister("pre_run_cell", _idle.began)
            with contextlib.suppress(ValueError):
                shell.events.unregister("post_run_cell", _cell_ended)
        # Jobs that wait are done all the same; nobody tells any more when a cell has ended.
        _idle.forget_cells()


_connections: dict[int, _Connection] = {}


def connect(shell: Any) -> None:
    """Answer front ends through the kernel of an IPython shell; once, however often it is called.

    A shell without a kernel, as in a terminal, has no front ends that could ask: nothing happens then.
    """
    kernel = getattr(shell, "kernel", None)
    if getattr(kernel, "comm_manager", None) is None or id(shell) in _connections:
        return
    connection = _connections[id(shell)] = _Connection(shell, kernel)
    connection.connect()


def disconnect(shell: Any) -> None:
    """Take back what `connect` did, if it did anything. Comms that are open are sent nothing more."""
    connection = _connections.pop(id(shell), None)
    if connection is not None:
        connection.disconnect()


def _cell_ended(result: object = None) -> None:
    _idle.ended(result)
    _pushes.flush()


def _opened(comm: Any, message: Any) -> None:
    """Answer a front end that has opened a comm. Whatever it sends, nothing is raised."""
    content = message.get("content") if isinstance(message, dict) else None
    data = content.get("data") if isinstance(content, dict) else None
    identifier = data.get("identifier") if isinstance(data, dict) else None
    # ipykernel has the front end answer to the thread that a message seems to come from: always to this one.
    context = contextvars.copy_context()

    def viewer(sent: Message) -> None:
        # A kernel that is about to end cannot send; there is nobody to tell.
        with contextlib.suppress(Exception):
            here = context.copy()  # two threads cannot be in one context at a time
            here.run(comm.send, sent)
            if sent.get("kind") == "unknown":
                here.run(comm.close)

    if not isinstance(identifier, str) or find(identifier) is None:
        viewer({"kind": "unknown"})
        return
    stop = watch(identifier, viewer)

    def received(request: Any) -> None:
        content = request.get("content") if isinstance(request, dict) else None
        data = content.get("data") if isinstance(content, dict) else None
        kind = data.get("kind") if isinstance(data, dict) else None
        if kind == "measure":
            request_measurement(identifier, viewer)
        elif kind in PARTS:
            send_part(identifier, data, viewer)
        elif kind == "leave":
            stop()
            with contextlib.suppress(Exception):
                context.copy().run(comm.close)
        else:
            known = "'measure', 'graph', 'nodes', 'verification' and 'leave'"
            viewer({"kind": "error", "message": f"the kernel knows no request {kind!r:.80}; it knows {known}"})

    comm.on_msg(received)
    comm.on_close(lambda _: stop())
    send_report(identifier, viewer)
