"""A cell that was split and compiled, with its state, which is kept between its runs, and its report."""

from __future__ import annotations

import math
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from aotlab import events
from aotlab.errors import UsageError
from aotlab.notebook import measure as timing
from aotlab.notebook.cell import CellCode
from aotlab.notebook.cell_compiler import CellCompiler
from aotlab.notebook.cell_recording import CellRecording
from aotlab.notebook.cell_report import CellReporter
from aotlab.notebook.cell_state import CellState, RunState
from aotlab.notebook.functions import separately_compiled
from aotlab.notebook.graphs import CapturedGraph
from aotlab.notebook.names import Watch
from aotlab.notebook.options import Options
from aotlab.notebook.playground import Playground
from aotlab.notebook.regions import Region
from aotlab.notebook.shown import Shown
from aotlab.notebook.stock_graph import STOCK
from aotlab.notebook.tracebacks import line_in
from aotlab.notebook.traced import TracedFunction
from aotlab.report import Report, ReportFormatError
from aotlab.report.codec import decode
from aotlab.report.model import AppliedChoice, MemoryCurve, TimingRow, Views
from aotlab.upstream import Observation


class CompiledCell(Views[Report]):
    """A cell with everything that was compiled for it, and its report.

    The object has the fields and methods of a `Report`. They are read from the current report, which covers all events
    so far.

    Parameters
    ----------
    source
        The cell's text, including the magic's line.
    code
        The split cell.
    file
        The file name of the cell's code.
    options
        The options of the magic.
    playground
        The notebook's variables, and the globals that Dynamo adds to them.
    options_text
        The options as the user wrote them.

    Attributes
    ----------
    keep
        Called with each report that is shown, and with each report that has new timings.
    """

    def __init__(
        self,
        *,
        source: str,
        code: CellCode,
        file: str,
        options: Options,
        options_text: str,
        playground: Playground,
    ) -> None:
        self.code = code
        self.file = file
        self.options = options
        self.keep: Callable[[Report], None] = lambda _report: None
        self.recording = CellRecording(options.name, file)
        self._state = CellState(
            source=source, code=code, file=file, options=options, options_text=options_text, recording=self.recording
        )
        self._state.observation = None if options.engine == "aotlab" else Observation(options.name)
        self._namespace = playground.namespace
        # The cell's compiled functions refer to the cell through this callback. So the cell lives, and records events,
        # as long as one of these functions lives.
        self.compiler = CellCompiler(self._state, playground)
        self._reporter = CellReporter(self._state)
        self._timings: tuple[TimingRow, ...] = ()
        self._curves: tuple[MemoryCurve, ...] = ()
        self._applied: dict[AppliedChoice, AppliedChoice] = {}
        self._lock = threading.RLock()
        self.python_code: dict[int, types.CodeType] = {}
        self.shown: Shown | None = None
        self._shown_counts: tuple[int, ...] = ()

    @cached_property
    def regions(self) -> Mapping[int | str, Callable[..., object]]:
        """The compiled regions of the cell by number, and its separately compiled functions by name.

        They are made at the first use, because the first one in a process imports Dynamo, which takes a second or more.
        """
        code, compiler = self.code, self.compiler
        return {
            **{each.number: Region(compiler, each) for each in code.regions},
            **{name: separately_compiled(compiler, name, lines) for name, lines in code.called.items()},
        }

    @property
    def identifier(self) -> str:
        """The identifier by which a page requests the report of this cell."""
        return self.recording.identifier

    def __repr__(self) -> str:
        return f"<aotlab report of a cell: {self.report().verdict}>"

    def __getattr__(self, name: str) -> object:
        """Return an attribute of the report."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.report(), name)

    @contextmanager
    def run(
        self, *, execution_count: int | None, cell_id: str | None, again: bool, began_ns: int
    ) -> Iterator[RunState]:
        """Record one run of the cell, which happens in the block. The run started at ``began_ns``, before the block.

        ``execution_count`` and ``cell_id`` are described at `RunState`. ``again`` is true for every run but the first.
        """
        self.recording.begin_run(began_ns, again=again)
        with self._lock:
            run = self._state.run = RunState(execution_count=execution_count, cell_id=cell_id)
            for part in self._state.parts.values():
                part.calls, part.off, part.interrupted = 0, False, False
        self.compiler.forget_names()
        watch = Watch(self._namespace)
        try:
            with self.compiler.observing():
                yield run
        except BaseException as error:
            if not (isinstance(error, SystemExit) and not error.code):  # sys.exit(0) is no failure
                run.error, run.error_line = _one_line(error), line_in(error, self.file)
            run.stopped = self.recording.progress.stopped() if isinstance(error, KeyboardInterrupt) else ""
            raise
        finally:
            self.compiler.forget_names()
            written: dict[str, Tensor | None] = {}
            for graph in self._state.graphs():
                written |= graph.written()
            moved = {name for graph in self._state.graphs() for name in graph.moved}
            run.outside = watch.written(written, moved)
            self._reporter.name_results(self._namespace)

    def note(self, text: str) -> None:
        """Add a sentence to the report."""
        self._state.run.notes[text] = None

    @property
    def version(self) -> int:
        """A number that grows when the activity of the running cell changes."""
        return self.recording.progress.version

    def running_report(self) -> Report | None:
        """Return a small report with the present activity of the cell; None if it does not run."""
        return self._reporter.running()

    def show_in(self, shown: Shown) -> None:
        """Show the report in the output of the present run."""
        self.shown, self._shown_counts = shown, self._counts()
        self._show(shown)

    def show(self) -> None:
        """Show the report in the cell's output again if it has changed since it was shown."""
        counts = self._counts()
        if self.shown is not None and counts != self._shown_counts:
            self._shown_counts = counts
            self._show(self.shown)

    def _show(self, shown: Shown) -> None:
        report = self.report()
        graphs = [graph for frame in report.frames for graph in frame.graphs]
        # After a run that compiled nothing, nobody waits for the report, so the next cell can begin at once.
        shown.report(report, later=bool(graphs) and all(graph.reused for graph in graphs))
        self.keep(report)

    def _counts(self) -> tuple[int, ...]:
        """Return counts from which `show` sees that the report has changed, for example the number of calls."""
        graphs = self._state.graphs()
        entries = sum(len(each.compiled.entries) for each in graphs)
        calls = sum(part.calls for part in self._state.parts.values())
        return (len(graphs), entries, calls, len(self._timings), len(self._state.run.outside))

    def report(self) -> Report:
        """Return the current report."""
        with self._lock:
            report = self._reporter.report(self._timings)
            return replace(report, memory_curves=self._curves, applied_rows=tuple(self._applied.values()))

    def measure(self, progress: Callable[[str], None], stock_seconds: float = math.inf) -> Report:
        """Time the cell's graphs beside eager now, measure their memory, and return the report with the results.

        If stock ``torch.compile`` would probably compile for longer than ``stock_seconds``, it is not timed.
        """
        graphs = [graph for frame in self.report().frames for graph in frame.graphs]
        frames = {graph.entry: graph.index for graph in graphs}
        backend_s = {
            graph.entry: sum(stage.duration_ns or 0 for stage in graph.stages if stage.name == "compile") / 1e9
            for graph in graphs
        }
        upstream = self.options.engine == "upstream"
        every = [
            replace(
                _captured(each),
                engine="upstream" if upstream else "aotlab",
                graphs=frames,
                stock=None if upstream else getattr(each, "stock", None) or STOCK[self.options.backend],
                backend_s=sum(backend_s.get(entry.number, 0.0) for entry in each.compiled.entries),
            )
            for each in self._state.graphs()
            if each.compiled.entries
        ]
        began = time.perf_counter_ns()
        curves: list[MemoryCurve] = []
        with self.compiler.playground.opened():  # stock `torch.compile` adds names to the notebook's variables
            rows = timing.measure(every, progress, stock_seconds=stock_seconds, note=self.note, curve=curves.append)
        self.recording.hear(events.Spent(kind="timing", duration_ns=time.perf_counter_ns() - began))
        with self._lock:
            self._timings, self._curves = rows, tuple(curves)
        report = self.report()
        if self.shown is not None:  # if not, the report is shown soon
            self.keep(report)
        return report

    def apply(self, asked: Mapping[str, object], progress: Callable[[str], None]) -> Report:
        """Compile a graph with another choice of saved values, and measure it beside the cell's own choice.

        ``asked`` has the frame, the index of the graph, and the choice, as a page sends them. The new form is compared
        with eager. The cell keeps its own form. The report that is returned has a row about the choice.
        """
        choice = asked_choice(asked)
        frames = [each for each in self.report().frames if each.name == choice.frame]
        numbers = {graph.entry for frame in frames for graph in frame.graphs if graph.index == choice.graph}
        graphs = self._state.graphs() if self.options.engine != "upstream" else ()
        pairs = [(each, entry) for each in graphs for entry in each.compiled.entries if entry.number in numbers]
        if not pairs:
            raise UsageError("only a graph that aotlab compiled can be compiled again")
        graph, entry = pairs[0]
        options = replace(
            self.options,
            partitioner=choice.partitioner,
            memory_budget=1.0 if choice.budget is None else choice.budget,
            save=choice.save,
            recompute=choice.recompute,
        )
        compiled = graph.compiled_with(options.partition())
        one = replace(_captured(graph), frame=choice.frame)
        began = time.perf_counter_ns()
        progress(f"compiling {graph.name} with this choice, and comparing it with eager")
        timing.call_on_copies(one, compiled)
        new = compiled.entries[0].number
        curves: dict[str, MemoryCurve] = {}
        one = replace(one, compiled=compiled, graphs={new: choice.graph}, before=(graph.compiled, entry))
        rows = timing.measure([one], progress, note=self.note, curve=lambda each: curves.update({each.engine: each}))
        self.recording.hear(events.Spent(kind="timing", duration_ns=time.perf_counter_ns() - began))
        compared = graph.verified.get(new)
        medians = {(row.engine, row.phase): row.median_ns for row in rows}
        measured = replace(
            choice,
            equal=None if compared is None else all(row.equal for row in compared),
            forward_ns=medians.get(("aotlab", "forward")),
            backward_ns=medians.get(("aotlab", "backward")),
            before_forward_ns=medians.get(("before", "forward")),
            before_backward_ns=medians.get(("before", "backward")),
            curve=curves.get("aotlab"),
            before=curves.get("before"),
        )
        with self._lock:
            self._applied[choice] = measured
        return self.report()


