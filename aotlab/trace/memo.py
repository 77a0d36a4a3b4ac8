"""A cache of op results on fake tensors, kept between traces as long as torch's settings stay the same.

An op on fake tensors takes a tenth of a millisecond, and most of that time is overhead. Programs often call the same op
with tensors that have the same sizes, strides, dtype and device. From the second call on, the fake result is made from
a cached description.
"""

from __future__ import annotations

from typing import Any

import torch

from aotlab import _torch as internals
from aotlab._torch import FakeTensor, FakeTensorMode
from aotlab.trace.tape import tensors_in

#: The settings of the last trace, and the cached results of torch's own ops under these settings.
_cache: tuple[Any, dict[Any, Any]] = (None, {})
#: The cache is emptied if it has more results than this.
_MOST = 10_000


def cached_under(settings: Any) -> dict[Any, Any]:
    """Return the cache for ``settings``. It is empty if they differ from the settings of the last trace."""
    global _cache
    if _cache[0] != settings or len(_cache[1]) > _MOST:
        _cache = settings, {}
    return _cache[1]


class NoKey(Exception):  # noqa: N818  # a signal to the recorder
    """Raised if an argument cannot be part of a cache key. Then the op is run without the cache."""


def memo_key(value: Any) -> Any:
    """Return a cache key for arguments.

    Tensors with the same sizes, strides, offset, dtype and device have equal keys. The numbers 1, True and 1.0 have
    different keys.
    """
    if isinstance(value, FakeTensor):
        if value.constant is not None or value.is_conj() or value.is_neg():
            raise NoKey
        if internals.is_inference(value) != torch.is_inference_mode_enabled():
            raise NoKey  # a view of this tensor is an inference tensor if the tensor is one, whatever the mode is
        if value.fake_mode.shape_env is None:
            return (value.shape, value.stride(), value.dtype, value.device, value.storage_offset())
        described = (*value.shape, *value.stride(), value.storage_offset())
        return (tuple(map(internals.expression_of, described)), value.dtype, value.device)
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[memo_key(item) for item in value])
    if kind is dict:
        return tuple([(name, memo_key(item)) for name, item in value.items()])
    if kind is float:
        return (kind, value.hex())  # tells 0.0 from -0.0
    if kind in (torch.SymInt, torch.SymFloat):
        return (kind, internals.expression_of(value))
    if kind in (int, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format) or value is None:
        return (kind, value)
    raise NoKey


def memo_value(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a description of an op's results, from which `remake` makes them again, or None if that is impossible.

    It is possible if the results are new tensors with separate storages. It is also possible if the only result is a
    view of the first argument. The description of a view has five items, so that the recorder can recognize it.
    """
    if result is None:
        return ()
    if isinstance(result, (tuple, list)):
        items = [memo_value(item, args, kwargs) for item in result]
        if any(item is None or len(item) == 5 for item in items):
            return None
        keys = [internals.storage_key(tensor) for tensor in tensors_in(result)]
        return (type(result), items) if len(set(keys)) == len(keys) else None
    if type(result) is not FakeTensor or result.constant is not None or result.layout != torch.strided:
        return None
    if result.is_conj() or result.is_neg():
        return None
    if args and isinstance(args[0], FakeTensor) and internals.storage_key(args[0]) == internals.storage_key(result):
        return (result.shape, result.stride(), result.dtype, result.storage_offset(), None)
    nbytes, needed = result.untyped_storage().nbytes(), result.numel() * result.element_size()
    fills_storage = internals.is_zero(result.storage_offset()) and internals.is_zero(nbytes - needed)
    result_key = internals.storage_key(result)
    if not fills_storage or any(internals.storage_key(tensor) == result_key for tensor in tensors_in((args, kwargs))):
        return None
    return (result.shape, result.stride(), result.dtype, result.device)


def remake(mode: FakeTensorMode, description: Any) -> Any:
    """Make the results that `memo_value` described."""
    if not description:
        return None
    if len(description) == 2:
        kind, items = description
        return kind([remake(mode, item) for item in items])
    return internals.new_fake(mode, *description, dense=True)
