"""The values that a compiled forward saves, kept as autograd keeps its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals


class SavedValues:
    """The values that one call's forward saved, kept as autograd keeps its own.

    They go through the innermost ``saved_tensors_hooks``; their versions are checked when they are used; they are let
    go after a backward unless the graph is kept. ``released`` has one bit for each autograd node of the traced program
    that held tensors and has been used up: a second backward that reaches one of those fails as in eager, while one
    that does not goes through.
    """

    __slots__ = ("_hooks", "_values", "_versions", "released")

    def __init__(self, values: Sequence[Tensor]) -> None:
        hooks = internals.saved_tensor_hooks()
        self.released = 0
        self._hooks = hooks
        if any(value.is_inference() for value in values):
            raise RuntimeError(
                "Inference tensors cannot be saved for backward. Please do not use Tensors created in inference mode "
                "in computation tracked by autograd. To work around this, you can make a clone to get a normal tensor "
                "and use it in autograd, or use `torch.no_grad()` instead of `torch.inference_mode()`."
            )
        self._versions = internals.versions_of(values)
        self._values: list[Any] | None = list(values) if hooks is None else [hooks[0](value) for value in values]

    def use(self, mask: int) -> list[Tensor]:
        """Return the values for a backward that reaches the nodes in ``mask``.

        Raises
        ------
        RuntimeError
            As autograd does: when the graph has been freed, or a value was written in place.
        """
        if self.released & mask or self._values is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have "
                "already been freed). Saved intermediate values of the graph are freed when you call .backward() or "
                "autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or "
                "if you need to access saved tensors after calling backward."
            )
        if self._hooks is not None:
            return [self._hooks[1](value) for value in self._values]
        now = internals.versions_of(self._values)
        if now == self._versions:
            return list(self._values)
        for value, version, is_at in zip(self._values, self._versions, now, strict=True):
            if is_at != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{value.type()} {list(value.shape)}] is at version {is_at}; expected version {version} "
                    "instead. Hint: enable anomaly detection to find the operation that failed to compute its "
                    "gradient, with torch.autograd.set_detect_anomaly(True)."
                )
        return list(self._values)

    def release(self, mask: int, all_masks: Sequence[int]) -> None:
        """Note that a backward over ``mask`` has its values, and let go of what no other backward may still use."""
        if internals.keeps_graph():
            return
        self.released |= mask
        if all(m == 0 or m & self.released for m in all_masks):
            self._values = None if any(all_masks) else self._values


def restride(tangent: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Copy a tangent into the strides that the backward was traced with."""
    dense = tangent.to_dense() if tangent.layout != torch.strided else tangent
    return torch.empty_strided(dense.shape, stride, dtype=dense.dtype, device=dense.device).copy_(dense)
