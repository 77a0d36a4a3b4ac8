"""Where torch's fake tensors promise other sizes or strides than eager's kernel gives; put right one by one.

A wrong promise shows only when somebody reads it in the function, or when a gradient of that layout is asked for: by
then the graph is written. What is listed here was found by `aotlab verify ops`, with ``config.debug_assert`` on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from aotlab import torch_internals as internals
from aotlab.torch_internals import FakeTensorMode

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


_CORRECTIONS: dict[Any, Correction] = {
    internals.FFT_OF_REAL: _fft_of_real,
    torch.ops.aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    torch.ops.aten.max_unpool2d.default: _like_the_first,
    torch.ops.aten.channel_shuffle.default: _like_the_first,
    torch.ops.aten.native_channel_shuffle.default: _like_the_first,
    internals.SOFTMAX: _softmax,
    torch.ops.aten.view.default: _view,
}


def as_in_eager(op: Any, args: tuple[Any, ...], result: Any, mode: FakeTensorMode) -> Any:
    """Return the fake ``result`` of ``op`` in the sizes and strides that eager gives it."""
    correction = _CORRECTIONS.get(op)
    if correction is None:
        return result
    with mode:
        return correction(args, result)
