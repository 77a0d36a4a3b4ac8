"""What ops give on tensors of a kind, remembered from trace to trace for as long as torch's settings stay.

A fake op costs a tenth of a millisecond, most of it around the kernel. Programs call the same op on the same kinds of
tensors again and again; then the result is made from its remembered description.
"""

from __future__ import annotations

from typing import Any

import torch

from aotlab import _torch as internals
from aotlab._torch import FakeTensor, FakeTensorMode
from aotlab.trace.tape import tensors_in

#: The settings that the last trace was made under, and what is known under these of torch's own ops; so many at most.
_known: tuple[Any, dict[Any, Any]] = (None, {})
_MOST = 10_000


def known_under(settings: Any) -> dict[Any, Any]:
    """Return what is remembered under some settings."""
    global _known
    if _known[0] != settings or len(_known[1]) > _MOST:
        _known = settings, {}
    return _known[1]


class NoKey(Exception):  # noqa: N818  # a signal to the recorder
    """An argument cannot be part of a key."""


def memo_key(value: Any) -> Any:
    """Turn arguments into a key in which tensors of the same kind are equal, but 1, True and 1.0 are not."""
    if isinstance(value, FakeTensor):
        if value.constant is not None or value.is_conj() or value.is_neg():
            raise NoKey
        if internals.is_inference(value) != torch.is_inference_mode_enabled():
            raise NoKey  # whether a view of it is an inference tensor hangs on it, not on the mode
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
    """Describe results so that they can be made again; None if that cannot be done.

    It can for plain tensors on storages of their own, and for a single view of the first argument.
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
    own = internals.is_zero(result.storage_offset()) and internals.is_zero(nbytes - needed)
    mine = internals.storage_key(result)
    if not own or any(internals.storage_key(tensor) == mine for tensor in tensors_in((args, kwargs))):
        return None
    return (result.shape, result.stride(), result.dtype, result.device)


def remake(mode: FakeTensorMode, known: Any) -> Any:
    """Make the results that `memo_value` described."""
    if not known:
        return None
    if len(known) == 2:
        kind, items = known
        return kind([remake(mode, item) for item in items])
    return internals.new_fake(mode, *known, dense=True)
