"""Between capture and dedupe: what autocast keeps of leaves becomes inputs.

    with torch.autocast("cpu", torch.bfloat16):
        loss = f(x, w) + f(y, w)
    loss.backward()

Autocast casts a leaf that requires grad once in a region and keeps that until the region ends. So both calls use one
bfloat16 `w`: its gradients are summed in bfloat16 before they are cast back, and what is written to `w` in between is
not used. A graph that casts for itself would do neither.

The first trace under autocast shows of which leaves it keeps a cast. If there are any, the call is traced again with
these casts as further inputs, behind the others: the prologue asks autocast for them, which casts what it has not kept
yet, and the gradients reach the leaves through the casts' own history. A leaf that the function writes before it is
cast is left as it was: the graph casts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.guards import tensor_facts
from aotlab.recorder import RunEagerly, Tape, tensors_in
from aotlab.stages.capture import Call

_ONE_DTYPE = "stay with one dtype in a region to have it compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class CastsRecord:
    """Which leaves are taken as autocast keeps them: their names, the bytes of the casts, and of the leaves."""

    names: tuple[str, ...]
    nbytes: tuple[int, ...]
    leaf_nbytes: tuple[int, ...]


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


def run(call: Call, leaves: Sequence[int]) -> tuple[CastsRecord, Call]:
    """Add what autocast keeps of the tensors at the positions ``leaves`` to a call."""
    tensors = [call.values[i] for i in leaves]
    kept = internals.kept_casts(tensors)
    for position, cast in zip(leaves, kept, strict=True):
        if cast.dtype is not torch.get_autocast_dtype(cast.device.type):
            name = call.state.names[position]
            raise RunEagerly(f"autocast keeps a cast of `{name}` to another dtype", passing=True, suggestion=_ONE_DTYPE)
    state, end = call.state, len(call.values)
    names = tuple(f"autocast({state.names[i]})" for i in leaves)
    record = CastsRecord(
        names=names, nbytes=tuple(k.nbytes for k in kept), leaf_nbytes=tuple(tensor.nbytes for tensor in tensors)
    )
    state = replace(
        state,
        names=(*state.names, *names),
        leaves=(*state.leaves, *(tensor_facts(k) for k in kept)),
        same_as=(*state.same_as, *range(end, end + len(kept))),
    )
    return record, replace(call, values=(*call.values, *kept), casts=tuple(leaves), state=state)


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
