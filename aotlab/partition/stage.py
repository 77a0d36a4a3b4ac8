"""Stage 5, partition: cut the joint graph into a forward and a backward.

What the backward uses of the forward must be *saved*: it becomes an additional output of the forward and an input of
the backward::

    forward(x, y)          -> (out, x, y)          # x and y are saved
    backward(x, y, tangent) -> (tangent * y, tangent * x)

Which values to save is the partitioner's choice. Two things are this stage's, whichever partitioner was chosen:

- A saved *view* of an input or output is replaced by that tensor, and the view is made in the backward. Autograd counts
  writes per storage, and would not see a later write through a view that a compiler made.
- A saved input that the epilogue will overwrite is saved as a clone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from aotlab.capture.signals import RunEagerly
from aotlab.errors import RandomOpError
from aotlab.ir import graphs as ir
from aotlab.partition.default import default_partition
from aotlab.partition.described import FOR_DERIVATIVES, SavedValue, describe_saved
from aotlab.partition.saved import save_besides, save_clones, save_masks, save_roots_of_views, take_sizes
from aotlab.trace.live import Trace
from aotlab.trace.records import TraceRecord
from aotlab.trace.views import root_among

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord:
    """The two graphs; without anything to differentiate, ``backward`` is None and nothing is saved.

    ``num_forward_outputs`` of the forward's outputs come before the saved values. Of these ``own`` are the numbers of
    the caller's tensors themselves, which may be of other sizes by then.
    """

    partitioner: str
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[SavedValue, ...]
    num_forward_outputs: int
    own: tuple[int, ...] = ()

    @property
    def op_count(self) -> int:
        """The calls in both graphs."""
        return sum(ir.op_count(module.graph) for module in (self.forward, self.backward) if module is not None)


@dataclass(kw_only=True, eq=False)
class Split:
    """The partition with its live values: the tape's fake tensor of each saved value, None if it is not of the tape."""

    saved_values: list[Tensor | None] = field(default_factory=list)
    saved_names: list[str] = field(default_factory=list)
    #: Pairs of a value that a saved one stands for, since both are the same expression, and the saved one.
    same: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    #: The numbers of those that are copies to compute again with.
    copies: frozenset[int] = frozenset()
    #: What the forward graph hands on to be saved, None for a clone; a compiler may put others into the graph's nodes.
    graph_values: list[Tensor | None] = field(default_factory=list)


def run(trace_record: TraceRecord, trace: Trace, partitioner: Partitioner) -> tuple[PartitionRecord, Split]:
    """Partition the joint graph.

    Raises `RandomOpError`: the partitioner put a random op of the forward into the backward.
    """
    inputs, count = trace.inputs.placeholders, len(trace.forward_outputs)
    if not trace.training or len(ir.output_args(trace_record.module.graph)) == count:
        module = trace_record.module
        if trace.training:  # nothing could be differentiated: the forward alone
            module = trace.tape.graph("Forward", inputs, trace.forward_outputs, keep_impure="forward")
        record = PartitionRecord(partitioner="none", forward=module, backward=None, saved=(), num_forward_outputs=count)
        return record, Split()
    late = [*trace.tangents.fakes, *(fake for _, fake in trace.deriver.live_inputs)]
    static = list(trace.metadata.static_input_indices)
    for placeholder in _standing_for(trace_record.module, trace, trace.overwritten):
        placeholder.meta["overwritten"] = True  # to keep it takes a clone
    function = _function_of(partitioner)
    if not function.__module__.startswith("aotlab."):
        _check_unused(trace_record.module)
    given = [fake for _, fake in inputs], late
    forward, backward = partitioner(
        trace_record.module, given, num_fwd_outputs=count, static_lifetime_input_indices=static
    )
    if trace.symbols:
        take_sizes(forward, backward, count)
    # a partitioner may leave unused copies of random ops behind; a backward has nothing that must run unused
    ir.drop_unused(backward.graph, lambda node: node.op in ("placeholder", "output"))
    if function is default_partition:  # which saves memory only where that costs nothing at all
        save_masks(forward, backward, count)
        save_besides(forward, backward, _kept_besides(forward, count, trace), FOR_DERIVATIVES)
    save_roots_of_views(forward, backward, count, _standing_for(forward, trace, trace.bases))
    save_clones(forward, _standing_for(forward, trace, trace.overwritten), count)
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
        own=tuple(n for n, node in enumerate(saved) if node.op == "placeholder"),
    )
    return record, split


def _kept_besides(forward: fx.GraphModule, count: int, trace: Trace) -> list[fx.Node]:
    """Return what autograd's nodes keep for derivatives of higher order and is not saved, as the matrix of `det`.

    What the call overwrites is left out, for which it would take a copy.
    """
    tape = trace.tape
    nodes: dict[int, fx.Node] = {}
    for node in forward.graph.nodes:
        nodes.setdefault(id(node.meta.get("val")), node)
    known = {id(saved.meta.get("val")) for saved in ir.output_args(forward.graph)[count:] if saved is not None}
    inputs = {id(fake) for _, fake in trace.inputs.placeholders}
    written = {id(fake) for fake in trace.overwritten}
    more: list[fx.Node] = []

    def add(value: Tensor) -> None:
        known.add(id(value))
        if id(value) in nodes and id(value) not in written:
            more.append(nodes[id(value)])

    values = trace.kept_by(trace.saving.bits, of_torch=True)
    kept = [value for value in values if root_among(tape, value, known) is None]
    for value in kept:
        root = root_among(tape, value, inputs)
        if root is not None and id(root) not in known:
            add(root)
    for value in kept:
        operations, outside = tape.needed([value], known)
        if outside or any(tape.operations[i].is_random for i in operations):
            add(value)
        known.add(id(value))
    return more


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
    """Run eagerly where others' partitioners would drop an op of the forward that nobody uses and that stays."""
    for node in joint.graph.nodes:
        if node.op == "call_function" and not node.users and ir.phase_of(node) == "forward" and ir.must_stay(node):
            raise RunEagerly(
                f"nobody uses the result of `{node.target}`, which may raise or draws random numbers",
                suggestion="use aotlab.default_partition, to have it compiled",
            )


def _standing_for(forward: fx.GraphModule, trace: Trace, values: Sequence[Tensor]) -> set[fx.Node]:
    """Return the graph's inputs that stand for ``values``."""
    fakes = {id(value) for value in values}
    # a joint graph has tangents besides
    pairs = zip(ir.placeholders(forward.graph), trace.inputs.placeholders, strict=False)
    return {placeholder for placeholder, (_, fake) in pairs if id(fake) in fakes}


def _check_random(backward: fx.GraphModule) -> None:
    """Refuse a partition that draws in the backward what the forward draws."""
    for node in backward.graph.nodes:
        if ir.is_random(node.target) and ir.phase_of(node) == "forward":
            raise RandomOpError(
                f"the partitioner puts `{node.target}` of the forward into the backward",
                line=ir.line_of(node),
                why="it would draw other numbers than the forward did",
                suggestion="use aotlab.default_partition",
            )
