"""A running cell shows its activity, and the tables of a graph before the graph is compared with eager."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ipykernel")

from aotlab import events
from aotlab.notebook import live, shown, traced
from aotlab.notebook.progress import Progress
from aotlab.report import Report
from aotlab.trace import trace_stage
from tests.notebook.plain_shells import cell, execute, interrupted, kernel_notebook, plain_shell, run_in_kernel
from tests.notebook.portrait import REPORT_MIME

SETUP = "import torch\nx = torch.ones(3, requires_grad=True)"
STEP = "%%aotcompile -o report --backend eager\ny = x * 2\nprint('printed')"


def started(entry: int = 7, backend: str = "inductor") -> events.CompileStarted:
    """Return the event that the compilation of the function ``f`` starts."""
    return events.CompileStarted(function="f", function_id=1, entry=entry, frontend="dynamo", backend=backend)


def ended(stage: str) -> events.StageFinished:
    """Return the event that a stage has ended."""
    return events.StageFinished(entry=7, stage=stage, record=None, duration_ns=1, nodes=None)


#: Events in their order, each with the text after it.
STORY: list[tuple[events.Event, str]] = [
    (events.Begun(kind="dynamo"), "Dynamo captures lines 2–3"),
    (events.Spent(kind="dynamo", duration_ns=1), "The cell runs lines 2–3"),
    (started(), "aotlab traces f"),
    (ended("trace"), "aotlab divides the graph of f"),
    (ended("partition"), "aotlab divides the graph of f"),
    (events.GraphStarted(entry=7, graph="forward"), "Inductor compiles the forward graph of f"),
    (events.Begun(kind="header"), "Inductor prepares the header of its C++ kernels"),
    (events.Spent(kind="header", duration_ns=1), "Inductor compiles the forward graph of f"),
    (events.KernelStarted(entry=7, name="a"), "Inductor compiles the forward graph of f: 0 of 1 kernel done"),
    (events.KernelStarted(entry=7, name="b"), "Inductor compiles the forward graph of f: 0 of 2 kernels done"),
    (
        events.KernelFinished(entry=7, name="b", duration_ns=1, cached=True),
        "Inductor compiles the forward graph of f: 1 of 2 kernels done",
    ),
    (events.GraphStarted(entry=7, graph="backward"), "Inductor compiles the backward graph of f"),
    (events.CompileFinished(entry=7, duration_ns=1, guards=()), "The cell runs lines 2–3"),
    (events.Begun(kind="verification", subject="f"), "The results of f are compared with eager"),
    (
        events.Begun(kind="dynamo"),
        "The results of f are compared with eager",
    ),  # stock torch.compile compiles for the comparison
    (events.Spent(kind="dynamo", duration_ns=1), "The results of f are compared with eager"),
    (
        events.KernelStarted(entry=7, name="a", engine="upstream"),
        "The results of f are compared with eager (stock torch.compile sets the tolerance): 0 of 1 kernel done",
    ),
    (events.Spent(kind="verification", duration_ns=1), "The cell runs lines 2–3"),
    (events.GraphStarted(entry=7, graph="backward"), "Inductor compiles the backward graph of f"),  # a later backward
    (
        events.BackwardCompiled(entry=7, pattern=(True,), record=None, duration_ns=1),
        "The cell runs lines 2–3",
    ),
]


def test_the_engines_events_become_words() -> None:
    """After each event, the activity that has begun last and has not ended is named."""
    progress = Progress()
    progress.begin(0)
    progress.runs("lines 2–3")
    versions = [progress.version]
    for event, expected in STORY:
        progress.hear(event)
        running = progress.running(())
        assert running is not None
        assert running.text == expected, event
        versions.append(progress.version)
    assert versions == sorted(versions)
    progress.end()
    assert progress.running(()) is None


class Eye:
    """A page that follows each cell from its beginning, and stores the reports that it receives."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.has_tables = threading.Event()

    def receive(self, message: dict[str, Any]) -> None:
        """Store the report of a message."""
        if message["kind"] == "report":
            report = Report.from_dict(message["report"])
            self.reports.append(report)
            if report.frames and report.frames[0].graphs[0].outputs:
                self.has_tables.set()


@pytest.fixture
def eye(monkeypatch: pytest.MonkeyPatch) -> Eye:
    """Return a page that follows all cells of the test."""
    found, register = Eye(), live.register

    def registered(report: live.LiveReport) -> None:
        register(report)
        live.watch(report.identifier, found.receive)

    monkeypatch.setattr(live, "register", registered)
    return found


