"""Fake tensors, and the memory of tensors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from traceback import StackSummary, format_list
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# `suggest_memory_format` returns the memory format that kernels choose for results if their input is this tensor.
from torch._prims_common import make_contiguous_strides_for as make_contiguous_strides_for
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from aotlab._torch.callers_symbols import ADMITTED
from aotlab._torch.replaced import replaced
from aotlab._torch.symbolic_sizes import is_symbolic, traced


def fake_mode(env: Any = None) -> FakeTensorMode:
    """Make a fake mode for the shape environment ``env``, or for fixed sizes if it is None.

    Unlike torch's constructor, this function does not record the caller's stack, because that takes time.
    """
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
    """Make a fake tensor with a new storage, without running a fake kernel.

    This function takes a third of the time of a fake op. Pass ``dense=True`` if the strides certainly leave no gaps in
    memory: with symbolic sizes, this halves the time.
    """
    if dense and mode.shape_env is not None:
        meta_tensor = torch.empty([math.prod(shape)], dtype=dtype, device="meta").as_strided(shape, stride, 0)
    else:
        meta_tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta_tensor, device)


def new_fake_view(
    mode: FakeTensorMode, base: FakeTensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int
) -> FakeTensor:
    """Make a fake tensor on the storage of ``base``. Its storage offset is ``offset``, in elements of ``dtype``."""
    meta_tensor = torch.empty([0], dtype=dtype, device="meta").set_(base.untyped_storage(), 0, (0,), (1,))
    return FakeTensor(mode, meta_tensor.as_strided(shape, stride, offset), base.device)


def is_inference(tensor: Tensor) -> bool:
    """Tell whether a tensor was made in inference mode. Function modes do not see the check."""
    return not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.ADInplaceOrView)


def enter_fake(mode: FakeTensorMode, real: Tensor) -> FakeTensor:
    """Make a fake tensor with fixed sizes for the input ``real``.

    This is fast if the input is dense and fills its storage. For other inputs it calls ``mode.from_tensor``.
    """
    shape, stride = real.shape, real.stride()
    elements = real.numel()
    span = sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)]) + 1
    fills_storage = real.storage_offset() == 0 and real.untyped_storage().nbytes() == elements * real.element_size()
    if fills_storage and span == elements and not real.is_conj():
        return new_fake(mode, shape, stride, real.dtype, real.device)
    return mode.from_tensor(real.detach(), static_shapes=True)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging a traceback for each op that fails on fake tensors, for the length of a block.

    The log would only disturb: if the op fails in eager, too, the user sees eager's error.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def quiet(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


def forget_tensors(fake_mode: FakeTensorMode) -> None:
    """Make a fake mode forget the real tensors for which it has made fake tensors.

    The mode is part of a reference cycle, so it lives until the garbage collector runs. Its references to the tensors
    must end earlier.
    """
    fake_mode.fake_tensor_converter = type(fake_mode.fake_tensor_converter)(copy_data=False)


@functools.cache
def _takes_objects(op: OpOverload) -> bool:
    """Tell whether an op takes script objects. torch's cache of fake results raises when it compares such objects."""
    return "__torch__." in str(op._schema)


def call_by_fake_mode(mode: FakeTensorMode, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on fake tensors with ``mode`` active, as the fake kernels expect, and handle three rare cases."""
    if _takes_objects(op):
        mode.cache_enabled = False  # not only for this op: Inductor uses the same mode later
    with mode:
        size: Any = args[0].size(*args[1:] or (0,)) if op is torch.ops.aten.unbind.int else 0
        # torch would describe each result of such an `unbind` by a longer expression than the result before it
        if is_symbolic(size) and not size.node.expr.is_symbol:
            raise RuntimeError(f"`unbind` makes {size.node.hint} tensors, and this number depends on symbolic sizes")
        upsampling = "upsample" in op._opname and "backward" in op._opname
        if upsampling and any(map(is_symbolic, (*args[1], *args[2]))):
            # torch has no fake kernel for the backward of upsampling with symbolic sizes
            return args[0].new_empty(args[2]).contiguous(memory_format=suggest_memory_format(args[0]))
        return op(*args, **kwargs)


def has_its_memory_to_itself(tensor: Tensor) -> bool:
    """Tell whether no other tensor shares the storage of ``tensor``, neither a view nor a saved tensor of autograd."""
    storage = tensor.untyped_storage()  # the count has one use for this object, and one for the tensor
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2


def is_dense(tensor: Tensor) -> bool:
    """Tell whether the strides leave no gaps: the memory from the first to the last element holds no other values."""
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.numel() == span


def only_fake_modes() -> bool:
    """Tell whether no dispatch mode is active, or only one fake mode of the caller."""
    return [type(mode) for mode in _get_current_dispatch_mode_stack()] in ([], [FakeTensorMode])


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's first element.

    A fake tensor has no address, and a tensor whose storage was freed has the address 0. The function invents one, so
    that such tensors of one storage have the right distance from each other, and those of different storages are far
    apart.
    """
    if isinstance(tensor, FakeTensor) or tensor.data_ptr() == 0:
        return (storage_key(tensor) << 48) + traced([tensor.storage_offset()])[0] * tensor.element_size()
    return tensor.data_ptr()


def is_fake(value: object) -> bool:
    """Tell whether a value is a fake tensor that can be traced: one with concrete sizes, or with admitted symbols.

    Raise RuntimeError for a CUDA tensor that requires grad if torch was built without CUDA: torch would abort the
    process when it computes the tensor's gradient.
    """
    if not isinstance(value, FakeTensor) or (is_symbolic(value) and not ADMITTED.get()):
        return False
    if value.is_cuda and value.requires_grad and not torch.backends.cuda.is_built():
        raise RuntimeError(
            "aotlab does not trace a fake CUDA tensor that requires grad if torch was built without CUDA, because such "
            "a torch aborts the process when it computes the gradient; detach the tensor, or use a torch with CUDA"
        )
    return True


def memory_window(first: Tensor, shift: int, count: int, dtype: torch.dtype) -> Tensor:
    """Make a 1-d tensor of ``count`` elements on the memory that begins ``shift`` bytes after the start of ``first``.

    The result is a synthetic base. If ``first`` is a fake tensor, the result shares its storage. Otherwise the result
    has a new storage, which does not keep the memory alive.
    """
    if isinstance(first, FakeTensor):
        offset = (first.storage_offset() * first.element_size() + shift) // dtype.itemsize
        return new_fake_view(first.fake_mode, first, (count,), (1,), dtype, offset)
    start, nbytes = first.data_ptr() + shift, count * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(start, first.device, nbytes)
    return torch.empty(0, dtype=dtype, device=first.device).set_(storage, 0, (count,), (1,))


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage as long as the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


_storage_ids = itertools.count()
_known_storages: dict[int, tuple[StorageWeakRef, int]] = {}


def storage_id(tensor: Tensor) -> int | None:
    """Return a number that identifies a tensor's storage for the life of the process, or None if it has no storage.

    A weak reference tells whether the storage is alive, so a new storage at the address of a dead one gets a new
    number.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    key = storage_key(tensor)
    entry = _known_storages.get(key)
    if entry is None or entry[0].expired():
        if len(_known_storages) % 1024 == 1023:
            for address, (reference, _) in list(_known_storages.items()):
                if reference.expired():
                    del _known_storages[address]
        entry = _known_storages[key] = StorageWeakRef(storage), next(_storage_ids)
    return entry[1]
