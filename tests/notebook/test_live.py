"""Live reports: which viewers are notified, when, and on which thread. Tests of comms use a real kernel."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from aotlab.errors import UsageError
from aotlab.notebook import live
from aotlab.report.codec import decode
from aotlab.report.counts import count
from aotlab.report.model import Cell, Environment, Frame, Graph, Guard, Input, Node, Report, TimingRow, VerificationRow

ROOT = Path(__file__).parents[2]

#: The tests of this file share a kernel.
pytestmark = pytest.mark.xdist_group("live")

#: Nothing here takes longer, unless it hangs.
PATIENCE = 60


def row(engine: str = "eager", median_ns: int = 1000) -> TimingRow:
    """Make a timing."""
    return TimingRow(
        engine=engine, phase="forward", median_ns=median_ns, min_ns=1, p10_ns=1, p90_ns=2 * median_ns, repeats=3
    )


class Fake:
    """A live report whose every answer is set by hand."""

    def __init__(self, identifier: str) -> None:
        self.identifier = identifier
        self.now = Report(
            environment=Environment(aotlab="0", torch="2", python="3", platform="x"), identifier=identifier
        )
        self.measured: list[threading.Thread] = []
        self.error: BaseException | None = None

    def report(self) -> Report:
        """Return the report that the test set."""
        return self.now

    def note(self, text: str) -> None:
        """Change the report."""
        self.now = Report(environment=self.now.environment, identifier=self.identifier, notes=(*self.now.notes, text))

    def measure(self, progress: Callable[[str], None]) -> Report:
        """Send a progress text, and add a timing or raise."""
        self.measured.append(threading.current_thread())
        progress("timing f")
        if self.error is not None:
            raise self.error
        self.now = self.now.with_timings([row()])
        return self.now


@pytest.fixture
def fake() -> Fake:
    """Register a live report of a new name."""
    found = Fake(uuid.uuid4().hex)
    live.register(found)
    return found


class Eye:
    """A viewer that keeps every message it receives."""

    def __init__(self, identifier: str) -> None:
        self.seen: queue.Queue[dict[str, Any]] = queue.Queue()
        self.stop = live.watch(identifier, self.seen.put)

    def next(self) -> dict[str, Any]:
        """Wait for a message."""
        return self.seen.get(timeout=PATIENCE)

    def kinds(self) -> list[str]:
        """List the kinds of all messages that came so far."""
        found = []
        while not self.seen.empty():
            found.append(self.seen.get_nowait()["kind"])
        return found


# --- without a kernel ----------------------------------------------------------------------------------------------


def test_reports_are_found_by_their_identifier(fake: Fake) -> None:
    """A registered report is found by its identifier. Other identifiers find nothing."""
    assert live.find(fake.identifier) is fake
    assert live.find("nothing of that name") is None


def test_the_oldest_reports_are_forgotten() -> None:
    """A long session keeps the reports that were registered last, and lets go of the others and their viewers."""
    again, old = Fake("again"), Fake("old")
    live.register(again)
    live.register(old)
    eye = Eye("old")
    for number in range(live.MOST_REPORTS - 2):
        live.register(Fake(f"later {number}"))
    assert live.find("old") is old
    live.register(again)
    live.register(Fake("the last"))
    assert live.find("old") is None
    assert live.find("again") is again
    live.changed("old")
    assert eye.kinds() == []


def test_changes_are_pushed_together(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes in quick succession reach a viewer as one message, with the last state; no change is no message."""
    monkeypatch.setattr(live, "INTERVAL", 3600)  # the cell ends before that
    eye = Eye(fake.identifier)
    for number in range(10):
        fake.note(f"change {number}")
        live.changed(fake.identifier)
    live._cell_ended()
    message = eye.next()
    assert (message["kind"], message["report"]["notes"][-1]) == ("report", "change 9")
    live.changed(fake.identifier)
    live._cell_ended()
    live._cell_ended()
    assert eye.kinds() == []


def test_a_long_cell_is_followed(fake: Fake) -> None:
    """A change is pushed before long, although no cell ends."""
    eye = Eye(fake.identifier)
    fake.note("x")
    live.changed(fake.identifier)
    assert eye.next()["report"]["notes"] == ["x"]