def test_tables_come_before_the_comparison(eye: Eye, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is compared with eager, its tables are shown, and the verdict says that it is not compared yet."""
    compare = traced.compare

    def waiting(*args: Any, **named: Any) -> Any:
        assert eye.has_tables.wait(30)
        return compare(*args, **named)

    monkeypatch.setattr(traced, "compare", waiting)
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, SETUP)
        run_in_kernel(notebook, STEP)
        final = notebook.shell.user_ns["report"]
    during = next(each for each in eye.reports if each.running is not None and each.frames)
    assert during.summary is not None
    assert (during.summary.state, during.summary.status) == ("running", "running")
    assert during.summary.sentence == "The cell is running. 1 graph compiled, 1 not yet compared with eager."
    assert during.outputs[["name", "shape"]].values.tolist() == [["y", "[3]"]]
    assert during.cell is not None
    assert during.cell.parts == ()
    assert "trace" in [step.stage for step in during.running.steps]
    assert final.running is None
    assert final.summary is None


@contextmanager
def updates_without_pause() -> Iterator[None]:
    """Let the display of a running cell show each change at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shown, "INTERVAL", 0.001)
        patch.setattr(shown, "SHARE", 1.0)
        yield


def states(messages: list[dict[str, Any]]) -> list[str]:
    """Return the states of the reports that a front end receives, and the types of the other messages."""
    return [
        message["data"][REPORT_MIME]["summary"]["state"] if REPORT_MIME in message.get("data", {}) else message["type"]
        for message in messages
    ]


def test_the_report_is_the_last_message() -> None:
    """The display begins before the cell prints. After the report, no thread shows an activity.

    A run that compiles nothing does not wait for its report.
    """
    with updates_without_pause(), kernel_notebook() as notebook:
        run_in_kernel(notebook, SETUP)
        for number in range(5):
            notebook.messages.clear()
            run_in_kernel(notebook, STEP)
            timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
            assert len(timers) == (number > 0)
            for timer in timers:
                timer.join(30)
            seen = [each for each in states(notebook.messages) if each not in ("status", "execute_input")]
            assert seen[0] == "running"
            assert seen.index("stream") > 0
            assert seen[-1] == "verified"
            assert [each.name for each in threading.enumerate() if each.name == "aotlab-progress"] == []


def test_only_the_newest_report_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a newer report of the same run is shown before a thread shows an older one, the older one is dropped."""
    monkeypatch.setattr(shown, "_LATER", 0.5)
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, SETUP)
        run_in_kernel(notebook, STEP)
        run_in_kernel(notebook, STEP)
        cell = live.find(notebook.shell.user_ns["report"].identifier)
        assert cell is not None
        notebook.messages.clear()
        cell.shown.report(replace(notebook.shell.user_ns["report"], name="newer"))
        for timer in [each for each in threading.enumerate() if isinstance(each, threading.Timer)]:
            timer.join(30)
        names = [each["data"][REPORT_MIME]["name"] for each in notebook.messages if REPORT_MIME in each.get("data", {})]
        assert names == ["newer"]


def test_quiet_cells_and_terminals_have_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be updated, no thread is started, and nothing is displayed before the report."""
    monkeypatch.setattr(shown.Shown, "_follow", lambda *_: pytest.fail("a thread was started"))
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, SETUP)
        notebook.messages.clear()
        run_in_kernel(notebook, STEP.replace("eager", "eager --quiet"))
        assert not [each for each in states(notebook.messages) if each in ("running", "verified")]
        notebook.messages.clear()
        run_in_kernel(notebook, "%%capture captured\nget_ipython().run_cell_magic('aotcompile', '', 'z = x + 1')")
        assert not [each for each in states(notebook.messages) if each == "running"]
    shell = plain_shell()
    execute(shell, SETUP)
    displays: list[dict[str, Any]] = []
    monkeypatch.setattr(shell.display_pub, "publish", lambda data: displays.append(data))
    execute(shell, cell("y = x * 2", options=""))
    assert [REPORT_MIME in each for each in displays] == [True]


PLACES = [(traced, "compare", "in the comparison with eager"), (trace_stage, "run", "in aotlab's trace")]


@pytest.mark.parametrize(("owner", "name", "place"), PLACES, ids=[place for *_, place in PLACES])
def test_an_interrupt_names_its_time_and_place(owner: Any, name: str, place: str) -> None:
    """The report of an interrupted cell says after which time and in which activity; nothing runs on."""
    with kernel_notebook() as notebook:
        run_in_kernel(notebook, SETUP)
        notebook.messages.clear()
        with interrupted(owner, name):
            reply = run_in_kernel(notebook, STEP, ok=False)
        assert reply["ename"] == "KeyboardInterrupt"
        assert "y" not in notebook.shell.user_ns
        report = notebook.shell.user_ns["report"]
        assert report.running is None
        assert report.cell.stopped.startswith("after ")
        assert report.cell.stopped.endswith(f"s, {place}")
        assert f"was interrupted at line 2 {report.cell.stopped}." in report.verdict
        assert states(notebook.messages)[-2:].count("running") == 0
        run_in_kernel(notebook, STEP)
        assert notebook.shell.user_ns["report"].cell.stopped == ""
