"""What autocast keeps of leaves while a function is traced; see `aotlab.stages.casts`.

install   where the casts are inputs, autocast is made to keep these
kept_in   else the trace is asked of which leaves it has kept casts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder import Tape, tensors_in


class _StandsFor(torch.autograd.Function):
    """Hang a tensor, which stays the same object, on another one; no op is recorded."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, value: Tensor) -> Tensor:
        """Give it the other's history."""
        ctx.mark_dirty(kept)
        return kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Pass the gradient on."""
        return None, gradient


def install(tape: Tape, leaves: Sequence[Tensor], casts: Sequence[Tensor]) -> None:
    """Let autocast keep the wrappers ``casts`` of the wrappers ``leaves`` while the function is traced."""
    count = len(tape.operations)
    for kept, value in zip(internals.kept_casts(leaves), casts, strict=True):
        kept.detach_()
        internals.replace_value(kept, internals.from_functional(value))
        if value.requires_grad:
            with torch.enable_grad():
                _StandsFor.apply(kept, value)  # type: ignore[no-untyped-call]  # untyped in torch
    del tape.operations[count:]  # how autocast came by them


def kept_in(tape: Tape, leaves: Sequence[tuple[int, Tensor, Tensor]]) -> list[int]:
    """Return of which leaves a trace had autocast keep a cast of what they held at first; call it while it records.

    Each leaf is (number, wrapper, fake); the numbers are returned. Left out are leaves that are used in several ways
    besides: gradients that come from outside of the graph, as that of a cast does then, are summed last.
    """
    if torch.is_inference_mode_enabled() or not internals.keeps_casts():
        return []
    besides = Counter(
        fake_id
        for operation in tape.operations
        if operation.target is not internals.CAST
        for fake_id in {id(tensor) for tensor in tensors_in((operation.args, operation.kwargs))}
    )
    return [
        number
        for number, wrapper, fake in leaves
        if besides[id(fake)] < 2 and _casts(tape, fake) and _is_kept(tape, wrapper, fake)
    ]


def _is_kept(tape: Tape, wrapper: Tensor, fake: Tensor) -> bool:
    """Ask autocast for the cast: it casts, and the tape grows by that, unless it has kept one."""
    if not internals.may_keep_cast_of(wrapper):
        return False
    count = len(tape.operations)
    [kept] = internals.kept_casts([wrapper])
    found = kept.dtype is torch.get_autocast_dtype(kept.device.type) and not _casts(tape, fake, count)
    del tape.operations[count:]
    return found


def _casts(tape: Tape, fake: Tensor, since: int = 0) -> bool:
    dtype = torch.get_autocast_dtype(fake.device.type)
    return any(
        operation.target is internals.CAST and operation.args[0] is fake and operation.result.dtype is dtype
        for operation in tape.operations[since:]
    )
