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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from aotlab import torch_internals as internals
from aotlab.guards import tensor_facts
from aotlab.recorder import RunEagerly
from aotlab.stages.capture import Call

_ONE_DTYPE = "stay with one dtype in a region to have it compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class CastsRecord:
    """Which leaves are taken as autocast keeps them: their names, the bytes of the casts, and of the leaves."""

    names: tuple[str, ...]
    nbytes: tuple[int, ...]
    leaf_nbytes: tuple[int, ...]


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
