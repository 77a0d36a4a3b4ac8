"""Replace saved values: save the base of a view, a clone of an overwritten input, or the symbolic sizes.

A view that a compiler made does not share the version counter of its base, so autograd would not notice a write. An
input that the call overwrites does not have its old value any more when the backward runs. The stage
`aotlab.partition.partition_stage` calls the functions of this module after the partitioner. In all of them ``count`` is
the number of forward outputs, after which the forward returns its saved values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, fx

from aotlab._torch import CAST, OpOverload
from aotlab.ir import fx_graphs as ir

_UNSQUEEZE = torch.ops.aten.unsqueeze.default
_AS_STRIDED = torch.ops.aten.as_strided.default  # its input may be much larger


def save_roots_of_views(forward: fx.GraphModule, backward: fx.GraphModule, count: int, bases: set[fx.Node]) -> None:
    """Save an input or output in place of a view of it, and a tensor in place of its expansion.

    The backward makes the view. Saved views of the synthetic ``bases`` are not replaced here; `save_clones` clones them
    later.
    """
    ends = visible(forward.graph, count) - bases
    _save_roots(forward, backward, count, lambda node: view_chain(node, ends) or expansion_chain(node, bases))


def expansion_chain(node: fx.Node, bases: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes from an expanded tensor back to the tensor that was expanded, both included.

    The list has only ``node`` if it is not the expansion of another node, or if that node is a synthetic base. A
    compiler may return an expanded tensor with other strides, in more memory, but the backward is compiled for strides
    of 0.
    """
    chain = [node]
    while ir.is_view(chain[-1]) and (_is_expanded(chain[-1]) or (len(chain) > 1 and chain[-1].target is _UNSQUEEZE)):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]  # a view op's first argument is a node
    cannot = _is_expanded(chain[-1]) or chain[-1] in bases or any(each.target is _AS_STRIDED for each in chain)
    return [node] if cannot else chain


def _is_expanded(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and any(type(stride) is int and stride == 0 for stride in value.stride())


def save_masks(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Save a tensor of bools in place of a tensor of numbers that is computed from it elementwise.

    For example, a dropout's mask is saved in place of its scaled mask, and the backward scales the mask again.
    """
    visible_nodes = visible(forward.graph, count)

    def chain_to_mask(node: fx.Node) -> list[fx.Node]:
        chain = mask_chain(node, visible_nodes)
        if len(chain) > 1:
            chain[-1].meta["kept_because"] = "bools take less memory than the numbers that are computed from them"
        return chain

    _save_roots(forward, backward, count, chain_to_mask)


def mask_chain(node: fx.Node, ends: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes from a saved value back to the tensor of bools that is saved in its place, if there is one.

    The search does not go beyond the nodes in ``ends``. Without a tensor of bools, the list has only ``node``.
    """
    chain = [node]
    while isinstance(value := chain[-1].meta["val"], Tensor) and value.dtype is not torch.bool:
        if chain[-1] in ends or not _is_elementwise_of_one(chain[-1]):
            return chain[:1]
        chain.append(chain[-1].all_input_nodes[0])
    return chain


def run_late(graph: fx.Graph) -> None:
    """Move the ops of the forward in a backward graph to their first use. Before it, their results are not alive."""
    for node in reversed(list(graph.nodes)):
        is_op = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if is_op and node.users and ir.phase_of(node) == "forward" and not ir.must_stay(node):
            min(node.users).prepend(node)


def visible(graph: fx.Graph, count: int) -> set[fx.Node]:
    """Return the nodes of tensors that the caller can see: inputs and the first ``count`` outputs."""
    return {*ir.placeholders(graph), *(node for node in ir.output_args(graph)[:count] if node is not None)}


def _is_elementwise_of_one(node: fx.Node) -> bool:
    """Tell whether an op is elementwise with one tensor input, which has the same shape as the result."""
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
    forward: fx.GraphModule, backward: fx.GraphModule, count: int, chain_of: Callable[[fx.Node], list[fx.Node]]
) -> None:
    """Replace each saved value by another value, from which the backward computes it again.

    ``chain_of`` returns the chain of nodes from a saved value back to the node that is saved in its place. If the chain
    has only one node, the value itself stays saved.
    """
    returned = ir.output_args(forward.graph)
    inputs = ir.placeholders(backward.graph)
    saved = [node for node in returned[count:] if node is not None]
    chains = [chain_of(node) for node in saved]
    if all(len(each) == 1 for each in chains):
        return
    # Map each node that the forward saves to the placeholder of the backward that receives its value. A value whose
    # chain has only one node stays saved and keeps its placeholder. The loop adds the roots of the longer chains.
    slots = {node: inputs[n] for n, node in enumerate(saved) if len(chains[n]) == 1}
    for chain, placeholder in zip(chains, inputs, strict=False):
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
    # the backward's inputs are the saved values, in the order in which the forward returns them, then the tangents
    first_op = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for placeholder in [*slots.values(), *inputs[len(saved) :]]:
        first_op.prepend(placeholder)
    ir.return_from(forward.graph, (*returned[:count], *slots))
    ir.drop_unused(forward.graph)


def _copy(node: fx.Node, copies: dict[fx.Node, fx.Node], graph: fx.Graph) -> fx.Node:
    """Copy a node and all nodes that it depends on into another graph; return the copy.

    A symbolic size is not copied, because it is a placeholder of the other graph. ``copies`` maps the nodes that were
    copied so far to their copies.
    """
    if node not in copies:
        sizes = ir.placeholders(graph) if isinstance(node.meta["val"], torch.SymInt | torch.SymFloat) else []
        placeholder = next((each for each in sizes if each.meta["val"] is node.meta["val"]), None)
        copies[node] = (
            graph.node_copy(node, lambda each: _copy(each, copies, graph)) if placeholder is None else placeholder
        )
    return copies[node]


def save_further(forward: fx.GraphModule, backward: fx.GraphModule, further_nodes: Sequence[fx.Node], why: str) -> None:
    """Save also the ``further_nodes`` of the forward, which the first-order backward does not use.

    ``why`` is the reason, as text for the report.
    """
    first_op = next(node for node in backward.graph.nodes if node.op != "placeholder")
    behind = (n for n in ir.placeholders(backward.graph) if "tangents" in str(n.target) or ir.is_size(n))
    first_tangent = next(behind, first_op)
    for node in further_nodes:
        node.meta["kept_because"] = why
        with backward.graph.inserting_before(first_tangent):
            backward.graph.placeholder(node.name).meta = dict(node.meta)
    ir.return_from(forward.graph, (*ir.output_args(forward.graph), *further_nodes))


def take_from_saved(
    graph: fx.Graph, saved: Sequence[tuple[str, Tensor | None]], copies: Collection[int]
) -> tuple[int, ...]:
    """Make a backward compute values again from copies, and return the positions of the saved values that it uses.

    The placeholders of ``graph`` are named after saved values, or are tangents. ``saved`` are the names and fake
    tensors of the saved values. ``copies`` are the positions of the saved values that are copies, made so that other
    values can be computed again from them. An op of the forward that reads the original of a copy reads the copy
    afterwards.
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
        if not (node.users or ir.is_size(node) or str(node.target).startswith("tangents")):
            graph.erase_node(node)
    ordered += [node for node in ir.placeholders(graph) if node not in ordered]
    first_op = next(node for node in graph.nodes if node.op != "placeholder")
    for node in ordered:
        first_op.prepend(node)
    return tuple(n for n, node in by_number.items() if node in ordered)


def view_chain(node: fx.Node, ends: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes from a view back to the nearest node in ``ends`` of which it is a view, both included.

    The list is empty if ``node`` is not a view of a node in ``ends``.
    """
    chain = [node]
    while chain[-1] not in ends:
        if not ir.is_view(chain[-1]):
            return []
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]  # a view op's first argument is a node
    return chain


