"""Compile the regions and functions of one cell, and compare their calls with their Python code, run eagerly.

A *part* of a cell is a region or a function that the cell defines.
"""

from __future__ import annotations

import inspect
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import events
from aotlab.backends import resolve
from aotlab.cache import next_number
from aotlab.frontends.dynamo_frontend import prepare_dynamo, watch_captures
from aotlab.frontends.tensor_names import Named, named_tensors
from aotlab.ir.fx_graphs import copied_graph
from aotlab.notebook import live
from aotlab.notebook.cell import RegionCode
from aotlab.notebook.cell_recording import EXPLICIT_BREAK
from aotlab.notebook.cell_state import CellState, Limit, PartState, Trial
from aotlab.notebook.eager_run import run_on_copies
from aotlab.notebook.graphs import CapturedGraph, calling_code, dynamo_callable, title_of
from aotlab.notebook.names import WatchedArgument
from aotlab.notebook.playground import Playground
from aotlab.notebook.quiet import quiet_dynamo
from aotlab.notebook.stock_graph import StockGraph
from aotlab.notebook.traced import TracedFunction
from aotlab.notebook.traced_region import TracedRegion
from aotlab.rehearse import RehearsalBackend
from aotlab.report.dynamo_breaks import function_of
from aotlab.report.engines import UPSTREAM
from aotlab.report.text import why_dynamo_stopped
from aotlab.report.verdict import DIFFERS
from aotlab.verification import eager

#: An option of `torch.compile` (torch 2.13). With it, the graphs that one cell's calls of a function add do not count
#: towards the recompile limit of the same function in another cell.
_ISOLATED = "isolate_recompiles"
_LIMIT_OPTIONS: dict[str, Any] = {_ISOLATED: True} if _ISOLATED in inspect.signature(torch.compile).parameters else {}

_Traced = TypeVar("_Traced", bound=TracedFunction)


