"""Stage 3, synthetic bases: inputs that share memory, if one of them is mutated.

    buffer = torch.zeros(4)
    f(buffer[:3], buffer[1:])        # and f writes to its first argument

The graph must see the write through the second argument too. So the graph takes the shared memory as one input, a
*synthetic base*, and makes both arguments as windows of it::

    forward(base):                   # four floats
        a = base[0:3]; b = base[1:4]

This stage groups inputs whose byte intervals overlap. It also groups views of one tensor that requires grad, because a
write to one of them gives all of them a new autograd history. The inputs of a group are its *members*. The trace makes
the windows (`aotlab.trace.entering`). If no member is written, or if no base can be made, the members stay separate
inputs. Otherwise each compiled call makes the base from the caller's tensors, and the epilogue copies the new values
into the written members.
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
    """The memory that several inputs share, as a 1-d tensor of ``dtype``.

    ``members`` are the indices of the kept inputs that become windows of the base. The memory starts at the first
    member's address plus ``shift`` (bytes, zero or negative), and has ``nbytes`` bytes. The trace sets ``fake`` and
    ``traced``: the fake tensor of the base, and the traced tensor around it.
    """

    members: tuple[int, ...]
    shift: int
    nbytes: int
    dtype: torch.dtype
    fake: Tensor | None = None
    traced: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of elements of the base."""
        return self.nbytes // self.dtype.itemsize


def plan(members: Sequence[int], tensors: Sequence[Tensor]) -> Base:
    """Return the base that covers the memory of all ``tensors``.

    ``members`` are the indices of these tensors among the kept inputs.
    """
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
    """The overlaps among the inputs, and the groups of kept inputs.

    ``bases`` has the indices of the kept inputs of each group. A group becomes one base if one of its inputs is
    written.
    """

    overlaps: tuple[Overlap, ...]
    bases: tuple[tuple[int, ...], ...] = ()


def run(call: Call, dedupe: DedupeRecord) -> tuple[SyntheticBasesRecord, list[Base]]:
    """Find the groups of inputs that share memory, or that are views of one tensor that requires grad."""
    index = {position: k for k, position in enumerate(dedupe.kept)}
    overlaps, links = [], []
    for a, b, _ in call.state.overlapping:
        (start, end), (other_start, other_end) = byte_interval(call.values[a]), byte_interval(call.values[b])
        shared = min(end, other_end) - max(start, other_start)
        if shared > 0:
            overlaps.append(Overlap(first=index[a], second=index[b], bytes=shared))
        links.append((index[a], index[b]))
    groups = [] if call.view_bases else _groups(links)  # the base of each group is an input
    bases = [plan(members, [call.values[dedupe.kept[k]] for k in members]) for members in groups]
    return SyntheticBasesRecord(overlaps=tuple(overlaps), bases=tuple(map(tuple, groups))), bases


def _groups(links: list[tuple[int, int]]) -> list[list[int]]:
    """Merge linked pairs into groups: the pairs (0, 1), (1, 4) and (2, 3) give [0, 1, 4] and [2, 3]."""
    group: dict[int, set[int]] = {}
    for a, b in links:
        merged = group.get(a, {a}) | group.get(b, {b})
        for k in merged:
            group[k] = merged
    return [sorted(members) for members in {id(members): members for members in group.values()}.values()]


def are_unchanged(groups: Sequence[Base], infos: Sequence[InputAliasInfo]) -> bool:
    """Tell whether the function changed no input of any of the ``groups``, so that they need no base."""
    members = [infos[k] for base in groups for k in base.members]
    return not any(i.moves_version or i.mutates_data or i.mutates_metadata for i in members)
