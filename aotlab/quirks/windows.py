"""``as_strided`` and ``storage_offset``: looks at the place of a tensor in its storage.

    x = buffer[2:]
    x.storage_offset()               # 2
    x.as_strided((2,), (1,))         # a window that reaches no memory but that of x

An entry whose function looked at an offset is guarded to be for inputs with that offset; what is written, or shares
memory with another input, is looked at eagerly, as the trace has it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.places import user_line
from aotlab.trace.chronicle import InputStorage, span
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.quirk import Handler, Quirk


class Windows(Quirk):
    """Answers where that is certain."""

    name = "windows"

    def claims(self) -> Mapping[Any, Handler]:
        return {Tensor.storage_offset: _offset, Tensor.as_strided: _as_strided, torch.as_strided: _as_strided}


def _offset(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensor: Tensor = args[0]
    with internals.disable_torch_function():
        base = internals.base_of(tensor)
    if base is not None and internals.storage_key(base) not in guard.chronicle.storages:
        guard.check_strides(base)  # a part of it begins behind so many strides
    _storage_of_input(guard, tensor, "the offset")
    return int(tensor.storage_offset())


def _as_strided(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take a window of a tensor, if that is in memory that the graph sees."""
    tensor: Tensor = args[0]
    storage = _storage_of_input(guard, tensor, "`as_strided`")
    result = func(*args, **kwargs)
    start, stop = span(result)
    first, last = (0, tensor.untyped_storage().nbytes()) if storage is None else span(storage.wrapper)
    has_gaps = storage is not None and not internals.is_dense(storage.wrapper)
    if start < stop and (has_gaps or start < first or last < stop):  # fake tensors do not look
        raise RunEagerly(f"`as_strided` reaches memory that the tensor itself does not show, at {user_line()}")
    if storage is not None or (result.requires_grad and not internals.is_dense(tensor)):
        # of an intermediate with gaps, its history would be made again by other sizes and strides
        guard.chronicle.fix(result, "is viewed by `as_strided`")
    return result


def _storage_of_input(guard: EscapeGuard, tensor: Tensor, what: str) -> InputStorage | None:
    """Return the input's memory that a tensor lies in, which has to be as the caller has it."""
    storage = guard.chronicle.storages.get(internals.storage_key(tensor))
    if storage is None:
        return None
    if storage.is_base:
        raise RunEagerly(f"{what} of an input that shares memory is asked for, at {user_line()}")
    if internals.has_data_mutation(storage.wrapper) or internals.has_metadata_mutation(storage.wrapper):
        raise RunEagerly(f"{what} of `{storage.name}`, which is written, is asked for, at {user_line()}")
    guard.chronicle.offsets_read.update(storage.members)
    return storage
