"""Make the report of a compiled cell from its recorded events and its state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab.frontends.tensor_names import Named, named_tensors
from aotlab.ir.metadata import OutputType
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.notebook.cell_parts import against, cell_parts
from aotlab.notebook.cell_state import CellState
from aotlab.notebook.graphs import CapturedGraph
from aotlab.notebook.stock_graph import StockGraph
from aotlab.notebook.traced import TracedFunction
from aotlab.notebook.traced_region import TracedRegion
from aotlab.report import Cell, Report, VerificationRow
from aotlab.report.engines import engine_rows
from aotlab.report.groups import input_groups
from aotlab.report.model import Frame, Graph, Output, Placeholder, Result, Span, Step, Storage, TimelineRow, TimingRow
from aotlab.report.recompiles import limit_words
from aotlab.report.rows import tensor_info
from aotlab.upstream import graph_of, numbered, with_indices
from aotlab.verification import Comparison

#: The ``process`` of the phases that stock `torch.compile` logged in the cell's own process.
STOCK = "stock torch.compile"


#: An input or output in texts: ``inputs[0]``, ``out[0]``, or ``out[0]['y']`` for a variable of a traced region.
_PLACE = re.compile(r"((?:out|inputs)\[\d+\])((?:\['\w+'\])?)")


class CellReporter:
    """Makes the reports of a cell, with the notebook's names for the results of its graphs.

    Parameters
    ----------
    state
        The state of the cell.
    """

    def __init__(self, state: CellState) -> None:
        self._state = state
        self._result_names: dict[int, dict[str, str]] = {}
        self._named_inputs: dict[int, tuple[Output, ...]] = {}
        # The graphs of stock `torch.compile`, by the entry's number. Reading a graph from its records takes long, so it
        # is read again only if the numbers of records and phases, or the graph's index, have changed.
        self._stock_graphs: dict[int, tuple[tuple[int, ...], Graph]] = {}
        # The rows of each entry, by the entry's number, and the facts that the rows contain: the frame, the graph's
        # index and the names of the results. A cell can have thousands of rows, so the rows of an entry are made again
        # only if one of these facts has changed.
        self._verification_rows: dict[int, tuple[tuple[object, ...], tuple[VerificationRow, ...]]] = {}

    def name_results(self, namespace: Mapping[str, Any]) -> None:
        """Look up and store the notebook's names for the results of all graphs, after a run of the cell."""
        present = named_tensors(namespace)
        for _name, tensor in present.values():
            internals.unmark_static(tensor)
        for graph in (*self._state.graphs(), *self._state.twins):
            for entry, names in graph.result_names(present).items():
                if names:
                    self._result_names[entry] = names
                self._named_inputs[entry] = self._inputs_bound_again(graph, present, namespace)

    def _inputs_bound_again(
        self, graph: CapturedGraph | TracedFunction, present: Named, namespace: Mapping[str, Any]
    ) -> tuple[Output, ...]:
        """Return a row of an output for each input of a graph to which the cell has bound one more name.

        For ``y = x``, the report lists ``y`` as an output that is the input ``x`` itself. ``present`` has the
        notebook's tensors and their names, by `id`.
        """
        inputs = graph.inputs() or ()
        names = {id(each): present[id(each)][0] for each in inputs if id(each) in present}
        bound = {name: namespace.get(name) for name in self._state.code.bound}
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
                for name, value in bound.items()
                if isinstance(value, Tensor) and names.get(id(value), name) != name
            ]
        )

    def running(self) -> Report | None:
        """Return a small report with the present activity of the cell, without its graphs; None if it does not run."""
        state = self._state
        cell = Cell(source=state.source, identifier=state.run.cell_id, execution_count=state.run.execution_count)
        report = state.recording.head()
        running = state.recording.progress.running(state.recording.ended_activities())
        return None if running is None else replace(report, cell=cell, running=running)

    def report(self, timings: tuple[TimingRow, ...]) -> Report:
        """Return the report of all events so far."""
        state, run = self._state, self._state.run
        base = state.recording.report()
        graphs = state.graphs()
        # If a region was refused as a whole and then ran piece by piece, the report shows the pieces. But a graph
        # that gave wrong results is always shown.
        replaced = [graph for part in state.parts.values() if part.replaced for graph in part.graphs]
        numbers = {each.compiled.number for each in replaced if not _differs(each)}
        stock = state.stock_graphs()
        frames = tuple([self._frame(frame, stock) for frame in state.recording.frames_without(base, numbers)])
        ours = [frame for frame in frames if frame.engine == "aotlab"]
        used = [each.number for frame in ours for graph in frame.graphs for each in graph.storages]
        theirs = [frame for frame in frames if frame.engine != "aotlab"]
        frames = (*ours, *numbered(theirs, first=max(used, default=-1) + 1))
        rows: list[VerificationRow] = []
        notes = dict.fromkeys(base.notes) | run.notes
        serving = "upstream" if state.options.engine == "upstream" else "aotlab"
        for part in list(state.parts.values()):
            name = next((graph.name for graph in part.graphs), None)
            for comparisons in () if part.replaced else part.compared:
                rows += _verification_rows(comparisons, name, None, str, "python", serving)
        for graph in (*graphs, *state.twins):
            rows += self._rows_of(graph, frames)
            notes |= {f"{graph.name} was not compared with eager: {each}": None for each in graph.unverified.values()}
            if graph.surprising:
                notes[
                    f"{graph.name}: the compiled code raised {graph.failure}, but eager did not. Eager's result is used"
                ] = None
        running = state.recording.progress.running(state.recording.ended_activities())
        outside, groups = input_groups(run.outside)
        cell = Cell(
            source=state.source,
            identifier=run.cell_id,
            execution_count=run.execution_count,
            options=state.options_text,
            kind="definitions" if state.code.defines_only else "statements",
            error=run.error,
            error_line=run.error_line,
            stopped=run.stopped,
            parts=tuple(cell_parts(state, frames)) if running is None else (),  # unknown until the cell ends
            mutated_outside=outside,
            groups=groups,
        )
        report = replace(base, frames=frames, cell=cell, running=running, timing_rows=timings, notes=tuple(notes))
        report = report.with_verification(rows)
        return replace(
            report, engine_rows=engine_rows(report), timeline_rows=tuple(self._timeline(base, frames, stock))
        )

    def _timeline(
        self, base: Report, frames: Sequence[Frame], stock: Mapping[int, StockGraph]
    ) -> Iterator[TimelineRow]:
        """Return the time line of the run, and the phases of the compilations by stock `torch.compile`."""
        state = self._state
        entries = {(frame.name, graph.index): graph.entry for frame in base.frames for graph in frame.graphs}
        places = {graph.entry: (frame.name, graph.index) for frame in frames for graph in frame.graphs}
        for row in base.timeline_rows:
            entry = entries.get((row.frame or "", row.graph or 0))
            frame, graph = (None, None) if entry is None else places.get(entry, (None, None))
            yield replace(row, frame=frame, graph=graph)
        if state.observation is not None:
            ids = {entry: each.compile_id for entry, each in stock.items()}
            names = {key: places[entry] for entry, key in ids.items() if key is not None and entry in places}
            begin = state.recording.began_at()
            for row in state.observation.timeline_of(names):
                yield replace(row, start_ns=row.start_ns - begin, process=STOCK)

    def _frame(self, frame: Frame, stock: Mapping[int, StockGraph]) -> Frame:
        frame = self._of_upstream(frame, stock) if any(each.entry in stock for each in frame.graphs) else frame
        # A region's names are known before its first run ends. Then they are shown while it is compared with eager.
        regions = {each.name: each.names for each in self._state.graphs() if isinstance(each, TracedRegion)}
        names = regions.get(frame.name, {})
        graphs = [_with_names(each, self._result_names.get(each.entry, names)) for each in frame.graphs]
        graphs = [replace(g, outputs=(*g.outputs, *self._named_inputs.get(g.entry, ()))) for g in graphs]
        parts, families = self._state.parts.values(), self._state.families
        limits = {families[code][1]: each for part in parts for code, each in part.limits.items()}
        limit = limits.get(frame.name)
        words = "" if limit is None else limit_words(limit.name, limit.most, graphs, several=limit.several)
        return replace(frame, graphs=tuple(graphs), limit=words)

    def _of_upstream(self, frame: Frame, stock: Mapping[int, StockGraph]) -> Frame:
        """Add the results of stock `torch.compile`, which its records contain, to the graphs of a frame."""
        observation = self._state.observation
        compilations = {} if observation is None else observation.compilations()
        ids = [stock[each.entry].compile_id for each in frame.graphs]
        indices: dict[int | None, int] = {}
        indices |= {key.number: each.index for key, each in zip(ids, frame.graphs, strict=True) if key is not None}
        graphs = []
        for key, graph in zip(ids, frame.graphs, strict=True):
            compilation = compilations.get(key) if key is not None else None
            if compilation is not None:
                made_of = len(compilation.records), len(compilation.phases), graph.index
                if self._stock_graphs.get(graph.entry, ((), None))[0] != made_of:
                    self._stock_graphs[graph.entry] = made_of, graph_of(compilation, graph.index, graph.entry)
                found = with_indices(self._stock_graphs[graph.entry][1], indices)
                graph = replace(
                    _named(found, stock[graph.entry].input_name),
                    status=graph.status,
                    backend=graph.backend,
                    at_ns=graph.at_ns,
                    duration_ns=graph.duration_ns,
                    calls=graph.calls,
                    reused=graph.reused,
                )
            graphs.append(graph)
        return replace(frame, engine="upstream", graphs=tuple(graphs))

    def _rows_of(self, graph: CapturedGraph | TracedFunction, frames: Sequence[Frame]) -> Iterator[VerificationRow]:
        indices = {each.entry: (frame.name, each.index) for frame in frames for each in frame.graphs}
        for entry, comparisons in graph.verified.items():
            name, index = indices.get(entry, (graph.name, None))
            names = self._result_names.get(entry, {})
            cached = self._verification_rows.get(entry)
            if cached is None or cached[0] != (name, index, names):
                engine = "upstream" if isinstance(graph, StockGraph) else "aotlab"
                rows = _verification_rows(comparisons, name, index, _renamer(names), against(graph), engine)
                cached = (name, index, dict(names)), rows
                self._verification_rows[entry] = cached
            yield from cached[1]


