"""Records of the memory over time: the modelled lifetimes of a graph's tensors, and measured curves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from aotlab.errors import UserLine

#: The kinds of memory, in the order in which pictures stack them.
MEMORY_KINDS = ("parameters", "inputs", "outputs", "saved", "temporary", "gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A storage in a graph's memory; `Memory.tensors` makes these rows.

    Attributes
    ----------
    name
        The node that allocates the storage.
    kind
        One of `MEMORY_KINDS`.
    nbytes
        The size of the storage in bytes.
    begin, end
        The first and the last step at which the storage is alive.
    line, module
        The user's line and the module that allocated it; None and empty if they are unknown.
    """

    name: str
    kind: str
    nbytes: int
    begin: int
    end: int
    line: UserLine | None
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of one training step of a graph (or of one call, without a backward), modelled from its ops.

    The first step is the begin of the forward. Then there is a step for each op that allocates memory, a step for the
    end of the forward, a step for the begin of the backward, a step for each op of the backward that allocates memory,
    and a step for the end of the backward. At a step, the inputs of its op are still alive.

    The storages are stored in columns, because a report has many of them: item ``i`` of each of the tuples ``names``,
    ``kinds``, ``nbytes``, ``begins``, ``ends``, ``lines`` and ``modules`` describes storage ``i``. `tensors` returns
    them as rows.

    Attributes
    ----------
    steps, forward_steps
        The number of steps, and the number of steps of the forward.
    names, kinds, nbytes
        For each storage: the node that allocates it, its kind, and its size in bytes. The kind is ``"parameters"``
        (with buffers), ``"inputs"``, ``"outputs"`` (the forward allocates it for an output, which the caller keeps),
        ``"saved"`` (for the backward), ``"temporary"``, or ``"gradients"`` (including the incoming gradients).
    begins, ends
        For each storage: the first and the last step at which it is alive.
    lines, modules
        For each storage: the index of its user line in ``line_table`` (-1 if the line is unknown), and the index of its
        module in ``module_table``.
    line_table, module_table
        The lines and the modules. An empty module means that no module ran the op.
    unknown
        The number of storages whose size is unknown, because it depends on symbolic sizes without an example value.
        They count as 0 bytes.
    from_code
        Whether the model follows the buffers in the code that the backend generated, and not the ops of the graph.
    """

    steps: int = 0
    forward_steps: int = 0
    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    nbytes: tuple[int, ...] = ()
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()
    modules: tuple[int, ...] = ()
    line_table: tuple[UserLine, ...] = ()
    module_table: tuple[str, ...] = ()
    unknown: int = 0
    from_code: bool = False

    def tensors(self) -> Iterator[LiveTensor]:
        """Yield the storages as rows."""
        columns = self.names, self.kinds, self.nbytes, self.begins, self.ends, self.lines, self.modules
        for name, kind, nbytes, begin, end, line, module in zip(*columns, strict=True):
            yield LiveTensor(
                name=name,
                kind=kind,
                nbytes=nbytes,
                begin=begin,
                end=end,
                line=self.line_table[line] if line >= 0 else None,
                module=self.module_table[module],
            )

    def curves(self) -> dict[str, list[int]]:
        """Return for each kind of memory the bytes that are alive at each step."""
        changes = {kind: [0] * (self.steps + 1) for kind in MEMORY_KINDS}
        for kind, nbytes, begin, end in zip(self.kinds, self.nbytes, self.begins, self.ends, strict=True):
            changes[kind][begin] += nbytes
            changes[kind][end + 1] -= nbytes
        return {kind: list(accumulate(each[:-1])) for kind, each in changes.items()}

    def totals(self) -> list[int]:
        """Return the sum of the bytes of all kinds at each step."""
        return [sum(each) for each in zip(*self.curves().values(), strict=True)]

    @property
    def peak(self) -> int:
        """The first step with the most bytes."""
        totals = self.totals()
        return totals.index(max(totals))

    @property
    def base_bytes(self) -> int:
        """The bytes that the caller holds during the whole step: parameters and inputs."""
        return sum(n for n, kind in zip(self.nbytes, self.kinds, strict=True) if kind in ("parameters", "inputs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """The measured memory of one training step, or of one call without a backward.

    Attributes
    ----------
    engine
        ``"eager"``, ``"upstream"`` (stock ``torch.compile``) or ``"aotlab"``.
    device
        The device whose memory was measured.
    forward, backward
        The bytes in use after each op, without the memory that was in use before the call (parameters and inputs), and
        without the workspace that an op frees before it ends. Of a long measurement, some ops are left out, but never
        the peak.
    frame, graph
        The frame and the graph that were measured, if they are in this report.
    """

    engine: str
    device: str = "cpu"
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    frame: str | None = None
    graph: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes."""
        return max((*self.forward, *self.backward), default=0)
