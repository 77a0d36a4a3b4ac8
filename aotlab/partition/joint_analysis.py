"""Analyze a joint graph for a partitioner: the nodes of the forward, the values that the backward needs, their costs.

    def f(x, w):
        return (x * w * 3).sin()        # eager saves x, w, and x * w * 3

To compute ``x * w * 3`` again, the backward needs ``x`` and ``w`` with the values of the forward. The caller may write
them before the backward runs, and a write that does not move the version counter (``w.data.mul_(2)``) would go
unnoticed. So values are computed again from copies of the tensors that the caller can reach, and the copies cost
memory. No copies are needed where the backward uses ``x`` and ``w`` directly, because eager's backward also reads their
present values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from aotlab._torch import OpOverload, traced
from aotlab.ir.fx_graphs import COPY, is_size, moves_nothing, output_args, phase_of, placeholders
from aotlab.ir.specs import StorageNumbers
from aotlab.partition.costs import Cost, cost_of, nbytes, why_once
from aotlab.partition.default import ancestors, extract, forward_nodes, is_tangent, primals_and_tangents

N = TypeVar("N", bound=Hashable)

#: The end of the name of a copy.
AS_IT_WAS = "_as_it_was"


class JointAnalysis:
    """A joint graph with the facts that a partitioner uses.

    ``outputs`` are returned by the forward, and ``gradients`` by the backward. ``same`` maps a node to an earlier node
    with the same expression, which replaces it. ``forward`` are the nodes of the forward. ``backward`` are the nodes
    that can only run in the backward. ``needed`` are the values that these nodes use and that the forward can compute.
    ``costs`` has the costs of all values that the backward might use, in the graph's order. ``inputs`` has the inputs
    of each node, after the replacements in ``same``.
    """

    def __init__(self, graph: fx.Graph, count: int, static: Collection[int], reachable: Collection[fx.Node]) -> None:
        """Analyze a joint graph.

        ``count`` is the number of the forward's outputs. ``static`` are the positions of parameters and buffers among
        the primals. ``reachable`` is the result of `caller_reachable`.
        """
        self.graph = graph
        returned = output_args(graph)
        self.outputs, self.gradients = returned[:count], returned[count:]
        self.same = same = common_subexpressions(graph, self.outputs)
        self.inputs: dict[fx.Node, Sequence[fx.Node]] = {}
        # The nodes that can only run in the backward: they depend on tangents, or are ops that the traced backward ran
        # and that must not run twice (for example random ops and assertions).
        bound: set[fx.Node] = set()
        for node in graph.nodes:
            node_inputs = self.inputs[node] = [same.get(each, each) for each in node.all_input_nodes]
            pinned = node.op == "call_function" and phase_of(node) == "backward" and why_once(node)
            if pinned or is_tangent(node) or not bound.isdisjoint(node_inputs):
                bound.add(node)
        self.backward: set[fx.Node] = set()
        self.needed: set[fx.Node] = set()
        todo = [same.get(node, node) for node in self.gradients if node is not None]
        while todo:
            node = todo.pop()
            if node not in bound:
                self.needed.add(node)
            elif node not in self.backward:
                self.backward.add(node)
                todo += self.inputs[node]
        self.forward = {same.get(node, node) for node in forward_nodes(graph, self.outputs)}
        primals, _ = primals_and_tangents(graph)
        lasting = {primals[n] for n in static if n < len(primals)}
        reached = ancestors(self.needed, inputs=self.inputs)
        flops: dict[object, int] = {}
        self.costs: dict[fx.Node, Cost] = {}
        for node in graph.nodes:
            if node in reached:
                early, lasts, is_open = node in self.forward, node in lasting, node in reachable
                self.costs[node] = cost_of(node, in_forward=early, static=lasts, reachable=is_open, flops=flops)

    def split(
        self, module: fx.GraphModule, saved_nodes: Sequence[fx.Node], reasons: Mapping[fx.Node, str]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Write the forward and the backward graph, with ``saved_nodes`` as the saved values.

        Saved values that are not tensors come after saved tensors. ``reasons`` has the reason for saving each node, as
        text for the report.
        """
        primals, tangents = primals_and_tangents(self.graph)
        numbers = [node for node in saved_nodes if not isinstance(node.meta.get("val"), Tensor)]
        saved = [*(node for node in saved_nodes if isinstance(node.meta.get("val"), Tensor)), *numbers]
        body = self.forward | ancestors(saved, self.forward, self.inputs)
        early = [node for node in self.graph.nodes if node in body]
        forward = extract(module, primals, early, (*self.outputs, *saved), "Forward", same=self.same)
        _make_only_saved(forward)
        replaced_values: dict[fx.Node, list[Any]] = {}
        for other, node in self.same.items():
            replaced_values.setdefault(node, []).append(other.meta.get("val"))
        for node, copy in zip(saved, output_args(forward.graph)[len(self.outputs) :], strict=True):
            assert copy is not None
            copy.meta["kept_because"] = reasons[node]
            copy.meta["stands_for"] = replaced_values.get(node, [])
        late = self._late_order(saved)
        return forward, extract(module, [*saved, *tangents], late, self.gradients, "Backward", same=self.same)

    def _late_order(self, saved: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the backward's nodes in an order in which each value is computed again just before its first use."""
        ends = {node for node in self.gradients if node is not None} | self.backward
        wanted = [self.same.get(node, node) for node in self.graph.nodes if node in ends]
        return just_before_use(wanted, self.inputs, {*saved, *placeholders(self.graph)})


def just_before_use(ends: Iterable[N], inputs: Mapping[N, Sequence[N]], done: set[N]) -> list[N]:
    """Return ``ends`` and everything that they need in an order in which each value is computed just before its use.

    ``inputs`` maps each value to the values that it is computed from, and ``done`` are the values that exist already.
    """
    order: list[N] = []
    for end in ends:
        todo = [end]
        while todo:
            if todo[-1] in done:
                todo.pop()
            elif missing := [each for each in inputs[todo[-1]] if each not in done]:
                todo += missing
            else:
                done.add(todo[-1])
                order.append(todo.pop())
    return order


def memory_of(node: fx.Node, storages: StorageNumbers) -> int | None:
    """Return the number that ``storages`` gives to the storage of a node's value.

    Nodes that share memory have the same number. The result is None if the value has no storage.
    """
    value = node.meta.get("val")
    return storages.number(value) if isinstance(value, Tensor) else None


def held_bytes(saved: Iterable[fx.Node], graph: fx.Graph, count: int) -> int:
    """Return the bytes of memory that a forward with these saved values holds for its backward.

    Memory that several values share is counted once. Memory of inputs and of the first ``count`` outputs is not
    counted. Each clone of an overwritten input is counted.
    """
    memory = partial(memory_of, storages=StorageNumbers())
    primals, _ = primals_and_tangents(graph)
    free = {memory(node) for node in (*primals, *output_args(graph)[:count]) if isinstance(node, fx.Node)}
    written = {memory(node) for node in primals if node.meta.get("overwritten")} - {None}
    held: dict[object, int] = {}
    for node in saved:
        value, number = node.meta.get("val"), memory(node)
        if number is None or value is None:
            held[node] = nbytes(value)
        elif number in written:
            held[node] = traced([value.numel()])[0] * value.element_size()
        elif number not in free:
            held[number] = nbytes(value)
    return sum(held.values())


# --- common subexpressions -------------------------------------------------------------------------------------


def common_subexpressions(graph: fx.Graph, returned: Iterable[fx.Node | None]) -> dict[fx.Node, fx.Node]:
    """Map each redundant node to the earlier node with the same expression, which can replace it.

    A node of the forward never replaces a node of the backward, because a checkpoint computes values again on purpose.
    Nodes that share memory with ``returned`` nodes are not replaced, because these are separate tensors in eager.
    """
    storages = StorageNumbers()

    def memory(node: fx.Node) -> set[int | None]:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else (value,)
        return {storages.number(each) for each in values if isinstance(each, Tensor)} - {None}

    returned_storages = {number for node in returned if isinstance(node, fx.Node) for number in memory(node)}
    same: dict[fx.Node, fx.Node] = {}
    first_by_key: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        is_pure = node.target is operator.getitem or (isinstance(node.target, OpOverload) and not why_once(node))
        if node.op != "call_function" or not is_pure or not returned_storages.isdisjoint(memory(node)):
            continue
        try:
            key = (node.target, phase_of(node), _key(node.args, same), _key(node.kwargs, same))
            first = first_by_key.setdefault(key, node)
        except TypeError:  # an argument is not hashable
            continue
        if first is not node:
            same[node] = first
    return same


def _key(value: Any, same: dict[fx.Node, fx.Node]) -> Hashable:
    """Return a hashable key for arguments. ``1``, ``True`` and ``1.0`` have different keys, as have 0.0 and -0.0."""
    if isinstance(value, fx.Node):
        return same.get(value, value)
    if isinstance(value, (list, tuple)):
        return (type(value), *(_key(each, same) for each in value))
    if isinstance(value, dict):
        return tuple((name, _key(each, same)) for name, each in sorted(value.items()))
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    hash(value)
    return (type(value), value)


# --- copies of tensors that the caller can reach --------------------------------------------------------------------


def caller_reachable(joint: fx.Graph, count: int) -> set[fx.Node]:
    """Return the forward's nodes whose memory the caller can reach.

    They share memory with one of the first ``count`` outputs, or with a primal that the call does not overwrite.
    """
    memory = partial(memory_of, storages=StorageNumbers())
    tensors = (node for node in primals_and_tangents(joint)[0] if not is_size(node))
    tops = {node for node in tensors if not node.meta.get("overwritten")}
    caller_tensors = (node for node in [*tops, *output_args(joint)[:count]] if isinstance(node, fx.Node))
    visible = {memory(node) for node in caller_tensors} - {None}
    early = (node for node in joint.nodes if node.op == "call_function" and phase_of(node) == "forward")
    return tops | {node for node in early if memory(node) in visible}


@contextmanager
def with_copies(reachable: Set[fx.Node], worth: Callable[[fx.Node], bool]) -> Iterator[None]:
    """Return a context manager that inserts copies of the ``reachable`` values into the graph, and removes them again.

    In the context, a node that is computed from a reachable value reads the copy, if ``worth(node)`` says that the node
    may be computed again.
    """
    copies: list[fx.Node] = []
    try:
        for node in reachable:
            users = [user for user in node.users if user not in reachable and _computes(user) and worth(user)]
            if users:
                copies.append(_insert_copy(node))
                for user in users:
                    user.replace_input_with(node, copies[-1])
        yield
    finally:
        for copy in copies:
            copy.replace_all_uses_with(copy.all_input_nodes[0])
            copy.graph.erase_node(copy)


def _insert_copy(node: fx.Node) -> fx.Node:
    value = node.meta["val"]
    copied_value = value.clone()  # this may raise, so it is done before the graph is changed
    with node.graph.inserting_after(node):
        name = f"{node.name}{AS_IT_WAS}"
        copy = node.graph.create_node("call_function", torch.ops.aten.clone.default, (node,), name=name)
    copy.meta = {**node.meta, "val": copied_value, "phase": "forward", COPY: True}
    copy.meta.update(saved_value=value, saved_name=copy.name)
    return copy


def _make_only_saved(forward: fx.GraphModule) -> None:
    """Make all ops of a forward graph read the original values, and remove the copies that it does not return.

    `with_copies` inserted the copies. The ops of the forward do not need them, because the caller cannot write tensors
    while the forward runs.
    """
    for node in [node for node in forward.graph.nodes if COPY in node.meta and node.op == "call_function"]:
        node.replace_all_uses_with(node.all_input_nodes[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            forward.graph.erase_node(node)
    forward.recompile()


def _computes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and phase_of(node) == "forward" and not moves_nothing(node.target)
