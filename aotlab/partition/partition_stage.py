"""Stage 5, partition: split the joint graph into a forward and a backward.

A value of the forward that the backward uses must be *saved*: it becomes an additional output of the forward and an
input of the backward::

    forward(x, y)          -> (out, x, y)          # x and y are saved
    backward(x, y, tangent) -> (tangent * y, tangent * x)

The partitioner chooses the values to save. This stage does two more things, for every partitioner:

- It replaces a saved *view* of an input or output by that input or output, and the backward makes the view. The reason:
  a view that a compiler made does not share the tensor's version counter, so autograd would not notice a later write.
- It saves a clone of a saved input that the epilogue will overwrite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from aotlab.capture.signals import RunEagerly
from aotlab.errors import RandomOpError
from aotlab.ir import fx_graphs as ir
from aotlab.partition.default import default_partition
from aotlab.partition.replace_saved import (
    run_late,
    save_clones,
    save_further,
    save_masks,
    save_roots_of_views,
    take_sizes,
)
from aotlab.partition.saved_descriptions import FOR_DERIVATIVES, SavedValue, describe_saved
from aotlab.trace.live_trace import Trace
from aotlab.trace.records import TraceRecord
from aotlab.trace.view_ops import root_among

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord:
    """The result of the stage: the forward graph, the backward graph, and the saved values.

    If nothing is differentiated, ``backward`` is None and nothing is saved. The forward returns ``num_forward_outputs``
    outputs, then the saved values. ``saved_inputs`` has the positions, in ``saved``, of the values that are inputs of
    the graph. The caller may resize such a tensor before the backward runs, so the run-time code checks it. ``joint``
    is the joint graph that was split (None if nothing is differentiated), and ``static`` are the positions of
    parameters and buffers among its primals.
    """

    partitioner: str
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[SavedValue, ...]
    num_forward_outputs: int
    saved_inputs: tuple[int, ...] = ()
    joint: fx.GraphModule | None = None
    static: tuple[int, ...] = ()

    @property
    def op_count(self) -> int:
        """The number of op calls in both graphs."""
        return sum(ir.op_count(module.graph) for module in (self.forward, self.backward) if module is not None)


@dataclass(kw_only=True, eq=False)
class Split:
    """The saved values of a partition as fake tensors of the trace. Later backwards are derived from these tensors.

    ``saved_values`` has None for a value that is not on the trace's tape, because a partitioner or compiler created it.
    ``saved_names`` are the names of the saved values.
    """

    saved_values: list[Tensor | None] = field(default_factory=list)
    saved_names: list[str] = field(default_factory=list)
    #: Pairs of a value and the saved value that replaces it, because both are the same expression.
    same: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    #: The positions of the saved values that are copies, made so that the backward can compute other values again from
    #: them (`aotlab.partition.joint_analysis`).
    copies: frozenset[int] = frozenset()
    #: The fake tensors of the saved values as the forward graph returns them, with None for a clone. They are stored
    #: here because a compiler may replace them in the graph's nodes.
    graph_values: list[Tensor | None] = field(default_factory=list)


def run(trace_record: TraceRecord, trace: Trace, partitioner: Partitioner) -> tuple[PartitionRecord, Split]:
    """Partition the joint graph.

    Raises `RandomOpError` if the partitioner put a random op of the forward into the backward.
    """
    inputs, count = trace.inputs.placeholders, len(trace.forward_outputs)
    if not trace.training or len(ir.output_args(trace_record.module.graph)) == count:
        module = trace_record.module
        if trace.training:  # no gradient reaches an input, so there is no backward: write the forward only
            module = trace.tape.graph("Forward", inputs, trace.forward_outputs, keep_impure="forward")
        record = PartitionRecord(partitioner="none", forward=module, backward=None, saved=(), num_forward_outputs=count)
        return record, Split()
    late = [*trace.tangents.fakes, *(fake for _, fake in trace.deriver.live_inputs)]
    static = list(trace.metadata.static_input_indices)
    for placeholder in _placeholders_of(trace_record.module, trace, trace.overwritten):
        placeholder.meta["overwritten"] = True  # the partitioner counts a clone if it saves this input
    function = _function_of(partitioner)
    if not function.__module__.startswith("aotlab."):
        _check_unused(trace_record.module)
    joint_inputs = [fake for _, fake in inputs], late
    forward, backward = partitioner(
        trace_record.module, joint_inputs, num_fwd_outputs=count, static_lifetime_input_indices=static
    )
    if trace.symbols:
        take_sizes(forward, backward, count)
    # A partitioner may leave unused copies of random ops in the backward. No unused op of a backward must run.
    ir.drop_unused(backward.graph, lambda node: node.op in ("placeholder", "output"))
    if function is default_partition:  # it saves what autograd saves, with a mask where that takes no more time
        save_masks(forward, backward, count)
        run_late(backward.graph)
        save_further(forward, backward, _saved_for_derivatives(forward, count, trace), FOR_DERIVATIVES)
    save_roots_of_views(forward, backward, count, _placeholders_of(forward, trace, trace.bases))
    save_clones(forward, _placeholders_of(forward, trace, trace.overwritten), count)
    forward.recompile()
    backward.recompile()
    ir.check_graph(forward, "forward")
    ir.check_graph(backward, "backward")
    _check_random(backward)

    saved = [node for node in ir.output_args(forward.graph)[count:] if node is not None]
    split = Split(copies=frozenset(n for n, node in enumerate(saved) if ir.COPY in node.meta))
    for n, node in enumerate(saved):
        value = _tensor(node.meta.get("val"))
        origin = _tensor(node.meta.get("saved_value", value))
        origin = origin if origin is not None and trace.tape.knows(origin) else None
        split.saved_values.append(origin)
        split.saved_names.append(node.meta.get("saved_name", node.name))
        split.graph_values.append(None if "saved_value" in node.meta else value)
        if origin is not None and n not in split.copies:
            split.same += [(other, origin) for other in node.meta.get("stands_for", ()) if isinstance(other, Tensor)]
    record = PartitionRecord(
        partitioner=_name_of(partitioner),
        forward=forward,
        backward=backward,
        saved=describe_saved(forward, backward, count, trace, split.saved_names, split.copies),
        num_forward_outputs=count,
        saved_inputs=tuple(n for n, node in enumerate(saved) if node.op == "placeholder"),
        joint=trace_record.module,
        static=tuple(static),
    )
    return record, split


def _saved_for_derivatives(forward: fx.GraphModule, count: int, trace: Trace) -> list[fx.Node]:
    """Return the nodes that autograd saves only for higher-order derivatives, for example the matrix of `det`.

    Inputs that the call overwrites are left out, because saving them would take a clone.
    """
    tape = trace.tape
    nodes: dict[int, fx.Node] = {}
    for node in forward.graph.nodes:
        nodes.setdefault(id(node.meta.get("val")), node)
    covered = {id(saved.meta.get("val")) for saved in ir.output_args(forward.graph)[count:] if saved is not None}
    inputs = {id(fake) for _, fake in trace.inputs.placeholders}
    written = {id(fake) for fake in trace.overwritten}
    further_nodes: list[fx.Node] = []

    def add(value: Tensor) -> None:
        covered.add(id(value))
        if id(value) in nodes and id(value) not in written:
            further_nodes.append(nodes[id(value)])

    values = trace.values_kept_by(trace.saving.bits, of_torch=True)
    uncovered = [value for value in values if root_among(tape, value, covered) is None]
    for value in uncovered:
        root = root_among(tape, value, inputs)
        if root is not None and id(root) not in covered:
            add(root)
    for value in uncovered:
        operations, outside = tape.needed([value], covered)
        if outside or any(tape.operations[i].is_random for i in operations):
            add(value)
        covered.add(id(value))
    return further_nodes


def _tensor(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) else None


def _name_of(partitioner: Partitioner) -> str:
    if isinstance(partitioner, functools.partial):
        settings = ", ".join(f"{name}={value!r}" for name, value in partitioner.keywords.items())
        return f"{_name_of(partitioner.func)}({settings})"
    return str(getattr(partitioner, "__name__", type(partitioner).__name__))


def _function_of(partitioner: Partitioner) -> Partitioner:
    while isinstance(partitioner, functools.partial):
        partitioner = partitioner.func
    return partitioner


def _check_unused(joint: fx.GraphModule) -> None:
    """Run eagerly if an op of the forward must run although nobody uses its result (an assertion, for example).

    Partitioners from outside aotlab drop such an op.
    """
    for node in joint.graph.nodes:
        if node.op == "call_function" and not node.users and ir.phase_of(node) == "forward" and ir.must_stay(node):
            raise RunEagerly("partitioner-drops-unused-op", op=node.target)


def _placeholders_of(forward: fx.GraphModule, trace: Trace, values: Sequence[Tensor]) -> set[fx.Node]:
    """Return the placeholders of the graph that belong to the fake tensors ``values``."""
    fakes = {id(value) for value in values}
    # not strict: a joint graph has tangents, too
    pairs = zip(ir.placeholders(forward.graph), trace.inputs.placeholders, strict=False)
    return {placeholder for placeholder, (_, fake) in pairs if id(fake) in fakes}


def _check_random(backward: fx.GraphModule) -> None:
    """Raise `RandomOpError` if the backward contains a random op of the forward."""
    for node in backward.graph.nodes:
        if ir.is_random(node.target) and ir.phase_of(node) == "forward":
            raise RandomOpError(
                f"the partitioner puts `{node.target}` of the forward into the backward",
                line=ir.line_of(node),
                why="it would draw other numbers than the forward did",
                suggestion="use aotlab.default_partition",
            )
