"""A cell that has been taken apart and compiled: what is kept of it from run to run, and its report."""

from __future__ import annotations

import inspect
import operator
import re
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import config, observe
from aotlab.backends import resolve
from aotlab.cache import next_number
from aotlab.errors import UsageError
from aotlab.frontends.dynamo import prepare_dynamo, watch_captures
from aotlab.ir.metadata import OutputType
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.notebook import live
from aotlab.notebook import measure as timing
from aotlab.notebook.cell import CellCode, PythonLines, RegionCode
from aotlab.notebook.classify import LEFT_OUT
from aotlab.notebook.functions import compiled_function
from aotlab.notebook.graphs import CapturedGraph, RunInstead, calling_code, dynamo_callable, title_of
from aotlab.notebook.names import Watch, WatchedArgument, named_tensors
from aotlab.notebook.options import Options
from aotlab.notebook.playground import Playground
from aotlab.notebook.quiet import quiet_dynamo
from aotlab.notebook.rehearsal import Rehearsal, rehearse
from aotlab.notebook.shown import Shown
from aotlab.notebook.tracebacks import cleaned, line_in, walk
from aotlab.notebook.traced import TracedFunction
from aotlab.rehearse import RehearsalBackend
from aotlab.report import Cell, Recording, Report, VerificationRow
from aotlab.report.assemble import tensor_info
from aotlab.report.collect import function_of
from aotlab.report.model import (
    CellPart,
    Frame,
    Graph,
    GraphBreakRow,
    Input,
    Output,
    Placeholder,
    Result,
    Span,
    Storage,
    TimingRow,
)
from aotlab.report.recompiles import limit_words
from aotlab.report.text import RECOMPILE_LIMIT, is_of_cell, lines_of, places_in, why_dynamo_stopped
from aotlab.report.verdict import DIFFERS
from aotlab.report.views import Views
from aotlab.report.ways import with_ways
from aotlab.verification import Comparison

#: How often a region that raises is compiled anew: one that raises in every round of a loop stays eager at last.
MOST_ERRORS = 8

#: Torch's optimizers end a graph before their step, on purpose; nothing is left uncompiled by it.
_BREAK = "User-inserted graph break"
#: Lets one cell's graphs of a function not count for another's, whose recompile limit they would use up (torch 2.13).
_OWN = "isolate_recompiles"
_OF_ITS_OWN: dict[str, Any] = {_OWN: True} if _OWN in inspect.signature(torch.compile).parameters else {}


class CellRecording(Recording):
    """A recording that hears only of the graphs of one cell."""

    def __init__(self, name: str | None = None, file: str = "") -> None:
        super().__init__(name)
        self._file = file
        self.numbers: set[int] = set()
        self.inside = False

    def knows(self, entry: int) -> bool:
        """Tell whether an entry belongs to this cell."""
        return entry in self._entries

    def frames_without(self, report: Report, numbers: set[int]) -> tuple[Frame, ...]:
        """Return the frames of ``report``, but for those of the functions ``numbers`` of which nothing was compiled."""
        kept = [
            frame
            for frame, (number, _) in zip(report.frames, list(self._frames), strict=False)
            if number not in numbers or any(graph.status == "compiled" for graph in frame.graphs)
        ]
        return (*kept, *report.frames[len(self._frames) :])

    def calls_so_far(self) -> dict[int, int]:
        """Return how many calls were heard of, by the number of the function."""
        return {number: log.compiled + log.eager for (number, _), log in list(self._frames.items())}

    def hear(self, event: observe.Event) -> None:
        """Take note of an event, if it is about this cell."""
        match event:
            case observe.CompileStarted() | observe.CapturedAgain() | observe.Called():
                mine = event.function_id in self.numbers
            case observe.Spent():
                mine = self.inside or event.kind == "timing"
            case observe.GraphBreak():
                mine = self.inside and not (_BREAK in event.reason and "/torch/" in str(event.stack[-1:]))
            case _:
                mine = getattr(event, "entry", None) in self._entries
        if mine:
            super().hear(event)

    def _in_cell(self, row: GraphBreakRow, event: observe.GraphBreak) -> GraphBreakRow:
        """Look for the cell's line among those that run and those that Dynamo was capturing."""
        running = [(frame.f_code, line) for frame, line in traceback.walk_stack(None)]
        lines = [(function_of(code.co_name), line) for code, line in running[::-1] if code.co_filename == self._file]
        lines += [(function_of(each.name), each.lineno or 0) for each in event.stack if each.filename == self._file]
        # The frame that ran, and perhaps its rest after an earlier break, in which the line is the later one.
        line = next((line for name, line in reversed(lines) if name == lines[0][0]), None)
        own = row.line is not None and is_of_cell(row.line, self._file)
        return replace(row, cell_line=line, where=f"line {row.line.line}" if own and row.line else row.where)


