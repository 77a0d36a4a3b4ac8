"""What is saved in a value's place: the tensor that it is a view of, a clone, or sizes that vary.

Autograd counts writes per storage, and would not see one through a view that a compiler made; and an input that the
call overwrites is gone by the time of the backward. `aotlab.partition.stage` says which values each rule is for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, fx

from aotlab._torch import CAST, OpOverload
from aotlab.ir import graphs as ir


def save_roots_of_views(forward: fx.GraphModule, backward: fx.GraphModule, count: int, bases: set[fx.Node]) -> None:
    """Save an input or output in place of a view of it; of synthetic bases, what is needed is cloned later on."""
    visible = _visible(forward, count) - bases
    _save_roots(forward, backward, count, lambda node: way_to(node, visible) or [node])


def save_masks(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Save bools in place of numbers computed from them element by element, as the scaled mask of a dropout."""
    visible = _visible(forward, count)

    def way(node: fx.Node) -> list[fx.Node]:
        chain = [node]
        while node not in visible and node.meta["val"].dtype is not torch.bool:
            if not _is_elementwise_of_one(node):
                return chain[:1]
            node = node.all_input_nodes[0]
            chain.append(node)
        if node.meta["val"].dtype is not torch.bool:
            return chain[:1]
        if len(chain) > 1:
            node.meta["kept_because"] = "bools take a fraction of the numbers computed from them"
        return chain

    _save_roots(forward, backward, count, way)


def _visible(forward: fx.GraphModule, count: int) -> set[fx.Node]:
    """Return the nodes that the caller has: inputs and outputs."""
    outputs = ir.output_args(forward.graph)[:count]
    return {*ir.placeholders(forward.graph), *(node for node in outputs if node is not None)}


def _is_elementwise_of_one(node: fx.Node) -> bool:
    """Tell whether an op computes each element from one of another value of the same shape, and from numbers."""
    target, inputs = node.target, node.all_input_nodes
    return (
        isinstance(target, OpOverload)
        and (torch.Tag.pointwise in target.tags or target is CAST)
        and not ir.must_stay(node)
        and len(inputs) == 1
        and isinstance(inputs[0].meta["val"], Tensor)
        and inputs[0].meta["val"].shape == node.meta["val"].shape
    )


def _save_roots(
    forward: fx.GraphModule, backward: fx.GraphModule, count: int, way: Callable[[fx.Node], list[fx.Node]]
) -> None:
    """Save in place of each saved value the last of its ``way``, from which the backward computes it again."""
    returned = ir.output_args(forward.graph)
    inputs = ir.placeholders(backward.graph)
    saved = [node for node in returned[count:] if node is not None]
    ways = [way(node) for node in saved]
    if all(len(each) == 1 for each in ways):
        return
    slots = {node: inputs[n] for n, node in enumerate(saved) if len(ways[n]) == 1}  # of the backward, by forward node
    for chain, placeholder in zip(ways, inputs, strict=False):
        if len(chain) == 1:
            continue
        *steps, root = chain
        if root not in slots:
            with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
                slots[root] = backward.graph.placeholder(root.name)
            slots[root].meta = dict(root.meta)
        copies: dict[fx.Node, fx.Node] = {root: slots[root]}
        first_op = next(n for n in backward.graph.nodes if n.op != "placeholder")
        with backward.graph.inserting_before(first_op):
            for step in reversed(steps):
                _copy(step, copies, backward.graph)
        placeholder.replace_all_uses_with(copies[chain[0]])
        backward.graph.erase_node(placeholder)
    # the backward takes the saved values in the order in which the forward returns them, then the tangents
    first_op = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for placeholder in [*slots.values(), *inputs[len(saved) :]]:
        first_op.prepend(placeholder)
    ir.return_from(forward.graph, (*returned[:count], *slots))
    ir.drop_unused(forward.graph)


def _copy(node: fx.Node, copies: dict[fx.Node, fx.Node], graph: fx.Graph) -> fx.Node:
    """Copy a node into another graph, with what it is computed from; sizes are placeholders of both graphs."""
    if node not in copies:
        own = (each for each in ir.placeholders(graph) if node.op == "placeholder" and each.name == node.name)
        found = next(own, None)
        copies[node] = graph.node_copy(node, lambda each: _copy(each, copies, graph)) if found is None else found
    return copies[node]


