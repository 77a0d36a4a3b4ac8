"""The rematerializing partitioner: values that the backward can cheaply compute again are not saved.

Each value that the backward needs from the forward can be *saved*, or *computed again* from earlier values that are
saved. Both have a cost (`aotlab.partition.costs`). The cheapest choice for all values together is a minimum cut
(`aotlab.partition.choice`).

Before the backward runs, the caller may write the tensors that it can reach, and some writes go unnoticed. If the
backward uses such a tensor directly, eager saves it too, and saving it takes no memory. To compute another value again
from such a tensor, a copy is needed (`aotlab.partition.joint_analysis`).

A *memory budget* limits the saved bytes. 1 selects the fastest choice, 0 the choice with the least memory.

This partitioner never saves more bytes than the default partitioner. If the fastest choice would save more, the fastest
choice within that limit is used. If no choice is within the limit, the default partitioner splits the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any

from torch import fx

from aotlab.errors import UsageError
from aotlab.partition.choice import Choice, Chooser, saved_of
from aotlab.partition.costs import ONCE, is_cheap
from aotlab.partition.default import default_partition, default_parts
from aotlab.partition.joint_analysis import JointAnalysis, caller_reachable, held_bytes, with_copies
from aotlab.partition.replace_saved import mask_chain, visible

#: The reason for saving a value that the user chose.
CHOSEN = "the option `save` names it"


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Sequence[Any],
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    memory_budget: float | None = 1.0,
    save: Collection[str] = (),
    recompute: Collection[str] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph so that saving values for the backward and computing them again cost least together.

    The signature equals the one of ``torch._functorch.partitioners.min_cut_rematerialization_partition`` in torch 2.13,
    with the additional parameters ``memory_budget``, ``save`` and ``recompute``.

    Parameters
    ----------
    joint_module, _joint_inputs, num_fwd_outputs
        The joint graph, its example inputs, and the number of forward outputs, as for `default_partition`. The argument
        ``compiler`` has no effect.
    static_lifetime_input_indices
        The positions of primals that live longer than the call (parameters, buffers). Saving them costs nothing.
    memory_budget
        A number from 0 to 1. 0 allows only the least possible memory; 1 allows the memory of the fastest choice; a
        number between them allows that fraction of the difference. Below 1, values are computed again from inputs and
        outputs themselves, as in a checkpoint. If such a tensor was written before the backward, the backward raises.
        After a write that does not move the version counter (to ``x.data``), the backward uses the new values. At 1,
        values are computed again from copies of these tensors. If upstream traced the joint graph, copies are used at
        every budget, because such a graph does not say which inputs the call overwrites. None begins with the choice of
        the default partitioner; only ``save`` and ``recompute`` change it.
    save, recompute
        The names of nodes that are saved, and of nodes that the backward computes again, whatever the budget chose.
        Names of other graphs have no effect. To compute a node again, further values may be needed that must not be
        computed twice; these are saved, too.

    Returns a forward and a backward, as `default_partition` does. ``meta["kept_because"]`` of each saved node says why
    it is saved. Raises `UsageError` if the budget is not between 0 and 1, or if a node in ``recompute`` must not be
    computed again.

    Examples
    --------
    >>> import torch, aotlab
    >>> def saved(partition):
    ...     f = aotlab.compile(lambda x: (x + 1).cos().exp().sin(), backend="eager", partitioner=partition)
    ...     _ = f(torch.ones(2, requires_grad=True))
    ...     return [value.name for value in f.entries[0].records.partition.saved]
    >>> saved(aotlab.default_partition), saved(aotlab.min_cut_rematerialization_partition)
    (['add', 'exp'], ['add'])
    """
    by_default = memory_budget is None and bool(save or recompute)
    if not by_default and (type(memory_budget) not in (int, float) or not 0 <= (memory_budget or 0) <= 1):
        raise UsageError(f"memory_budget is a number from 0 (least memory) to 1 (least time), not {memory_budget}")
    graph = joint_module.graph
    saved_by_default = default_parts(graph, num_fwd_outputs)[2]
    most = held_bytes(saved_by_default, graph, num_fwd_outputs)
    reachable = caller_reachable(graph, num_fwd_outputs)
    # A joint graph that upstream traced does not say which inputs the call overwrites (for example the statistics of a
    # batch norm), so values are computed again from copies at every budget.
    unsure = not any("phase" in node.meta for node in graph.nodes)
    with with_copies(reachable, lambda node: is_cheap(node) and (unsure or memory_budget == 1)):
        joint = JointAnalysis(graph, num_fwd_outputs, static_lifetime_input_indices or (), reachable)
        choice = _chosen(joint, memory_budget, most)
        if save or recompute:
            fits = choice is not None and _held(joint, choice) <= most
            first = choice.saved if choice is not None and fits else _masks(joint, saved_by_default)
            named = {node.name: joint.same.get(node, node) for node in graph.nodes}
            wanted = {named[name] for name in save if name in named}
            unwanted = {named[name] for name in recompute if name in named}
            saved = saved_of(joint, {*first, *wanted} - unwanted)
            banned = {node for node in unwanted if node in joint.costs and joint.costs[node].recompute is None}
            _check_computed_again(joint, banned | unwanted.intersection(saved))
            reasons = {node: CHOSEN if node in wanted else _reason(node, frozenset(saved), joint) for node in saved}
            return joint.split(joint_module, saved, reasons)
        if choice is not None and _held(joint, choice) <= most:
            nodes = frozenset(choice.saved)
            return joint.split(joint_module, choice.saved, {node: _reason(node, nodes, joint) for node in nodes})
    return default_partition(joint_module, _joint_inputs, num_fwd_outputs=num_fwd_outputs)


