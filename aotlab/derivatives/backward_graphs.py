"""Write the graph of a backward that is derived after the forward was partitioned.

The graph may start only from the values that the forward saved, and computes other values again from these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab.errors import PartialBackwardError
from aotlab.ir.fx_graphs import placeholders
from aotlab.partition.partition_stage import Split
from aotlab.partition.replace_saved import run_late, take_from_saved
from aotlab.trace.live_trace import Trace
from aotlab.trace.records import Pattern

#: The last item of the result of `casting_of` if the backward must run as an fx graph, not as compiled kernels.
BY_GRAPH = ("by graph",)

#: The suffix of a placeholder's name if its value was not saved. A graph with such a placeholder can be used only if
#: `take_from_saved` replaces the placeholder by a copy of the value, because the forward may have saved a copy.
_MISSING = "_not_saved"


def casting_of(values: Sequence[Tensor | None], *, exact: bool) -> tuple[object, ...]:
    """Return the active autocast state, followed by `BY_GRAPH` if compiled kernels cannot take ``values``.

    ``values`` are the gradients with which a backward is called. The result is a part of the key under which the
    compiled backward is stored, because eager's backward uses the autocast of the code that calls the backward, not the
    autocast of the forward. Under a function transform, or with ``is_grads_batched=True``, one tensor may represent
    several. Torch's ops accept such tensors, but compiled kernels do not. ``exact`` is true for backends that call
    torch's ops. They never need `BY_GRAPH`.
    """
    casting = internals.autocast_state() if internals.any_autocast_enabled() else ()
    return casting if exact or not internals.is_beyond_kernels(values) else (*casting, *BY_GRAPH)


def derive_backward(
    trace: Trace, split: Split, segment: int, pattern: Pattern, requested: Collection[int] | None = None
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Write the backward graph of a segment for a pattern of defined tangents.

    The graph takes the saved values that it needs, the defined tangents and the live inputs (inputs that the backward
    reads or writes in their state at that time, see `aotlab.trace.deriver`). It returns one gradient or None for each
    slot of the segment, then the new values of the live inputs. ``requested`` are the slots whose gradients autograd
    requests; None means all slots. A value that the forward did not save is recomputed from saved values if that is
    possible. The second result holds the positions of the saved values that the graph takes.

    Raises `PartialBackwardError` if a value was not saved and cannot be recomputed.
    """
    gradients = trace.deriver.derive(segment, pattern, autocast=internals.any_autocast_enabled(), requested=requested)
    defined = [
        (f"tangents_{n + 1}", internals.from_functional(traced))
        for n, traced in zip(
            trace.tangents.of_entries[segment], trace.deriver.traced_tangents(segment, pattern), strict=True
        )
        if traced is not None
    ]
    written = write_backward(trace, split, gradients, [*defined, *trace.deriver.live_inputs])
    if written is None:
        raise PartialBackwardError(
            "a backward from some of the outputs needs a value that the forward did not save",
            why=f"the partitioner chose the saved values for a backward from all {len(pattern)} outputs",
            suggestion="use aotlab.default_partition",
        )
    return written


def write_backward(
    trace: Trace, split: Split, outputs: Sequence[Tensor | None], defined: Sequence[tuple[str, Tensor]]
) -> tuple[fx.GraphModule, tuple[int, ...]] | None:
    """Write a graph that computes ``outputs`` from saved values and the tangents in ``defined``.

    ``defined`` has the name and the fake tensor of each tangent. Returns the graph and the positions of the saved
    values that it takes. Returns None if a value was not saved and cannot be recomputed.
    """
    operations = trace.tape.operations
    named = list(zip(split.saved_names, split.saved_values, strict=True))
    results = [(name, value) for n, (name, value) in enumerate(named) if value is not None and n in split.copies]
    # recomputation starts from copies of inputs; if that is not enough, also from copies of results
    for begins in ((), results) if split.copies else ((),):
        # The graph first gets one placeholder for each value. Afterwards `take_from_saved` makes it read the copies.
        first: dict[int, tuple[str, Tensor]] = {}
        for n, (name, value) in enumerate(named):
            if value is not None and n not in split.copies:
                first[id(value)] = name, value
        graph_inputs = [each for each in trace.inputs.placeholders if isinstance(each[1], Tensor)]
        for name, value in (*begins, *(graph_inputs if split.copies else ())):
            first.setdefault(id(value), (f"{name}{_MISSING}", value))
        same = [(other, value) for other, value in split.same if trace.tape.knows(other) and id(value) in first]
        stop = {*first, *(id(fake) for _, fake in defined), *(id(other) for other, _ in same)}
        stop |= {internals.expression_of(symbol) for _, symbol in trace.symbols}
        indices, outside = trace.tape.needed(outputs, stop)
        if outside or any(operations[i].phase == "forward" and operations[i].is_random for i in indices):
            continue
        module = trace.tape.graph("Backward", [*first.values(), *trace.symbols, *defined], outputs, same=same)
        numbers = take_from_saved(module.graph, named, split.copies)
        if not any(str(node.target).endswith(_MISSING) for node in placeholders(module.graph)):
            run_late(module.graph)
            module.recompile()
            return module, numbers
    return None
