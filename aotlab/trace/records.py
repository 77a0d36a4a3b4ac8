"""What trace hands on: the frozen record, and the small ones that its live values are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx

from aotlab.errors import UserLine
from aotlab.ir.metadata import ViewAndMutationMeta

#: For each tangent of a segment, whether it is defined; or the strides with which it comes, if they are not the usual.
Pattern = Sequence[bool | tuple[int, ...]]


def is_full(pattern: Pattern) -> bool:
    """Tell whether all tangents are defined, each with its usual strides."""
    return all(way is True for way in pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """The joint graph (or, without anything to differentiate, the forward graph) and what the run showed.

    ``inputs`` names the placeholders that stand for inputs, ``outputs`` says what each forward output is,
    ``random_ops`` lists the ops that draw random numbers. ``autograd_nodes`` are what autograd will see of a call,
    ``bases`` the kept inputs that the graph takes as one synthetic base, base by base, ``sizes`` its last inputs.
    ``static_since`` says why sizes that were to vary, or numbers, do not.
    """

    tracer: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AutogradNode:
    """One autograd node of a call: the results that it ``makes``, and what its ``gradients`` go to, by name."""

    number: int
    makes: tuple[str, ...]
    goes_to: tuple[str, ...]
    gradients: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class SizeOf:
    """A graph input that is a size: of the flat argument ``position`` in ``dim``, or the number there (None)."""

    name: str
    position: int
    dim: int | None


class TraceFailed(Exception):  # noqa: N818  # a signal to the pipeline, which then lets eager speak
    """The traced program raised something that is neither a refusal nor aotlab's own."""


@dataclass(frozen=True, slots=True)
class Write:
    """A value that the epilogue writes into the caller's tensor, the kept input ``index``.

    ``visible`` says that autograd sees the write; ``counts`` that it moves the version counter.
    """

    index: int
    visible: bool
    counts: bool


SourceKind = Literal["input", "root", "output", "cut"]


@dataclass(frozen=True, slots=True)
class Source:
    """What stands at run time for an edge of the traced autograd graph.

    ``"input"``: the kept input ``index``; ``"root"``: the differentiable forward output ``index``; ``"output"``: the
    user's output ``index``, a view; ``"cut"``: the cut edge ``index``.
    """

    kind: SourceKind
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A hook to be registered by each call: where in the autograd graph it hangs, and on which traced tensor.

    ``edge`` is a node and the number of its output.
    """

    edge: tuple[Any, int]
    tensor: Tensor
    function: Callable[..., Any]
    line: UserLine | None
