"""Decompositions promise values, not strides: where something does not lie row by row, the op's own fake is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from aotlab._torch import OpOverload, pytree
from aotlab.trace.tape import tensors_in

_ATEN = torch.ops.aten

#: Records an op on positional arguments, and returns its result.
Record = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def needs_look(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a decomposition of ``op`` might lay its results out otherwise than the op does."""
    return not op.is_view and not all(tensor.is_contiguous() for tensor in tensors_in((args, kwargs)))


def laid_out(result: Any, fake: Any, record: Record) -> Any:
    """Return what a decomposition made, copied where its strides are not those of the op's own ``fake`` result."""
    given, wanted = list(tensors_in(result)), list(tensors_in(fake))
    if len(given) != len(wanted):  # one of them leaves out what is not wanted
        return result
    copies = {id(tensor): _copied(tensor, like, record) for tensor, like in zip(given, wanted, strict=True)}
    if all(copies[id(tensor)] is tensor for tensor in given):
        return result
    return pytree.tree_map_only(Tensor, lambda tensor: copies[id(tensor)], result)


def order_of_memory(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions in the order of the memory; None unless they lie in it one in the other, without gaps."""
    sizes, strides = tensor.shape, tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], sizes[d] == 1)))
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            return None
        expected *= sizes[d]
    return order


def _copied(tensor: Tensor, like: Tensor, record: Record) -> Tensor:
    """Copy a tensor into the strides of another; not if it has them, or if these leave memory out."""
    order = order_of_memory(like) if tensor.shape == like.shape and any(_differ(tensor, like)) else None
    if order is None:
        return tensor
    permuted = record(_ATEN.permute.default, (tensor, list(order)), {})
    rows = record(_ATEN.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    copy: Tensor = record(_ATEN.permute.default, (rows, [order.index(d) for d in range(len(order))]), {})
    return copy


def _differ(tensor: Tensor, like: Tensor) -> Iterator[bool]:
    """Tell of each dimension that leads to other elements whether its strides differ."""
    if tensor.numel():
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), like.stride(), strict=True):
            yield size > 1 and stride != wanted
