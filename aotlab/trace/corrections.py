"""Give the results of decompositions the strides of the original op.

A decomposition computes the right values, but its result may have other strides than eager's result. The strides can
differ only if an argument is not contiguous. In this case, the op itself is run on fake tensors, and the result of the
decomposition gets the strides of the op's fake result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from aotlab._torch import OpOverload, expression_of, pytree
from aotlab.trace.tape import tensors_in

_ATEN = torch.ops.aten

#: A function that records an op (its target, its positional and keyword arguments) and returns its result.
Record = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def strides_may_differ(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a decomposition of ``op`` might return other strides than the op."""
    return not op.is_view and not all(tensor.is_contiguous() for tensor in tensors_in((args, kwargs)))


def with_strides_of(result: Any, fake: Any, record: Record) -> Any:
    """Return the ``result`` of a decomposition with the strides of ``fake``, which the op itself returned.

    ``result`` may be a tensor or a structure of tensors. Each tensor with other strides is copied.
    """
    tensors, fakes = list(tensors_in(result)), list(tensors_in(fake))
    if len(tensors) != len(fakes):  # the op or the decomposition leaves out optional results, so no pairs can be formed
        return result
    copies = {id(tensor): _copied(tensor, like, record) for tensor, like in zip(tensors, fakes, strict=True)}
    if all(copies[id(tensor)] is tensor for tensor in tensors):
        return result
    return pytree.tree_map_only(Tensor, lambda tensor: copies[id(tensor)], result)


def order_of_memory(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions in descending order of stride, or None if ``tensor`` is not dense and non-overlapping."""
    sizes, strides = tensor.shape, tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], sizes[d] == 1)))
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            return None
        expected *= sizes[d]
    return order


def draws_otherwise(op: OpOverload, args: tuple[Any, ...], *, exact: bool) -> bool:
    """Tell whether a random op may draw other numbers than the in-place op that it replaces, or may fail.

    In-place ops fill a tensor in the order of its memory; `bernoulli.p` fills it in the order of its indices. On the
    CPU, ``normal_`` has another kernel for tensors that are not contiguous; `normal_functional` first copies a tensor
    with gaps into a contiguous tensor. The fake result of `uniform` has the gaps of the argument. The real result is
    dense, so Inductor would raise. ``exact`` says whether the backend must draw eager's numbers.
    """
    if op is _ATEN.uniform.default or (exact and op is _ATEN.normal_functional.default and args[0].is_cpu):
        return order_of_memory(args[0]) is None
    return exact and op is _ATEN.bernoulli.p and not args[0].is_contiguous()


def _copied(tensor: Tensor, like: Tensor, record: Record) -> Tensor:
    """Return a copy of a tensor with the strides of ``like``.

    Return the tensor itself if it has these strides, or if ``like`` is not dense and non-overlapping.
    """
    order = order_of_memory(like) if tensor.shape == like.shape and any(_differ(tensor, like)) else None
    if order is None:
        return tensor
    permuted = record(_ATEN.permute.default, (tensor, list(order)), {})
    rows = record(_ATEN.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    copy: Tensor = record(_ATEN.permute.default, (rows, [order.index(d) for d in range(len(order))]), {})
    return copy


def _differ(tensor: Tensor, like: Tensor) -> Iterator[bool]:
    """Yield for each dimension whether the strides differ.

    Yield False for a dimension of size 1, because its stride has no effect.
    """
    for size, stride, like_stride in zip(tensor.shape, tensor.stride(), like.stride(), strict=True):
        is_same = expression_of(stride) == expression_of(like_stride)  # adds no guard
        yield not is_same and size > 1 and stride != like_stride and tensor.numel() > 0
