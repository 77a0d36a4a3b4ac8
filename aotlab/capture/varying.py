"""Which sizes vary: those that were others at an earlier call, or all."""

from __future__ import annotations

from torch import Tensor

from aotlab.capture.call import Call
from aotlab.guards.call_state import CallState, TensorFacts

#: The dimensions, by flat argument, whose sizes were seen to vary.
Varying = dict[int, set[int]]


def note(varying: Varying, then: CallState, now: CallState) -> None:
    """Note which sizes of ``now`` are others than those of ``then``, where the arguments are nested alike."""
    if then.nesting != now.nesting or len(then.leaves) != len(now.leaves):
        return
    for position, (before, after) in enumerate(zip(then.leaves, now.leaves, strict=True)):
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts) and len(before.shape) == len(after.shape):
            pairs = zip(before.shape, after.shape, strict=True)
            dims = {d for d, (was, is_now) in enumerate(pairs) if was != is_now}
            if dims:
                varying.setdefault(position, set()).update(dims)


def chosen(call: Call, dynamic: bool | None, varying: Varying | None) -> Varying:
    """Return the dimensions that are to be traced as symbols: sizes of 0 and 1 are cases of their own."""
    if dynamic is False or (dynamic is None and not varying):
        return {}
    found: Varying = {}
    for position in call.tensor_positions:
        tensor: Tensor = call.values[position]
        asked = range(tensor.dim()) if dynamic else (varying or {}).get(position, ())
        dims = {dim for dim in asked if tensor.shape[dim] > 1}
        if dims and position >= call.lifted_count:
            found[position] = dims
    return found
