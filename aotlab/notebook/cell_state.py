"""The state of a compiled cell: its parts, and its present run.

A *part* of a cell is a region or a function that the cell defines. `CellCompiler` and the callables that run the parts
change the state. `CellReporter` reads the state to make the report.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aotlab.cache import next_number
from aotlab.notebook.cell import CellCode
from aotlab.notebook.cell_recording import CellRecording
from aotlab.notebook.eager_run import EagerRun
from aotlab.notebook.graphs import CapturedGraph
from aotlab.notebook.options import Options
from aotlab.notebook.stock_graph import StockGraph
from aotlab.notebook.traced import TracedFunction
from aotlab.report.model import CellPart, Input, Node
from aotlab.upstream import Observation
from aotlab.verification import Comparison


@dataclass(slots=True, kw_only=True)
class Limit:
    """A recompile limit of Dynamo that a function has reached.

    ``name`` is the name of the limit in ``torch._dynamo.config``, and ``most`` is its value. ``several`` tells whether
    more calls may have run eagerly than the report counts.
    """

    name: str
    most: int
    several: bool = False


@dataclass(slots=True, kw_only=True)
class Trial:
    """One call of a part. If an entry is compiled during the call, the call is compared with the part's Python code.

    Attributes
    ----------
    function, args, kwargs
        The Python code of the part, and the arguments of the call.
    bound, values
        The variables that the code binds, and their values before the call.
    calls_before
        The number of calls that each graph had served before this call, by the graph's `id`.
    random, grad_mode
        The state of torch's random number generator on the CPU, and grad mode, before the call.
    began, eager_run
        Whether a run of the Python code on copies was tried, and the run. The run is None if running the code twice
        could be observed.
    entries
        The numbers of the entries that were compiled during the call.
    """

    function: types.FunctionType
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    bound: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    calls_before: Mapping[int, int] = field(default_factory=dict)
    random: Tensor = field(default_factory=torch.get_rng_state)
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    began: bool = False
    eager_run: EagerRun | None = None
    entries: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class PartState:
    """The state, in the present run, of a region or of a function that the cell defines.

    Attributes
    ----------
    first_line, last_line
        The lines of the part.
    function
        The name of the function. It is None for a region.
    statements
        The first and last line of each statement of a region, if it has several.
    calls
        The number of calls in this run.
    off
        Whether aotlab was switched off at the latest call.
    mended
        Whether the part has raised and then got a new code object, so that Dynamo captures the part again.
    errors
        How often the part has got a new code object because it raised.
    interrupted
        Whether a call was interrupted.
    replaced
        Whether the statements of the region run one by one, because aotlab refused the whole region.
    graphs
        The graphs that Dynamo captured for the part, or the function that the direct frontend traces.
    reasons
        The reasons why Dynamo or aotlab did not compile the part, or did not compile all of it.
    limits
        The recompile limits that were reached, by Dynamo's number for the code object.
    trial
        The call that is running now.
    compared
        The comparisons with the part's Python code, for each compared call.
    as_python
        The numbers of the entries whose results were equal to the Python code's results.
    differs
        A sentence that says how the compiled form's results differ from those of the Python code. If this text is not
        empty, all later calls of the part run eagerly.
    in_eager
        Whether a call has run eagerly because of ``differs``, or while aotlab was switched off.
    """

    first_line: int
    last_line: int
    function: str | None = None
    statements: tuple[tuple[int, int], ...] = ()
    calls: int = 0
    off: bool = False
    mended: bool = False
    errors: int = 0
    interrupted: bool = False
    replaced: bool = False
    graphs: list[CapturedGraph | TracedFunction] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)
    limits: dict[int, Limit] = field(default_factory=dict)
    trial: Trial | None = None
    compared: list[tuple[Comparison, ...]] = field(default_factory=list)
    as_python: set[int] = field(default_factory=set)
    differs: str = ""
    in_eager: bool = False

    @property
    def title(self) -> str:
        """The name of the part in sentences: the name of its function, or its lines."""
        if self.function is not None:
            return self.function
        return CellPart(first_line=self.first_line, last_line=self.last_line, how="compiled").lines

    def calls_by_graph(self) -> dict[int, int]:
        """Return how many calls each graph has served, by the graph's `id`."""
        return {id(each): each.served_calls for each in self.graphs}

    def take_back(self, calls_before: Mapping[int, int]) -> bool:
        """Undo the writes of the graphs that ran since a snapshot; return whether all of them were undone.

        ``calls_before`` is the snapshot: the result of `calls_by_graph`, with the number of calls of each graph. Writes
        are undone in reverse order, up to the first graph whose writes cannot be undone.
        """
        graphs = [each for each in self.graphs if isinstance(each, CapturedGraph)]
        active = [each for each in graphs if each.served_calls > calls_before.get(id(each), 0)]
        return all(not each.written() or each.take_back() for each in reversed(active))

    def settle(self) -> None:
        """Drop the values that were kept to undo writes of graphs, because the code around the graphs has finished."""
        for graph in self.graphs:
            if isinstance(graph, CapturedGraph):
                graph.settle()