@dataclass(slots=True, kw_only=True)
class Limit:
    """A limit of Dynamo's that a function has reached: its name, the limit, whether calls of it may be uncounted."""

    name: str
    most: int
    several: bool = False


@dataclass(slots=True, kw_only=True)
class _Part:
    """What is known of a region, or of a function that the cell defines, in the present run."""

    first_line: int
    last_line: int
    function: str | None = None
    statements: tuple[tuple[int, int], ...] = ()  # their lines
    calls: int = 0
    off: bool = False
    mended: bool = False
    errors: int = 0
    interrupted: bool = False
    replaced: bool = False
    graphs: list[CapturedGraph | TracedFunction] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)
    limits: dict[int, Limit] = field(default_factory=dict)  # of code that Dynamo compiles no more, by its number
    trial: _Trial | None = None
    compared: list[tuple[Comparison, ...]] = field(default_factory=list)  # with Python, call by call
    as_python: set[int] = field(default_factory=set)  # the entries that were
    differs: str = ""  # how its results are other than Python's: it runs eagerly from then on
    in_eager: bool = False


@dataclass(slots=True, kw_only=True)
class _Trial:
    """One call of a part, which is compared with Python if something new is compiled for it."""

    function: types.FunctionType
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    bound: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)  # of these names, before
    served: Mapping[int, int] = field(default_factory=dict)
    random: Tensor = field(default_factory=torch.get_rng_state)
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    began: bool = False
    rehearsal: Rehearsal | None = None
    entries: set[int] = field(default_factory=set)


