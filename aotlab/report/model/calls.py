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
        How long the call took. If the call waited for a compilation, this includes the compilation.
    graph
        The index in its frame of the graph that served the call; None if the call ran eagerly.
    compiled
        Whether the call ran compiled code.
    cold
        Whether the call waited for a compilation.
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
        The number of calls, the number of calls that ran compiled code, and the number of calls that ran eagerly.
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
        The index in its frame of the graph that was not compiled.
    error
        The name of the exception's class.
    reason
        The key under which refusals are counted, for example ``"RandomOp"``.
    case
        The id of the case in the catalogue of eager fallbacks, for `aotlab.explain`; empty if the catalogue has no such
        case.
    message
        The message of the exception.
    argument
        The name of the argument that caused the refusal; None if no argument did.
    line
        The user's line that caused the refusal; None if it is unknown.
    outcome
        What happened to the call: ``"raised"`` or ``"ran eagerly"``.
    at_ns
        When the compilation was refused or failed, counted from the beginning of the recording.
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
        The number of graphs and the number of refusals.
    compile_ns
        The time that compiling the graphs took.
    recompiles
        The number of graphs that were compiled because no earlier graph accepted the call.
    served
        The number of graphs that were compiled in this run of the recorded code, or compiled earlier and used in this
        run.
    reused
        The number of graphs in ``served`` that were compiled in an earlier run.
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
        The function's name, unique in the report.
    function
        The function's qualified name.
    engine
        The engine that compiled the graphs: ``"aotlab"``, or ``"upstream"`` for stock `torch.compile`.
    line
        The line where the function is defined. For code that Dynamo captured, the line where the first capture ended.
    graphs, refusals, calls
        The compiled entries, the failed compilations, and the calls of the function.
    limit
        The name of the Dynamo limit that the function has reached, and how to avoid reaching it; empty if the function
        has reached no limit. Past the limit, a call that none of the graphs accepts runs eagerly.
    counts
        The counts of the frame before the report was cut. They are computed when the report is prepared for a page or a
        notebook's output, and are None until then.
    """

    name: str
    function: str
    engine: str = "aotlab"
    line: UserLine | None = None
    graphs: tuple[Graph, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    calls: Calls = Calls()
    limit: str = ""
    counts: FrameCounts | None = None
