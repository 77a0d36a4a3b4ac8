"""Keep the reports that can still change (*live reports*), and send the changes to the pages that show the reports.

A *page* is our JavaScript that draws a report in the browser: the JupyterLab extension, or the widget. To draw a saved
report, a page needs only the report's JSON. While the kernel that made the report is alive, the page can request more:
the current report, and a measurement of forward and backward beside eager. For this, the extension opens a comm (a
channel between page and kernel) to the target `TARGET`, with ``{"identifier": "…"}``. Widgets receive the same messages
through `watch`.

    kernel → page   {"kind": "report", "report": {…}}                              at once, and after each change
                    {"kind": "progress", "text": "…"}                              while measuring
                    {"kind": "error", "message": "…"}                              a request or measurement has failed
                    {"kind": "unknown"}                                            the kernel has no such report; the
                                                                                   comm closes
                    {"kind": "graph", "frame": "…", "graph": {…}}                  one graph as a whole
                    {"kind": "nodes", "frame": "…", "index": 0, "nodes": […]}      the nodes of one graph
                    {"kind": "verification", "rows": […]}                          all rows of the verification
                    {"kind": "outside", "rows": […]}                               all tensors written outside of graphs
    page → kernel   {"kind": "measure"}
                    {"kind": "apply", "frame": "…", "index": 0,                    compile and measure a graph with
                     "partitioner": "min-cut", "budget": 0.5,                      another choice of saved values
                     "save": […], "recompute": […]}
                    {"kind": "graph", "frame": "…", "index": 0}
                    {"kind": "nodes", "frame": "…", "index": 0}
                    {"kind": "verification"}, {"kind": "outside"}
                    {"kind": "leave"}                                              the report is no longer shown; the
                                                                                   comm closes

Only the kernel closes a comm. If JupyterLab closed the comm, the comm's thread in the kernel would end, too, and each
message that the thread had not read yet would cause a traceback in the notebook.

When a report or an error arrives, the page stops showing progress. A report message is never larger than `MOST_SENT`
characters. If parts of the report were cut because of this limit, the page requests a part when the user opens it.

*Threads.* ipykernel 7 answers a page's comm on a separate thread, immediately, even while a cell runs. So the code that
answers a page must be safe on any thread. This code looks up the report in a table, changes the list of its viewers,
makes the current report (so `LiveReport.report` must be thread-safe) and sends it. It does not measure, because a
measurement runs the user's code. A measurement is passed to the thread that runs the cells, and waits until no cell is
running. A cell that the user submits meanwhile waits for the measurement. So a cell and a measurement never see each
other's grad mode, random state or unfinished tensors, and only one program at a time is timed. The kernel's interrupt
ends a measurement. While one measurement waits or runs, requests for another are refused.

*Pushes.* To push a report is to send it to its viewers because it has changed. A call of `changed` is cheap, because it
only marks the report. All marked reports are pushed when the running cell ends. If the cell runs for long, a timer
thread pushes them as well, a quarter of a second after the first call of `changed`. If pushes are slow, the timer waits
longer, so that pushes take at most one percent of the time of a cell.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from aotlab.errors import UsageError
from aotlab.report.codec import encode
from aotlab.report.counts import counted
from aotlab.report.cut import cleaned, fitting
from aotlab.report.model import Report

#: The comm target that pages connect to.
TARGET = "aotlab.report"

#: The largest number of characters in the JSON of a report message. It is sent often, so it is not compressed.
MOST_SENT = 200_000

#: The kinds of requests for a part of a report that was cut from the report message.
PARTS = ("graph", "nodes", "outside", "verification")

#: How many live reports are kept. If there are more, the oldest one is dropped. A page that shows this report then
#: shows the last state that it received, and cannot measure.
MOST_REPORTS = 64

#: How many viewers can follow one report. If there are more, the oldest one is dropped. This limit is needed because a
#: page that is reloaded abandons its comms without closing them.
_MOST_VIEWERS = 16

#: The shortest time, in seconds, between two pushes (sent reports) while a report keeps changing.
INTERVAL = 0.25

#: The share of the time that pushes may take: after a push of 100 ms, the next one waits for at least 9.9 s.
SHARE = 0.01

Message = dict[str, object]
#: A function that sends one message to one page.
Viewer = Callable[[Message], None]


class LiveReport(Protocol):
    """An object whose report can still change, for example a compiled cell.

    `report` returns the report at the present time, and any thread may call it at any time. `measure` is called on the
    thread that runs the cells, while no cell runs. The reports that `report` returns afterwards contain the timings.
    ``identifier`` is the identifier of all these reports.
    """

    @property
    def identifier(self) -> str:
        """The identifier by which pages request the report."""

    def report(self) -> Report:
        """Return the current report."""

    def measure(self, progress: Callable[[str], None]) -> Report:
        """Time forward and backward beside eager now, and return the report with these timings."""

    def apply(self, asked: Mapping[str, object], progress: Callable[[str], None]) -> Report:
        """Compile a graph with another choice of saved values and measure it; return the report with the result.

        ``asked`` is a page's request, which may have wrong fields. Then `UsageError` is raised.
        """


# --- reports and viewers -----------------------------------------------------------------------------------------


class _Registry:
    """The live reports of the process and their viewers. All methods are thread-safe."""

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
        """Tell whether ``report`` differs from the last report that was sent, and record it as sent."""
        with self._lock:
            before = self._sent.get(identifier)
            self._sent[identifier] = report
        return before is not report and before != report


_registry = _Registry()


def register(report: LiveReport) -> None:
    """Make a live report available to pages. If there are more than `MOST_REPORTS`, the oldest one is dropped."""
    _registry.add(report)


def find(identifier: str) -> LiveReport | None:
    """Return the live report with this identifier, or None if it does not exist or was dropped."""
    return _registry.find(identifier)


def watch(identifier: str, viewer: Viewer) -> Callable[[], None]:
    """Call ``viewer`` with every message about the report ``identifier`` from now on. Any thread may make the calls.

    Return a function that ends the calls.
    """
    _registry.look(identifier, viewer)
    return lambda: _registry.look_away(identifier, viewer)


def changed(identifier: str) -> None:
    """Mark a report as changed, so that its viewers soon receive the changed report. Cheap and thread-safe."""
    if _registry.viewers(identifier):
        _pushes.mark(identifier)


# --- messages ----------------------------------------------------------------------------------------------------


def report_message(report: Report) -> Message:
    """Return the message that shows ``report``, cut to the size limit `MOST_SENT`."""
    small = fitting(report, lambda candidate: len(json.dumps(candidate.to_dict(sparse=True))) <= MOST_SENT, MOST_SENT)
    return {"kind": "report", "report": small.to_dict(sparse=True)}


def part_message(report: Report, asked: object) -> Message | None:
    """Return the message with the part of ``report`` that a page requests, or None if there is no such part.

    ``asked`` is the page's request, which may be any object.
    """
    fields = asked if isinstance(asked, dict) else {}
    if fields.get("kind") == "verification":
        return {"kind": "verification", "rows": [encode(cleaned(row)) for row in report.verification_rows]}
    if fields.get("kind") == "outside":
        outside = report.cell.mutated_outside if report.cell is not None else ()
        return {"kind": "outside", "rows": [encode(cleaned(row)) for row in outside]}
    for frame in counted(report).frames:
        for graph in frame.graphs:
            if (frame.name, graph.index) == (fields.get("frame"), fields.get("index")):
                if fields.get("kind") == "nodes":
                    return {
                        "kind": "nodes",
                        "frame": frame.name,
                        "index": graph.index,
                        "nodes": [encode(cleaned(node), sparse=True) for node in graph.nodes],
                    }
                return {"kind": "graph", "frame": frame.name, "graph": encode(cleaned(graph))}
    return None


def send_part(identifier: str, asked: object, viewer: Viewer) -> None:
    """Send one viewer the part of a report that its request ``asked`` names, if there is such a part."""
    live = find(identifier)
    try:
        message = None if live is None else part_message(live.report(), asked)
    except Exception as error:  # noqa: BLE001  # a failed report must not end the kernel's thread
        message = _error("that part of the report cannot be made", error)
    if message is not None:
        viewer(message)


def send_report(identifier: str, viewer: Viewer) -> None:
    """Send one viewer the current report, or a message that the kernel has no such report."""
    live = find(identifier)
    if live is None:
        viewer({"kind": "unknown"})
        return
    try:
        viewer(report_message(live.report()))
    except Exception as error:  # noqa: BLE001  # a failed report must not end the kernel's thread
        viewer(_error("the report cannot be made", error))


def request_measurement(identifier: str, viewer: Viewer, asked: Mapping[str, object] | None = None) -> None:
    """Measure the graphs of a report as soon as no cell runs; if ``asked`` is given, apply this choice to one graph.

    All viewers of the report receive the result. If there will be no measurement, only ``viewer`` receives the reason.
    """
    if find(identifier) is None:
        viewer({"kind": "unknown"})
    elif not _measuring.acquire(blocking=False):
        viewer({"kind": "error", "message": "a measurement is waiting or running already"})
    else:
        if _idle.busy:
            _tell(identifier, {"kind": "progress", "text": "waiting for the running cell to end"})
        try:
            _when_idle(lambda: _measure(identifier, asked))
        except BaseException:
            _measuring.release()
            raise


_measuring = threading.Lock()


def _measure(identifier: str, asked: Mapping[str, object] | None) -> None:
    """Measure the graphs of a report now, or apply a choice, and send the result to its viewers.

    Must be called on the thread that runs the cells.
    """

    def progress(text: str) -> None:
        _tell(identifier, {"kind": "progress", "text": str(text)})

    try:
        live = find(identifier)
        if live is None:
            _tell(identifier, {"kind": "unknown"})
            return
        try:
            with _interruptible():
                report = live.measure(progress) if asked is None else live.apply(asked, progress)
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
    """Send the report to all viewers, unless it is equal to the last report that was sent."""
    live = find(identifier)
    if live is None or not _registry.viewers(identifier):
        return
    try:
        report = live.report()
        if not _registry.is_news(report, identifier):
            return
        message = report_message(report)
    except Exception as error:  # noqa: BLE001  # this may run on our timer thread or in an IPython hook
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
    """The reports that have changed since they were last sent. The end of a cell, or a timer, sends them by `flush`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._marked: dict[str, None] = {}
        self._timer: threading.Timer | None = None
        self._not_before = 0.0

    def mark(self, identifier: str) -> None:
        """Record that a report has changed, and start the timer that will send it, unless the timer is running."""
        with self._lock:
            self._marked[identifier] = None
            if self._timer is None:
                wait = max(INTERVAL, self._not_before - time.monotonic())
                self._timer = threading.Timer(wait, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self, *, cell_ended: bool = False) -> None:
        """Send the marked reports now. At the end of a cell, this does not delay the first push of the next cell."""
        # Only one thread sends at a time. Otherwise an older report could arrive after a newer one.
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
                self._not_before = 0 if cell_ended else end + (end - begin) * (1 / SHARE - 1)


