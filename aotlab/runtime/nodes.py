"""The autograd nodes of compiled calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.runtime.saved import SavedValues

if TYPE_CHECKING:
    from aotlab.runtime.backward import Backward


class Compiled(torch.autograd.Function):
    """The node of a compiled call, or of one segment of it; the results that it stands behind were computed before.

    It keeps some of them as anchors: gradients of gradients come in there (`aotlab.derivatives.higher`).
    """

    @staticmethod
    def forward(
        ctx: Any, backward: Backward, saved: SavedValues, results: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the results; behind them an empty one, if that is to be the anchor."""
        ctx.set_materialize_grads(False)
        ctx.compiled, ctx.values = backward, saved
        if not backward.anchors:
            results = (*results, torch.empty(0))
        if not (saved.hooked and internals.hooks_are_foreign()):  # those are not to see what eager does not keep
            ctx.to_save = tuple([results[n] for n in backward.anchors or (-1,)])
        return results

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the compiled backward. The last None is for an input that only requires grad, if there is no other."""
        return None, None, None, *ctx.compiled(ctx.values, tangents[: len(ctx.compiled.masks)]), None


class PassOn(torch.autograd.Function):
    """Hands a gradient on to ``through``, and has the shape of ``like``."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, through: Tensor) -> Tensor:
        """Return something without memory that has the history of ``through``."""
        ctx.set_materialize_grads(False)
        return like.detach()

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None]:
        """Hand the gradient on."""
        return None, gradient


def pass_on(through: Tensor) -> Tensor:
    """Return a tensor without memory whose gradient goes where that of ``through`` goes now.

    A later write to ``through`` gives it another history; nodes that are to hang on the present one take this.
    """
    like = torch.empty((), dtype=through.dtype, device=through.device).expand(through.shape)
    return PassOn.apply(like, through)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
