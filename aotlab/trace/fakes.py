"""The strides of fake results, where torch's fake kernels promise others than the real kernels give.

    x = torch.ones(3, 4).t()
    torch.cat([torch.ones(0), x]).stride()     # (3, 1); Inductor takes it for a copy of x: (1, 4)

A wrong promise shows when somebody reads it in the function, when a gradient of that layout is asked for, or in what
Inductor returns, which it lays out as promised. What is listed here was found by `aotlab verify ops`, with
``config.debug_assert`` on, and by the same for tensors that do not lie row by row. Decompositions promise values, not
strides: where something does not lie row by row, the op's own fake is asked.

Where the recorded ops are other ones than eager's, see `aotlab.trace.corrections`; what cannot be mended runs eagerly
by a row in `aotlab.trace.boundary.EAGER_OPS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode, OpOverload
from aotlab.capture.signals import RunEagerly
from aotlab.trace.tape import tensors_in

#: Records an op on positional arguments, and returns its result.
Record = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
#: Makes the right fake results of an op from its arguments and the wrong ones.
Correction = Callable[[tuple[Any, ...], Any], Any]


def _multilabel_margin_loss(args: tuple[Any, ...], result: Any) -> Any:
    # a single sample has a single loss, however it is to be reduced
    loss, is_target = result
    return (loss.new_empty(()) if args[0].dim() < 2 else loss, is_target)


def _like_the_first(args: tuple[Any, ...], result: Any) -> Any:
    # the kernel keeps the memory format of what it is given
    return result.new_empty(result.shape).to(memory_format=internals.suggest_memory_format(args[0]))


def _softmax(args: tuple[Any, ...], result: Any) -> Any:
    # the kernel looks whether there is such a dimension
    tensor, dim = args[0], args[1]
    (tensor if tensor.dim() else tensor.unsqueeze(0)).size(dim)
    return result


def _as_first_on_cpu(args: tuple[Any, ...], result: Any) -> Any:
    # the first of several results has the memory format of what is given; of the GPU's kernels that is not known
    if args[0].device.type != "cpu":
        return result
    return (_like_the_first(args, result[0]), *result[1:])


def _contiguous(args: tuple[Any, ...], result: Any) -> Any:
    return result.new_empty(result.shape)


def _ldexp(args: tuple[Any, ...], result: Any) -> Any:
    # the powers of two by which it multiplies lie row by row
    tensor, exponents = args
    return _elementwise_like(_ATEN.mul.Tensor)((tensor, exponents.new_empty(exponents.shape)), result)


_MASKS = (torch.bool, torch.uint8)


def _index(args: tuple[Any, ...], result: Any) -> Any:
    tensor, indices = args
    places = [d for d, index in enumerate(indices) if index is not None]
    given = [indices[d] for d in places]
    if result.numel() == 0 or tensor.device.type != "cpu" or any(index.dtype in _MASKS for index in given):
        return result  # the GPU's kernel copies some indices first
    if all(each.is_contiguous() for each in (tensor, *given)):
        return result.new_empty(result.shape)
    if len(given) > 2:
        raise RunEagerly(
            f"an index of {len(given)} tensors, some of which do not lie row by row",
            suggestion="call contiguous() before, to have it compiled",
        )
    adjacent = places[-1] - places[0] == len(places) - 1
    before = places[0] if adjacent else 0  # what is taken from several places comes first
    rest = [stride for d, stride in enumerate(tensor.stride()) if d not in places]
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    after = [0] * (len(rest) - before)
    walks = [[*rest[:before], *[0] * len(shape), *rest[before:]]]
    for index in given:
        strides = [stride if size > 1 else 0 for size, stride in zip(index.shape, index.stride(), strict=True)]
        walks.append([*[0] * before, *[0] * (len(shape) - len(strides)), *strides, *after])
    with internals.outside_of_trace():
        # the kernel lays out its result as any kernel does that reads tensors with these strides
        read = [torch.empty_strided(result.shape, walk, device="meta") for walk in walks]
        made = torch.mul(*read) if len(read) == 2 else torch.addcmul(*read)
    return result.new_empty_strided(result.shape, made.stride())


def _elementwise_like(op: OpOverload) -> Correction:
    """Take the strides of another op, whose fake is made by the code that makes the kernels' results."""

    def correction(args: tuple[Any, ...], result: Any) -> Any:
        given = [each for each in args if isinstance(each, Tensor)]
        if len(given) < 2:  # a number beside a tensor
            return result
        with internals.outside_of_trace():
            like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in given[:2]]
            strides = op(*like).stride()
        return result.new_empty_strided(result.shape, strides) if strides != result.stride() else result

    return correction


@functools.cache
def _fft_strides_are_right() -> bool:
    # torch 2.11's are those of a contiguous result; eager puts the transformed dimension innermost
    op, real = internals.FFT_OF_REAL, torch.empty(3, 4)
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(real), [0], 0, True)
    return bool(fake.stride() == op(real, [0], 0, True).stride())


def _fft_of_real(args: tuple[Any, ...], result: Any) -> Any:
    with internals.no_dispatch_modes():
        if _fft_strides_are_right():
            return result
        given = args[0]
        # which dimension gets which stride is for the kernel to say: that differs by library
        like = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
        strides = internals.FFT_OF_REAL(like, *args[1:]).stride()
    return result.new_empty_strided(result.shape, strides)


def _view(args: tuple[Any, ...], result: Any) -> Any:
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
_LAYOUTS: dict[Any, Correction] = {
    **dict.fromkeys(
        (
            _ATEN.div.Tensor_mode, _ATEN.floor_divide.default, _ATEN.heaviside.default, _ATEN.logaddexp.default,
            _ATEN.logaddexp2.default, _ATEN.logical_and.default, _ATEN.logical_or.default, _ATEN.logical_xor.default,
            _ATEN.logit_backward.default, _ATEN.native_dropout_backward.default,
        ),
        _elementwise_like(_ATEN.mul.Tensor),
    ),
    **dict.fromkeys(
        (_ATEN.copysign.Tensor, _ATEN.special_xlog1py.default, _ATEN.xlogy.Tensor),
        _elementwise_like(_ATEN.div.Tensor),  # which makes floating-point numbers of integers, as these do
    ),
    **dict.fromkeys(internals.BATCH_NORMS, _as_first_on_cpu),
    _ATEN.index.Tensor: _index,
    _ATEN.pow.Scalar: _contiguous,
    _ATEN.ldexp.Tensor: _ldexp,
    _ATEN.grid_sampler_2d.default: _contiguous,
    internals.FFT_OF_REAL: _fft_of_real,
    _ATEN.max_unpool2d.default: _like_the_first,
    _ATEN.channel_shuffle.default: _like_the_first,
    _ATEN.native_channel_shuffle.default: _like_the_first,
}  # fmt: skip
#: Ops whose results lie in memory otherwise than torch's fakes say.
LAID_OUT = frozenset(_LAYOUTS)

_CORRECTIONS: dict[Any, Correction] = {
    **_LAYOUTS,
    _ATEN.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    internals.SOFTMAX: _softmax,
    _ATEN.view.default: _view,
}


def as_in_eager(op: Any, args: tuple[Any, ...], result: Any, mode: FakeTensorMode) -> Any:
    """Return the fake ``result`` of ``op`` in the sizes and strides that eager gives it."""
    correction = _CORRECTIONS.get(op)
    if correction is None:
        return result
    with mode:
        return correction(args, result)


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
    return internals.pytree.tree_map_only(Tensor, lambda tensor: copies[id(tensor)], result)


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
