"""Calls that ran eagerly, so that the like need not be looked at as a whole again.

To find out that a call is of a kind that was refused may take many times as long as the call itself; but eager is
always right. So when calls that look alike at a glance ran eagerly twice, the next 4 of them run eagerly without a
look, after another look the next 8, and so on: what the user changes to have them compiled is seen in time.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

#: So many kinds of calls are remembered; so many calls at most go without a look.
_MOST_KINDS, _MOST_CALLS = 64, 4096


def glance(value: Any) -> Hashable:
    """Describe an argument at a glance: a tensor by dtype, sizes and so on, a container by what is in it."""
    if type(value) in (Tensor, Parameter):
        return type(value), value.dtype, value.shape, value.requires_grad, value.device
    if type(value) in (bool, int, float, str, type(None)):
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(map(glance, value))
    if type(value) is dict:
        return dict, tuple([(glance(key), glance(item)) for key, item in value.items()])
    return (type(value),)


def _describe(module: Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    return module is not None and module.training, modes, glance(args), glance(kwargs)


class Refusals:
    """What a function remembers of its calls that ran eagerly."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, list[int]] = {}

    def kind(self, module: Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
        """Describe a call of a function, or of a module; None if nothing is remembered."""
        return _describe(module, args, kwargs) if self._kinds else None

    def is_known(self, kind: Hashable | None) -> bool:
        """Tell whether a call runs eagerly without another look."""
        found = self._kinds.get(kind)
        if found is None or not found[1]:
            return False
        found[1] -= 1
        return True

    def ran_eagerly(self, module: Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember that a call was looked at and ran eagerly."""
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        found = self._kinds.setdefault(_describe(module, args, kwargs), [0, 0])
        found[0] += 1
        found[1] = min(2 ** found[0], _MOST_CALLS) if found[0] > 1 else 0

    def compiled(self, kind: Hashable | None) -> None:
        """Forget what is known of calls like one that was compiled."""
        self._kinds.pop(kind, None)
