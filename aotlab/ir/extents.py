"""Find the bytes of memory that tensors occupy, and the pairs of tensors that share memory or a version counter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aotlab import _torch as internals


def byte_interval(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of ``tensor`` and the address after its last byte.

    The interval also contains the gaps between elements. It is (0, 0) for an empty tensor.
    """
    shape, stride = internals.traced(tensor.shape), internals.traced(tensor.stride())
    start = 0 if 0 in shape else internals.address_of(tensor)
    return (start, start + extent_bytes(shape, stride, tensor.element_size()))


def extent_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return the number of bytes from the first to the last byte of a strided tensor, including both."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


def within_its_storage(tensor: Tensor) -> bool:
    """Tell whether all elements of a tensor are inside of its storage. If not, reading them crashes the process.

    FSDP frees the storages of parameters. Also, a tensor has its new shape and its old storage after a ``resize_`` that
    raised.
    """
    return tensor.layout != torch.strided or needed_bytes(tensor) <= tensor.untyped_storage().nbytes()


def needed_bytes(tensor: Tensor) -> int:
    """Return the smallest size in bytes of a storage that has all elements of a strided tensor."""
    extent = extent_bytes(tensor.shape, tensor.stride(), tensor.element_size())
    return int(tensor.storage_offset()) * tensor.element_size() + extent if extent else 0


def overlapping_pairs(tensors: Sequence[tuple[int, Tensor]]) -> tuple[tuple[int, int, int], ...]:
    """Return the pairs of tensors whose byte intervals overlap, or that require grad and have the same base.

    ``tensors`` are pairs of a position and a tensor. Each result is (position, position, number of bytes from the start
    of the first tensor to the start of the second).
    """
    spans = [(tensor.device.type, *byte_interval(tensor), i) for i, tensor in tensors]
    starts = {i: start for _, start, _, i in spans}
    pairs: set[tuple[int, int]] = set()
    reaching: list[tuple[str, int, int, int]] = []  # the spans before `span` that end after its start
    for span in sorted(span for span in spans if span[1] != span[2]):
        device, start, _, i = span
        reaching = [each for each in reaching if each[0] == device and each[2] > start]
        pairs.update((min(other, i), max(other, i)) for *_, other in reaching)
        reaching.append(span)
    families: dict[int, int] = {}
    for i, tensor in tensors:
        if tensor.requires_grad and tensor.numel():
            base = internals.base_of(tensor)
            first = families.setdefault(id(tensor if base is None else base), i)
            if first != i:
                pairs.add((first, i))
    return tuple(sorted((a, b, starts[b] - starts[a]) for a, b in pairs))


def counted_together(tensors: Sequence[tuple[int, Tensor]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of tensors that share a version counter.

    ``tensors`` are pairs of a position and a tensor, and each result is a pair of positions. If several tensors share a
    counter, each later tensor is paired with the first: (0, 3), (0, 5).
    """
    families: dict[int, list[tuple[int, Tensor]]] = {}
    for n, tensor in tensors:
        families.setdefault(internals.storage_key(tensor), []).append((n, tensor))
    pairs = []
    for family in families.values():
        firsts: list[tuple[int, Tensor]] = []
        for n, tensor in family if len(family) > 1 else ():
            first = next((m for m, other in firsts if internals.share_version(other, tensor)), None)
            if first is None:
                firsts.append((n, tensor))
            else:
                pairs.append((first, n))
    return tuple(pairs)
