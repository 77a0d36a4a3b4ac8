"""``as_strided`` of what the function computed: a window of its memory, told by sizes and strides.

    y = x * 2
    y.as_strided((2,), (1,))         # reaches no memory but that of y

Where an argument begins in its memory no entry asks; so a window of one, or of a view of one, is looked at eagerly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.places import user_line
from aotlab.trace.chronicle import span
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.quirk import Handler, Quirk


class Windows(Quirk):
    """Takes those that are certain."""

    name = "windows"

    def claims(self) -> Mapping[Any, Handler]:
        return {Tensor.as_strided: _as_strided, torch.as_strided: _as_strided}


def _as_strided(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take a window of a tensor, if that is in memory that the graph sees."""
    tensor: Tensor = args[0]
    if internals.storage_key(tensor) in guard.chronicle.storages:
        instead = "use unfold, or compute with indices and shapes, to have it compiled"
        raise RunEagerly(f"an argument is viewed by `as_strided`, at {user_line()}", suggestion=instead)
    result = func(*args, **kwargs)
    start, stop = span(result)
    if start < stop and tensor.untyped_storage().nbytes() < stop:  # fake tensors do not look
        raise RunEagerly(f"`as_strided` reaches memory that the tensor itself does not show, at {user_line()}")
    if result.requires_grad and not internals.is_dense(tensor):
        # of an intermediate with gaps, its history would be made again by other sizes and strides
        guard.chronicle.fix(result, "is viewed by `as_strided`")
    return result
