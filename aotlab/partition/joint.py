"""A joint graph as a partitioner sees it: what the forward consists of, what the backward needs, and what both cost.

    def f(x, w):
        return (x * w * 3).sin()        # eager keeps x, w, and x * w * 3

To compute ``x * w * 3`` again takes ``x`` and ``w`` as they were, and where a write does not count (``w.data.mul_(2)``)
nobody would notice. So it takes copies of what the caller can reach, which cost memory; where the backward itself uses
``x`` and ``w``, it has them as they are by then, as eager does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from aotlab._torch import OpOverload, traced
from aotlab.ir.graphs import COPY, is_size, moves_nothing, output_args, phase_of, placeholders
from aotlab.ir.specs import StorageNumbers
from aotlab.partition.costs import Cost, cost_of, nbytes, why_once
from aotlab.partition.default import ancestors, extract, forward_nodes, is_tangent, primals_and_tangents


class Joint:
    """What a partitioner knows of a joint graph.

    ``outputs`` and ``gradients`` are what forward and backward return; ``same`` leads from nodes to those that stand
    for them. ``forward`` are the nodes of the forward, ``backward`` those that can run nowhere but in the backward,
    ``needed`` the other values that these use. ``costs`` are those of all values that the backward might use, in the
    graph's order; ``inputs`` what each of them, and each node of ``backward``, is computed from.
    """

    def __init__(self, graph: fx.Graph, count: int, static: Collection[int], reachable: Collection[fx.Node]) -> None:
        """Read a graph: the forward's output ``count``, the numbers of ``static`` primals, what is `within_reach`."""
        self.graph = graph
        returned = output_args(graph)
        self.outputs, self.gradients = returned[:count], returned[count:]
        self.same = same = common_subexpressions(graph, self.outputs)
        self.inputs: dict[fx.Node, Sequence[fx.Node]] = {}
        # tangents reach them, or they draw and assert in the backward: they can run nowhere else
        bound: set[fx.Node] = set()
        for node in graph.nodes:
            own = self.inputs[node] = [same.get(each, each) for each in node.all_input_nodes]
            pinned = node.op == "call_function" and phase_of(node) == "backward" and why_once(node)
            if pinned or is_tangent(node) or not bound.isdisjoint(own):
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
        self, module: fx.GraphModule, kept: Sequence[fx.Node], reasons: Mapping[fx.Node, str]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Write the two graphs; what is no tensor comes last among what is saved."""
        primals, tangents = primals_and_tangents(self.graph)
        numbers = [node for node in kept if not isinstance(node.meta.get("val"), Tensor)]
        saved = [*(node for node in kept if isinstance(node.meta.get("val"), Tensor)), *numbers]
        body = self.forward | ancestors(saved, self.forward, self.inputs)
        early = [node for node in self.graph.nodes if node in body]
        forward = extract(module, primals, early, (*self.outputs, *saved), "Forward", same=self.same)
        _make_only_saved(forward)
        others: dict[fx.Node, list[Any]] = {}
        for other, node in self.same.items():
            others.setdefault(node, []).append(other.meta.get("val"))
        for node, copy in zip(saved, output_args(forward.graph)[len(self.outputs) :], strict=True):
            assert copy is not None
            copy.meta["kept_because"] = reasons[node]
            copy.meta["stands_for"] = others.get(node, [])
        late = self._late_order(saved)
        return forward, extract(module, [*saved, *tangents], late, self.gradients, "Backward", same=self.same)

    def _late_order(self, saved: Sequence[fx.Node]) -> list[fx.Node]:
        """Order the backward so that each value is computed again just before it is first used."""
        order: list[fx.Node] = []
        done = {*saved, *placeholders(self.graph)}
        ends = {node for node in self.gradients if node is not None} | self.backward
        for node in self.graph.nodes:
            if node in ends:
                todo = [self.same.get(node, node)]
                while todo:
                    if todo[-1] in done:
                        todo.pop()
                    elif missing := [each for each in self.inputs[todo[-1]] if each not in done]:
                        todo += missing
                    else:
                        done.add(todo[-1])
                        order.append(todo.pop())
        return order


def memory_of(node: fx.Node, storages: StorageNumbers) -> int | None:
    """Return the number of a node's memory, None for one without: nodes with the same number share it."""
    value = node.meta.get("val")
    return storages.number(value) if isinstance(value, Tensor) else None


def held_bytes(saved: Iterable[fx.Node], graph: fx.Graph, count: int) -> int:
    """Return how much memory a forward with these saved values holds for its backward, in bytes.

    Shared memory counts once, that of inputs and ``count`` outputs not at all, the clones of overwritten inputs each.
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
    """Find nodes that an earlier node of the same half can stand for: from each to the one that does.

    The halves stay apart, for checkpoints, and what shares memory with what is ``returned``, as eager keeps it apart.
    """
    storages = StorageNumbers()

    def memory(node: fx.Node) -> set[int | None]:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else (value,)
        return {storages.number(each) for each in values if isinstance(each, Tensor)} - {None}

    kept = {number for node in returned if isinstance(node, fx.Node) for number in memory(node)}
    same: dict[fx.Node, fx.Node] = {}
    known: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        is_pure = node.target is operator.getitem or (isinstance(node.target, OpOverload) and not why_once(node))
        if node.op != "call_function" or not is_pure or not kept.isdisjoint(memory(node)):
            continue
        try:
            key = (node.target, phase_of(node), _key(node.args, same), _key(node.kwargs, same))
            first = known.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed
            continue
        if first is not node:
            same[node] = first
    return same


def _key(value: Any, same: dict[fx.Node, fx.Node]) -> Hashable:
    """Make arguments comparable; ``1``, ``True`` and ``1.0`` are different arguments, as are ``0.0`` and ``-0.0``."""
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


# --- copies of what the caller can reach ---------------------------------------------------------------------------


def within_reach(joint: fx.Graph, count: int) -> set[fx.Node]:
    """Return the forward's nodes in memory of its ``count`` outputs or of primals that are not overwritten."""
    memory = partial(memory_of, storages=StorageNumbers())
    tensors = (node for node in primals_and_tangents(joint)[0] if not is_size(node))
    tops = {node for node in tensors if not node.meta.get("overwritten")}
    seen = (node for node in [*tops, *output_args(joint)[:count]] if isinstance(node, fx.Node))
    visible = {memory(node) for node in seen} - {None}
    early = (node for node in joint.nodes if node.op == "call_function" and phase_of(node) == "forward")
    return tops | {node for node in early if memory(node) in visible}


@contextmanager
def copied(reachable: Set[fx.Node], worth: Callable[[fx.Node], bool]) -> Iterator[None]:
    """Let what is computed from values in reach take copies meanwhile, if it is ``worth`` computing again."""
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
    made = value.clone()  # before the graph is touched: it may raise
    with node.graph.inserting_after(node):
        name = f"{node.name}_as_it_was"
        copy = node.graph.create_node("call_function", torch.ops.aten.clone.default, (node,), name=name)
    copy.meta = {**node.meta, "val": made, "phase": "forward", COPY: True}
    copy.meta.update(saved_value=value, saved_name=copy.name)
    return copy


def _make_only_saved(forward: fx.GraphModule) -> None:
    """Let a forward graph compute with what copies were made of, and make only those copies that it returns."""
    for node in [node for node in forward.graph.nodes if COPY in node.meta and node.op == "call_function"]:
        node.replace_all_uses_with(node.all_input_nodes[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            forward.graph.erase_node(node)
    forward.recompile()


def _computes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and phase_of(node) == "forward" and not moves_nothing(node.target)
