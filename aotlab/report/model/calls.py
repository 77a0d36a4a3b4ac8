"""Records of a function's calls and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.errors import UserLine
from aotlab.report.model.graphs import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a frame.

    Attributes
    ----------
    at_ns
        When the call ended, counted from the beginning of the recording.
    duration_ns
        How long it took. If the call compiled, this includes the compilation.
    graph
        The index of the graph that served the call; None if the call ran eagerly.
    compiled
        Whether it ran compiled code.
    cold
        Whether it waited for a compilation.
    """

    at_ns: int
    duration_ns: int
    graph: int | None
    compiled: bool
    cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of one frame during the recording.

    Attributes
    ----------
    total, compiled, eager
        The number of calls, of those that ran compiled code, and of those that ran eagerly.
    recent
        The last calls, at most a thousand, oldest first.
    """

    total: int = 0
    compiled: int = 0
    eager: int = 0
    recent: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A compilation that failed or was refused.

    Attributes
    ----------
    graph
        The index of the graph in its frame.
    error
        The class of the exception.
    reason
        The key under which refusals are counted, for example ``"RandomOp"``.
    case
        The id of the row of the catalogue of eager fallbacks, for `aotlab.explain`; empty if there is no row.
    message
        The message of the exception.
    argument
        The name of the argument that caused the refusal; None if no argument did.
    line
        The user's line that caused the refusal; None if it is unknown.
    outcome
        What happened to the call: ``"raised"`` or ``"ran eagerly"``.
    at_ns
        When it happened, counted from the beginning of the recording.
    """

    graph: int
    error: str
    reason: str
    case: str = ""
    message: str
    argument: str | None = None
    line: UserLine | None = None
    outcome: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCounts:
    """The counts of a frame before the report was cut.

    Attributes
    ----------
    graphs, refusals
        The number of graphs and of refusals.
    compile_ns
        The time that compiling the graphs took.
    recompiles, served, reused
        The number of graphs that were compiled because no earlier graph accepted the call, of graphs that this run
        compiled or used, and of graphs among the latter that an earlier run compiled.
    """

    graphs: int = 0
    refusals: int = 0
    compile_ns: int = 0
    recompiles: int = 0
    served: int = 0
    reused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One function that was compiled or called.

    Attributes
    ----------
    name
        Its name, unique in the report.
    function
        Its qualified name.
    line
        Where the function is defined. For code that Dynamo captured, it is the line where the first capture ended.
    graphs, refusals, calls
        See the records of those names.
    limit
        The Dynamo limit that the function has reached, and how to avoid it; empty if it has reached none. Past the
        limit, a call that none of the graphs accepts runs eagerly.
    counts
        The counts of the frame before anything was cut; None in a report that was only recorded, not shown.
    """

    name: str
    function: str
    line: UserLine | None = None
    graphs: tuple[Graph, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    calls: Calls = Calls()
    limit: str = ""
    counts: FrameCounts | None = None