def save_besides(forward: fx.GraphModule, backward: fx.GraphModule, more: Sequence[fx.Node], why: str) -> None:
    """Save more nodes of the forward, which the backward does not use; ``why`` says what for."""
    first_op = next(node for node in backward.graph.nodes if node.op != "placeholder")
    behind = (n for n in ir.placeholders(backward.graph) if "tangents" in str(n.target) or ir.is_size(n))
    first_tangent = next(behind, first_op)
    for node in more:
        node.meta["kept_because"] = why
        with backward.graph.inserting_before(first_tangent):
            backward.graph.placeholder(node.name).meta = dict(node.meta)
    ir.return_from(forward.graph, (*ir.output_args(forward.graph), *more))


def take_from_saved(
    graph: fx.Graph, saved: Sequence[tuple[str, Tensor | None]], copies: Collection[int]
) -> tuple[int, ...]:
    """Let a backward use copies for what it computes again; return the numbers of the saved values that it uses.

    ``graph`` takes values by their first names, and tangents. ``saved`` are the names and fake tensors of the saved
    values, ``copies`` the numbers of those that are copies to compute again with.
    """
    inputs = {str(node.target): node for node in ir.placeholders(graph)}
    top = next(iter(graph.nodes))
    by_number: dict[int, fx.Node] = {}
    for n, (name, value) in enumerate(saved):
        if name not in inputs:
            with graph.inserting_before(top):
                inputs[name] = graph.placeholder(name)
            inputs[name].meta["val"] = value
        by_number[n] = inputs[name]
    copied = {id(saved[n][1]): by_number[n] for n in copies}
    for node in list(graph.nodes):
        copy = copied.get(id(node.meta.get("val")))
        if copy is None or copy is node:
            continue
        for user in list(node.users):
            early = user.op == "call_function" and ir.phase_of(user) == "forward"
            if early and not (isinstance(user.target, OpOverload) and ir.moves_nothing(user.target)):
                user.replace_input_with(node, copy)
    ir.drop_unused(graph)
    ordered = [node for node in by_number.values() if node.users]
    for node in set(ir.placeholders(graph)):
        if not node.users and not str(node.target).startswith(("tangents", "size_")):
            graph.erase_node(node)
    ordered += [node for node in ir.placeholders(graph) if node not in ordered]
    first_op = next(node for node in graph.nodes if node.op != "placeholder")
    for node in ordered:
        first_op.prepend(node)
    return tuple(n for n, node in by_number.items() if node in ordered)


def way_to(node: fx.Node, ends: set[fx.Node]) -> list[fx.Node]:
    """Return the way from a view to the first of ``ends`` that it views, both included; nothing if there is none."""
    way = [node]
    while way[-1] not in ends:
        if not ir.is_view(way[-1]):
            return []
        way.append(way[-1].args[0])  # type: ignore[arg-type]  # a view op's first argument is a node
    return way


def save_clones(forward: fx.GraphModule, overwritten: set[fx.Node], count: int) -> None:
    """Save a clone of each saved input, or view of one, that the epilogue overwrites."""
    returned = list(ir.output_args(forward.graph))
    for i, node in enumerate(returned[count:], count):
        if node is not None and way_to(node, overwritten):
            with forward.graph.inserting_before(forward.graph.output_node()):
                clone = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
            clone.meta = dict(node.meta) | {"saved_value": node.meta["val"], "saved_name": node.name}
            returned[i] = clone
    ir.return_from(forward.graph, returned)


def take_sizes(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Let a backward take the sizes themselves in place of numbers that its forward saves behind ``count`` outputs."""
    returned, inputs = ir.output_args(forward.graph), ir.placeholders(backward.graph)
    pairs = [(node, given) for node, given in zip(returned[count:], inputs, strict=False) if node is not None]
    numbers = {node: given for node, given in pairs if not isinstance(node.meta["val"], Tensor)}
    tangent = inputs[len(pairs)]
    copies: dict[fx.Node, fx.Node] = {}
    for size in filter(ir.is_size, ir.placeholders(forward.graph)):
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
    ir.return_from(forward.graph, [*returned[:count], *tensors])
    ir.drop_unused(forward.graph)
