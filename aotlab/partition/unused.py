"""Ops of the forward that nobody uses, and that stay since they may raise or draw random numbers.

Most partitioners do not know of them. While one works, each such op is held by an output of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aotlab._torch import ASSERTIONS, OpOverload
from aotlab.ir.graphs import STAYS, output_args, placeholders, return_from


def _holder(result: Any) -> Any:
    """Stand for the result of an op that nobody uses; no graph that is run has it."""
    return result


def hold_unused(joint: fx.GraphModule, count: int) -> int:
    """Give each op of the forward that has to stay unused an output behind the forward's; return how many there are."""
    graph = joint.graph
    calls = (node for node in graph.nodes if node.op == "call_function" and not node.users)
    kept = [node for node in calls if node.meta.get("phase", "forward") == "forward" and must_stay(node)]
    if not kept:
        return 0
    small = next(node.meta["val"] for node in placeholders(graph) if isinstance(node.meta.get("val"), torch.Tensor))
    holders = []
    for node in kept:
        with graph.inserting_after(node):
            holder = graph.call_function(_holder, (node,))
        holder.meta.update(val=small, phase="forward")
        holders.append(holder)
    returned = output_args(graph)
    return_from(graph, (*returned[:count], *holders, *returned[count:]))
    joint.recompile()
    return len(holders)


def let_go(module: fx.GraphModule, count: int, held: int) -> None:
    """Take away what `hold_unused` gave."""
    returned = output_args(module.graph)
    return_from(module.graph, (*returned[:count], *returned[count + held :]))
    for holder in returned[count : count + held]:
        assert holder is not None
        (op,) = holder.all_input_nodes
        op.meta[STAYS] = True
        if not holder.users:
            module.graph.erase_node(holder)
    module.recompile()


def must_stay(node: fx.Node) -> bool:
    """Tell whether a node stays in a forward though nobody uses it."""
    if node.op in ("placeholder", "output"):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    return draws or node.target._schema.is_mutable or node.target in ASSERTIONS or STAYS in node.meta
