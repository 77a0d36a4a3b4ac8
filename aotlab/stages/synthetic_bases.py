"""Stage 3, synthetic bases: inputs that share memory, of which one is mutated.

    buffer = torch.zeros(4)
    f(buffer[:3], buffer[1:])        # and f writes to its first argument

The graph must see the write through the second argument too. So the memory that both share is passed as one input, a
*synthetic base*, and both arguments are windows of it inside the graph::

    forward(base):                   # four floats
        a = base[0:3]; b = base[1:4]

An input that is a view of a tensor with a history gets a base too, though it shares its memory with no other input: a
write to it changes the history of that tensor, and of all its views.

This stage finds the groups, on byte intervals, so that windows of different dtypes and storages over one buffer count
too. Views of one tensor that requires grad belong together also where their bytes do not overlap: a write to one gives
the others a new history. Inside trace the windows are made (`aotlab.analysis.windows`). If it turns out that none of a
group is written, its windows become inputs of their own again, and there is no base. They are inputs of their own from
the beginning where no base can be made, or where the function does with them what cannot be done to windows.

At run time the base is made anew at each call, a tensor over the caller's memory; the epilogue writes the new values
into the windows that were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.analysis.windows import Base, has_owner, plan, plan_whole
from aotlab.guards import byte_interval
from aotlab.ir.metadata import InputAliasInfo
from aotlab.recorder import RunEagerly
from aotlab.stages.capture import Call
from aotlab.stages.dedupe import DedupeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Two kept inputs (positions in `DedupeRecord.kept`) whose byte intervals share ``bytes`` bytes."""

    first: int
    second: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticBase:
    """Memory that the kept inputs ``members`` share: ``nbytes`` bytes, seen as ``dtype``.

    Whether the graph takes it as an input in place of them depends on whether one of them is written.
    """

    members: tuple[int, ...]
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticBasesRecord:
    """The overlaps among the inputs, and the groups that may be merged into a base.

    ``views`` are the bases of single inputs, views of a tensor with a history.
    """

    overlaps: tuple[Overlap, ...]
    bases: tuple[SyntheticBase, ...] = ()
    views: tuple[SyntheticBase, ...] = ()


def run(call: Call, dedupe: DedupeRecord) -> tuple[SyntheticBasesRecord, list[Base]]:
    """Find the inputs that share memory or a history.

    Raises
    ------
    RunEagerly
        They share it in a way that no base can express.
    """
    index = {position: k for k, position in enumerate(dedupe.kept)}
    overlaps = []
    links = []
    for a, b, _ in call.state.overlapping:
        (start, end), (other_start, other_end) = byte_interval(call.values[a]), byte_interval(call.values[b])
        shared = min(end, other_end) - max(start, other_start)
        if shared > 0:
            overlaps.append(Overlap(first=index[a], second=index[b], bytes=shared))
        links.append((index[a], index[b]))
    groups = _groups(links)
    bases = [plan(members, [call.values[dedupe.kept[k]] for k in members]) for members in groups]
    views = _lone_views(call, dedupe, {k for members in groups for k in members})
    record = SyntheticBasesRecord(overlaps=tuple(overlaps), bases=_recorded(bases), views=_recorded(views))
    return record, [*bases, *views]


def _lone_views(call: Call, dedupe: DedupeRecord, grouped: set[int]) -> list[Base]:
    """Plan the bases of inputs that are views of a tensor with a history, beside the groups."""
    found = []
    if torch.is_grad_enabled():
        for k, position in enumerate(dedupe.kept):
            if k not in grouped and has_owner(call.values[position]) and call.values[position].numel():
                with suppress(RunEagerly):  # only needed if it is written; the trace will see
                    found.append(plan([k], [call.values[position]]))
    return found


def _recorded(bases: Sequence[Base]) -> tuple[SyntheticBase, ...]:
    return tuple(SyntheticBase(members=b.members, nbytes=b.nbytes, dtype=str(b.dtype)) for b in bases)


def _groups(links: list[tuple[int, int]]) -> list[list[int]]:
    """Return the connected components, each in order."""
    group: dict[int, set[int]] = {}
    for a, b in links:
        merged = group.get(a, {a}) | group.get(b, {b})
        for k in merged:
            group[k] = merged
    return [sorted(members) for members in {id(members): members for members in group.values()}.values()]


def whole_storages(call: Call, dedupe: DedupeRecord, room: Mapping[int, int]) -> list[Base]:
    """Plan bases that are whole storages, one for each from which inputs come, where nothing requires grad.

    ``room`` says how many bytes the storage of a kept input needs to have.
    """
    tensors = {k: call.values[position] for k, position in enumerate(dedupe.kept)}
    groups: dict[int, list[int]] = {}
    for k, tensor in tensors.items():
        if tensor.layout is torch.strided:
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(k)
    found = []
    for start, members in groups.items():
        own = [tensors[k] for k in members]
        base = plan_whole(members, own, max(room.get(k, 0) for k in members))
        others = [byte_interval(tensor) for k, tensor in tensors.items() if k not in members]
        if base is not None and not any(a < start + base.nbytes and start < b for a, b in others):
            found.append(base)
    return found


def may_be_parted(groups: Sequence[Base], tensors: Sequence[Tensor]) -> bool:
    """Tell whether inputs that share memory can be traced as if they did not, as long as the function changes none.

    Not if one is a view of another one that requires grad: a function that differentiates inside can tell.
    """
    for base in groups:
        members = [tensors[k] for k in base.members]
        for tensor in members:
            owner = internals.base_of(tensor)
            if owner is not None and owner.requires_grad and any(owner is other for other in members):
                return False
    return bool(groups)


def are_unchanged(groups: Sequence[Base], infos: Sequence[InputAliasInfo]) -> bool:
    """Tell whether the function left the members of all groups as they were, so that it is nothing that they share."""
    members = [infos[k] for base in groups for k in base.members]
    return not any(
        info.is_changed
        or info.moves_version
        or info.mutates_data
        or info.mutates_metadata
        or info.mutates_storage_metadata
        or info.given
        for info in members
    )