@dataclass(slots=True, kw_only=True)
class RunState:
    """The state of one run of the cell. The code that runs the cell changes it, and the report reads it.

    Attributes
    ----------
    execution_count, cell_id
        The execution number that the cell's prompt shows, and Jupyter's identifier of the cell.
    error, error_line
        The error that ended the run, in one line, and the cell's line that raised it.
    stopped
        When and in which activity the user interrupted the run, in words.
    notes
        Sentences for the report.
    outside
        The notebook's tensors that were written outside of the compiled graphs.
    finished_lines
        The last line of the latest statement that has begun. Statements after it have not run.
    """

    execution_count: int | None = None
    cell_id: str | None = None
    error: str | None = None
    error_line: int | None = None
    stopped: str = ""
    notes: dict[str, None] = field(default_factory=dict)
    outside: tuple[Input, ...] = ()
    finished_lines: int = 0

    def begins(self, line: int) -> None:
        """Record that a statement begins to run. ``line`` is its last line."""
        self.finished_lines = max(self.finished_lines, line)


@dataclass(slots=True, kw_only=True)
class CellState:
    """Everything that is known about a compiled cell.

    Attributes
    ----------
    source
        The cell's text, including the magic's line.
    code
        The split cell.
    file
        The file name of the cell's code.
    options, options_text
        The options of the magic, and the options as the user wrote them.
    recording
        The recorded events.
    parts
        The state of each part of the cell. The key of a function is its name, and the key of a region is its number. If
        aotlab refuses a region of several statements, each statement becomes a separate region, called a *piece*. The
        key of a piece is a pair: the number of the refused region, and the index of the statement in this region.
    families
        Maps Dynamo's number for a code object to a pair: the number that identifies this code object in events, and its
        name in the report. All graphs that Dynamo captures from one code object have the same number and name.
    observation
        The records of stock `torch.compile`, if it compiles graphs of the cell.
    twins, stock_families
        With ``--engine both``: the graphs that stock `torch.compile` compiled for comparison, and their numbers and
        names, as in ``families``.
    traced_lines
        The nodes of each traced graph and the cell's lines that they come from, by the entry's number.
    run
        The state of the present run.
    """

    source: str
    code: CellCode
    file: str
    options: Options
    options_text: str
    recording: CellRecording
    parts: dict[object, PartState] = field(default_factory=dict)
    families: dict[int, tuple[int, str]] = field(default_factory=dict)
    observation: Observation | None = None
    twins: list[StockGraph] = field(default_factory=list)
    stock_families: dict[int, tuple[int, str]] = field(default_factory=dict)
    traced_lines: dict[int, tuple[tuple[Node, ...], set[int]]] = field(default_factory=dict)
    run: RunState = field(default_factory=RunState)

    def graphs(self) -> list[CapturedGraph | TracedFunction]:
        """Return the captured graphs and traced functions of all parts."""
        return [graph for part in list(self.parts.values()) for graph in list(part.graphs)]

    def stock_graphs(self) -> dict[int, StockGraph]:
        """Return the graphs that stock `torch.compile` compiled, by the number of their entry."""
        every = [*self.graphs(), *self.twins] if self.observation is not None else []
        return {each.compiled.entry_number: each for each in every if isinstance(each, StockGraph)}

    def family(self, code: int | None, title: str, *, stock: bool = False) -> tuple[int, str]:
        """Return the number in events and the name in the report for the graphs of one code object.

        ``code`` is Dynamo's number for the code object. A new code object gets the name ``title``, with a number added
        if another code object has this name. ``stock`` is true for the twins of the graphs.
        """
        families = self.stock_families if stock else self.families
        family = families.get(code) if code is not None else None
        if family is None:
            family = (next_number(), _unique(title, families))
            if code is not None:
                families[code] = family
            self.recording.numbers.add(family[0])
        return family


def _unique(title: str, families: Mapping[int, tuple[int, str]]) -> str:
    taken = {name for _number, name in families.values()}
    count, name = 1, title
    while name in taken:
        count += 1
        name = f"{title} ({count})"
    return name