class CompiledCell(Views):
    """A cell with everything that was compiled of it, and its report.

    It answers to everything that a `Report` answers to, at any time about what has happened so far.

    Parameters
    ----------
    source
        The cell's text, the magic's line included.
    code
        The cell, taken apart.
    file
        The file name of its code.
    options
        What stands behind the magic.
    playground
        The notebook's variables, and what Dynamo keeps there.
    options_text
        The same as it was written.

    Attributes
    ----------
    say
        Hears what is being done, in short phrases, while the cell runs.
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
        self.source = source
        self.code = code
        self.file = file
        self.options = options
        self.options_text = options_text
        self.say: Callable[[str], None] = lambda _text: None
        self.recording = CellRecording(options.name, file)
        self._playground = playground
        chosen = options.backend if options.rehearse is None else RehearsalBackend(options.rehearse, draws="eager")
        self._backend = resolve(chosen, draws="eager")  # a cell does what eager does
        self._device = options.wanted_device()
        self._names: dict[int, tuple[str, Tensor]] | None = None
        self._families: dict[int, tuple[int, str]] = {}
        self._parts: dict[object, _Part] = {}
        self._timings: tuple[TimingRow, ...] = ()
        self._notes: dict[str, None] = {}
        self._error: str | None = None
        self._error_line: int | None = None
        self._inputs_again: dict[int, tuple[Output, ...]] = {}
        self._execution_count: int | None = None
        self._cell_id: str | None = None
        self._outside: tuple[Input, ...] = ()
        self._result_names: dict[int, dict[str, str]] = {}
        # by entry, with what they were made for: an unchanged cell has thousands of rows, the same at each run
        self._verification_rows: dict[int, tuple[tuple[object, ...], tuple[VerificationRow, ...]]] = {}
        self._finished_lines = 0
        self._lock = threading.RLock()
        self.python_code: dict[int, types.CodeType] = {}
        self.shown: Shown | None = None
        self._shown_state: tuple[int, ...] = ()
        self.regions: dict[int | str, Callable[..., Any]] = {each.number: self._region(each) for each in code.regions}
        self.regions |= {name: self._by_itself(name, lines) for name, lines in code.called.items()}

    @property
    def identifier(self) -> str:
        """What front ends ask for its report by."""
        return self.recording.identifier

    def __repr__(self) -> str:
        return f"<aotlab report of a cell: {self.report().verdict}>"

    def __getattr__(self, name: str) -> object:
        """Answer with the report's fields and methods."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.report(), name)

    # --- running

    @contextmanager
    def run(
        self, *, execution_count: int | None, cell_id: str | None, again: bool, began_ns: int
    ) -> Iterator[_Progress]:
        """Keep account of one run of the cell, which happens in the block; it ``began_ns`` before."""
        self.recording.begin_run(began_ns, again=again)
        with self._lock:
            self._error, self._error_line, self._notes, self._outside = None, None, {}, ()
            self._execution_count, self._cell_id = execution_count, cell_id
            self._finished_lines = 0
            for part in self._parts.values():
                part.calls, part.off, part.interrupted = 0, False, False
        self._names = None
        watch = Watch(self._playground.namespace)
        run = _Progress(self)
        try:
            yield run
        except BaseException as error:
            self._error, self._error_line = _one_line(error), line_in(error, self.file)
            raise
        finally:
            self._names = None
            in_graphs: dict[str, Tensor | None] = {}
            graphs = self._captured()
            for each in graphs:
                in_graphs |= each.written()
            moved = {name for each in graphs if isinstance(each, CapturedGraph) for name in each.moved}
            self._outside = watch.written(in_graphs, moved)
            known = named_tensors(self._playground.namespace)
            for _name, tensor in known.values():
                internals.unmark_static(tensor)
            for each in graphs:
                for entry, names in each.result_names(known).items():
                    if names:
                        self._result_names[entry] = names
                    self._inputs_again[entry] = self._further_names(each, known)

    def _further_names(
        self, graph: CapturedGraph | TracedFunction, known: Mapping[int, tuple[str, Tensor]]
    ) -> tuple[Output, ...]:
        """Describe the inputs of a graph for which the cell has made one more name."""
        inputs = (graph.inputs() or ()) if isinstance(graph, CapturedGraph) else ()
        names = {id(each): known[id(each)][0] for each in inputs if id(each) in known}
        found = {name: self._playground.namespace.get(name) for name in self.code.bound}
        return tuple(
            [
                Output(
                    name=name,
                    output_type=OutputType.IS_INPUT.value,
                    raw_type=f"{type(value).__module__}.{type(value).__qualname__}",
                    tensor=tensor_info(spec_of(value, StorageNumbers())),
                    base_kind="input",
                    base=names[id(value)],
                    relation=f"is input {names[id(value)]} itself",
                    requires_grad=value.requires_grad,
                )
                for name, value in found.items()
                if isinstance(value, Tensor) and names.get(id(value), name) != name
            ]
        )

    def compile_function(self, function: types.FunctionType, name: str, line: tuple[int, int]) -> Any:
        """Return ``function`` compiled by the frontend that was asked for, with its graphs in this cell's report."""
        part = _Part(first_line=line[0], last_line=line[1], function=name)
        self._parts[name] = part
        return self._trace(function, part) if self.options.frontend == "direct" else self._compile(function, part)

    def compile_again(self, function: types.FunctionType, part: _Part) -> Any:
        """Hand a function of which nothing was captured to Dynamo once more, as new code."""
        return self._compile(function, part)

    def _trace(self, function: types.FunctionType, part: _Part) -> TracedFunction:
        traced = TracedFunction(
            function,
            name=str(part.function),
            backend=self._backend,
            number=next_number(),
            device=self._device,
            dynamic=True if self.options.dynamic else None,
            verify=self.options.verify,
            progress=lambda text: self.say(text),
            refused=lambda text: part.reasons.setdefault(text),
        )
        self.recording.numbers.add(traced.compiled.number)
        part.graphs.append(traced)
        return traced

    def _region(self, region: RegionCode, key: object = None) -> Callable[[], Any]:
        namespace = self._playground.namespace
        function = types.FunctionType(region.code, namespace)
        statements = tuple([(each.first_line, each.last_line) for each in region.pieces])
        part = _Part(first_line=region.first_line, last_line=region.last_line, statements=statements)
        self._parts[region.number if key is None else key] = part
        compiled = self._compile(function, part)
        pieces: list[Callable[[], Any]] = []

        def piece_by_piece() -> Any:
            if not pieces:
                part.replaced = True
                whole = {graph.name for graph in part.graphs}
                self._families = {code: each for code, each in self._families.items() if each[1] not in whole}
                pieces.extend(self._region(each, (region.number, i)) for i, each in enumerate(region.pieces))
            result = None
            for each in pieces:
                result = each()
            return result

        def call() -> Any:
            nonlocal function, compiled
            part.calls += 1
            if part.mended:
                part.mended = False
                part.reasons.clear()
            if not config.enabled or part.differs:
                part.off, part.in_eager = not config.enabled, True
                return function()
            if pieces:
                return piece_by_piece()
            self._names = None
            before = {name: namespace[name] for name in region.bound if name in namespace}
            trial = _Trial(function=function, bound=region.bound, values=before)
            trial.served = served = {id(each): each.served for each in part.graphs}
            refused = False
            try:
                with self.compiling(part, region.bound), self._trying(part, trial):
                    result = compiled()
            except RunInstead as instead:
                refused = instead.refused
            except Exception as error:
                ran = function.__code__
                # Dynamo does not look again at code that raised; the next run, with the mistake mended, is new to it.
                if part.errors < MOST_ERRORS:
                    function = types.FunctionType(region.code.replace(), namespace)
                    compiled = self._compile(function, part)
                    part.mended, part.errors = True, part.errors + 1
                undone = self._undone(error, ran, part, served)
                self.settle(part)
                if not undone:
                    cleaned(error, self.file)
                    raise
                torch.set_rng_state(trial.random)
            else:
                if self.differs(part, trial, result):
                    return function()
                self.settle(part)
                _in_order(namespace, [name for name in region.bound if name not in before and name in namespace])
                return result
            if refused and region.pieces:
                return piece_by_piece()
            # What failed was the first thing of the region that had an effect; eager tells the rest.
            result = function()
            for each in part.graphs:
                each.surprising = each.surprising or each.failure is not None
            return result

        return call

    def _by_itself(self, name: str, lines: tuple[int, int]) -> Callable[..., Any]:
        """Return what calls a function of the cell, compiled by itself, from lines that Python runs."""
        made: list[object] = []
        compiled: Any = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made, compiled
            function = self._playground.namespace[name]
            if not isinstance(function, types.FunctionType) or function.__code__.co_filename != self.file:
                return function(*args, **kwargs)
            # Defined by a repeated run of the cell, it is the same function if its parts are.
            parts = [function.__code__, *(function.__defaults__ or ()), function.__kwdefaults__, function.__closure__]
            if len(parts) != len(made) or not all(map(operator.is_, parts, made)):
                made, compiled = parts, compiled_function(self, name, function, lines)
            return compiled(*args, **kwargs)

        return call

    def trial(
        self, part: _Part, function: types.FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[_Trial]:
        """Let a call of a function be compared with its Python, in a block, if something new is compiled for it."""
        served = {id(each): each.served for each in part.graphs}
        return self._trying(part, _Trial(function=function, args=args, kwargs=kwargs, served=served))

    @contextmanager
    def _trying(self, part: _Part, trial: _Trial) -> Iterator[_Trial]:
        outer, part.trial = part.trial, trial  # a function may call itself
        try:
            yield trial
        finally:
            part.trial = outer

    def _rehearse(self, part: _Part, entry: int) -> None:
        """Run the Python of what is being called on copies, if nothing of it has happened yet."""
        trial = part.trial
        if trial is None:
            return
        trial.entries.add(entry)
        code = calling_code(self.file)
        own = trial.function.__code__
        # Dynamo's code for the whole, not for the rest after a break, and not the code itself, left to Python.
        if trial.began or code is None or code is own or code.co_name != own.co_name:
            return
        trial.began = True
        began = time.perf_counter_ns()
        trial.rehearsal = rehearse(
            trial.function,
            self._playground.namespace,
            trial.args,
            trial.kwargs,
            bound=trial.bound,
            grad_mode=trial.grad_mode,
            exact=self._backend.name == "eager",
        )
        observe.emit(observe.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))

    def differs(self, part: _Part, trial: _Trial, result: object) -> bool:
        """Compare what a call has done with its Python; True if it differs and was taken back, so that eager counts."""
        if trial.rehearsal is None:
            return False
        began = time.perf_counter_ns()
        rows = trial.rehearsal.compare(result)
        observe.emit(observe.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))
        part.compared.append(rows)
        first = next((row.sentence for row in rows if not row.equal), None)
        if first is None:
            part.as_python |= trial.entries
            return False
        part.differs = f"{DIFFERS}: {first}"
        active = [g for g in part.graphs if isinstance(g, CapturedGraph) and g.served > trial.served.get(id(g), 0)]
        if not trial.rehearsal.undoable or not all(not g.written() or g.take_back() for g in reversed(active)):
            self._notes[f"{_named(part)}: {part.differs}; its results could not be taken back, and count"] = None
            return False
        for name in trial.bound:
            self._playground.namespace.pop(name, None)
        self._playground.namespace.update(trial.values)
        torch.set_rng_state(trial.random)
        self.settle(part)
        part.in_eager = True
        return True

    def settle(self, part: _Part) -> None:
        """Let go of what was kept to take the writes of graphs back: the code around them has run."""
        for graph in part.graphs:
            if isinstance(graph, CapturedGraph):
                graph.settle()

    def note_outside(self, part: _Part, function: types.FunctionType, watched: Sequence[WatchedArgument]) -> None:
        """Report what a call of a function wrote between its graphs, where no graph of it can have been the writer."""
        if not (part.reasons or not part.graphs) or any(each.written() for each in part.graphs):
            return
        for each in watched:
            row = each.written()
            if row is None:
                continue
            known = self._present_names()
            name = known[id(each.tensor)][0] if id(each.tensor) in known else str(each.position)
            if isinstance(each.position, int) and id(each.tensor) not in known:
                names = function.__code__.co_varnames[: function.__code__.co_argcount]
                name = names[each.position] if each.position < len(names) else f"args[{each.position - len(names)}]"
            others = [one for one in self._outside if one.name != name]
            self._outside = (*others, replace(row, name=name))
        self._names = None  # it holds the notebook's tensors

    def _undone(self, error: Exception, ran: types.CodeType, part: _Part, served: Mapping[int, int]) -> bool:
        """Tell whether a region that raised has had no effect, so that it can run once more, eagerly.

        Dynamo binds names when a frame has run, not when it comes to their statements. Where the region's own frame
        raised, after graphs at most whose writes can be taken back, it is as if nothing had happened.
        """
        frames = [each.tb_frame.f_code for each in walk(error.__traceback__)]
        inside = [code for code in frames if code.co_filename == self.file]
        if not frames or frames[-1].co_filename != self.file or len(inside) != 1 or inside[0].co_name != "<module>":
            return False
        if part.reasons:  # Dynamo broke the frame off, and before the break it has bound names and changed objects
            return False
        if inside[0] is ran:  # Dynamo has left it to Python, and every statement has had its effect
            return False
        graphs = [each for each in part.graphs if isinstance(each, CapturedGraph)]
        active = [each for each in graphs if each.served > served.get(id(each), 0)]
        return all(not each.written() or each.take_back() for each in reversed(active))

    def _compile(self, function: types.FunctionType, part: _Part) -> Any:
        def backend(graph: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return self._capture(graph, part)

        prepare_dynamo()
        watch_captures()
        backend.is_aotlabs = True  # type: ignore[attr-defined]  # read by what `prepare_dynamo` puts into Dynamo
        dynamic = True if self.options.dynamic else None if part.function is not None else False
        return torch.compile(function, backend=backend, dynamic=dynamic, **_OF_ITS_OWN)

    @contextmanager
    def compiling(self, part: _Part, bound: Sequence[str] = ()) -> Iterator[None]:
        """Let Dynamo compile and run code of this cell in a block, and note why it did not go on where it did not."""
        within, self.recording.inside = self.recording.inside, True
        if self.options.frontend == "direct":
            try:
                yield
            finally:
                self.recording.inside = within
                self._names = None
                live.changed(self.identifier)
            return
        before, varying = internals.dynamo_reasons(), self.options.dynamic or part.function is not None
        began, limits, calls = time.perf_counter_ns(), dict(part.limits), self.recording.calls_so_far()
        try:
            with (
                self._playground.opened(bound),
                internals.dynamo_settings(exact=self._backend.name == "eager", varying=varying),
                quiet_dynamo(part.reasons, lambda: self._playground.compiling, partial(self._note_limit, part)),
            ):
                yield
            self._count_eager_calls(part, limits, calls, began)
        except KeyboardInterrupt:
            part.interrupted = True
            raise
        finally:
            self.recording.inside = within
            self._names = None  # it holds the notebook's tensors
            for reason, count in internals.dynamo_reasons().items():
                if count > before.get(reason, 0) and not (_BREAK in reason and "graph_break" not in self.source):
                    part.reasons[why_dynamo_stopped(reason)] = None
            live.changed(self.identifier)

    def _note_limit(self, part: _Part, function: str, name: str, most: int) -> None:
        """Take note that Dynamo compiles code no more, when it says so."""
        code, _ = internals.dynamo_compile_id()
        if code is not None:
            part.limits.setdefault(code, Limit(name=name, most=most))
            self._family(code, function_of(function))

    def _count_eager_calls(
        self, part: _Part, limits: Mapping[int, Limit], before: Mapping[int, int], began: int
    ) -> None:
        """Count what ran eagerly because Dynamo compiles it no more; it tells of the first such call only.

        What no graph has served since ``began`` has run so, if it was called; of more calls than one nobody knows.
        """
        now = self.recording.calls_so_far() if part.limits else {}
        for code, limit in part.limits.items():
            number, name = self._families[code]
            graphs_ran = now.get(number, 0) - before.get(number, 0)
            limit.several = limit.several or graphs_ran > (code in limits)
            if code not in limits or not graphs_ran:
                spent = time.perf_counter_ns() - began
                observe.emit(
                    observe.Called(function=name, function_id=number, entry=None, duration_ns=spent, compiled=False)
                )

    def part_of(self, name: str) -> _Part:
        """Return the account of a function that the cell defines."""
        return self._parts[name]

    def _capture(self, graph: fx.GraphModule, part: _Part) -> Callable[..., Any]:
        code, _ = internals.dynamo_compile_id()
        title = title_of(graph, self.file, part.first_line, part.last_line, part.function)
        family = self._family(code, title)
        captured = CapturedGraph(
            graph,
            name=family[1],
            names=self._present_names,
            backend=self._backend,
            number=family[0],
            device=self._device,
            verify=self.options.verify,
            cell_file=self.file,
            progress=lambda text: self.say(text),
            before=lambda entry: self._rehearse(part, entry),
        )
        part.graphs.append(captured)
        return dynamo_callable(captured)

    def _family(self, code: int | None, title: str) -> tuple[int, str]:
        """Return the number and the name under which the graphs of a code of Dynamo's are told."""
        family = self._families.get(code) if code is not None else None
        if family is None:
            family = (next_number(), self._unique(title))
            if code is not None:
                self._families[code] = family
            self.recording.numbers.add(family[0])
        return family

    def _unique(self, title: str) -> str:
        taken = {name for _number, name in self._families.values()}
        count, name = 1, title
        while name in taken:
            count += 1
            name = f"{title} ({count})"
        return name

    def _present_names(self) -> Mapping[int, tuple[str, Tensor]]:
        if self._names is None:
            self._names = named_tensors(self._playground.namespace)
        return self._names

    def _captured(self) -> list[CapturedGraph | TracedFunction]:
        return [graph for part in list(self._parts.values()) for graph in list(part.graphs)]

    def note(self, text: str) -> None:
        """Put a sentence into the report."""
        self._notes[text] = None

    def tell(self, event: observe.Event) -> None:
        """Say what the engine does, if it does it for this cell."""
        if isinstance(event, observe.CompileStarted) and event.function_id in self.recording.numbers:
            self.say(f"compiling {event.function}")
        elif (
            isinstance(event, observe.StageFinished)
            and event.stage == "partition"
            and self.recording.knows(event.entry)
        ):
            self.say(f"compiling with {self.options.backend}")

    def show_in(self, shown: Shown) -> None:
        """Show the report in the output of the present run."""
        self.shown, self._shown_state = shown, self._state()
        if not shown.quiet:
            shown.report(self.report())

    def show(self) -> None:
        """Show the report where the cell's output is, if it has changed since it was shown."""
        state = self._state()
        if self.shown is not None and state != self._shown_state:
            self._shown_state = state
            self.shown.report(self.report())

    def _state(self) -> tuple[int, ...]:
        """Return what changes when something happens to the cell's functions."""
        graphs = self._captured()
        entries = sum(len(each.compiled.entries) for each in graphs)
        calls = sum(part.calls for part in self._parts.values())
        return (len(graphs), entries, calls, len(self._timings), len(self._outside))

    # --- the report

    def report(self) -> Report:
        """Return the report as it stands now."""
        with self._lock:
            base = self.recording.report()
            graphs = self._captured()
            # What was refused as a whole and then taken piece by piece is told by the pieces, unless it was wrong.
            replaced = [graph for part in self._parts.values() if part.replaced for graph in part.graphs]
            numbers = {each.compiled.number for each in replaced if not _differs(each)}
            frames = tuple([self._frame(frame) for frame in self.recording.frames_without(base, numbers)])
            rows: list[VerificationRow] = []
            notes = dict.fromkeys(base.notes) | self._notes
            for part in list(self._parts.values()):
                name = next((graph.name for graph in part.graphs), None)
                for comparisons in () if part.replaced else part.compared:
                    rows += _rows_of(comparisons, name, None, str, "python")
            for graph in graphs:
                rows += self._verification(graph, frames)
                notes |= {
                    f"{graph.name} was not compared with eager: {each}": None for each in graph.unverified.values()
                }
                if graph.surprising:
                    notes[
                        f"{graph.name}: the compiled code raised {graph.failure}, eager did not; eager's result counts"
                    ] = None
            report = replace(
                base,
                frames=frames,
                cell=Cell(
                    source=self.source,
                    identifier=self._cell_id,
                    execution_count=self._execution_count,
                    options=self.options_text,
                    kind="definitions" if self.code.defines_only else "statements",
                    error=self._error,
                    error_line=self._error_line,
                    parts=tuple(self._parts_with_ways(frames, base.graph_break_rows)),
                    mutated_outside=self._outside,
                ),
                timing_rows=self._timings,
                notes=tuple(notes),
            )
            return report.with_verification(rows)

    def measure(self, progress: Callable[[str], None]) -> Report:
        """Time the cell's graphs beside eager, now, and return the report with these timings."""
        frames = {graph.entry: graph.index for frame in self.report().frames for graph in frame.graphs}
        every = [
            timing.Captured(
                frame=each.name,
                graph=each.graph,
                compiled=each.compiled,
                inputs=each.inputs,
                whole=each.whole,
                graphs=frames,
                stock="aot_eager" if self.options.backend == "eager" else "inductor",
            )
            for each in self._captured()
            if isinstance(each, CapturedGraph) and each.compiled.entries
        ]
        if not every and self.options.frontend == "direct":
            raise UsageError(
                "functions that the direct frontend traced are not timed here; see aotlab.compile and bench"
            )
        began = time.perf_counter_ns()
        rows = timing.measure(every, progress, note=lambda text: self._notes.setdefault(text))
        self.recording.hear(observe.Spent(kind="timing", duration_ns=time.perf_counter_ns() - began))
        with self._lock:
            self._timings = rows
        return self.report()

    def _frame(self, frame: Frame) -> Frame:
        graphs = [_with_names(each, self._result_names.get(each.entry, {})) for each in frame.graphs]
        graphs = [replace(g, outputs=(*g.outputs, *self._inputs_again.get(g.entry, ()))) for g in graphs]
        limits = {self._families[code][1]: each for part in self._parts.values() for code, each in part.limits.items()}
        limit = limits.get(frame.name)
        words = "" if limit is None else limit_words(limit.name, limit.most, graphs, several=limit.several)
        return replace(frame, graphs=tuple(graphs), limit=words)

    def _verification(
        self, graph: CapturedGraph | TracedFunction, frames: Sequence[Frame]
    ) -> Iterator[VerificationRow]:
        indices = {each.entry: (frame.name, each.index) for frame in frames for each in frame.graphs}
        for entry, comparisons in graph.verified.items():
            name, index = indices.get(entry, (graph.name, None))
            names = self._result_names.get(entry, {})
            made = self._verification_rows.get(entry)
            if made is None or made[0] != (name, index, names):
                made = (name, index, dict(names)), _rows_of(comparisons, name, index, _renamer(names), _against(graph))
                self._verification_rows[entry] = made
            yield from made[1]

    def _cell_parts(self, frames: Sequence[Frame]) -> list[CellPart]:
        compiled = {
            frame.name
            for frame in frames
            if frame.calls.compiled and any(graph.status == "compiled" for graph in frame.graphs)
        }
        refusals = {frame.name: frame.refusals[0].message for frame in frames if frame.refusals}
        parts: list[CellPart] = []
        for part in list(self._parts.values()):
            if part.replaced:
                continue
            names = tuple(dict.fromkeys(each.name for each in part.graphs))
            used = tuple([each for each in names if each in compiled])
            reason = ""
            refused = [refusals[each] for each in names if each in refusals]
            refused += [graph.refused for graph in part.graphs if graph.refused is not None]
            others = sorted(part.reasons, key=lambda each: each != RECOMPILE_LIMIT)
            reasons = [places_in(each.strip().splitlines()[0]) for each in (*refused, *others) if each.strip()]
            if part.differs and part.in_eager:
                how, reason, used = "eager", part.differs, ()
            elif part.off:
                how, reason = "eager", "aotlab is switched off: aotlab.disable() was called"
            elif part.interrupted and part.calls <= 1:
                how, reason = "not run", "interrupted while it was being compiled or run"
            elif not part.calls and part.function is not None:
                how, reason = "not run", "a function that was not called yet"
            elif not part.calls:
                how = "not run"
            elif used:
                how, reason = "compiled", part.differs or next(iter(reasons), "")
            elif reasons:
                how, reason = "eager", reasons[0]
            elif part.function is not None:
                how, reason = "eager", "Dynamo captured nothing of its first call, and does not look at it again"
            else:
                how, reason = "python", "no computation with tensors"
            last_line, line = part.last_line, self._error_line
            if line is not None and part.calls == 1 and part.first_line <= line:
                for first, last in part.statements:
                    if line < first:  # the cell ended before it
                        last_line = min(last_line, first - 1)
                        parts.append(CellPart(first_line=first, last_line=last, how="not run"))
            compared = _compared(part) if how == "compiled" else ""
            found = CellPart(first_line=part.first_line, last_line=last_line, how=how, frames=used, reason=reason)
            parts.append(replace(found, compared=compared))
        captured = self._captured_lines(frames)
        for each in self.code.python:
            if not self._is_function(each):
                parts.append(_python_part(each, self._finished_lines, captured))
        ranks = ("nothing", "graph", "python")
        for index, called in enumerate(parts):  # a function's lines, which others call, were compared as these were
            callers = {one.compared for one in parts if one.compared and set(one.frames) & set(called.frames)}
            if called.how == "compiled" and not called.compared and callers:
                parts[index] = replace(called, compared=min(callers, key=ranks.index))
        return _merged(sorted(parts, key=lambda part: (part.first_line, part.last_line)))

    def _parts_with_ways(self, frames: Sequence[Frame], breaks: Sequence[GraphBreakRow]) -> Iterable[CellPart]:
        parts = self._cell_parts(frames)
        return with_ways(parts, breaks, self._captured_lines(frames), self.source) if breaks else parts

    def _captured_lines(self, frames: Sequence[Frame]) -> dict[int, set[str]]:
        """Return the lines of the cell of which graphs hold something, with the names of their frames."""
        found: dict[int, set[str]] = {}
        for frame in frames:
            for graph in frame.graphs:
                for node in graph.nodes if graph.status == "compiled" else ():
                    if node.line is not None and is_of_cell(node.line, self.file):
                        found.setdefault(node.line.line, set()).add(frame.name)
        return found

    def _is_function(self, lines: PythonLines) -> bool:
        return any(part.function is not None and part.first_line == lines.first_line for part in self._parts.values())


def _rows_of(
    comparisons: Sequence[Comparison], frame: str | None, graph: int | None, rename: Callable[[str], str], against: str
) -> tuple[VerificationRow, ...]:
    return tuple(
        VerificationRow(
            engine="aotlab",
            kind=row.kind,
            subject=rename(row.subject),
            equal=row.equal,
            expected=rename(row.expected),
            actual=rename(row.actual),
            sentence=rename(row.sentence),
            frame=frame,
            graph=graph,
            against=against,
        )
        for row in comparisons
    )


def _against(graph: CapturedGraph | TracedFunction) -> str:
    """Say what a graph was compared with: a function that was traced is compared with itself."""
    return "python" if isinstance(graph, TracedFunction) else "graph"


def _compared(part: _Part) -> str:
    """Say with what all that is compiled of a part was compared: the least that holds for all of its entries."""
    every = [(graph, entry.number) for graph in part.graphs for entry in graph.compiled.entries]
    if not every or any(number not in graph.verified for graph, number in every):
        return "nothing"
    whole = all(_against(graph) == "python" or number in part.as_python for graph, number in every)
    return "python" if whole else "graph"


def _named(part: _Part) -> str:
    if part.function is not None:
        return part.function
    return lines_of(CellPart(first_line=part.first_line, last_line=part.last_line, how="compiled"))


def _differs(graph: CapturedGraph | TracedFunction) -> bool:
    return any(not row.equal for comparisons in graph.verified.values() for row in comparisons)


def _in_order(namespace: dict[str, Any], names: Sequence[str]) -> None:
    """Let new names follow each other in a namespace as their statements do."""
    if len(names) > 1:
        values = [(name, namespace.pop(name)) for name in names]
        namespace.update(values)


class _Progress:
    """What the runner of a cell tells of its progress."""

    def __init__(self, cell: CompiledCell) -> None:
        self._cell = cell

    def begins(self, line: int) -> None:
        """Note that the statement at ``line`` begins."""
        self._cell._finished_lines = max(self._cell._finished_lines, line)


def _python_part(lines: PythonLines, reached: int, captured: Mapping[int, set[str]]) -> CellPart:
    run = lines.first_line <= reached
    inside = [captured[line] for line in range(lines.first_line, lines.last_line + 1) if line in captured]
    if run and inside and lines.reason == "defines a function":  # which compiled lines call
        return CellPart(
            first_line=lines.first_line,
            last_line=lines.last_line,
            how="compiled",
            frames=tuple(dict.fromkeys(sorted(set().union(*inside)))),
        )
    return CellPart(
        first_line=lines.first_line,
        last_line=lines.last_line,
        how="not run" if not run else "eager" if lines.reason.endswith(LEFT_OUT) else "python",
        reason=lines.reason if run else "",
    )


def _merged(parts: Sequence[CellPart]) -> list[CellPart]:
    """Join neighbouring lines that ran in the same way for the same reason."""
    merged: list[CellPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if (
            last is not None
            and not part.frames
            and not last.frames
            and (last.how, last.reason) == (part.how, part.reason)
        ):
            merged[-1] = replace(last, last_line=max(last.last_line, part.last_line))
        else:
            merged.append(part)
    return merged


def _with_names(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Call a graph's outputs what the notebook calls them."""
    if not names:
        return graph
    rename = _renamer(names)

    def output(each: Output) -> Output:
        return replace(
            each,
            name=rename(each.name),
            base=None if each.base is None else rename(each.base),
            views=None if each.views is None else rename(each.views),
            relation=rename(each.relation),
            part_of=rename(each.part_of),
        )

    def result(each: Result) -> Result:
        return replace(each, target=rename(each.target)) if each.kind == "output" else each

    def span(each: Span) -> Span:
        return replace(each, name=rename(each.name), part_of=rename(each.part_of)) if each.role == "output" else each

    def storage(each: Storage) -> Storage:
        return replace(each, spans=tuple([span(one) for one in each.spans]))

    def placeholder(each: Placeholder) -> Placeholder:
        return replace(each, user_name=rename(each.user_name)) if each.user_name.startswith("grad_of_") else each

    return replace(
        graph,
        placeholders=tuple([placeholder(each) for each in graph.placeholders]),
        results=tuple([result(each) for each in graph.results]),
        outputs=tuple([output(each) for each in graph.outputs]),
        storages=tuple([storage(each) for each in graph.storages]),
    )


def _renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    def rename(text: str) -> str:
        if "out[" not in text:
            return text
        return re.sub(r"out\[\d+\]", lambda found: names.get(found[0], found[0]), text)

    return rename


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
