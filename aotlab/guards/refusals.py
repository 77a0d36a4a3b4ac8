"""Remember which kinds of calls were refused, so that similar calls run by Dynamo or eagerly without a new attempt.

To *examine* a call means to record its state and to try to compile it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: The most kinds of refused calls that each function remembers.
MOST_REFUSALS = 64
#: The largest number of calls in a row that run without an examination.
_LONGEST = 4096


@dataclass(slots=True)
class _Kind:
    """The record of the refused calls for which `glance` returned the same kind.

    ``looks`` is the number of calls of this kind that were examined and then refused. The next ``left`` calls of this
    kind are not examined. If ``by_dynamo`` is true, Dynamo captures and runs these calls. Otherwise they run eagerly.
    """

    looks: int = 0
    left: int = 0
    by_dynamo: bool = False


class Refusals:
    """The kinds of calls that were refused, so that similar calls are not examined again each time.

    Examining a call may take many times as long as the call itself. Without an examination, a call may always run
    eagerly or by Dynamo. So if two similar calls were refused, the next 4 are not examined, after another refusal the
    next 8, and so on. Calls are similar if `glance` gives the same kind for them.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def known(self, kind: Hashable) -> _Kind | None:
        """Return the record of a kind of calls, or None if the next call of this kind must be examined.

        If the result is a record, the caller runs one call without an examination, and the record counts this call.
        """
        record = self._kinds.get(kind)
        if record is None or not record.left:
            return None
        record.left -= 1
        return record

    def refused(self, kind: Hashable, *, by_dynamo: bool) -> None:
        """Record that a call was examined and refused, and whether Dynamo or eager ran it."""
        if len(self._kinds) >= MOST_REFUSALS:
            self._kinds.clear()
        record = self._kinds.setdefault(kind, _Kind())
        record.by_dynamo = by_dynamo
        record.looks += 1
        record.left = min(2**record.looks, _LONGEST) if record.looks > 1 else 0

    def compiled(self, kind: Hashable) -> None:
        """Forget the refusals of a kind, because a call of this kind was compiled."""
        self._kinds.pop(kind, None)


def glance(module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return the kind of a call, as a key for `Refusals`.

    It consists of the training mode of ``module``, torch's modes, the names of the keyword arguments, and the types and
    shapes of all arguments. ``module`` is None if a function is called.
    """
    values = (*args, *kwargs.values())
    types_and_shapes = [
        (type(value), value.shape if type(value) is Tensor and not value.is_nested else None) for value in values
    ]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    return module is not None and module.training, modes, tuple(kwargs), tuple(types_and_shapes)
