"""Views from before a write to what they are views of.

    v = y.view(-1)
    y.add_(c)                        # y has a history, which now ends here
    v.sum()                          # so has v: autograd makes it anew when it is asked for next

Eager makes it by ``as_strided``, the backward of which fills new memory with the strides of ``y``. For a tensor that is
traced autograd takes the ops again that led to the view, and the backward of these may hand on what comes to it: here
one number, expanded. So what their last node returns is copied into the strides of ``y``.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals

#: Autograd's nodes of views behind which eager takes the ops again, too: ``as_strided`` cannot say what they do.
_SAID_BY_THEIR_OPS = ("ViewAsComplex", "ViewAsReal", "Conj", "NegView", "ViewBackward1")


class OlderViews:
    """Notes the views that a traced function makes, and gives those the history of eager's that a write made older."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, weakref.ref[Tensor]]] = {}
        self._anew: dict[int, weakref.ref[Tensor]] = {}

    def made(self, result: Any) -> None:
        """Note what an op returned, if it is a view."""
        if isinstance(result, Tensor) and internals.is_functional(result):
            base = internals.base_of(result)
            if base is not None:
                self._of.setdefault(id(base), {})[id(result)] = weakref.ref(result)

    def wrote(self, owner: Tensor) -> None:
        """Look at the views of a tensor, no view itself, that has been written or a view of which has."""
        if id(owner) not in self._of or not owner.requires_grad:
            return
        node = owner.grad_fn
        if node is not None and internals.is_copy_slices(node):
            return  # it copies what comes to it
        for view in [each() for each in self._of[id(owner)].values()]:
            if view is not None and internals.base_of(view) is owner and (last := _last_node(view, node)) is not None:
                self._anew[id(view)] = weakref.ref(view)
                _lay_out(last, owner.shape, owner.stride())

    def is_anew(self, view: Tensor) -> bool:
        """Tell whether the history of a view is such a one."""
        known = self._anew.get(id(view))
        return known is not None and known() is view


def _last_node(view: Tensor, stop: Any) -> Any:
    """Return the last of the nodes that lead from a view to its base; None where ``as_strided`` has no part in it."""
    try:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            node = view.grad_fn  # which is looked at for the first time outside, where the ops have histories
    except RuntimeError:  # one of several views, or made under no_grad: it must not be used any more
        return None
    while node is not None and not str(node.name()).startswith(_SAID_BY_THEIR_OPS):
        if len(node.next_functions) != 1 or (target := node.next_functions[0][0]) is None:
            return None
        if target is stop or internals.accumulates(target):
            return node
        node = target
    return None


def _lay_out(node: Any, shape: torch.Size, stride: tuple[int, ...]) -> None:
    """Let a node return its gradient in new memory of these strides."""

    def lay_out(gradients: tuple[Tensor | None, ...], _came: object) -> tuple[Tensor | None, ...] | None:
        (gradient,) = gradients
        if gradient is None:
            return None
        return (torch.empty_strided(shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient),)

    node.register_hook(lay_out)