def test_what_costs_much_is_pushed_rarely(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a push that took long, the next one waits for 99 times as long, unless the cell ended."""
    waits: list[float] = []

    class Timer(threading.Thread):
        def __init__(self, wait: float, job: Callable[[], None]) -> None:
            super().__init__()
            waits.append(wait)

        def start(self) -> None:
            pass

        def cancel(self) -> None:
            pass

    now = [0.0]
    pushes = live._Pushes()
    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(message: object) -> None:
        now[0] += 2.0

    live.watch(fake.identifier, slow)
    fake.note("x")
    pushes.mark(fake.identifier)
    pushes.mark(fake.identifier)
    assert waits == [live.INTERVAL]
    pushes.flush()
    pushes.mark(fake.identifier)
    assert waits == [live.INTERVAL, pytest.approx(198.0)]
    pushes.flush(cell_ended=True)
    pushes.mark(fake.identifier)
    assert waits[2:] == [live.INTERVAL]


def test_who_stops_looking_is_told_no_more(fake: Fake) -> None:
    """A viewer that has gone gets nothing; the other one does."""
    gone, here = Eye(fake.identifier), Eye(fake.identifier)
    gone.stop()
    fake.note("x")
    live.changed(fake.identifier)
    assert here.next()["kind"] == "report"
    assert gone.kinds() == []
    here.stop()
    live.changed(fake.identifier)  # with nobody looking, there is nothing to do
    assert fake.identifier not in live._pushes._marked


def test_viewers_that_a_reload_left_behind_do_not_pile_up(fake: Fake) -> None:
    """Of many viewers of one report, only the newest ones are notified."""
    eyes = [Eye(fake.identifier) for _ in range(live._MOST_VIEWERS + 1)]
    fake.note("x")
    live.changed(fake.identifier)
    assert eyes[-1].next()["kind"] == "report"
    assert eyes[0].kinds() == []


def test_a_message_has_a_largest_size(fake: Fake) -> None:
    """A report of megabytes is cut to the size limit of a message, and its notes say so."""
    fake.now = fake.now.with_timings([row(median_ns=number) for number in range(20_000)])
    assert len(fake.now.to_json()) > live.MOST_SENT
    sent = live.report_message(fake.now)["report"]
    again = Report.from_dict(sent)
    assert len(json.dumps(sent)) <= live.MOST_SENT
    assert again.notes[-1].startswith("This output is cut to fit a notebook")
    assert again.identifier == fake.identifier


def test_measuring_tells_progress_and_result(fake: Fake) -> None:
    """Without a kernel a measurement is made at once."""
    eye = Eye(fake.identifier)
    live.request_measurement(fake.identifier, eye.seen.put)
    assert eye.next() == {"kind": "progress", "text": "timing f"}
    message = eye.next()
    assert (message["kind"], len(message["report"]["timing_rows"])) == ("report", 1)
    assert eye.kinds() == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UsageError("its inputs are gone"), "its inputs are gone"),
        (ValueError("bad\nworse"), "the measurement failed: ValueError: bad"),
        (RuntimeError(), "the measurement failed: RuntimeError"),
        (KeyboardInterrupt(), "the measurement was interrupted"),
    ],
)
def test_a_failed_measurement_is_said_and_can_be_repeated(fake: Fake, error: BaseException, expected: str) -> None:
    """An error in a measurement becomes one message, and the next measurement may begin."""
    eye = Eye(fake.identifier)
    fake.error = error
    live.request_measurement(fake.identifier, eye.seen.put)
    assert ["progress", expected] == [eye.next()["kind"], eye.next()["message"]]
    fake.error = None
    live.request_measurement(fake.identifier, eye.seen.put)
    assert eye.kinds() == ["progress", "report"]


def test_a_report_that_cannot_be_made_is_an_error_message(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in making a report reaches the viewer as a sentence, not the kernel as an exception."""
    eye = Eye(fake.identifier)
    monkeypatch.setattr(fake, "report", lambda: 1 // 0)
    live.send_report(fake.identifier, eye.seen.put)
    expected = "the report cannot be made: ZeroDivisionError: integer division or modulo by zero"
    assert {"kind": "error", "message": expected} == eye.next()
    live.changed(fake.identifier)
    assert {"kind": "error", "message": expected} == eye.next()


def test_jobs_wait_for_cells() -> None:
    """A job brought while a cell runs is done when that ends, also if another cell ran within it."""
    idle, done = live._Idle(), []
    scheduled: list[Callable[[], None]] = []
    idle.schedule = scheduled.append

    class Result:
        def __init__(self, info: object) -> None:
            self.info = info

    outer, inner = object(), object()
    idle.began(outer)
    idle.submit(lambda: done.append("job"))
    scheduled.pop()()  # the loop runs while the cell awaits something
    assert done == []
    idle.began(inner)
    idle.ended(Result(inner))
    idle.ended(Result(object()))  # the end of a cell whose beginning was not announced
    assert (scheduled, done) == ([], [])
    idle.ended(Result(outer))
    scheduled.pop()()
    assert done == ["job"]


def test_a_cancelled_cell_has_ended() -> None:
    """An interrupted cell with ``await`` ends without a result; jobs do not wait for it for ever."""
    idle, done = live._Idle(), []
    scheduled: list[Callable[[], None]] = []
    idle.schedule = scheduled.append
    idle.began(object())
    idle.submit(lambda: done.append("job"))
    idle.ended(None)
    scheduled.pop()()
    assert done == ["job"]


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_a_job_that_raises_does_not_end_the_loop(error: BaseException) -> None:
    """An error in one job is contained, and the next job is done."""
    idle, done = live._Idle(), []
    scheduled: list[Callable[[], None]] = []
    idle.schedule = scheduled.append

    def fail() -> None:
        raise error

    idle.submit(fail)
    idle.submit(lambda: done.append("next"))
    scheduled.pop(0)()
    assert done == ["next"]


def test_a_shell_without_kernel_is_left_alone() -> None:
    """In a terminal there is nobody to answer: connecting and disconnecting do nothing."""

    class Shell:
        kernel = None

    live.connect(Shell())
    live.disconnect(Shell())
    assert live._connections == {}


# --- with a kernel -------------------------------------------------------------------------------------------------

SETUP = """
import sys, threading, time, os
from aotlab.notebook import live
from aotlab.report.codec import decode
from aotlab.report.model import Environment, Frame, Graph, Guard, Node, Report, TimingRow, VerificationRow

class Live:
    def __init__(self, identifier):
        self.identifier = identifier
        environment = Environment(aotlab="0", torch="2", python="3", platform="x")
        self.now = Report(environment=environment, identifier=identifier)
        self.log = []
        self.forever = False

    def report(self):
        return self.now

    def note(self, text):
        self.now = Report(environment=self.now.environment, identifier=self.identifier, notes=(*self.now.notes, text))
        live.changed(self.identifier)

    def measure(self, progress):
        self.log.append("measuring")
        progress(threading.current_thread().name)
        while self.forever:
            time.sleep(0.01)
        row = TimingRow(engine="eager", phase="forward", median_ns=5, min_ns=1, p10_ns=1, p90_ns=9, repeats=3)
        self.now = self.now.with_timings([row])
        return self.now

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

known = Live("known")
live.register(known)
live.connect(get_ipython())
live.connect(get_ipython())
"""


class Comm:
    """A front end's end of a comm."""

    def __init__(self, kernel: Kernel, data: object, subshell: str | None = None) -> None:
        self.kernel = kernel
        self.subshell = subshell
        self.identifier = uuid.uuid4().hex
        self._send("comm_open", {"target_name": live.TARGET, "data": data})

    def send(self, data: object) -> None:
        """Send a message."""
        self._send("comm_msg", {"data": data})

    def close(self) -> None:
        """Close it."""
        self._send("comm_close", {"data": {}})

    def next(self) -> dict[str, Any]:
        """Wait for the kernel's next message on this comm; ``{"kind": "closed"}`` when it closes it."""

        def is_ours(message: dict[str, Any]) -> bool:
            ours = message["content"].get("comm_id") == self.identifier
            return ours and message["msg_type"] in ("comm_msg", "comm_close")

        message = self.kernel.wait_for(is_ours)
        return {"kind": "closed"} if message["msg_type"] == "comm_close" else message["content"]["data"]

    def _send(self, kind: str, content: dict[str, object]) -> None:
        message = self.kernel.client.session.msg(kind, {**content, "comm_id": self.identifier})
        if self.subshell is not None:
            message["header"]["subshell_id"] = self.subshell
        self.kernel.client.shell_channel.send(message)


class Kernel:
    """A real kernel, and all that it has said."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self._said: list[dict[str, Any]] = []

    def wait_for(self, matches: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Take the first message that matches; the others stay for later."""
        for index, message in enumerate(self._said):
            if matches(message):
                return self._said.pop(index)
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE)
            if matches(message):
                return message
            self._said.append(message)

    def begin(self, code: str) -> str:
        """Send a cell."""
        return self.client.execute(code)

    def end(self, cell: str) -> str:
        """Wait until a cell has ended, and return its printed text."""
        text = ""
        while True:
            message = self.wait_for(lambda m: m["parent_header"].get("msg_id") == cell)
            if message["msg_type"] == "stream":
                text += message["content"]["text"]
            if message["msg_type"] == "error":
                text += "\n".join(message["content"]["traceback"])
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return text.strip()

    def run(self, code: str) -> str:
        """Run a cell to its end."""
        return self.end(self.begin(code))

    def subshell(self) -> str:
        """Make a thread of the kernel's that answers while a cell runs, as JupyterLab does for comms."""
        self.client.control_channel.send(self.client.session.msg("create_subshell_request", {}))
        reply = self.client.get_control_msg(timeout=PATIENCE)
        return str(reply["content"]["subshell_id"])


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """Start one kernel for the module."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    manager, client = start_new_kernel(kernel_name="python3", env=environment, startup_timeout=PATIENCE)
    try:
        found = Kernel(manager, client)
        assert found.run(SETUP) == ""
        yield found
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def known(kernel: Kernel) -> str:
    """Give the kernel a live report of a new name, in its variable ``known``."""
    identifier = uuid.uuid4().hex
    assert kernel.run(f"known = Live({identifier!r}); live.register(known)") == ""
    return identifier


def test_a_comm_gets_the_report_at_once(kernel: Kernel, known: str) -> None:
    """A front end that requests a known report receives it, complete and readable."""
    message = Comm(kernel, {"identifier": known}).next()
    assert message["kind"] == "report"
    assert Report.from_dict(message["report"]).identifier == known


def test_parts_of_a_report_come_as_a_whole(fake: Fake) -> None:
    """A front end can request the parts that were cut from a report's message.

    These are a graph, the verification, and the changes outside the cell.
    """
    guards = tuple(Guard(kind="size", subject=f"x{i}", sentence="x" * 200) for i in range(5000))
    node = Node(stage="trace", part="joint", name="mul", op="call_function", target="mul", phase="forward")
    graph = Graph(index=1, entry=7, status="compiled", guards=guards, nodes=(node,))
    rows = tuple(VerificationRow(engine="aotlab", kind="value", subject=f"out[{i}]", equal=True) for i in range(3000))
    frame = Frame(name="f", function="f", graphs=(graph,))
    outside = tuple(Input(name=f"x{i}.grad", kind="new", mutates_data=False) for i in range(3000))
    cell = Cell(source="f(x)", mutated_outside=outside)
    fake.now = replace(fake.now, frames=(frame,), verification_rows=rows, cell=cell)
    eye = Eye(fake.identifier)
    live.send_report(fake.identifier, eye.seen.put)
    cut = Report.from_dict(eye.next()["report"])
    assert len(cut.frames[0].graphs[0].guards) < 5000
    live.send_part(fake.identifier, {"kind": "graph", "frame": "f", "index": 1}, eye.seen.put)
    assert decode(Graph, eye.next()["graph"]) == replace(graph, nodes=(), counts=count(graph))
    live.send_part(fake.identifier, {"kind": "verification"}, eye.seen.put)
    assert tuple(decode(VerificationRow, row) for row in eye.next()["rows"]) == rows
    live.send_part(fake.identifier, {"kind": "outside"}, eye.seen.put)
    assert tuple(decode(Input, row) for row in eye.next()["rows"]) == outside
    live.send_part(fake.identifier, {"kind": "nodes", "frame": "f", "index": 1}, eye.seen.put)
    nodes = eye.next()
    assert (nodes["kind"], nodes["frame"], nodes["index"]) == ("nodes", "f", 1)
    assert [decode(Node, each) for each in nodes["nodes"]] == [node]
    for nonsense in ({"kind": "graph", "frame": "g", "index": 1}, {"kind": "graph", "index": []}, None):
        live.send_part(fake.identifier, nonsense, eye.seen.put)
    assert eye.seen.empty()
    eye.stop()


def test_an_unknown_report_is_said_to_be_unknown(kernel: Kernel) -> None:
    """A front end that requests a report of another session receives `unknown`, and the comm closes."""
    comm = Comm(kernel, {"identifier": "of yesterday"})
    assert [comm.next(), comm.next()] == [{"kind": "unknown"}, {"kind": "closed"}]


@pytest.mark.parametrize("data", [None, [], 7, "x", {}, {"identifier": 7}, {"identifier": ["x"]}, {"kind": "measure"}])
def test_garbage_at_the_opening_is_unknown(kernel: Kernel, data: object) -> None:
    """Whatever a comm is opened with, the kernel answers and lives."""
    comm = Comm(kernel, data)
    assert [comm.next(), comm.next()] == [{"kind": "unknown"}, {"kind": "closed"}]
    assert kernel.run("print('alive')") == "alive"


@pytest.mark.parametrize(
    "data", [None, [], 7, "x", {}, {"kind": 7}, {"kind": {"deep": ["er"]}}, {"kind": "x" * 10_000}]
)
def test_garbage_on_an_open_comm_is_an_error_message(kernel: Kernel, known: str, data: object) -> None:
    """A malformed message gets an answer of bounded length, and the comm continues to work."""
    comm = Comm(kernel, {"identifier": known})
    comm.next()
    comm.send(data)
    answer = comm.next()
    assert (answer["kind"], len(answer["message"]) < 200) == ("error", True)
    comm.send({"kind": "measure"})
    assert [comm.next()["kind"], comm.next()["kind"]] == ["progress", "report"]


def test_changes_come_at_the_end_of_the_cell(kernel: Kernel, known: str) -> None:
    """Several changes in one cell arrive as one message.

    If the report is unchanged since the last message, nothing is sent.
    """
    comm = Comm(kernel, {"identifier": known})
    comm.next()
    kernel.run("live.INTERVAL, interval = 3600, live.INTERVAL")  # only the cells' ends push
    kernel.run("known.note('one'); known.note('two')")
    assert comm.next()["report"].get("notes", ()) == ["one", "two"]
    kernel.run("live.changed(known.identifier)")
    kernel.run("known.note('three')")
    assert comm.next()["report"].get("notes", ()) == ["one", "two", "three"]
    kernel.run("live.INTERVAL = interval")


def test_a_front_end_that_leaves(kernel: Kernel, known: str) -> None:
    """The kernel closes the comm: JupyterLab's own close may overtake the thread that has to read it."""
    comm = Comm(kernel, {"identifier": known}, kernel.subshell())
    comm.next()
    comm.send({"kind": "leave"})
    assert comm.next() == {"kind": "closed"}


def test_a_closed_comm_is_told_nothing(kernel: Kernel, known: str) -> None:
    """When the view is gone, the report has no viewer left."""
    comm = Comm(kernel, {"identifier": known})
    comm.next()
    assert kernel.run("print(len(live._registry.viewers(known.identifier)))") == "1"
    comm.close()
    assert kernel.run("print(len(live._registry.viewers(known.identifier)))") == "0"


def test_questions_are_answered_while_a_cell_runs(kernel: Kernel, known: str, tmp_path: Path) -> None:
    """A comm on a separate thread gets the report and its changes before the cell has ended."""
    cell = kernel.begin(
        f"known.note('begun'); wait_for({str(tmp_path / 'more')!r}); known.note('more')\n"
        f"wait_for({str(tmp_path / 'end')!r}); print('ended')"
    )
    comm = Comm(kernel, {"identifier": known}, kernel.subshell())
    while "begun" not in comm.next()["report"].get("notes", ()):
        pass
    (tmp_path / "more").touch()
    while "more" not in comm.next()["report"].get("notes", ()):
        pass
    (tmp_path / "end").touch()
    assert kernel.end(cell) == "ended"


def test_a_measurement_is_made_on_the_main_thread(kernel: Kernel, known: str) -> None:
    """A measurement runs user code, so it runs on the main thread, even if another thread received the request."""
    comm = Comm(kernel, {"identifier": known}, kernel.subshell())
    comm.next()
    comm.send({"kind": "measure"})
    assert comm.next() == {"kind": "progress", "text": "MainThread"}
    message = comm.next()
    assert (message["kind"], message["report"]["timing_rows"][0]["median_ns"]) == ("report", 5)


@pytest.mark.parametrize(
    "pause",
    ["wait_for({path!r})", "import asyncio\nwhile not os.path.exists({path!r}):\n    await asyncio.sleep(0.01)"],
)
def test_a_measurement_waits_for_the_running_cell(kernel: Kernel, known: str, tmp_path: Path, pause: str) -> None:
    """While a cell computes, or awaits something, a measurement is announced and not begun; a second one is refused."""
    path = str(tmp_path / "end")
    cell = kernel.begin(f"known.note('begun')\n{pause.format(path=path)}\nknown.log.append('cell ended')")
    subshell = kernel.subshell()
    comm = Comm(kernel, {"identifier": known}, subshell)
    while "begun" not in comm.next()["report"].get("notes", ()):
        pass
    comm.send({"kind": "measure"})
    assert comm.next() == {"kind": "progress", "text": "waiting for the running cell to end"}
    comm.send({"kind": "measure"})
    assert comm.next() == {"kind": "error", "message": "a measurement is waiting or running already"}
    Path(path).touch()
    kernel.end(cell)
    assert comm.next() == {"kind": "progress", "text": "MainThread"}
    assert comm.next()["kind"] == "report"
    assert kernel.run("print(known.log)") == "['cell ended', 'measuring']"


def test_the_kernels_interrupt_ends_a_measurement(kernel: Kernel, known: str) -> None:
    """An interrupt between cells ends the dashboard's measurement.

    ipykernel itself ignores such an interrupt; the kernel stays alive.
    """
    kernel.run("known.forever = True; import signal; before = signal.getsignal(signal.SIGINT)")
    comm = Comm(kernel, {"identifier": known})
    comm.next()
    comm.send({"kind": "measure"})
    assert comm.next()["kind"] == "progress"
    kernel.manager.interrupt_kernel()
    assert comm.next() == {"kind": "error", "message": "the measurement was interrupted"}
    assert kernel.run("print(1 + 1)") == "2"


def test_cells_that_are_sent_meanwhile_wait(kernel: Kernel, known: str) -> None:
    """A cell that is sent during a measurement runs after it."""
    comm = Comm(kernel, {"identifier": known})
    comm.next()
    kernel.run("known.forever = True")
    comm.send({"kind": "measure"})
    assert comm.next()["kind"] == "progress"
    cell = kernel.begin("print(known.log)")
    kernel.manager.interrupt_kernel()
    assert comm.next()["kind"] == "error"
    assert kernel.end(cell) == "['measuring']"


def test_disconnecting_takes_everything_back(kernel: Kernel, known: str) -> None:
    """After `disconnect` the kernel has neither our target nor our hooks, and `connect` brings them back once."""
    count = """
hooks = get_ipython().events.callbacks
print(live.TARGET in get_ipython().kernel.comm_manager.targets,
      sum("aotlab" in (f.__module__ or "") for name in hooks for f in hooks[name]))
"""
    assert kernel.run(count) == "True 2"
    assert kernel.run(f"live.disconnect(get_ipython()); live.disconnect(get_ipython()){count}") == "False 0"
    assert kernel.run(f"live.connect(get_ipython()); live.connect(get_ipython()){count}") == "True 2"
    assert Comm(kernel, {"identifier": known}).next()["kind"] == "report"
