"""Stage 3, synthetic bases: inputs that share memory, of which one is mutated.

    buffer = torch.zeros(4)
    f(buffer[:3], buffer[1:])        # and f writes to its first argument

The graph must see the write through the second argument too. So the memory that both share is passed as one input, a
*synthetic base*, and both arguments are windows of it inside the graph::

    forward(base):                   # four floats
        a = base[0:3]; b = base[1:4]

This stage finds the groups, by byte intervals; and views of one tensor that requires grad, to which a write gives a new
history. The windows are made in the trace (`aotlab.trace.entering`); if none is written, or where no base can be made,
they are inputs of their own. A base is made at each call, and the epilogue writes the new values into the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.ir.extents import byte_interval
from aotlab.ir.metadata import InputAliasInfo


@dataclass(kw_only=True, eq=False)
class Base:
    """The memory that inputs share, the ``members`` being its windows; ``fake`` and ``wrapper`` are its traced form.

    It begins at the first member's address plus ``shift`` (zero or negative), and has ``nbytes``, seen as ``dtype``.
    """

    members: tuple[int, ...]
    shift: int
    nbytes: int
    dtype: torch.dtype
    fake: Tensor | None = None
    wrapper: Tensor | None = None

    @property
    def count(self) -> int:
        """How many elements it has."""
        return self.nbytes // self.dtype.itemsize


def plan(members: Sequence[int], tensors: Sequence[Tensor]) -> Base:
    """Decide what memory a base for ``tensors`` covers."""
    spans = [byte_interval(t) for t in tensors]
    start, stop = min(begin for begin, _ in spans), max(end for _, end in spans)
    dtype = tensors[0].dtype
    nbytes = stop - start - (stop - start) % dtype.itemsize
    return Base(members=tuple(members), shift=start - internals.address_of(tensors[0]), nbytes=nbytes, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two kept inputs (positions in `DedupeRecord.kept`) whose byte intervals share ``bytes`` bytes."""

    first: int
    second: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticBasesRecord:
    """The overlaps among the inputs, and the groups (again of kept inputs) that become one base if one is written."""

    overlaps: tuple[Overlap, ...]
    bases: tuple[tuple[int, ...], ...] = ()


def run(call: Call, dedupe: DedupeRecord) -> tuple[SyntheticBasesRecord, list[Base]]:
    """Find the inputs that share memory or a history."""
    index = {position: k for k, position in enumerate(dedupe.kept)}
    overlaps, links = [], []
    for a, b, _ in call.state.overlapping:
        (start, end), (other_start, other_end) = byte_interval(call.values[a]), byte_interval(call.values[b])
        shared = min(end, other_end) - max(start, other_start)
        if shared > 0:
            overlaps.append(Overlap(first=index[a], second=index[b], bytes=shared))
        links.append((index[a], index[b]))
    groups = _groups(links)
    bases = [plan(members, [call.values[dedupe.kept[k]] for k in members]) for members in groups]
    return SyntheticBasesRecord(overlaps=tuple(overlaps), bases=tuple(map(tuple, groups))), bases


def _groups(links: list[tuple[int, int]]) -> list[list[int]]:
    group: dict[int, set[int]] = {}
    for a, b in links:
        merged = group.get(a, {a}) | group.get(b, {b})
        for k in merged:
            group[k] = merged
    return [sorted(members) for members in {id(members): members for members in group.values()}.values()]


def are_unchanged(groups: Sequence[Base], infos: Sequence[InputAliasInfo]) -> bool:
    """Tell whether the function left the members of all groups as they were, so that it is nothing that they share."""
    members = [infos[k] for base in groups for k in base.members]
    return not any(i.moves_version or i.mutates_data or i.mutates_metadata for i in members)
