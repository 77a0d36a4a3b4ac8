"""Where torch's fake kernels give something else than eager's kernels, such as other strides.

    x = torch.ones(3, 4).t()
    torch.cat([torch.ones(0), x]).stride()     # (3, 1); Inductor takes it for a copy of x: (1, 4)

A wrong promise shows when somebody reads it in the function, when a gradient of that layout is asked for, or in what
Inductor returns. What is listed was found by `aotlab verify ops`, with ``config.debug_assert`` on, and by the same for
tensors that do not lie row by row. Decompositions promise values, not strides: where something does not lie row by row,
the op's own fake is asked. (What cannot be mended runs eagerly by a row in `aotlab.trace.boundary.EAGER_OPS`; what is
recorded as other ops is in `aotlab.quirks.kernels`.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode, OpOverload, pytree
from aotlab.trace.tape import tensors_in

# --- fake results --------------------------------------------------------------------------------------------------

#: Makes the right fake results of an op from the op, its arguments and the wrong ones.
FakeCorrection = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], Any]


def _by_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Ask the kernel how it lays out its results, with zeros in tensors that lie like the arguments."""
    given = tensors_in((args, kwargs))
    if op is not internals.FFT_OF_REAL and all(tensor.is_contiguous() for tensor in given):
        return result.new_empty(result.shape)
    with internals.outside_of_trace(), torch.inference_mode(False), torch.no_grad():
        real_args, real_kwargs = pytree.tree_map_only(Tensor, _zeros_like, (args, kwargs))
        try:
            real = op(*real_args, **real_kwargs)
        except Exception:  # noqa: BLE001  # what a kernel has against zeros says nothing of its layout
            return result
    same = real.shape != result.shape or real.stride() == result.stride()
    return result if same else result.new_empty_strided(result.shape, real.stride())


def _zeros_like(fake: Tensor) -> Tensor:
    last = sum((size - 1) * step for size, step in zip(fake.shape, fake.stride(), strict=True))
    memory = torch.zeros(last + 1 if fake.numel() else 0, dtype=fake.dtype, device=fake.device)
    return memory.as_strided(fake.shape, fake.stride())


def _batch_norm(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # the result has the memory format of what is given; of the GPU's kernels that is not known
    if args[0].device.type != "cpu":
        return result
    normed = result[0].new_empty(result[0].shape)
    return (normed.to(memory_format=internals.suggest_memory_format(args[0])), *result[1:])


def _multilabel_margin_loss(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # a single sample has a single loss, however it is to be reduced
    loss, is_target = result
    return (loss.new_empty(()) if args[0].dim() < 2 else loss, is_target)


def _softmax(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # the kernel looks whether there is such a dimension
    tensor, dim = args[0], args[1]
    (tensor if tensor.dim() else tensor.unsqueeze(0)).size(dim)
    return result


def _view(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # around a dimension of size one the fake takes tensors for viewable that are not; eager's kernel knows
    tensor = args[0]
    if not tensor.is_contiguous():
        with internals.outside_of_trace():
            torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(result.shape)
    if result.storage_offset() != tensor.storage_offset():
        # the fake mode's cache has taken another view of a tensor without elements for this one
        return tensor.as_strided(result.shape, result.stride(), tensor.storage_offset())
    return result


_ATEN = torch.ops.aten
_LAYOUTS: dict[Any, FakeCorrection] = {
    **dict.fromkeys(internals.BATCH_NORMS, _batch_norm),
    **dict.fromkeys(
        (
            _ATEN.binary_cross_entropy.default, _ATEN.channel_shuffle.default, _ATEN.copysign.Tensor,
            _ATEN.div.Tensor_mode, _ATEN.floor_divide.default, _ATEN.grid_sampler_2d.default, _ATEN.heaviside.default,
            _ATEN.im2col.default, _ATEN.index.Tensor, _ATEN.ldexp.Tensor, _ATEN.logaddexp.default,
            _ATEN.logaddexp2.default, _ATEN.logical_and.default, _ATEN.logical_or.default, _ATEN.logical_xor.default,
            _ATEN.logit_backward.default, _ATEN.max_unpool2d.default, _ATEN.native_channel_shuffle.default,
            _ATEN.native_dropout_backward.default, _ATEN.pow.Scalar, _ATEN.roll.default, _ATEN.special_xlog1py.default,
            _ATEN.xlogy.Tensor, internals.FFT_OF_REAL,
        ),
        _by_kernel,
    ),
}  # fmt: skip
#: Ops whose results lie in memory otherwise than torch's fakes say.
LAID_OUT = frozenset(_LAYOUTS)

_FAKES: dict[Any, FakeCorrection] = {
    **_LAYOUTS,
    _ATEN.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    internals.SOFTMAX: _softmax,
    _ATEN.view.default: _view,
}


def as_in_eager(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, mode: FakeTensorMode) -> Any:
    """Return the fake ``result`` of ``op`` in the sizes and strides that eager gives it."""
    correction = _FAKES.get(op)
    if correction is None:
        return result
    with mode:
        return correction(op, args, kwargs, result)


# --- decompositions ------------------------------------------------------------------------------------------------

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
    back = [order.index(d) for d in range(len(order))]
    copy: Tensor = record(_ATEN.permute.default, (rows, back), {})
    return copy


def _differ(tensor: Tensor, like: Tensor) -> Iterator[bool]:
    """Tell of each dimension that leads to other elements whether its strides differ."""
    if tensor.numel():
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), like.stride(), strict=True):
            yield size > 1 and stride != wanted
