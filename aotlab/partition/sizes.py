"""Sizes as inputs of graphs: behind the inputs of a forward, and behind what a backward takes of saved values."""

from __future__ import annotations

from torch import Tensor, fx

from aotlab.ir.graphs import drop_unused, is_size, output_args, placeholders, return_from


def take_sizes(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Let a backward take the sizes themselves in place of numbers that its forward saves behind ``count`` outputs."""
    returned, inputs = output_args(forward.graph), placeholders(backward.graph)
    pairs = [(node, given) for node, given in zip(returned[count:], inputs, strict=False) if node is not None]
    numbers = {node: given for node, given in pairs if not isinstance(node.meta["val"], Tensor)}
    tangent = inputs[len(pairs)]
    copies: dict[fx.Node, fx.Node] = {}
    for size in filter(is_size, placeholders(forward.graph)):
        with backward.graph.inserting_before(tangent):
            copies[size] = numbers.pop(size) if size in numbers else backward.graph.placeholder(size.name)
        copies[size].meta = dict(size.meta)
        tangent.prepend(copies[size])

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = backward.graph.node_copy(node, copied)
        return copies[node]

    first_op = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for node, given in numbers.items():
        with backward.graph.inserting_before(first_op):
            given.replace_all_uses_with(copied(node))
        backward.graph.erase_node(given)
    tensors = [node for node, _ in pairs if isinstance(node.meta["val"], Tensor)]
    return_from(forward.graph, [*returned[:count], *tensors])
    drop_unused(forward.graph)
