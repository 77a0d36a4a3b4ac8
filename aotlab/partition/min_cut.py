"""The rematerializing partitioner: what the backward can cheaply compute again is not kept.

Each value that the backward needs of the forward can be *kept* or *computed again* from values kept further up. Both
cost something (`aotlab.partition.costs`), and the cheapest choice for all is a minimum cut (`aotlab.partition.choice`).

What the caller can reach may be written by then in ways that nobody notices. Where the backward proper uses it, eager
keeps it too, and it costs nothing; to compute something again from it takes a copy (`aotlab.partition.joint`).

A *memory budget* is a limit on kept bytes, met by a price on them; 1 asks for what is fastest, 0 for the least.

Never is more kept than by the default partitioner: where the fastest choice would, a price is found at which it does
not, or the default partitioner's choice is taken.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch import fx

from aotlab.errors import UsageError
from aotlab.partition.choice import Choice, Chooser
from aotlab.partition.costs import ONCE, is_cheap
from aotlab.partition.default import default_partition, default_parts
from aotlab.partition.joint import Joint, copied, held_bytes, within_reach


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

    It is called as ``torch._functorch.partitioners.min_cut_rematerialization_partition`` of torch 2.13, with budgets.

    Parameters
    ----------
    joint_module, _joint_inputs, num_fwd_outputs
        As for `default_partition`. ``compiler`` changes nothing.
    static_lifetime_input_indices
        The primals that live longer than the call (parameters, buffers): to keep them costs nothing.
    memory_budget
        Of the memory between the least that can be kept (0) and what is kept when time alone counts (1), the part
        that may be used. Below 1, values are computed again from inputs and outputs themselves, as a checkpoint does:
        if one was written by then, the backward raises; uncounted writes, as to ``x.data``, show. At 1, and in
        upstream's graphs, which do not say which inputs the call overwrites, it takes copies of them.

    Returns a forward and a backward as `default_partition` does; ``meta["kept_because"]`` of what is saved says why it
    is kept. Raises `UsageError` if the budget is not between 0 and 1.

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
    if type(memory_budget) not in (int, float) or not 0 <= memory_budget <= 1:
        raise UsageError(f"memory_budget is a number from 0 (least memory) to 1 (least time), not {memory_budget}")
    graph = joint_module.graph
    most = held_bytes(default_parts(graph, num_fwd_outputs)[2], graph, num_fwd_outputs)
    reachable = within_reach(graph, num_fwd_outputs)
    # a graph of upstream's does not say which inputs the call overwrites, as batch norm does its statistics
    unsure = not any("phase" in node.meta for node in graph.nodes)
    with copied(reachable, lambda node: is_cheap(node) and (unsure or memory_budget == 1)):
        joint = Joint(graph, num_fwd_outputs, static_lifetime_input_indices or (), reachable)
        chooser = Chooser(joint)
        choice = chooser.fastest()
        if _held(joint, choice) > most:
            choice = chooser.within(most, choice)
        if memory_budget < 1:
            choice = chooser.lowered(memory_budget, choice)
        if _held(joint, choice) <= most:
            kept = frozenset(choice.kept)
            return joint.split(joint_module, choice.kept, {node: _reason(node, kept, joint) for node in kept})
    return default_partition(joint_module, _joint_inputs, num_fwd_outputs=num_fwd_outputs)


def _held(joint: Joint, choice: Choice) -> int:
    return held_bytes(choice.kept, joint.graph, len(joint.outputs))


def _reason(node: fx.Node, kept: Set[fx.Node], joint: Joint) -> str:
    """Say why a value is kept and not computed again: the ban, or the edge that the cut goes through."""
    cost = joint.costs[node]
    if cost.again is None:
        return cost.ban
    needs: dict[fx.Node, None] = {}  # what is not kept, and would have to be there as well
    todo = [each for each in joint.inputs[node] if each not in kept]
    while todo:
        each = todo.pop()
        if each not in needs:
            needs[each] = None
            if joint.costs[each].again is not None:
                todo += [one for one in joint.inputs[each] if one not in kept]
    costs = {each: joint.costs[each] for each in needs}
    to_keep = [each for each in needs if costs[each].again is None]
    banned = next((each for each in to_keep if costs[each].kind == ONCE), None)
    if banned is not None:
        ban = costs[banned].ban
        return f"to compute it again, as {cost.kind}, takes `{banned.name}`, which is not kept either: {ban}"
    more = _listed([each for each in needs if costs[each].again is not None], "computed again")
    more += _listed(to_keep, "kept for it")
    keep = cost.keep or 0
    again = cost.again + sum(c.again if c.again is not None else c.keep or 0 for c in costs.values())
    moves = f"to keep it moves {in_bytes(keep)}, to compute it again, as {cost.kind}, {in_bytes(again)}"
    if again >= keep:
        return moves + more
    held = sum(costs[each].nbytes for each in to_keep)
    if held >= cost.nbytes:
        return f"{moves}{more}; but that would hold {in_bytes(held)}, and this {in_bytes(cost.nbytes)}"
    return f"{moves}{more}; but what is kept elsewhere was settled before"


def _listed(nodes: Sequence[fx.Node], what: str) -> str:
    names = " and ".join(f"`{node.name}`" for node in nodes[:3])
    return f", with {names}{' and others' if len(nodes) > 3 else ''} {what}" if nodes else ""


def in_bytes(count: float) -> str:
    """Write a number of bytes, as ``3 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
