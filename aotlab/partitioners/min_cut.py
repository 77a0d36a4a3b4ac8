"""The rematerializing partitioner: what the backward can cheaply compute again is not kept.

Of what the forward computes, the backward needs some values. Each can be *kept* or *computed again* from values that
are kept further up. Both cost something (`aotlab.partitioners.costs`), and the cheapest choice for all values together
is a minimum cut. Every value becomes an edge between "computed again" and "there in the backward"::

    forward ──again──▶ value ──keep──▶ value' ──∞──▶ each value that can be computed from it ─ ─ ▶ backward

Cutting ``keep`` means to keep the value; cutting ``again``, to compute it again, and then its inputs must be there in
the backward too. For an op that must not run twice ``again`` is infinite.

What the caller can reach, as inputs and outputs, may be written by then in ways that nobody notices. Where the backward
proper uses it, eager keeps it too, and it costs nothing; to compute something again from it takes a copy
(`aotlab.partitioners.copies`), unless less memory is asked for than that.

A *memory budget* is a price on kept bytes. At a higher price fewer bytes are kept and more is computed again; both are
monotone in the price, and so in the budget: 1 asks for what is fastest, 0 for the least that can be kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from aotlab.errors import UsageError
from aotlab.ir.graphs import output_args, phase_of, placeholders
from aotlab.ir.specs import StorageNumbers
from aotlab.partitioners.copies import COPY, copied, make_only_saved, within_reach
from aotlab.partitioners.costs import REACHABLE, Cost, cost_of, is_cheap, must_not_run_twice
from aotlab.partitioners.default import forward_nodes, is_tangent
from aotlab.partitioners.extract import extract
from aotlab.partitioners.flow import Network
from aotlab.partitioners.same import common_subexpressions

#: Of otherwise equal values those that were made late are kept rather: they count up to one part in so many less.
_SPREAD = 32


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Sequence[Any],
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    memory_budget: float = 1.0,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that keeping values for the backward and computing them again cost least together.

    Parameters
    ----------
    joint_module
        Its placeholders are primals, then tangents (whose names contain ``tangents``); it returns the forward's
        outputs, then one gradient or None per primal.
    _joint_inputs
        Not looked at.
    compiler
        Accepted for callers of upstream's function; all compilers get the same partition.
    num_fwd_outputs
        How many of the outputs are the forward's.
    static_lifetime_input_indices
        The primals that live longer than the call (parameters, buffers): to keep them costs nothing.
    memory_budget
        Of the memory between the least that can be kept (0) and what is kept when time alone counts (1), the part
        that may be used. Never more is kept than by `default_partition`. Below 1, values are computed again from
        inputs and outputs themselves, as a checkpoint does: if one was written by then, the backward raises; writes
        that autograd does not count, as to ``x.data``, show in what is computed again. At 1 it takes copies of them.

    Returns
    -------
    forward, backward
        As those of `default_partition`. What the forward returns for the backward says in ``meta["kept_because"]``
        why it is kept.

    Raises
    ------
    UsageError
        The budget is not between 0 and 1.

    Notes
    -----
    Same signature and calling convention as ``torch._functorch.partitioners.min_cut_rematerialization_partition`` of
    torch 2.13, with ``memory_budget`` besides, so that each can stand in for the other.

    Examples
    --------
    >>> import torch, aotlab
    >>> def saved(partition):
    ...     f = aotlab.compile(lambda x: (x + 1).cos().exp().sin(), backend="eager", partitioner=partition)
    ...     _ = f(torch.ones(2, requires_grad=True))
    ...     return [value.name for value in f.entries[0].records["partition"].saved]
    >>> saved(aotlab.default_partition), saved(aotlab.min_cut_rematerialization_partition)
    (['add', 'exp'], ['add'])
    """
    if not 0 <= memory_budget <= 1:
        raise UsageError(f"memory_budget is a number from 0 (least memory) to 1 (least time), not {memory_budget}")
    graph, static = joint_module.graph, frozenset(static_lifetime_input_indices or ())
    reachable = within_reach(graph, num_fwd_outputs)
    with copied(reachable, is_cheap) if memory_budget == 1 else nullcontext():
        joint = _Joint.of(graph, num_fwd_outputs, static, reachable)
        return joint.split(joint_module, joint.choose(memory_budget).kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What to keep, in the graph's order, and what follows: bytes (weighted), and the traffic of all."""

    kept: tuple[fx.Node, ...]
    weight: int
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joint:
    """What the partitioner knows of a joint graph.

    ``same`` maps nodes to those that stand for them; ``needed`` are the values that the backward proper, ``backward``,
    uses; ``costs`` are those of all values that it might use, in the graph's order; ``scale`` makes weights of bytes.
    """

    graph: fx.Graph
    outputs: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]
    same: Mapping[fx.Node, fx.Node]
    forward: frozenset[fx.Node]
    backward: frozenset[fx.Node]
    needed: frozenset[fx.Node]
    costs: Mapping[fx.Node, Cost]
    scale: Mapping[fx.Node, int]

    @classmethod
    def of(cls, graph: fx.Graph, count: int, static: frozenset[int], reachable: Collection[fx.Node]) -> _Joint:
        returned = output_args(graph)
        outputs, gradients = returned[:count], returned[count:]
        same = common_subexpressions(graph, outputs)
        forward = frozenset(same.get(node, node) for node in forward_nodes(graph, outputs))
        # tangents reach them, or they draw and assert in the backward: they can run nowhere else
        bound: set[fx.Node] = set()
        for node in graph.nodes:
            pinned = phase_of(node) == "backward" and node.op == "call_function" and must_not_run_twice(node)
            if is_tangent(node) or pinned or any(same.get(each, each) in bound for each in node.all_input_nodes):
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
                todo += [same.get(each, each) for each in node.all_input_nodes]
        primals = [node for node in placeholders(graph) if not is_tangent(node)]
        lasting = {primals[n] for n in static if n < len(primals)}
        costs: dict[fx.Node, Cost] = {}
        reached = set(needed)
        todo = list(needed)
        while todo:
            for each in todo.pop().all_input_nodes:
                each = same.get(each, each)
                if each not in reached:
                    reached.add(each)
                    todo.append(each)
        for node in graph.nodes:
            if node in reached:
                costs[node] = cost_of(
                    node,
                    in_forward=node in forward,
                    static=node in lasting,
                    overwritten=bool(node.meta.get("overwritten")),
                    reachable=node in reachable,
                )
        return cls(
            graph=graph,
            outputs=outputs,
            gradients=gradients,
            same=same,
            forward=forward,
            backward=frozenset(backward),
            needed=frozenset(needed),
            costs=costs,
            scale={node: _SPREAD * len(costs) + len(costs) - i for i, node in enumerate(costs)},
        )

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that a node uses, each as the one that stands for it."""
        return [self.same.get(each, each) for each in node.all_input_nodes]

    def choose(self, budget: float) -> _Choice:
        """Find the cheapest choice that stays within the budget, and within what the default partitioner keeps."""
        above, most = self.solve(1, 0), self.default_weight()
        if budget == 1 and above.weight <= most:
            return above
        most = min(above.weight, most)
        below = self.solve(1, 1 + sum((cost.keep or 0) + (cost.again or 0) for cost in self.costs.values()))
        limit = below.weight + int((most - below.weight) * budget)
        # The choices over all prices lie on a convex curve: walk along it to the one that just keeps within the limit.
        while above.weight > limit:
            bytes_saved, price = above.weight - below.weight, below.time - above.time
            between = self.solve(bytes_saved, price)
            worth = [each.time * bytes_saved + each.weight * price for each in (above, between)]
            if bytes_saved <= 0 or worth[1] >= worth[0]:  # no corner lies between them
                return below
            if between.weight <= limit:
                below = between
            else:
                above = between
        return above

    def solve(self, time: int, weight: int) -> _Choice:
        """Choose what is kept so that ``time`` per byte of traffic and ``weight`` per byte that is held cost least."""
        positions = {node: 2 + 2 * i for i, node in enumerate(self.costs)}
        finite = [
            time * ((cost.keep or 0) + (cost.again or 0)) + weight * self.weight(n) for n, cost in self.costs.items()
        ]
        network = Network(1 + sum(finite))
        for node, cost in self.costs.items():
            before, after = network.node(), network.node()
            again = network.infinite if cost.again is None else time * cost.again
            keep = network.infinite if cost.keep is None else time * cost.keep + weight * self.weight(node)
            network.edge(network.source, before, again)
            network.edge(before, after, keep)
            for each in set(self.inputs(node)):
                network.edge(positions[each] + 1, before, network.infinite)
            if node in self.needed:
                network.edge(after, network.sink, network.infinite)
        late = network.late_cut()
        kept = [node for node, n in positions.items() if n not in late and n + 1 in late]
        again_too = [node for node, n in positions.items() if n in late]
        return _Choice(
            kept=tuple(kept),
            weight=sum(map(self.weight, kept)),
            time=sum(self.costs[node].keep or 0 for node in kept)
            + sum(self.costs[node].again or 0 for node in again_too),
        )

    def weight(self, node: fx.Node) -> int:
        """Return the bytes that a value holds, scaled; what is made late weighs a little less."""
        return self.costs[node].nbytes * self.scale[node]

    def default_weight(self) -> int:
        """Return what the default partitioner keeps, memory that is shared counted once."""
        storages = StorageNumbers()
        held: dict[object, int] = {}
        for node in self.forward:
            users = (user for user in node.users if user not in self.forward and self.same.get(user, user) is user)
            if node in self.costs and node.op == "call_function" and (node in self.needed or any(users)):
                value = node.meta.get("val")
                if not isinstance(value, (list, tuple)):
                    number = storages.number(value) if isinstance(value, Tensor) else None
                    held[node if number is None else number] = self.weight(node)
        return sum(held.values())

    def split(self, module: fx.GraphModule, kept: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Write the two graphs."""
        tangents = [node for node in placeholders(self.graph) if is_tangent(node)]
        primals = [node for node in placeholders(self.graph) if not is_tangent(node)]
        numbers = [node for node in kept if not isinstance(node.meta.get("val"), Tensor)]
        saved = [*(node for node in kept if node not in numbers), *numbers]
        body = set(self.forward)
        todo = list(saved)
        while todo:
            node = todo.pop()
            body.add(node)
            todo += [each for each in self.inputs(node) if each not in body]
        forward = extract(
            module,
            primals,
            [node for node in self.graph.nodes if node in body],
            (*self.outputs, *saved),
            "Forward",
            same=self.same,
        )
        make_only_saved(forward)
        others: dict[fx.Node, list[Any]] = {}
        for other, node in self.same.items():
            others.setdefault(node, []).append(other.meta.get("val"))
        for node, copy in zip(saved, output_args(forward.graph)[len(self.outputs) :], strict=True):
            assert copy is not None
            copy.meta["kept_because"] = self.reason(node)
            copy.meta["stands_for"] = others.get(node, [])
        backward = extract(
            module, [*saved, *tangents], self.late_order(saved), self.gradients, "Backward", same=self.same
        )
        return forward, backward

    def late_order(self, saved: Sequence[fx.Node]) -> list[fx.Node]:
        """Order the backward so that each value is computed again just before it is first used."""
        order: list[fx.Node] = []
        done = {*saved, *(node for node in placeholders(self.graph))}
        for node in self.graph.nodes:
            if node in self.backward or node in self.gradients:
                todo = [self.same.get(node, node)]
                while todo:
                    if todo[-1] in done:
                        todo.pop()
                    elif missing := [each for each in self.inputs(todo[-1]) if each not in done]:
                        todo += missing
                    else:
                        done.add(todo[-1])
                        order.append(todo.pop())
        return order

    def reason(self, node: fx.Node) -> str:
        """Say why a value is kept and not computed again."""
        cost = self.costs[node]
        if node.op == "placeholder":
            return "an input cannot be computed again"
        if COPY in node.meta:
            return "what is computed again from it must not see what the caller writes there"
        if cost.again is None and cost.kind == REACHABLE:
            return "the caller can write it, and eager keeps it too"
        if cost.again is None:
            return f"it is {cost.kind}"
        keep, again = _bytes(cost.keep or 0), _bytes(cost.again)
        if cost.again >= (cost.keep or 0):
            return f"to keep it moves {keep}, to compute it again, as {cost.kind}, {again}"
        if any(self.costs[each].again is None for each in self.inputs(node) if each.op != "placeholder"):
            return f"computed again, as {cost.kind}, it would need the result of an op that must not run twice"
        inputs = ", ".join(f"`{each.name}`" for each in self.inputs(node))
        return f"computed again, as {cost.kind}, it would need {inputs}, which is not kept and costs more than this"


def _bytes(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]  # from here on a float
    return f"{count:.4g} GiB"