def _named(graph: Graph, rename: Callable[[str], str]) -> Graph:
    """Give the inputs of a graph of stock `torch.compile` the notebook's names."""
    names = {row.name: rename(row.name) for row in graph.inputs}

    def output(each: Output) -> Output:
        name = names.get(each.base or "", each.base)
        return replace(each, base=name, relation=each.relation.replace(f"input {each.base}", f"input {name}"))

    def storage(each: Storage) -> Storage:
        spans = [replace(one, name=names.get(one.name, one.name)) if one.role == "input" else one for one in each.spans]
        return replace(each, spans=tuple(spans), owner=names.get(each.owner, each.owner))

    return replace(
        graph,
        inputs=tuple(
            [
                replace(each, name=names[each.name], overlaps=tuple([names.get(one, one) for one in each.overlaps]))
                for each in graph.inputs
            ]
        ),
        placeholders=tuple(
            [replace(each, user_name=names.get(each.user_name, each.user_name)) for each in graph.placeholders]
        ),
        outputs=tuple([output(each) for each in graph.outputs]),
        storages=tuple(map(storage, graph.storages)),
    )


def _verification_rows(
    comparisons: Sequence[Comparison],
    frame: str | None,
    graph: int | None,
    rename: Callable[[str], str],
    against: str,
    engine: str,
) -> tuple[VerificationRow, ...]:
    return tuple(
        VerificationRow(
            engine=engine,
            kind=row.kind,
            subject=rename(row.subject),
            equal=row.equal,
            expected=rename(row.expected),
            actual=rename(row.actual),
            sentence=rename(row.sentence),
            frame=frame,
            graph=graph,
            against=against,
            tolerance=row.tolerance,
            absolute=row.absolute,
            relative=row.relative,
        )
        for row in comparisons
    )


def _differs(graph: CapturedGraph | TracedFunction) -> bool:
    return any(not row.equal for comparisons in graph.verified.values() for row in comparisons)


def _with_names(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Rename a graph's outputs. ``names`` maps the names in the report (``out[0]``) to the notebook's names."""
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

    def step(each: Step) -> Step:
        makes = tuple([replace(one, tensor=rename(one.tensor)) for one in each.makes])
        return each if each.kind == "call" else replace(each, text=rename(each.text), makes=makes)

    def placeholder(each: Placeholder) -> Placeholder:
        return replace(each, user_name=rename(each.user_name)) if each.user_name.startswith("grad_of_") else each

    return replace(
        graph,
        placeholders=tuple([placeholder(each) for each in graph.placeholders]),
        results=tuple([result(each) for each in graph.results]),
        outputs=tuple([output(each) for each in graph.outputs]),
        storages=tuple([storage(each) for each in graph.storages]),
        steps=tuple([step(each) for each in graph.steps]),
    )


def _renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    def rename(text: str) -> str:
        if "out[" not in text and "inputs[" not in text:
            return text
        return _PLACE.sub(lambda match: names.get(match[0]) or names.get(match[1], match[1]) + match[2], text)

    return rename