class CellCompiler:
    """Compiles the regions and functions of one cell, and compares their calls with their Python code, run eagerly.

    Parameters
    ----------
    state
        The state of the cell. The compiler adds parts, graphs, reasons and notes to it.
    playground
        The notebook's variables, and the globals that Dynamo adds to them.
    """

    def __init__(self, state: CellState, playground: Playground) -> None:
        self.state = state
        self.namespace = playground.namespace
        self.playground = playground
        options = state.options
        backend = options.backend if options.rehearse is None else RehearsalBackend(options.rehearse, draws="eager")
        self._backend = resolve(backend, draws="eager")  # a cell must draw the same random values as in eager
        self._exact = self._backend.name == "eager"
        self._device = options.wanted_device()
        self._names: Named | None = None
        self._observes = False

    # --- compiling

    def compile_function(self, function: types.FunctionType, name: str, lines: tuple[int, int]) -> Any:
        """Return the compiled form of ``function``. Its graphs appear in the cell's report.

        ``name`` is the function's name in the report, and ``lines`` are its first and last line in the cell.
        """
        part = PartState(first_line=lines[0], last_line=lines[1], function=name)
        self.state.parts[name] = part
        frontend = self.state.options.frontend
        if frontend == "dynamo":
            return self.compile(function, part)
        refused = part.reasons.setdefault if frontend == "direct" else None
        return self._traced(part, TracedFunction(function, refused=refused, **self._settings_of_trace(part)))

    def trace_region(self, code: RegionCode, part: PartState) -> TracedRegion:
        """Return the form of a region that the direct frontend compiles. It is added to the graphs of ``part``."""
        return self._traced(part, TracedRegion(code, self.namespace, **self._settings_of_trace(part)))

    def _settings_of_trace(self, part: PartState) -> dict[str, Any]:
        options = self.state.options
        return {
            "name": part.title,
            "backend": self._backend,
            "partitioner": options.partition(),
            "number": next_number(),
            "device": self._device,
            "dynamic": True if options.dynamic else None if part.function is not None else False,
            "verify": options.verify,
            "names": self._present_names,
        }

    def _traced(self, part: PartState, traced: _Traced) -> _Traced:
        self.state.recording.numbers.add(traced.compiled.number)
        part.graphs.append(traced)
        return traced

    def decline(self, part: PartState, traced: TracedFunction, reason: str) -> None:
        """Record why the direct frontend has declined a part, which Dynamo captures from now on."""
        self.state.run.notes[f"{part.title}: not traced directly, so Dynamo captures it: {reason}"] = None
        if not (traced.served_calls or traced.verified):
            part.graphs.remove(traced)
            self.state.recording.forget(traced.compiled.number)

    def compile(self, function: types.FunctionType, part: PartState) -> Any:
        """Return the form of ``function`` that Dynamo compiles. The captured graphs are added to ``part``."""

        def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return self._capture(graph, example_inputs, part)

        ours = self.state.options.engine != "upstream"
        if ours:
            prepare_dynamo()
        watch_captures()
        backend.is_aotlabs = ours  # type: ignore[attr-defined]  # read by code that `prepare_dynamo` installs in Dynamo
        dynamic = True if self.state.options.dynamic else None if part.function is not None or not ours else False
        return torch.compile(function, backend=backend, dynamic=dynamic, **_LIMIT_OPTIONS)

    def _capture(self, graph: fx.GraphModule, example_inputs: Sequence[Any], part: PartState) -> Callable[..., Any]:
        state, engine = self.state, self.state.options.engine
        code, _ = internals.dynamo_compile_id()
        title = title_of(graph, state.file, part.first_line, part.last_line, part.function, state.code.functions)
        number, name = state.family(code, title)
        before = partial(self._run_on_copies, part)
        if engine == "aotlab":
            captured = CapturedGraph(graph, name=name, number=number, before=before, **self._settings())
            part.graphs.append(captured)
            return dynamo_callable(captured.__call__)
        if engine == "upstream":
            stock = self._by_stock(graph, example_inputs, name=name, number=number, before=before)
            part.graphs.append(stock)
            return dynamo_callable(stock.__call__)
        ours = copied_graph(graph)  # because stock's backend changes the graph that it gets
        captured = CapturedGraph(ours, name=name, number=number, before=before, **self._settings())
        number, name = state.family(code, name + UPSTREAM, stock=True)
        twin = self._by_stock(graph, example_inputs, name=name, number=number, before=lambda _entry: None)
        part.graphs.append(captured)
        twin.beside = captured
        if (by_stock := twin.compiled.uncounted) is not None:
            captured.yardstick = captured.stock = lambda _: by_stock  # a third compilation is not necessary
        state.twins.append(twin)

        def both(*inputs: Any) -> Any:
            twin.examine(*inputs)
            return captured(*inputs)

        return dynamo_callable(both)

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of `CapturedGraph` that all graphs of the cell have in common."""
        return {
            "names": self._present_names,
            "backend": self._backend,
            "partitioner": self.state.options.partition(),
            "device": self._device,
            "verify": self.state.options.verify,
            "cell_file": self.state.file,
        }

    def _by_stock(self, graph: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> StockGraph:
        """Compile a graph by stock `torch.compile`, in the midst of Dynamo's compilation."""
        frame, number = internals.dynamo_compile_id()
        observation = self.state.observation
        assert observation is not None
        compile_id = None if frame is None else observation.compile_id(frame, int(number.rpartition("/")[2]))
        return StockGraph(graph, example_inputs, compile_id, **settings, **self._settings())

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Record what stock `torch.compile` compiles in a block, if it compiles graphs of the cell."""
        observation = self.state.observation
        if observation is None or self._observes:
            yield
            return
        self._observes = True
        try:
            with internals.compiling_without_caches(), internals.structured_trace(observation.hear):
                yield
        finally:
            self._observes = False

    @contextmanager
    def compiling(self, part: PartState, bound: Sequence[str] = (), *, traced: bool = False) -> Iterator[None]:
        """Prepare Dynamo for a block that calls the compiled form of ``part``, and record why its graphs break.

        ``bound`` are the variables that the code of ``part`` binds. If ``traced`` is true, the direct frontend made the
        compiled form. It does not use Dynamo, so the block only changes the state of the recording.
        """
        recording, options = self.state.recording, self.state.options
        recording.progress.runs(part.title)
        within, recording.inside = recording.inside, True
        if traced:
            try:
                yield
            except KeyboardInterrupt:
                part.interrupted = True
                raise
            finally:
                recording.inside = within
                self.forget_names()
                live.changed(recording.identifier)
            return
        before, varying = internals.dynamo_reasons(), options.dynamic or part.function is not None
        settings = (
            internals.dynamo_errors_suppressed()
            if options.engine == "upstream"
            else internals.dynamo_settings(exact=self._exact, varying=varying)
        )
        began, limits, calls = time.perf_counter_ns(), dict(part.limits), recording.calls_so_far()
        try:
            with (
                self.playground.opened(bound),
                settings,
                self.observing(),
                quiet_dynamo(part.reasons, lambda: self.playground.compiling, partial(self._note_limit, part)),
            ):
                yield
            self._count_eager_calls(part, limits, calls, began)
        except KeyboardInterrupt:
            part.interrupted = True
            raise
        finally:
            recording.inside = within
            self.forget_names()
            for reason, count in internals.dynamo_reasons().items():
                new = count > before.get(reason, 0)
                if new and not (EXPLICIT_BREAK in reason and "graph_break" not in self.state.source):
                    part.reasons[why_dynamo_stopped(reason)] = None
            live.changed(recording.identifier)

    def _note_limit(self, part: PartState, function: str, name: str, most: int) -> None:
        """Record that a recompile limit was reached, so that Dynamo no longer compiles the code that it captures now.

        ``function`` is the name of the function in Dynamo's message. ``name`` and ``most`` are the name and the value
        of the limit.
        """
        code, _ = internals.dynamo_compile_id()
        if code is not None:
            part.limits.setdefault(code, Limit(name=name, most=most))
            self.state.family(code, function_of(function))

    def _count_eager_calls(
        self, part: PartState, limits: Mapping[int, Limit], before: Mapping[int, int], began: int
    ) -> None:
        """Record one eager call for each code object of ``part`` whose recompile limit made it run eagerly.

        Dynamo reports a limit only at the call that reaches it. At a later call of ``part``, a code object is assumed
        to have run eagerly if none of its graphs has run since ``began``. If graphs of the code object have run, it may
        have run eagerly as well, which cannot be observed. Then `Limit.several` is set, because the report may count
        too few calls.

        Parameters
        ----------
        limits
            The limits that had been reached at the time ``began``, by Dynamo's number for the code object.
        before
            The count of recorded calls at the time ``began``, by the function's number in events.
        began
            The time, in ns, at which the call of ``part`` began.
        """
        now = self.state.recording.calls_so_far() if part.limits else {}
        for code, limit in part.limits.items():
            number, name = self.state.families[code]
            graphs_ran = now.get(number, 0) - before.get(number, 0)
            limit.several = limit.several or graphs_ran > (code in limits)
            if code not in limits or not graphs_ran:
                spent = time.perf_counter_ns() - began
                events.emit(
                    events.Called(function=name, function_id=number, entry=None, duration_ns=spent, compiled=False)
                )

    # --- comparing with Python

    @contextmanager
    def trying(self, part: PartState, trial: Trial) -> Iterator[None]:
        """Make ``trial`` the current call of ``part`` during a block.

        If an entry is compiled during the block, `_run_on_copies` runs the Python code of this call on copies of
        everything that the code reads.
        """
        outer, part.trial = part.trial, trial  # a function may call itself
        try:
            yield
        finally:
            part.trial = outer

    def _run_on_copies(self, part: PartState, entry: int) -> None:
        """Run the Python code of the current call on copies of what it reads, if the call has had no effect yet.

        A captured graph calls this method after it has compiled a new entry, whose number is ``entry``, and before it
        uses the entry.
        """
        trial = part.trial
        if trial is None:
            return
        trial.entries.add(entry)
        caller = calling_code(self.state.file)
        original = trial.function.__code__
        # The call has had no effect yet if Dynamo's code for the whole function calls the graph. If a resume function
        # (Dynamo's code for the rest after a graph break, with another name) or the original code calls it, Python has
        # already run statements of the function.
        if trial.began or caller is None or caller is original or caller.co_name != original.co_name:
            return
        trial.began = True
        events.emit(events.Begun(kind="verification", subject=part.title))
        began = time.perf_counter_ns()
        trial.eager_run = run_on_copies(
            trial.function,
            self.namespace,
            trial.args,
            trial.kwargs,
            bound=trial.bound,
            grad_mode=trial.grad_mode,
            exact=self._exact,
            yardstick=eager if self.state.options.engine == "upstream" else None,
        )
        events.emit(events.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))

    def differs(self, part: PartState, trial: Trial, result: object) -> bool:
        """Compare the effects and the ``result`` of a call with the run of its Python code on copies.

        If they differ, undo the effects of the call, and return True if that is possible. The caller of this method
        then runs the code eagerly. Otherwise, also if there was no run on copies, return False.
        """
        if trial.eager_run is None:
            return False
        began = time.perf_counter_ns()
        rows = trial.eager_run.compare(result)
        events.emit(events.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))
        part.compared.append(rows)
        first = next((row.sentence for row in rows if not row.equal), None)
        if first is None:
            part.as_python |= trial.entries
            return False
        part.differs = f"{DIFFERS}: {first}"
        if not trial.eager_run.undoable or not part.take_back(trial.calls_before):
            note = f"{part.title}: {part.differs}. Its effects cannot be undone, so the cell keeps these results"
            self.state.run.notes[note] = None
            return False
        for name in trial.bound:
            self.namespace.pop(name, None)
        self.namespace.update(trial.values)
        torch.set_rng_state(trial.random)
        part.settle()
        part.in_eager = True
        return True

    # --- the notebook's tensors

    def note_outside(self, part: PartState, function: types.FunctionType, watched: Sequence[WatchedArgument]) -> None:
        """Report the arguments that a call of ``function`` has written outside of the graphs of ``part``.

        ``watched`` describes the tensor arguments as they were before the call. Nothing is reported if the whole call
        was captured. Nothing is reported either if a graph of ``part`` writes inputs, because then the graph may have
        written the argument.
        """
        if not (part.reasons or not part.graphs) or any(each.written() for each in part.graphs):
            return
        for each in watched:
            row = each.written()
            if row is None:
                continue
            present = self._present_names()
            name = present[id(each.tensor)][0] if id(each.tensor) in present else str(each.position)
            if isinstance(each.position, int) and id(each.tensor) not in present:
                names = function.__code__.co_varnames[: function.__code__.co_argcount]
                name = names[each.position] if each.position < len(names) else f"args[{each.position - len(names)}]"
            run = self.state.run
            run.outside = (*[one for one in run.outside if one.name != name], replace(row, name=name))
        self.forget_names()

    def _present_names(self, wanted: Sequence[Any] = ()) -> Named:
        """Return the names of the notebook's tensors.

        The names are looked up once per call of a part, and again if a tensor in ``wanted`` has no name yet.
        """
        if self._names is None or any(isinstance(each, Tensor) and id(each) not in self._names for each in wanted):
            self._names = named_tensors(self.namespace)
        return self._names

    def forget_names(self) -> None:
        """Drop the table of the notebook's tensors and their names, because the table keeps the tensors alive."""
        self._names = None
