"""What a decomposition computes, in the strides that eager's kernel gives it.

    x = torch.ones(3, 4).t()
    torch.cat([torch.ones(0), x]).stride()     # (3, 1); Inductor takes it for a copy of x: (1, 4)

Decompositions promise values, not strides, and what is reshaped or returned later depends on them. They agree where all
that they are given lies row by row; elsewhere the op's own fake is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.trace.tape import tensors_in

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
    if all(copy is None for copy in copies.values()):
        return result
    return internals.pytree.tree_map_only(Tensor, lambda tensor: _or(copies[id(tensor)], tensor), result)


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


def _or(copy: Tensor | None, tensor: Tensor) -> Tensor:
    return tensor if copy is None else copy


def _copied(tensor: Tensor, like: Tensor, record: Record) -> Tensor | None:
    """Copy a tensor into the strides of another; None if it has them, or if these leave memory out."""
    if tensor.shape != like.shape or not any(_differ(tensor, like)):
        return None
    order = order_of_memory(like)
    if order is None:
        return None
    aten = torch.ops.aten
    permuted = record(aten.permute.default, (tensor, list(order)), {})
    rows = record(aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    back = [order.index(d) for d in range(len(order))]
    copy: Tensor = record(aten.permute.default, (rows, back), {})
    return copy


def _differ(tensor: Tensor, like: Tensor) -> Iterator[bool]:
    """Tell of each dimension that leads to other elements whether its strides differ."""
    if tensor.numel():
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), like.stride(), strict=True):
            yield size > 1 and stride != wanted
