"""Describe a joint graph as plain data, so that other choices of its saved values can be modelled later.

A partitioner makes one choice. A report also shows what other choices would save and compute again (`Plan`). For this,
the values of the joint graph are numbered in the graph's order, and their costs are stored by number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from aotlab.ir.fx_graphs import COPY, NodeRecord, node_records
from aotlab.partition.choice import Choice, Chooser, saved_of
from aotlab.partition.costs import Cost, fuses_of, is_cheap, traffic_of
from aotlab.partition.default import default_parts, primals_and_tangents
from aotlab.partition.joint_analysis import (
    AS_IT_WAS,
    JointAnalysis,
    caller_reachable,
    held_bytes,
    just_before_use,
    with_copies,
)
from aotlab.partition.replace_saved import mask_chain, visible

#: At most this many choices between the least and the most memory are searched in a graph with a thousand values. A
#: search takes about 15 ms there, and more in larger graphs, so fewer are searched.
MOST_CORNERS = 8


class Plan(NamedTuple):
    """The nodes that the forward and the backward run with one choice of saved values.

    ``saved`` are the saved values. ``early`` are the nodes of the forward, and ``late`` those of the backward, in the
    order in which they run. ``again`` are the nodes of the forward that the backward computes again.
    """

    saved: tuple[int, ...]
    early: tuple[int, ...]
    late: tuple[int, ...]
    again: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChoice:
    """A choice of saved values that a memory budget makes; ``budget`` is None for the default partitioner's choice.

    ``copies`` says whether values are computed again from copies of the tensors that the caller can reach.
    """

    budget: float | None
    saved: frozenset[int]
    copies: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JointValues:
    """The nodes of a joint graph, numbered from 0, without nodes that equal an earlier node.

    Attributes
    ----------
    nodes
        The descriptions of the nodes.
    inputs
        The inputs of each node. They include the copies that a budget of 1 reads (`without_copies` replaces them).
    costs, needed
        As in `aotlab.partition.joint_analysis.JointAnalysis`.
    outputs, gradients
        The results of the forward and of the backward; -1 for None.
    early, late
        The nodes of the forward, and the nodes that only the backward can run.
    default
        The values that the default partitioner saves.
    copies
        The copies of values that the caller can write before the backward.
    unsure
        Whether copies are used with every budget.
    callers, written
        The numbers of the storages of inputs and outputs, and of the inputs that the call overwrites. If a value in a
        storage that is overwritten is saved, a clone of it is saved.
    fuses
        For each node: 2 if Inductor usually computes the value inside the kernels that read it, 1 if it usually
        computes the inputs inside of the node's kernel, 0 if inputs and result are in memory.
    most
        The memory that min-cut may hold: that of all values that eager saves.
    traffic
        The estimated memory traffic of forward and backward in bytes, if nothing is computed again.
    """

    nodes: tuple[NodeRecord, ...]
    inputs: Mapping[int, tuple[int, ...]]
    costs: Mapping[int, Cost]
    needed: frozenset[int]
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    early: frozenset[int]
    late: frozenset[int]
    default: frozenset[int]
    copies: frozenset[int]
    unsure: bool
    callers: frozenset[int]
    written: frozenset[int]
    fuses: tuple[int, ...]
    traffic: int
    most: int

    def without_copies(self) -> JointValues:
        """Return the values for choices that compute values again from the caller's tensors themselves."""
        inputs = {
            n: tuple([self.inputs[each][0] if each in self.copies else each for each in of])
            for n, of in self.inputs.items()
        }
        costs = {n: cost for n, cost in self.costs.items() if n not in self.copies}
        return replace(self, inputs=inputs, costs=costs)

    def plan(self, preferred: Collection[int]) -> Plan:
        """Return the nodes that run if the values ``preferred`` are saved, as far as the backward needs them."""
        saved = saved_of(self, preferred)
        body, todo = set(self.early), list(saved)
        while todo:
            node = todo.pop()
            if node not in body:
                body.add(node)
                todo += self.inputs[node]
        done = {*saved, *(n for n, node in enumerate(self.nodes) if node.op == "placeholder")}
        late = just_before_use(sorted(self.late.union(self.gradients) - {-1}), self.inputs, done)
        return Plan(saved, tuple(sorted(body)), tuple(late), tuple([each for each in late if each not in self.late]))

    def held_bytes(self, saved: Collection[int]) -> int:
        """Return the memory that is held for the backward; see `aotlab.partition.joint_analysis.held_bytes`."""
        held: dict[int, int] = {}
        for n in saved:
            node = self.nodes[n]
            if node.spec is None or not node.storages:
                held[-1 - n] = self.costs[n].nbytes
            elif any(number in self.written for number, _ in node.storages):
                held[-1 - n] = _known(node.spec.nbytes)
            else:
                held.update({number: _known(size) for number, size in node.storages if number not in self.callers})
        return sum(held.values())

    def _roots(self, saved: Collection[int]) -> frozenset[int]:
        """Replace views of an input that the call overwrites by the input, as the partition stage does."""

        def root(n: int) -> int:
            storages, inputs = self.nodes[n].storages, self.inputs[n]
            is_view = bool(inputs) and storages == self.nodes[inputs[0]].storages
            return root(inputs[0]) if is_view and any(number in self.written for number, _ in storages) else n

        return frozenset(map(root, saved))

    def budgets(self) -> Iterator[BudgetChoice]:
        """Yield choices from the least memory to the most, and then the default partitioner's choice.

        The budget of a choice is the smallest one that makes this choice, rounded up.
        """
        most = self.most
        plain = self if self.unsure else self.without_copies()
        chooser = Chooser(plain)
        larger = _limited(plain, chooser, most)
        corners = chooser.corners(larger, max(2, min(MOST_CORNERS, 10 * 1000 // max(len(self.costs), 1))))
        sizes = [choice.weight // chooser.unit for choice in corners]
        if len(corners) == 1:  # every budget below 1 makes the same choice
            corners, sizes = [larger, larger], [0, 1]
        for choice, size, following in zip(corners, sizes, sizes[1:], strict=False):
            if self.held_bytes(choice.saved) <= most:
                budget = _budget(size - sizes[0], following - sizes[0], sizes[-1] - sizes[0])
                yield BudgetChoice(budget=budget, saved=self._roots(choice.saved), copies=self.unsure)
        fastest = _limited(self, Chooser(self), most)
        if self.held_bytes(fastest.saved) <= most:
            yield BudgetChoice(budget=1.0, saved=self._roots(fastest.saved), copies=True)
        yield BudgetChoice(budget=None, saved=self._roots(self.default))


def _limited(values: JointValues, chooser: Chooser[int], most: int) -> Choice[int]:
    """Return the fastest choice, or, if it holds more than ``most`` bytes, the fastest one within this limit."""
    choice = chooser.fastest()
    return choice if values.held_bytes(choice.saved) <= most else chooser.within(most, choice)


def _budget(size: int, following: int, whole: int) -> float:
    """Return a short fraction of ``whole`` bytes that allows ``size`` bytes and not ``following`` bytes."""
    for digits in range(2, 15):
        budget: float = -(-(size * 10**digits) // whole) / 10**digits
        if size <= int(whole * budget) < following:
            return budget
    return size / whole


def _name_of(node: fx.Node) -> str:
    """Return the name of a node; for a copy, the name that it had when the partitioner inserted it."""
    return f"{node.all_input_nodes[0].name}{AS_IT_WAS}" if COPY in node.meta else node.name


def _known(size: object) -> int:
    return size if isinstance(size, int) else getattr(size, "hint", None) or 0


def joint_values(joint: fx.GraphModule, count: int, static: Sequence[int]) -> JointValues:
    """Describe the values of a joint graph.

    ``count`` is the number of the forward's outputs, and ``static`` are the positions of parameters and buffers among
    the primals.
    """
    graph = joint.graph
    reachable = caller_reachable(graph, count)
    ends, all_saved = visible(graph, count), default_parts(graph, count)[2]
    saved_by_default = [mask_chain(node, ends)[-1] for node in all_saved]
    most = held_bytes(all_saved, graph, count)
    with with_copies(reachable, is_cheap):
        analysis = JointAnalysis(graph, count, static, reachable)
        kept = {*analysis.costs, *analysis.forward, *analysis.backward}
        nodes = [node for node in graph.nodes if node in kept or node.op == "placeholder"]
        of = {node: n for n, node in enumerate(nodes)}
        descriptions = {record.name: record for record in node_records(graph)}
        same = analysis.same

        def numbers(some: Collection[fx.Node]) -> frozenset[int]:
            return frozenset([of[same.get(node, node)] for node in some])

        def results(some: Sequence[fx.Node | None]) -> tuple[int, ...]:
            return tuple([-1 if node is None else of[same.get(node, node)] for node in some])

        copies = numbers([node for node, cost in analysis.costs.items() if cost.kind == "a copy"])
        primals, _ = primals_and_tangents(graph)
        flops: dict[object, int] = {}

        def storages(some: Collection[fx.Node | None]) -> frozenset[int]:
            return frozenset([n for node in some if node is not None for n, _ in descriptions[node.name].storages])

        return JointValues(
            nodes=tuple([replace(descriptions[node.name], name=_name_of(node)) for node in nodes]),
            inputs={of[node]: tuple([of[each] for each in analysis.inputs[node]]) for node in nodes},
            costs={of[node]: cost for node, cost in analysis.costs.items()},
            needed=numbers(analysis.needed),
            outputs=results(analysis.outputs),
            gradients=results(analysis.gradients),
            early=numbers(analysis.forward) - copies,
            late=numbers(analysis.backward),
            default=numbers(saved_by_default),
            copies=copies,
            unsure=not any("phase" in node.meta for node in graph.nodes),
            callers=storages([*primals, *analysis.outputs]),
            written=storages([node for node in primals if node.meta.get("overwritten")]),
            fuses=tuple([fuses_of(node) for node in nodes]),
            most=most,
            traffic=sum(traffic_of(node, flops) for node in nodes if of[node] not in copies),
        )
