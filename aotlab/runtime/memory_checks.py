"""What guards ask at run time about the memory that inputs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab.guards.call_state import counted_together, overlapping_pairs


def pattern_checker(expected: tuple[tuple[int, int, int], ...]) -> Callable[..., bool]:
    """Make a check of whether tensors share memory in another way than was traced."""

    def otherwise(*tensors: Tensor) -> bool:
        return overlapping_pairs(list(enumerate(tensors))) != expected

    return otherwise


def overlap_checker(extents: Sequence[int], written: Sequence[int]) -> Callable[..., bool]:
    """Make a check of whether the bytes of a written input overlap those of another input."""
    is_written = [i in written for i in range(len(extents))]
    lengths = tuple(zip(extents, is_written, strict=True))

    def overlap(*tensors: Tensor) -> bool:
        spans = sorted([(t.data_ptr(), n, w, t.device.type) for t, (n, w) in zip(tensors, lengths, strict=True) if n])
        end, written_end = 0, 0
        for start, length, is_one, _ in spans:
            if start < written_end or (is_one and start < end):
                return True
            stop = start + length
            if stop > end:
                end = stop
            if is_one and stop > written_end:
                written_end = stop
        return False

    return overlap


def owner_checker(members: Sequence[Tensor]) -> Callable[..., bool]:
    """Make a check of whether tensors are views of other tensors, or of tensors of another kind, than was traced."""

    def facts(tensors: Sequence[Tensor]) -> list[Any]:
        first = tensors[0].data_ptr()
        owners: list[Any] = []
        found: list[Any] = []
        for tensor in tensors:
            owner = internals.base_of(tensor)
            number = next((i for i, known in enumerate(owners) if known is owner), len(owners))
            if number == len(owners):
                owners.append(owner)
            kind: tuple[Any, ...] = ()
            if owner is not None:
                kind = (owner.shape, owner.stride(), owner.dtype, owner.requires_grad, owner.is_leaf)
                among = next((i for i, other in enumerate(tensors) if other is owner), None)
                kind = (*kind, owner.data_ptr() - first, among)
            found.append((number, kind))
        return found

    expected = facts(members)
    return lambda *tensors: facts(tensors) != expected


def share_a_base(*tensors: Tensor) -> bool:
    """Tell whether two of the tensors are views of one tensor."""
    owners = [id(t if (base := internals.base_of(t)) is None else base) for t in tensors]
    return len(set(owners)) < len(owners)


def counters_checker(members: Sequence[Tensor]) -> Callable[..., bool]:
    """Make a check of whether other tensors than was traced share a version counter."""
    expected = counted_together(list(enumerate(members)))
    return lambda *tensors: counted_together(list(enumerate(tensors))) != expected
