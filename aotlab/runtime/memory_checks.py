"""What guards ask at run time about the memory that inputs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from aotlab import _torch as internals
from aotlab.ir.extents import counted_together, overlapping_pairs


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


def relation_checker(count: int) -> Callable[..., bool]:
    """Make a check of whether one of the first tensors is a view of the same tensor as another of them all."""

    def related(*tensors: Tensor) -> bool:
        owners = [id(tensor if (base := internals.base_of(tensor)) is None else base) for tensor in tensors]
        first = set(owners[:count])
        return len(first) < count or not first.isdisjoint(owners[count:])

    return related


def counters_checker(members: Sequence[Tensor]) -> Callable[..., bool]:
    """Make a check of whether other tensors than was traced share a version counter."""
    expected = counted_together(list(enumerate(members)))
    return lambda *tensors: counted_together(list(enumerate(tensors))) != expected
