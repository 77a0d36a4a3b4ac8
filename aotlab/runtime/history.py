"""The history that a tensor has at one moment, kept for later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals


class _History(torch.autograd.Function):
    """Hands a gradient on to the history that its input had when it was applied."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def history_of(tensor: Tensor) -> Tensor:
    """Return a tensor without memory whose gradient goes where that of ``tensor`` goes now.

    A later write to ``tensor`` gives it another history; autograd nodes that are to hang on the present one take this.
    """
    result: Tensor = _History.apply(tensor)  # type: ignore[no-untyped-call]  # untyped in torch
    return result
