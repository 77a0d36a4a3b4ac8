"""``as_strided`` and ``storage_offset``: ops that depend on a tensor's storage offset.

    x = buffer[2:]
    x.storage_offset()               # 2
    x.as_strided((2,), (1,))         # a window that reaches only memory of x

If the function reads the offset of an input, the entry guards this offset. If the input is written, or shares memory
with another input, the call runs eagerly, because the traced tensor may then have another offset than the caller's
tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.quirk import Quirk
from aotlab.trace.storage_notes import InputStorage, span


class StorageOffsets(Quirk):
    """Runs `storage_offset` and `as_strided` in the trace, if the traced tensor has the offset of the caller's tensor.

    Otherwise the call runs eagerly.
    """

    name = "storage_offsets"

    def claims(self) -> Mapping[Any, Handler]:
        return {Tensor.storage_offset: _offset, Tensor.as_strided: _as_strided, torch.as_strided: _as_strided}


def _offset(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensor: Tensor = args[0]
    with internals.disable_torch_function():
        base = internals.base_of(tensor)
    if base is not None and internals.storage_key(base) not in guard.storage_notes.storages:
        guard.check_strides(base)  # the offset of a view of an intermediate depends on the strides of its base
    _storage_of_input(guard, tensor, "storage_offset")
    return int(tensor.storage_offset())


def _as_strided(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `as_strided` in the trace if its result contains only elements of the tensor that the graph gets.

    If the result contains other elements of the storage, the call runs eagerly, because the graph does not get them.
    """
    tensor: Tensor = args[0]
    storage = _storage_of_input(guard, tensor, "as_strided")
    result = func(*args, **kwargs)
    start, stop = span(result)
    first, last = (0, tensor.untyped_storage().nbytes()) if storage is None else span(storage.traced)
    has_gaps = storage is not None and not internals.is_dense(storage.traced)
    if start < stop and (has_gaps or start < first or last < stop):  # `as_strided` on fake tensors does not check this
        raise RunEagerly("as-strided-beyond-tensor", at=user_line())
    if storage is not None or (result.requires_grad and not internals.is_dense(tensor)):
        # After a write to an intermediate whose memory has gaps, autograd would regenerate the history of the view with
        # other sizes and strides than in eager.
        guard.storage_notes.forbid_writes(result, "is viewed by `as_strided`")
    return result


def _storage_of_input(guard: EscapeGuard, tensor: Tensor, op: str) -> InputStorage | None:
    """Return the notes on the input that shares its storage with ``tensor``, and note that its offset was read.

    The result is None if no input shares its storage with ``tensor``. The call runs eagerly if the input is written, or
    shares memory with another input, because the offset in the trace may then differ from the caller's.
    """
    storage = guard.storage_notes.storages.get(internals.storage_key(tensor))
    if storage is None:
        return None
    name = f"`{storage.name}`"
    if storage.is_base:
        raise RunEagerly("depends-on-storage-offset", op=op, name=name, why="shares memory", at=user_line())
    if internals.has_data_mutation(storage.traced) or internals.has_metadata_mutation(storage.traced):
        raise RunEagerly("depends-on-storage-offset", op=op, name=name, why="is written", at=user_line())
    guard.storage_notes.offsets_read.update(storage.members)
    return storage
