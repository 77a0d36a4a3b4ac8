"""Choose the dynamic sizes of a call: the sizes and numbers that are traced as symbols.

These are the sizes and numbers that differed between earlier calls, or all sizes, depending on ``dynamic`` of
`aotlab.compile`.
"""

from __future__ import annotations

import math

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.call import Call
from aotlab.guards.call_state import CallState, TensorFacts, ValueFacts
from aotlab.guards.reached import codes_in

#: Maps the position of a flat tensor argument to the set of its dimensions whose sizes vary. The position of a number
#: that varies is mapped to the set of the single element `NUMBER`.
DynamicSizes = dict[int, set[int]]
NUMBER = -1


def note_differences(varying: DynamicSizes, earlier: CallState, current: CallState) -> None:
    """Add to ``varying`` the sizes and numbers that differ between the states of an earlier and the current call.

    Nothing is added if the arguments of the two calls are nested differently.
    """
    if earlier.nesting != current.nesting or len(earlier.leaves) != len(current.leaves):
        return
    for position, (before, after) in enumerate(zip(earlier.leaves, current.leaves, strict=True)):
        dims: set[int] = set()
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts) and len(before.shape) == len(after.shape):
            pairs = zip(before.shape, after.shape, strict=True)
            dims = {d for d, (was, is_now) in enumerate(pairs) if was != is_now}
        elif isinstance(before, ValueFacts) and isinstance(after, ValueFacts) and before.type in (int, float):
            dims = {NUMBER} if before.type is after.type and not before.matches(after) else set()
        if dims:
            varying.setdefault(position, set()).update(dims)


def choose_dynamic_sizes(call: Call, dynamic: bool | None, varying: DynamicSizes | None) -> DynamicSizes:
    """Return the sizes and numbers that are traced as symbols.

    ``dynamic`` is the option of `aotlab.compile`, and ``varying`` has the sizes and numbers that differed between
    earlier calls. Dimensions that the user marked as dynamic or static (``torch._dynamo.mark_dynamic``) are treated
    accordingly, unless ``dynamic`` is False. These are never symbols: sizes of parameters and buffers, sizes of 0 and
    1, and floats that are 0, nan or infinite. Lifted numbers are always symbols, because they are lifted only if they
    vary. If the function may call `type`, no number is a symbol, because the type of a symbol is not the type of a
    number.
    """
    if dynamic is False:
        return {}
    dynamic_sizes: DynamicSizes = {}
    reads_types = bool(varying) and any("type" in code.co_names for code in codes_in(call.state.reached))
    input_start = sum(kind != "input" for _, kind in call.target.lifted_names())  # after parameters and buffers
    for position, value in enumerate(call.values[input_start:], input_start):
        seen_varying = (varying or {}).get(position, set())
        if isinstance(value, Tensor):
            marked, static = internals.marked_dims(value)
            dims_to_trace = (
                {*(range(value.dim()) if dynamic else seen_varying), *marked} - static if value.numel() else ()
            )
            dims = {dim for dim, size in enumerate(value.shape) if dim in dims_to_trace and size > 1}
        else:
            plain = type(value) is int or (type(value) is float and value != 0 and math.isfinite(value))
            varies = position < call.lifted_count or NUMBER in seen_varying
            dims = {NUMBER} if varies and plain and not reads_types else set()
        if dims:
            dynamic_sizes[position] = dims
    return dynamic_sizes
