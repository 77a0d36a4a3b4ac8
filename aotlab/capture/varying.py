"""Which sizes and numbers vary: those that were others at an earlier call, or all sizes."""

from __future__ import annotations

import math

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.call import Call
from aotlab.guards.call_state import CallState, TensorFacts, ValueFacts
from aotlab.guards.reached import codes_in

#: The dimensions, by flat argument, whose sizes were seen to vary; of an argument that is a number `NUMBER`.
Varying = dict[int, set[int]]
NUMBER = -1


def note(varying: Varying, then: CallState, now: CallState) -> None:
    """Note which sizes and numbers of ``now`` are others than those of ``then``, if arguments are nested alike."""
    if then.nesting != now.nesting or len(then.leaves) != len(now.leaves):
        return
    for position, (before, after) in enumerate(zip(then.leaves, now.leaves, strict=True)):
        dims: set[int] = set()
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts) and len(before.shape) == len(after.shape):
            pairs = zip(before.shape, after.shape, strict=True)
            dims = {d for d, (was, is_now) in enumerate(pairs) if was != is_now}
        elif isinstance(before, ValueFacts) and isinstance(after, ValueFacts) and before.type in (int, float):
            dims = {NUMBER} if before.type is after.type and not before.matches(after) else set()
        if dims:
            varying.setdefault(position, set()).update(dims)


def chosen(call: Call, dynamic: bool | None, varying: Varying | None) -> Varying:
    """Return what is to be traced as symbols: sizes of 0 and 1, floats of 0, nan and infinity are cases of their own.

    So are numbers where the function may ask for the type of one by `type`, which would say that it is a symbol.
    """
    if dynamic is False:
        return {}
    found: Varying = {}
    asks = bool(varying) and any("type" in code.co_names for code in codes_in(call.state.reached))
    first = sum(kind != "input" for _, kind in call.target.lifted_names())  # behind parameters and buffers
    for position, value in enumerate(call.values[first:], first):
        asked = (varying or {}).get(position, set())
        if isinstance(value, Tensor):
            marked, static = internals.marked_dims(value)
            wanted = {*(range(value.dim()) if dynamic else asked), *marked} - static if value.numel() else ()
            dims = {dim for dim, size in enumerate(value.shape) if dim in wanted and size > 1}
        else:
            plain = type(value) is int or (type(value) is float and value != 0 and math.isfinite(value))
            dims = {NUMBER} if NUMBER in asked and plain and not asks else set()
        if dims:
            found[position] = dims
    return found
