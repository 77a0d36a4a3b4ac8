"""Fake tensors, and the memory of tensors."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from traceback import StackSummary, format_list
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# The memory format that kernels give their results for what comes in.
from torch._prims_common import make_contiguous_strides_for as make_contiguous_strides_for
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from aotlab._torch.callers_symbols import ADMITTED
from aotlab._torch.replaced import replaced
from aotlab._torch.symbols import is_symbolic, traced


def fake_mode(env: Any = None) -> FakeTensorMode:
    """Make a fake mode, without an ``env`` for known sizes; it does not take down its caller's stack, as torch does."""
    with replaced(fake_tensor, "traceback", SimpleNamespace(extract_stack=StackSummary, format_list=format_list)):
        return FakeTensorMode(static_shapes=True) if env is None else FakeTensorMode(shape_env=env)


def new_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    dense: bool = False,
) -> FakeTensor:
    """Make a fake tensor with a storage of its own, without asking a kernel; a third of the time of a fake op.

    With symbols it takes half the time if it is known to be ``dense``.
    """
    if dense and mode.shape_env is not None:
        below = torch.empty([math.prod(shape)], dtype=dtype, device="meta").as_strided(shape, stride, 0)
    else:
        below = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, below, device)


def new_fake_view(
    mode: FakeTensorMode, base: FakeTensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int
) -> FakeTensor:
    """Make a fake tensor on the storage of ``base``; ``offset`` in elements of ``dtype``."""
    below = torch.empty([0], dtype=dtype, device="meta").set_(base.untyped_storage(), 0, (0,), (1,))
    return FakeTensor(mode, below.as_strided(shape, stride, offset), base.device)


def is_inference(tensor: Tensor) -> bool:
    """Tell whether a tensor was made in inference mode, without a function mode hearing of it."""
    return not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.ADInplaceOrView)


def enter_fake(mode: FakeTensorMode, real: Tensor) -> FakeTensor:
    """Make the fake of a plain dense input; others go the long way."""
    shape, stride = real.shape, real.stride()
    elements = real.numel()
    last = sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)]) + 1
    whole = real.storage_offset() == 0 and real.untyped_storage().nbytes() == elements * real.element_size()
    if whole and last == elements and not real.is_conj():
        return new_fake(mode, shape, stride, real.dtype, real.device)
    return mode.from_tensor(real.detach(), static_shapes=True)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors from logging a traceback for each op that fails; eager tells the user."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def quiet(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


def forget_tensors(fake_mode: FakeTensorMode) -> None:
    """Drop a fake mode's memory of which tensors it made fakes of: the mode itself lives until cycles are collected."""
    fake_mode.fake_tensor_converter = type(fake_mode.fake_tensor_converter)(copy_data=False)


def call_by_fake_mode(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on fake tensors under ``mode``, with ``mode`` itself on the stack as its kernels expect."""
    with mode:
        size: Any = args[0].size(*args[1:] or (0,)) if op is torch.ops.aten.unbind.int else 0
        if is_symbolic(size) and not size.node.expr.is_symbol:  # torch would write each result by a longer expression
            raise RuntimeError(f"`unbind` makes {size.node.hint} tensors, a number that is computed from sizes")
        upsampling = "upsample" in op._opname and "backward" in op._opname
        if upsampling and any(map(is_symbolic, (*args[1], *args[2]))):
            return args[0].new_empty(args[2]).contiguous(memory_format=suggest_memory_format(args[0]))  # torch has none
        return op(*args, **kwargs)


def has_its_memory_to_itself(tensor: Tensor) -> bool:
    """Tell whether no view or alias of ``tensor`` is alive, nor kept by an autograd node."""
    storage = tensor.untyped_storage()  # which counts for one beside the tensor
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor fills the memory between its first and its last element."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.numel() == last


def only_fake_modes() -> bool:
    """Tell whether no dispatch mode is on, or a fake mode of the caller's alone."""
    return [type(mode) for mode in _get_current_dispatch_mode_stack()] in ([], [FakeTensorMode])


def address_of(tensor: Tensor) -> int:
    """Return where a tensor begins; fake ones have no addresses, so each of their storages is far from all others."""
    if isinstance(tensor, FakeTensor):
        return (storage_key(tensor) << 48) + traced([tensor.storage_offset()])[0] * tensor.element_size()
    return tensor.data_ptr()


def is_fake(value: object) -> bool:
    """Tell whether a value is a fake tensor to be traced; raise RuntimeError if torch would end the process at it."""
    if not isinstance(value, FakeTensor) or (is_symbolic(value) and not ADMITTED.get()):
        return False
    if value.is_cuda and value.requires_grad and not torch.backends.cuda.is_built():
        raise RuntimeError("a torch without CUDA ends the process at the gradient of a fake CUDA tensor")
    return True


def memory_window(first: Tensor, shift: int, count: int, dtype: torch.dtype) -> Tensor:
    """Make a 1-d tensor, with a storage of its own, of memory ``shift`` bytes behind ``first``; it keeps none alive."""
    if isinstance(first, FakeTensor):
        offset = (first.storage_offset() * first.element_size() + shift) // dtype.itemsize
        return new_fake_view(first.fake_mode, first, (count,), (1,), dtype, offset)
    start, nbytes = first.data_ptr() + shift, count * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(start, first.device, nbytes)
    return torch.empty(0, dtype=dtype, device=first.device).set_(storage, 0, (count,), (1,))


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors on one storage share, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)