def _chosen(joint: JointAnalysis, budget: float | None, most: int) -> Choice[fx.Node] | None:
    """Return the fastest choice within a budget and, if possible, within ``most`` bytes."""
    if budget is None:
        return None
    chooser = Chooser(joint)
    choice = chooser.fastest()
    if _held(joint, choice) > most:
        choice = chooser.within(most, choice)
    return chooser.lowered(budget, choice) if budget < 1 else choice


def _masks(joint: JointAnalysis, saved: Sequence[fx.Node]) -> list[fx.Node]:
    """Replace saved numbers by the bools that they are computed from, as the partition stage does by default."""
    ends = visible(joint.graph, len(joint.outputs))
    masks = [mask_chain(node, ends)[-1] for node in saved]
    return [joint.same.get(node, node) for node in masks]


def _check_computed_again(joint: JointAnalysis, refused: Collection[fx.Node]) -> None:
    """Raise `UsageError` if there are nodes that should be computed again, but must be saved."""
    for node in refused:
        bans = [joint.costs[each].ban for each in (node, *joint.inputs[node])]
        why = next(filter(None, bans), "it depends on an op that must not run twice")
        raise UsageError(f"`{node.name}` cannot be computed again: {why}")


def _held(joint: JointAnalysis, choice: Choice[fx.Node]) -> int:
    return held_bytes(choice.saved, joint.graph, len(joint.outputs))


def _reason(node: fx.Node, saved: Set[fx.Node], joint: JointAnalysis) -> str:
    """Return, as text for the report, why a value is saved and not computed again.

    Either the value must not be computed again, or saving it costs less. In the second case, the text has both costs.
    """
    cost = joint.costs[node]
    if cost.recompute is None:
        return cost.ban
    needs: dict[fx.Node, None] = {}  # values that are not saved, and would be needed to compute it again
    todo = [each for each in joint.inputs[node] if each not in saved]
    while todo:
        each = todo.pop()
        if each not in needs:
            needs[each] = None
            if joint.costs[each].recompute is not None:
                todo += [input_ for input_ in joint.inputs[each] if input_ not in saved]
    costs = {each: joint.costs[each] for each in needs}
    to_save = [each for each in needs if costs[each].recompute is None]
    banned = next((each for each in to_save if costs[each].kind == ONCE), None)
    if banned is not None:
        ban = costs[banned].ban
        return f"computing it again, as {cost.kind}, needs `{banned.name}`, which is not saved either: {ban}"
    details = _listed([each for each in needs if costs[each].recompute is not None], "computed again")
    details += _listed(to_save, "saved for it")
    save = cost.save or 0
    recompute = cost.recompute + sum(c.recompute if c.recompute is not None else c.save or 0 for c in costs.values())
    moves = f"saving it moves {in_bytes(save)}, computing it again, as {cost.kind}, {in_bytes(recompute)}"
    if recompute >= save:
        return moves + details
    held = sum(costs[each].nbytes for each in to_save)
    if held >= cost.nbytes:
        return f"{moves}{details}; but that would hold {in_bytes(held)}, and saving it {in_bytes(cost.nbytes)}"
    return f"{moves}{details}; but the other saved values were chosen before"


def _listed(nodes: Sequence[fx.Node], role: str) -> str:
    names = " and ".join(f"`{node.name}`" for node in nodes[:3])
    return f", with {names}{' and others' if len(nodes) > 3 else ''} {role}" if nodes else ""


def in_bytes(count: float) -> str:
    """Format a number of bytes, for example as ``3 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
