"""Decide whether a compiled backward is also correct for tangents with other strides than the traced tangents.

    y = (x @ w).relu()
    y.sum().backward()      # the gradient of y is one number, expanded: its strides are all 0

Some of autograd's formulas depend on strides, so in general a new backward is derived for tangents with other strides.
But often the first node (here the node of ``relu``) turns the tangent into a gradient with the usual strides. Then the
backward for the usual strides can take the tangents as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab.trace.autograd_edges import next_edges
from aotlab.trace.deriver import Deriver, run_node
from aotlab.trace.history import nodes_of
from aotlab.trace.inputs import value_of
from aotlab.trace.records import Pattern
from aotlab.trace.tape import Operation, Tape, tensors_in


def is_right_for_layouts(deriver: Deriver, number: int, pattern: Pattern) -> bool:
    """Tell whether the backward of segment ``number`` for the usual strides is correct for the strides of ``pattern``.

    The nodes at the entries of the segment are run twice, with the usual strides and with the strides of the pattern.
    Both runs must record the same ops and return gradients with the same strides.
    """
    segment, tape = deriver.segments[number], deriver.recorder.tape
    arriving: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}
    usual = deriver.traced_tangents(number, [bool(layout) for layout in pattern])
    for edge, first, second in zip(segment.entries, usual, deriver.traced_tangents(number, pattern), strict=True):
        if first is not None and second is not None:
            if edge in segment.inputs or edge[1] in arriving.setdefault(edge[0], {}):
                return False
            arriving[edge[0]][edge[1]] = first, second
    passed = {node for start in nodes_of(segment, [(node, 0) for node in arriving]) for node, _ in next_edges(start)}
    with deriver.recording(autocast=False), torch.no_grad():
        for node, pairs in arriving.items():
            if all(first is second for first, second in pairs.values()):
                continue
            if node in passed or not segment.has(node) or internals.is_custom_function_node(node):
                return False
            runs = []
            for which in (0, 1):
                start = len(tape.operations)
                buffer = {slot: pair[which] for slot, pair in pairs.items()}
                gradients = run_node(node, buffer, segment, segment.stops)
                names = {id(internals.from_functional(traced)): ("given", slot) for slot, traced in buffer.items()}
                sent = {i: gradient for i, gradient in gradients.items() if node.next_functions[i] not in segment.stops}
                values = {i: value_of(gradient, "a gradient") for i, gradient in sent.items()}
                places = {i: (value.stride(), value.storage_offset()) for i, value in values.items()}
                runs.append((describe_ops(tape.operations[start:], names), places))
            if runs[0] != runs[1]:
                return False
    return True


def describe_ops(
    operations: Sequence[Operation], names: dict[int, Any], results: Any = (), tape: Tape | None = None
) -> list[Any]:
    """Return a description of ops and of ``results`` that is equal for two runs of the same ops.

    A tensor that one of the ops made is described by the number of this op. A tensor whose id is a key of ``names`` is
    described by its name there. With ``tape``, a constant of the tape is described by its values. Values can only be
    read outside of the trace.
    """

    def spell(value: Any) -> Any:
        if isinstance(value, fx.GraphModule):
            return value.code, [spell(getattr(value, n.target)) for n in value.graph.find_nodes(op="get_attr")]
        if isinstance(value, Tensor):
            is_real = not isinstance(value, internals.FakeTensor)  # an attribute of a graph module
            constant = value if is_real else None if tape is None else tape.constant(value)
            constant_key = None if constant is None else (constant.dtype, constant.device, constant.tolist())
            return constant_key or names.get(id(value), id(value))
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(spell, value)]
        return type(value), value

    described: list[Any] = []
    for n, operation in enumerate(operations):
        described.append((operation.target, spell(operation.args), {k: spell(v) for k, v in operation.kwargs.items()}))
        names.update({id(tensor): ("made", n, i) for i, tensor in enumerate(tensors_in(operation.result))})
    return [*described, spell(results)]
