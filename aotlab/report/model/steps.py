"""Records of the steps of a program: the bytes that each call and each step of the epilogue reads, writes and makes."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.errors import UserLine
from aotlab.report.model.tensors import Written


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A tensor that a step reads, writes or makes, with its bytes.

    Attributes
    ----------
    storage
        The number of the tensor's storage in the report. A storage that exists only while the program runs has a
        negative number: -1 is the first of these storages.
    tensor
        The name of the input or output, or the call that made the tensor, as code: ``"x.t()[0]"``. Empty if it is the
        step's own text.
    bytes
        The bytes of the tensor in the storage. For a write, those bytes that are written. None if a size, a stride or
        the offset is symbolic and has no known value.
    nbytes
        The size of the storage; None if the step does not make the storage.
    """

    storage: int
    tensor: str = ""
    bytes: Written | None = None
    nbytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a compiled program, in the order of the program.

    Attributes
    ----------
    kind
        ``"call"`` (the program called a torch function), ``"graph"`` (at its end, the graph itself copies a new value
        into an input), or ``"epilogue"`` (after the graph, the epilogue copies a value into an input, changes the sizes
        of an input, or makes an output again as a view).
    text
        The call or the epilogue's statement, as code: ``"x.t()[0].mul_(2)"``, ``"x.copy_(t_2)"``.
    line
        The user's line that made the call.
    nodes
        For a call, the nodes of the traced graph that were recorded for it. For another step, the node whose value it
        uses.
    reads, writes, makes
        The tensors that the step reads, writes and makes. A call that makes a view reads nothing. All three are empty
        for a call with wrapper subclasses, because its bytes are unknown.
    """

    kind: str
    text: str
    line: UserLine | None = None
    nodes: tuple[str, ...] = ()
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    makes: tuple[Access, ...] = ()
