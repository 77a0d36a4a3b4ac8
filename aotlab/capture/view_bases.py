"""A second attempt for a call that writes to views of tensors that are not arguments: pass these tensors as inputs.

    b = leaf.add(1)
    f(b[0], b.t())                   # and f writes to its first argument

The write changes the value and the autograd history of ``b``, and so those of ``b.t()``. A trace with one input for
each argument cannot represent this. So the graph takes the base ``b`` as an input, and makes the arguments as views of
it::

    forward(b):
        a = b.as_strided([2], [1], 0); c = b.as_strided([2, 2], [1, 2], 0)

The epilogue writes the new value to ``b`` only. Autograd then regenerates the histories of the caller's views, as in
eager. The base and its views are a *family*. The pipeline uses this module only after a trace ended for one of the
reasons in `CASES`, so other calls have no cost.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from aotlab import _torch as internals
from aotlab.capture.call import ArgumentRecord, Call, CaptureRecord
from aotlab.guards.call_state import tensor_facts
from aotlab.ir.extents import counted_together, overlapping_pairs
from aotlab.ir.specs import StorageNumbers, spec_of

#: The reasons for which a trace ends and which the bases of views may remove: ids of rows of `aotlab.fallbacks`.
CASES = frozenset(
    (
        "changes-sizes-of-argument",
        "no-synthetic-base",
        "output-of-several-inputs",
        "shared-input-gains-history",
        "shared-version-counter",
        "writes-view-with-grad-base",
    )
)


def with_view_bases(record: CaptureRecord, call: Call) -> tuple[CaptureRecord, Call] | None:
    """Return the call with the base of each view argument as an input.

    A base that is not an argument is appended to the call's values. The result is None if there is no view whose base
    can be an input, or if a tensor shares memory with a tensor of another family.
    """
    values, names, leaves = list(call.values), list(call.state.names), list(call.state.leaves)
    same_as, arguments = list(call.state.same_as), list(record.arguments)
    positions = {id(values[i]): i for i in reversed(call.tensor_positions)}
    bases: dict[int, int] = {}
    for i in sorted(positions.values()):
        base = internals.base_of(values[i])
        if base is None or not internals.is_strided_view(values[i]):
            continue
        if id(base) not in positions:
            name = f"{names[i]}._base"
            positions[id(base)] = len(values)
            same_as.append(len(values))
            values.append(base)
            names.append(name)
            leaves.append(tensor_facts(base, call.state.mentioned, name))
            view_spec = arguments[i].spec
            spec = replace(spec_of(base, StorageNumbers()), storage=view_spec.storage if view_spec else 0)
            arguments.append(ArgumentRecord(name=name, kind="base", spec=spec, storage_id=arguments[i].storage_id))
        bases[i] = positions[id(base)]
    distinct = [(i, values[i]) for i in sorted(positions.values())]
    pairs = overlapping_pairs(distinct)
    if not bases or torch.is_inference_mode_enabled() or any(bases.get(a, a) != bases.get(b, b) for a, b, _ in pairs):
        return None
    state = replace(
        call.state,
        names=tuple(names),
        leaves=tuple(leaves),
        same_as=tuple(same_as),
        overlapping=pairs,
        counters=counted_together(distinct),
    )
    extended = replace(call, values=tuple(values), state=state, view_bases=dict(sorted(bases.items())), own=call.state)
    return replace(record, arguments=tuple(arguments)), extended
