"""Copies of what the caller can reach, for what a backward computes again from it.

    def f(x, w):
        return (x * w * 3).sin()        # eager keeps x, w, and x * w * 3

To compute ``x * w * 3`` again takes ``x`` and ``w`` as they were. The caller may have written them by the time of the
backward, and where that does not count (``w.data.mul_(2)``) nobody would notice. So it takes copies of them, which cost
memory; where the backward itself uses ``x`` and ``w``, it has them as they are by then, as eager does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from aotlab._torch import UNSAFE_VIEW, OpOverload
from aotlab.ir.graphs import output_args, phase_of, placeholders
from aotlab.ir.specs import StorageNumbers
from aotlab.partition.default import is_tangent

#: In a node's ``meta``: it is a copy that `copied` made. The value that it copies is its "saved_value".
COPY = "copy_for_recomputation"


def moves_nothing(target: OpOverload) -> bool:
    """Tell whether an op's results are views, one or several, or would be if its schema said so."""
    if target is UNSAFE_VIEW:
        return True
    first = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return first is not None and not first.is_write


def within_reach(joint: fx.Graph, count: int) -> set[fx.Node]:
    """Return the nodes of a joint graph's forward whose values the caller can reach.

    They lie in the memory of the graph's first ``count`` outputs, which are the forward's, or of its primals, but for
    primals that the call overwrites, of which the forward saves a clone anyhow.
    """
    memory_of = memory_numbers()
    tops = {node for node in placeholders(joint) if not (is_tangent(node) or node.meta.get("overwritten"))}
    seen = (node for node in [*tops, *output_args(joint)[:count]] if isinstance(node, fx.Node))
    memory = {memory_of(node) for node in seen} - {None}
    early = (node for node in joint.nodes if node.op == "call_function" and phase_of(node) == "forward")
    return tops | {node for node in early if memory_of(node) in memory}


@contextmanager
def copied(reachable: Set[fx.Node], worth: Callable[[fx.Node], bool]) -> Iterator[None]:
    """Let what a joint graph computes from values in reach take copies of those meanwhile.

    ``worth`` says of a node whether it might be computed again.
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
    made = value.clone()  # before the graph is touched: it may raise
    with node.graph.inserting_after(node):
        name = f"{node.name}_as_it_was"
        copy = node.graph.create_node("call_function", torch.ops.aten.clone.default, (node,), name=name)
    copy.meta = {**node.meta, "val": made, "phase": "forward", COPY: True}
    copy.meta.update(saved_value=value, saved_name=copy.name)
    return copy


def make_only_saved(forward: fx.GraphModule) -> None:
    """Let a forward graph compute with what copies were made of, and make only those copies that it returns."""
    for node in [node for node in forward.graph.nodes if COPY in node.meta and node.op == "call_function"]:
        node.replace_all_uses_with(node.all_input_nodes[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            forward.graph.erase_node(node)
    forward.recompile()


def _computes(node: fx.Node) -> bool:
    if node.op != "call_function" or phase_of(node) != "forward" or node.target is operator.getitem:
        return False
    return isinstance(node.target, OpOverload) and not moves_nothing(node.target)


def memory_numbers() -> Callable[[fx.Node], int | None]:
    """Make what numbers the memory of nodes, None for one without: nodes with the same number share it."""
    storages = StorageNumbers()

    def memory(node: fx.Node) -> int | None:
        value = node.meta.get("val")
        return storages.number(value) if isinstance(value, Tensor) else None

    return memory