def save_clones(forward: fx.GraphModule, overwritten: set[fx.Node], count: int) -> None:
    """Save clones in place of the saved inputs that the epilogue overwrites, and of the saved views of such inputs."""
    returned = list(ir.output_args(forward.graph))
    for i, node in enumerate(returned[count:], count):
        if node is not None and view_chain(node, overwritten):
            with forward.graph.inserting_before(forward.graph.output_node()):
                clone = forward.graph.call_function(torch.ops.aten.clone.default, (node,))
            clone.meta = dict(node.meta) | {"saved_value": node.meta["val"], "saved_name": node.name}
            returned[i] = clone
    ir.return_from(forward.graph, returned)


def take_sizes(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> None:
    """Make a backward take the symbolic sizes as inputs, in place of saved numbers that are computed from the sizes.

    The forward returns its saved values after ``count`` outputs.
    """
    returned, inputs = ir.output_args(forward.graph), ir.placeholders(backward.graph)
    pairs = [
        (node, placeholder) for node, placeholder in zip(returned[count:], inputs, strict=False) if node is not None
    ]
    numbers = {node: placeholder for node, placeholder in pairs if not isinstance(node.meta["val"], Tensor)}
    tangent = inputs[len(pairs)]
    copies: dict[fx.Node, fx.Node] = {}
    # a forward returns the sizes that depend on values
    bound = [node for node in returned[:count] if node is not None and not isinstance(node.meta["val"], Tensor)]
    for size in [*filter(ir.is_size, ir.placeholders(forward.graph)), *bound]:
        with backward.graph.inserting_before(tangent):
            copies[size] = numbers.pop(size) if size in numbers else backward.graph.placeholder(size.name)
        copies[size].meta = dict(size.meta)
        tangent.prepend(copies[size])

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = backward.graph.node_copy(node, copied)
        return copies[node]

    first_op = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for node, placeholder in numbers.items():
        with backward.graph.inserting_before(first_op):
            placeholder.replace_all_uses_with(copied(node))
        backward.graph.erase_node(placeholder)
    tensors = [node for node, _ in pairs if isinstance(node.meta["val"], Tensor)]
    ir.return_from(forward.graph, [*returned[:count], *tensors])
    ir.drop_unused(forward.graph)