_pushes = _Pushes()


# --- the thread that runs the cells ------------------------------------------------------------------------------


class _Idle:
    """A queue of jobs for the thread that runs the cells. The jobs run one by one while no cell runs.

    Without a kernel there is no such thread. A submitted job then runs at once, on the thread that submits it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._cells: list[object] = []
        self.schedule: Callable[[Callable[[], None]], object] | None = None

    @property
    def busy(self) -> bool:
        """Whether a cell is running, according to IPython's hooks `began` and `ended`."""
        return bool(self._cells)

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` as soon as no cell runs. Can be called from any thread."""
        schedule = self.schedule
        if schedule is None:
            job()
            return
        with self._lock:
            self._jobs.append(job)
        schedule(self.work)

    def work(self) -> None:
        """Run the waiting jobs, unless a cell is running. The kernel's event loop calls this method.

        While a cell computes, the event loop calls nothing. While a cell awaits something, the event loop does call
        this method. Then the jobs stay in the queue, and the end of the cell schedules another call.
        """
        while not self.busy:
            with self._lock:
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except (Exception, KeyboardInterrupt):  # noqa: BLE001  # an error here would end the kernel's event loop
                # A job reports its own errors to the viewers.
                continue

    def forget_cells(self) -> None:
        """Assume that no cell runs, and schedule the waiting jobs."""
        self._cells = []
        if self.schedule is not None:
            self.schedule(self.work)

    def began(self, info: object) -> None:
        """Record that a cell has started. This is IPython's ``pre_run_cell`` hook."""
        self._cells.append(info)

    def ended(self, result: object) -> None:
        """Record that a cell has ended. This is IPython's ``post_run_cell`` hook.

        The start of the cell need not be recorded: the cell that loads the extension began before the hooks existed.
        """
        info = getattr(result, "info", None)
        # A cancelled cell has no result. It cannot be nested in another running cell, so no cell is running now.
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
    """Let the kernel's interrupt raise KeyboardInterrupt here. Between cells, ipykernel ignores the interrupt."""
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread can set signal handlers, and a handler that was set outside of Python cannot be restored.
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
    """The comm target and the hooks that were registered for one shell."""

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
            # `unregister` raises ValueError if other code has already removed our hooks, together with all others.
            with contextlib.suppress(ValueError):
                shell.events.unregister("pre_run_cell", _idle.began)
            with contextlib.suppress(ValueError):
                shell.events.unregister("post_run_cell", _cell_ended)
        # From now on no hook reports the end of a cell, so the waiting jobs must not wait for it.
        _idle.forget_cells()


_connections: dict[int, _Connection] = {}


def connect(shell: Any) -> None:
    """Answer pages through the kernel of an IPython shell. A second call does nothing.

    A shell without a kernel, such as IPython in a terminal, has no pages. For such a shell, this function does nothing.
    """
    kernel = getattr(shell, "kernel", None)
    if getattr(kernel, "comm_manager", None) is None or id(shell) in _connections:
        return
    connection = _connections[id(shell)] = _Connection(shell, kernel)
    connection.connect()


def disconnect(shell: Any) -> None:
    """Undo `connect`. Open comms receive no more messages."""
    connection = _connections.pop(id(shell), None)
    if connection is not None:
        connection.disconnect()


def _cell_ended(result: object = None) -> None:
    _idle.ended(result)
    _pushes.flush(cell_ended=True)


def _opened(comm: Any, message: Any) -> None:
    """Answer a page that has opened a comm: send the report, and answer the page's requests from now on.

    ``message`` is the page's first message. An invalid message raises no error.
    """
    content = message.get("content") if isinstance(message, dict) else None
    data = content.get("data") if isinstance(content, dict) else None
    identifier = data.get("identifier") if isinstance(data, dict) else None
    # ipykernel marks each message as a reply to the request that it finds in the current context (`contextvars`). Later
    # messages are sent from other threads, so they are sent in a copy of the context in which the comm was opened.
    context = contextvars.copy_context()

    def viewer(sent: Message) -> None:
        # A kernel that is shutting down cannot send, and nobody would receive the message.
        with contextlib.suppress(Exception):
            here = context.copy()  # two threads cannot be in one context at the same time
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
        if kind in ("measure", "apply"):
            request_measurement(identifier, viewer, data if kind == "apply" else None)
        elif kind in PARTS:
            send_part(identifier, data, viewer)
        elif kind == "leave":
            stop()
            with contextlib.suppress(Exception):
                context.copy().run(comm.close)
        else:
            kinds = ", ".join(map(repr, ("measure", "apply", *PARTS, "leave")))
            viewer({"kind": "error", "message": f"there is no request {kind!r:.80}. The requests are {kinds}"})

    comm.on_msg(received)
    comm.on_close(lambda _: stop())
    send_report(identifier, viewer)
