"""The frozen record of a trace, and the small records of which a `Trace` (`aotlab.trace.live_trace`) consists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx

from aotlab.errors import UserLine
from aotlab.ir.metadata import ViewAndMutationMeta
from aotlab.trace.program_calls import Program

#: The defined tangents of a segment's backward. For each tangent of the segment it has False (not defined), True
#: (defined, with the strides of the traced tangent), or the other strides that the tangent has.
Pattern = Sequence[bool | tuple[int, ...]]


def is_full(pattern: Pattern) -> bool:
    """Tell whether all tangents are defined, each with its usual strides."""
    return all(layout is True for layout in pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """The result of a trace: the joint graph (or the forward graph, if nothing requires grad) and its description.

    - ``inputs`` are the names of the placeholders, except those of the tangents.
    - ``outputs`` has a short text for each output of the forward graph.
    - ``random_ops`` are the ops of the forward that draw random numbers.
    - ``operations`` is the number of recorded ops.
    - ``autograd_nodes`` are the nodes that a call adds to the caller's autograd graph.
    - ``bases`` has for each synthetic base the indices of the kept inputs that it replaces. The base of views that is
      itself a kept input is the first of its group.
    - ``sizes`` are the graph inputs that are symbolic sizes. They are the last inputs of the graph.
    - ``static_since`` is the reason why sizes or numbers that should be dynamic are not.
    - ``program`` has the calls of the program; None if nobody records a report.
    """

    module: fx.GraphModule
    metadata: ViewAndMutationMeta
    training: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random_ops: tuple[str, ...]
    operations: int
    autograd_nodes: tuple[AutogradNode, ...] = ()
    bases: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[SizeOf, ...] = ()
    static_since: str = ""
    program: Program | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutogradNode:
    """One node that a call adds to the caller's autograd graph.

    ``makes`` are the names of the tensors that the node computes in the forward. ``gradients`` has, for each gradient
    that its backward returns, the name of the tensor or node to which the gradient flows (None if it flows nowhere).
    ``goes_to`` has each of these names once.
    """

    number: int
    makes: tuple[str, ...]
    goes_to: tuple[str, ...]
    gradients: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class SizeOf:
    """A graph input that is a symbolic size.

    It is the size in dimension ``dim`` of the flat argument ``position``. If ``dim`` is None, that argument is a
    number, and the graph input is this number.
    """

    name: str
    position: int
    dim: int | None


class TraceFailed(Exception):  # noqa: N818  # a signal to the pipeline, which then runs the call eagerly
    """Raised if the traced program raises an exception that is neither a refusal nor an error of aotlab.

    The call then runs eagerly, so that the user sees eager's exception, if eager raises one.
    """


@dataclass(frozen=True, slots=True)
class Write:
    """A write-back: the epilogue copies a new value into the kept input ``index``.

    ``visible`` says whether autograd sees the write, and ``moves_version`` whether it changes the version counter.
    """

    index: int
    visible: bool
    moves_version: bool


SourceKind = Literal["input", "view", "root", "output", "cut"]


@dataclass(frozen=True, slots=True)
class Source:
    """The run-time value that replaces an edge of the traced autograd graph.

    At run time, the gradient of this value flows where the traced gradient flows along the edge. The kinds are:

    - ``"input"``: kept input ``index``, with the history that it has before the call
    - ``"view"``: kept input ``index``, with the history that it has after its base was written or its sizes changed
    - ``"root"``: root ``index``
    - ``"output"``: the user's output ``index``, which is a view
    - ``"cut"``: an extra result of a segment's autograd node, for cut edge ``index``
    """

    kind: SourceKind
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A tensor hook that the function registered, and that each compiled call registers again.

    ``tensor`` is the traced tensor on which it was registered, and ``edge`` is the autograd edge of this tensor at that
    time (a node and the index of its output). ``function`` is the hook, and ``line`` is the user line.
    """

    edge: tuple[Any, int]
    tensor: Tensor
    function: Callable[..., Any]
    line: UserLine | None
