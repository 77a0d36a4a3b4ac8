"""Whether a backward computes the same of gradients that are laid out otherwise than those that it was traced with.

    y = (x @ w).relu()
    y.sum().backward()      # the gradient of y is one number, expanded: its strides are all 0

Autograd's formulas look at strides now and then, so a backward is derived for other strides. But mostly the first node
makes of them what has the usual ones again, as ``relu`` does here; then the backward for these takes them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab.trace.deriver import Deriver, run_node
from aotlab.trace.edges import next_edges
from aotlab.trace.history import nodes_of
from aotlab.trace.inputs import value_of
from aotlab.trace.records import Pattern
from aotlab.trace.tape import Operation, Tape, tensors_in


def does_the_same(deriver: Deriver, number: int, pattern: Pattern) -> bool:
    """Tell whether the first nodes of a segment, run with a pattern's tangents and with usual ones, do the same."""
    part, tape = deriver.segments[number], deriver.recorder.tape
    arriving: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}
    usual = deriver.given(number, [bool(way) for way in pattern])
    for edge, first, second in zip(part.entries, usual, deriver.given(number, pattern), strict=True):
        if first is not None and second is not None:
            if edge in part.inputs or edge[1] in arriving.setdefault(edge[0], {}):
                return False
            arriving[edge[0]][edge[1]] = first, second
    passed = {node for start in nodes_of(part, [(node, 0) for node in arriving]) for node, _ in next_edges(start)}
    with deriver.recording(autocast=False), torch.no_grad():
        for node, given in arriving.items():
            if all(first is second for first, second in given.values()):
                continue
            if node in passed or not part.has(node) or internals.is_custom_function_node(node):
                return False
            runs = []
            for which in (0, 1):
                start = len(tape.operations)
                own = {slot: pair[which] for slot, pair in given.items()}
                found = run_node(node, own, part, part.stops)
                names = {id(internals.from_functional(wrapper)): ("given", slot) for slot, wrapper in own.items()}
                sent = {i: gradient for i, gradient in found.items() if node.next_functions[i] not in part.stops}
                values = {i: value_of(gradient, "a gradient") for i, gradient in sent.items()}
                places = {i: (value.stride(), value.storage_offset()) for i, value in values.items()}
                runs.append((spelled(tape.operations[start:], names), places))
            if runs[0] != runs[1]:
                return False
    return True


def spelled(
    operations: Sequence[Operation], names: dict[int, Any], results: Any = (), tape: Tape | None = None
) -> list[Any]:
    """Write ops, and ``results`` of theirs, down so that those of two runs can be compared.

    Tensors that they made have numbers; ``names`` are those of what each run was given, by their ``id``. Constants of
    the ``tape``, if it is given, are compared by their values, which takes place outside of the trace.
    """

    def spell(value: Any) -> Any:
        if isinstance(value, fx.GraphModule):
            return value.code, [spell(getattr(value, n.target)) for n in value.graph.find_nodes(op="get_attr")]
        if isinstance(value, Tensor):
            is_real = not isinstance(value, internals.FakeTensor)  # of such a graph
            constant = value if is_real else None if tape is None else tape.constant(value)
            own = None if constant is None else (constant.dtype, constant.device, constant.tolist())
            return own or names.get(id(value), id(value))
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(spell, value)]
        return type(value), value

    found: list[Any] = []
    for n, operation in enumerate(operations):
        found.append((operation.target, spell(operation.args), {k: spell(v) for k, v in operation.kwargs.items()}))
        names.update({id(made): ("made", n, i) for i, made in enumerate(tensors_in(operation.result))})
    return [*found, spell(results)]
