"""Kinds of calls that were refused, so that the like run as those did without another look."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: So many refused kinds of calls are remembered by each function.
MOST_REFUSALS = 64
#: So many calls at most go without a look.
_LONGEST = 4096


@dataclass(slots=True)
class _Kind:
    """``looks`` were taken at calls of a kind, ``left`` of them are served without one, by Dynamo or by eager."""

    looks: int = 0
    left: int = 0
    by_dynamo: bool = False


class Refusals:
    """Kinds of calls that were refused, so that the like need not be looked at as a whole again.

    A look may take many times as long as the call itself, and eager is always right, as is what Dynamo captures. So
    when calls that look alike at a glance were refused twice, the next 4 of them are without a look, after another look
    the next 8, and so on.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def known(self, kind: Hashable) -> _Kind | None:
        """Return what is known of a call that runs without another look."""
        found = self._kinds.get(kind)
        if found is None or not found.left:
            return None
        found.left -= 1
        return found

    def refused(self, kind: Hashable, *, by_dynamo: bool) -> None:
        """Remember that a call was looked at and refused, and who ran it."""
        if len(self._kinds) >= MOST_REFUSALS:
            self._kinds.clear()
        found = self._kinds.setdefault(kind, _Kind())
        found.by_dynamo = by_dynamo
        found.looks += 1
        found.left = min(2**found.looks, _LONGEST) if found.looks > 1 else 0

    def compiled(self, kind: Hashable) -> None:
        """Forget what is known of calls like one that was compiled."""
        self._kinds.pop(kind, None)


def glance(module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Describe a call by its modes, and by the types and shapes of its arguments."""
    values = (*args, *kwargs.values())
    seen = [(type(each), each.shape if type(each) is Tensor and not each.is_nested else None) for each in values]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    return module is not None and module.training, modes, tuple(kwargs), tuple(seen)