def _captured(graph: CapturedGraph | TracedFunction) -> timing.Captured:
    """Return the forms of a graph or traced function for a measurement, with the inputs of its latest compilation."""
    if isinstance(graph, TracedFunction):
        return timing.Captured(
            frame=graph.name,
            graph=graph.function,
            compiled=graph.compiled,
            inputs=graph.inputs,
            calling=graph.calling,
        )
    return timing.Captured(
        frame=graph.name,
        graph=graph.graph,
        compiled=getattr(graph.compiled, "uncounted", graph.compiled),
        inputs=graph.inputs,
        whole=graph.whole,
    )


def asked_choice(asked: Mapping[str, object]) -> AppliedChoice:
    """Read the choice in a page's request. Raises `UsageError` if a field is missing or wrong."""
    names = ("frame", "partitioner", "budget", "save", "recompute")
    fields = {name: asked[name] for name in names if name in asked}
    budget = asked.get("budget")
    if type(budget) is int:  # in JSON, a page's 1.0 is 1
        fields["budget"] = float(budget)
    try:
        choice = decode(AppliedChoice, {**fields, "graph": asked.get("index")}, "the request")
    except ReportFormatError as error:
        raise UsageError(f"this choice cannot be applied: {error}") from None
    by_budget = choice.partitioner == "min-cut" and choice.budget is not None and 0 <= choice.budget <= 1
    if not by_budget and (choice.partitioner, choice.budget) != ("default", None):
        raise UsageError(f"this choice cannot be applied: {choice.partitioner} with the budget {choice.budget}")
    return choice


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
