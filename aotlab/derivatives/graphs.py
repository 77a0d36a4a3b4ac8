"""Graphs of backwards that are derived after the call: they begin at what its forward saved."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab.errors import PartialBackwardError
from aotlab.ir.graphs import placeholders
from aotlab.partition.saved import take_from_saved
from aotlab.partition.stage import Split
from aotlab.trace.live import Trace
from aotlab.trace.records import Pattern

#: Stands at the end of what `casting_of` returns where a backward is to run its graph as it is.
BY_GRAPH = ("by graph",)

#: The end of the name of a value of which only copies are saved.
_MISSING = "_not_saved"


def casting_of(values: Sequence[Tensor | None], *, exact: bool) -> tuple[object, ...]:
    """Return the autocast that is on, and `BY_GRAPH` where compiled kernels cannot take what came in.

    Eager's backward runs under the autocast of its own caller, whatever the forward ran under. Under a transform, or
    with ``is_grads_batched=True``, a tensor may stand for several, which torch's ops take and kernels do not.
    """
    casting = internals.autocast_state() if internals.any_autocast_enabled() else ()
    return casting if exact or not internals.is_beyond_kernels(values) else (*casting, *BY_GRAPH)


def derive_backward(
    trace: Trace, split: Split, segment: int, pattern: Pattern, asked: Collection[int] | None = None
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Write the backward graph of a segment for the tangents of a pattern.

    It takes those of the saved values that it needs, whose numbers are returned too, the defined tangents, and live
    inputs; it returns one gradient or None per slot, and new values of these (`aotlab.trace.deriver`). What the forward
    did not save, but can be computed from what it saved, is computed again.

    Raises `PartialBackwardError`: something is needed that was neither saved nor can be computed again.
    """
    gradients = trace.deriver.derive(segment, pattern, autocast=internals.any_autocast_enabled(), asked=asked)
    defined = [
        (f"tangents_{n + 1}", internals.from_functional(given))
        for n, given in zip(trace.tangents.of_entries[segment], trace.deriver.given(segment, pattern), strict=True)
        if given is not None
    ]
    found = write_backward(trace, split, gradients, [*defined, *trace.deriver.live_inputs])
    if found is None:
        raise PartialBackwardError(
            "a backward from some of the outputs needs a value that the forward did not save",
            why=f"the partitioner chose what to save for a backward from all {len(pattern)} of them",
            suggestion="use aotlab.default_partition",
        )
    return found


def write_backward(
    trace: Trace, split: Split, outputs: Sequence[Tensor | None], defined: Sequence[tuple[str, Tensor]]
) -> tuple[fx.GraphModule, tuple[int, ...]] | None:
    """Write a graph that computes ``outputs`` from saved values and the tangents in ``defined``.

    Returned with it are the numbers of the saved values that it takes; None if something is needed that was neither
    saved nor can be computed again.
    """
    operations = trace.tape.operations
    named = list(zip(split.saved_names, split.saved_values, strict=True))
    results = [(name, value) for n, (name, value) in enumerate(named) if value is not None and n in split.copies]
    # what is computed again begins at copies of inputs or, if that does not do, at copies of results, too
    for begins in ((), results) if split.copies else ((),):
        # each value by one name first; then what is computed again uses copies
        first: dict[int, tuple[str, Tensor]] = {}
        for n, (name, value) in enumerate(named):
            if value is not None and n not in split.copies:
                first[id(value)] = name, value
        given = [each for each in trace.inputs.placeholders if isinstance(each[1], Tensor)]
        for name, value in (*begins, *(given if split.copies else ())):
            first.setdefault(id(value), (f"{name}{_MISSING}", value))
        same = [(other, value) for other, value in split.same if trace.tape.knows(other) and id(value) in first]
        stop = {*first, *(id(fake) for _, fake in defined), *(id(other) for other, _ in same)}
        wanted, outside = trace.tape.needed(outputs, stop)
        if outside or any(operations[i].phase == "forward" and operations[i].is_random for i in wanted):
            continue
        module = trace.tape.graph("Backward", [*first.values(), *trace.symbols, *defined], outputs, same=same)
        numbers = take_from_saved(module.graph, named, split.copies)
        if not any(str(node.target).endswith(_MISSING) for node in placeholders(module.graph)):
            module.recompile()
            return module, numbers
    return None
