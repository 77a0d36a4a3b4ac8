"""A joint graph as a partitioner sees it: what the forward consists of, what the backward needs, and what both cost."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from aotlab._torch import OpOverload
from aotlab.ir.graphs import output_args, phase_of, placeholders
from aotlab.ir.specs import StorageNumbers
from aotlab.partition.copies import make_only_saved, memory_numbers
from aotlab.partition.costs import Cost, Flops, cost_of, must_not_run_twice, nbytes
from aotlab.partition.default import extract, forward_nodes, is_tangent


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """What a partitioner knows of a joint graph.

    ``outputs`` and ``gradients`` are what forward and backward return; ``same`` leads from nodes to those that stand
    for them. ``forward`` are the nodes of the forward, ``backward`` those that can run nowhere but in the backward,
    ``needed`` the other values that these use. ``costs`` are those of all values that the backward might use, in the
    graph's order; ``inputs`` what each of them, and each node of ``backward``, is computed from.
    """

    graph: fx.Graph
    outputs: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]
    same: Mapping[fx.Node, fx.Node]
    forward: frozenset[fx.Node]
    backward: frozenset[fx.Node]
    needed: frozenset[fx.Node]
    costs: Mapping[fx.Node, Cost]
    inputs: Mapping[fx.Node, Sequence[fx.Node]]

    @classmethod
    def of(cls, graph: fx.Graph, count: int, static: Collection[int], reachable: Collection[fx.Node]) -> Joint:
        """Read a graph whose first ``count`` outputs are the forward's.

        ``static`` are the numbers of the primals that live longer than the call, ``reachable`` is as in
        `aotlab.partition.copies.within_reach`.
        """
        returned = output_args(graph)
        outputs, gradients = returned[:count], returned[count:]
        same = common_subexpressions(graph, outputs)
        inputs: dict[fx.Node, Sequence[fx.Node]] = {}
        # tangents reach them, or they draw and assert in the backward: they can run nowhere else
        bound: set[fx.Node] = set()
        for node in graph.nodes:
            own = inputs[node] = [same.get(each, each) for each in node.all_input_nodes]
            pinned = node.op == "call_function" and phase_of(node) == "backward" and must_not_run_twice(node)
            if pinned or is_tangent(node) or not bound.isdisjoint(own):
                bound.add(node)
        backward: set[fx.Node] = set()
        needed: set[fx.Node] = set()
        todo = [same.get(node, node) for node in gradients if node is not None]
        while todo:
            node = todo.pop()
            if node not in bound:
                needed.add(node)
            elif node not in backward:
                backward.add(node)
                todo += inputs[node]
        forward = frozenset(same.get(node, node) for node in forward_nodes(graph, outputs))
        primals = [node for node in placeholders(graph) if not is_tangent(node)]
        lasting = {primals[n] for n in static if n < len(primals)}
        reached = ancestors(needed, inputs)
        flops = Flops()
        costs = {
            node: cost_of(
                node,
                in_forward=node in forward,
                static=node in lasting,
                overwritten=bool(node.meta.get("overwritten")),
                reachable=node in reachable,
                flops=flops,
            )
            for node in graph.nodes
            if node in reached
        }
        return cls(
            graph=graph,
            outputs=outputs,
            gradients=gradients,
            same=same,
            forward=forward,
            backward=frozenset(backward),
            needed=frozenset(needed),
            costs=costs,
            inputs=inputs,
        )

    def split(
        self, module: fx.GraphModule, kept: Sequence[fx.Node], reasons: Mapping[fx.Node, str]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Write the two graphs; what is no tensor comes last among what is saved."""
        tangents = [node for node in placeholders(self.graph) if is_tangent(node)]
        primals = [node for node in placeholders(self.graph) if not is_tangent(node)]
        numbers = [node for node in kept if not isinstance(node.meta.get("val"), Tensor)]
        saved = [*(node for node in kept if isinstance(node.meta.get("val"), Tensor)), *numbers]
        body = self.forward | ancestors(saved, self.inputs, self.forward)
        early = [node for node in self.graph.nodes if node in body]
        forward = extract(module, primals, early, (*self.outputs, *saved), "Forward", same=self.same)
        make_only_saved(forward)
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


def ancestors(
    nodes: Iterable[fx.Node], inputs: Mapping[fx.Node, Sequence[fx.Node]], stop: Collection[fx.Node] = frozenset()
) -> set[fx.Node]:
    """Return nodes and what they are computed from, but for ``stop`` and what only that is computed from."""
    found: set[fx.Node] = set()
    todo = [node for node in nodes if node not in stop]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [each for each in inputs[node] if each not in stop]
    return found


def held_bytes(saved: Iterable[fx.Node], graph: fx.Graph, count: int) -> int:
    """Return how much memory a forward with these saved values holds for its backward, in bytes.

    Memory that several of them share counts once, that of inputs and of the graph's first ``count`` outputs not at all;
    an input that the call overwrites is saved as a clone, and so is each view of it.
    """
    memory = memory_numbers()
    primals = [node for node in placeholders(graph) if not is_tangent(node)]
    free = {memory(node) for node in (*primals, *output_args(graph)[:count]) if isinstance(node, fx.Node)}
    written = {memory(node) for node in primals if node.meta.get("overwritten")} - {None}
    held: dict[object, int] = {}
    for node in saved:
        value, number = node.meta.get("val"), memory(node)
        if number is None or value is None:
            held[node] = nbytes(value)
        elif number in written:
            held[node] = value.numel() * value.element_size()
        elif number not in free:
            held[number] = nbytes(value)
    return sum(held.values())


# --- common subexpressions -------------------------------------------------------------------------------------


def common_subexpressions(graph: fx.Graph, returned: Iterable[fx.Node | None]) -> dict[fx.Node, fx.Node]:
    """Find nodes that an earlier node of the same half can stand for: from each to the one that does.

    Forward and backward are never merged: what the backward computes once more may be a checkpoint's. Nothing that
    shares memory with what is ``returned`` is merged: two results that eager keeps apart must not become one.
    """
    storages = StorageNumbers()
    kept = {memory for node in returned if isinstance(node, fx.Node) for memory in _memory(node, storages)}
    same: dict[fx.Node, fx.Node] = {}
    known: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not _is_pure(node) or not kept.isdisjoint(_memory(node, storages)):
            continue
        try:
            key = (node.target, phase_of(node), _key(node.args, same), _key(node.kwargs, same))
            first = known.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed
            continue
        if first is not node:
            same[node] = first
    return same


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and not must_not_run_twice(node)


def _memory(node: fx.Node, storages: StorageNumbers) -> set[int | None]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return {storages.number(each) for each in values if isinstance(each, Tensor)} - {None}


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
