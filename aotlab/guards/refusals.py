"""Kinds of calls that were refused, so that the like run eagerly without another look."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

#: So many refused kinds of calls are remembered by each function.
MOST_REFUSALS = 64
#: So many calls at most go without a look.
_LONGEST = 4096


class Refusals:
    """Kinds of calls that ran eagerly, so that the like need not be looked at as a whole again.

    A look may take many times as long as the call itself, and eager is always right. So when calls that look alike at a
    glance ran eagerly twice, the next 4 of them run eagerly without a look, after another look the next 8, and so on.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, list[int]] = {}

    def is_known(self, kind: Hashable) -> bool:
        """Tell whether a call runs eagerly without another look."""
        found = self._kinds.get(kind, (0, 0))
        if not found[1]:
            return False
        self._kinds[kind][1] -= 1
        return True

    def ran_eagerly(self, kind: Hashable) -> None:
        """Remember that a call was looked at and ran eagerly."""
        if len(self._kinds) >= MOST_REFUSALS:
            self._kinds.clear()
        looks = self._kinds.get(kind, (0, 0))[0] + 1
        self._kinds[kind] = [looks, min(2**looks, _LONGEST) if looks > 1 else 0]

    def compiled(self, kind: Hashable) -> None:
        """Forget what is known of calls like one that was compiled."""
        self._kinds.pop(kind, None)


def glance(module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Describe a call by its modes, and by the types and shapes of its arguments."""
    values = (*args, *kwargs.values())
    seen = [(type(each), each.shape if type(each) is Tensor and not each.is_nested else None) for each in values]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    return module is not None and module.training, modes, tuple(kwargs), tuple(seen)
