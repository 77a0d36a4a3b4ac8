"""The default partitioner: the forward saves all values that the backward uses, and nothing is computed again."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from aotlab._torch import graph_module
from aotlab.ir.fx_graphs import must_stay, output_args, phase_of, placeholders


def is_tangent(node: fx.Node) -> bool:
    """Tell whether a placeholder of a joint graph is a tangent."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def primals_and_tangents(graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the primals and the tangents of a joint graph: its two kinds of placeholders."""
    inputs = placeholders(graph)
    return [node for node in inputs if not is_tangent(node)], [node for node in inputs if is_tangent(node)]


def ancestors(
    nodes: Iterable[fx.Node | None],
    stop: Collection[fx.Node] = frozenset(),
    inputs: Mapping[fx.Node, Sequence[fx.Node]] | None = None,
) -> set[fx.Node]:
    """Return ``nodes`` and all nodes that they are computed from.

    The search does not enter the nodes in ``stop``, and they are not in the result. ``inputs`` maps each node to its
    inputs; without it, the search uses the inputs that the graph gives.
    """
    reached: set[fx.Node] = set()
    todo = [node for node in nodes if isinstance(node, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in reached and node not in stop:
            reached.add(node)
            todo += node.all_input_nodes if inputs is None else inputs[node]
    return reached


def forward_nodes(graph: fx.Graph, outputs: Sequence[fx.Node | None]) -> set[fx.Node]:
    """Return the nodes of the forward of a joint graph that returns ``outputs``.

    These are the primals and all nodes that are needed to compute ``outputs``. Ops that must run although nobody uses
    their results (for example assertions) also belong to the forward, with the nodes that they need. So do the
    `getitem` nodes that read the results of these ops.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    staying = [node for node in calls if node.meta.get("phase", "forward") == "forward" and must_stay(node)]
    nodes = ancestors([*primals_and_tangents(graph)[0], *outputs, *staying])
    return nodes | {node for node in calls if node.target is operator.getitem and node.args[0] in nodes}


def default_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    static_lifetime_input_nodes: Any = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph without recomputing anything.

    The signature equals the one of ``torch._functorch.partitioners.default_partition`` in torch 2.13. The arguments
    about static inputs have no effect.

    The joint graph takes primals, then tangents (whose names contain ``tangents``). It returns ``num_fwd_outputs``
    outputs of the forward, then one gradient or None per primal. Two graphs are returned. The forward takes the primals
    and returns its outputs and the saved values. The backward takes the saved values and the tangents, and returns the
    gradients.

    Examples
    --------
    >>> import torch, aotlab
    >>> parts = []
    >>> def show(gm, inputs):
    ...     parts.append(len(gm.graph.find_nodes(op="output")[0].args[0]))
    ...     return gm
    >>> f = aotlab.aot_function(lambda x: x.sin(), show, show, partition_fn=aotlab.default_partition)
    >>> _ = f(torch.ones(2, requires_grad=True))
    >>> parts  # the forward returns the output and the saved input, the backward returns the gradient
    [2, 1]
    """
    graph = joint_module.graph
    outputs = output_args(graph)
    in_forward, in_backward, saved = default_parts(graph, num_fwd_outputs)
    primals, tangents = primals_and_tangents(graph)
    early = [node for node in graph.nodes if node in in_forward]
    late = [node for node in graph.nodes if node in in_backward]
    forward = extract(joint_module, primals, early, (*outputs[:num_fwd_outputs], *saved), "Forward")
    for node in output_args(forward.graph)[num_fwd_outputs:]:
        assert node is not None
        node.meta["kept_because"] = "this partitioner recomputes nothing"
    return forward, extract(joint_module, [*saved, *tangents], late, outputs[num_fwd_outputs:], "Backward")


def default_parts(graph: fx.Graph, num_fwd_outputs: int) -> tuple[set[fx.Node], set[fx.Node], list[fx.Node]]:
    """Return the nodes of the forward, the nodes of the backward, and the nodes that the default partitioner saves."""
    outputs = output_args(graph)
    gradients = set(outputs[num_fwd_outputs:])
    forward = forward_nodes(graph, outputs[:num_fwd_outputs])
    forward |= ancestors(_used_late(graph, ancestors(gradients, forward), gradients), forward)
    backward = ancestors(gradients, forward)
    saved = [n for n in graph.nodes if n in forward and (n in gradients or any(user in backward for user in n.users))]
    return forward, backward, saved


def _used_late(graph: fx.Graph, backward: set[fx.Node], gradients: set[fx.Node | None]) -> list[fx.Node]:
    """Return the nodes that the traced forward ran, and whose results only the backward uses.

    ``backward`` are the nodes that the gradients depend on, without the forward's nodes. The forward graph must compute
    the returned nodes, because the caller may write their inputs before the backward runs.
    """
    depends_on: dict[fx.Node, tuple[bool, bool]] = {}  # whether a node depends on primals, and on tangents
    used_late = []
    for node in graph.nodes:
        dependencies = [depends_on[each] for each in node.all_input_nodes]
        is_input = node.op == "placeholder"
        by_primal = any(p for p, _ in dependencies) or (is_input and not is_tangent(node))
        by_tangent = any(t for _, t in dependencies) or (is_input and is_tangent(node))
        depends_on[node] = by_primal, by_tangent
        early = node.meta.get("phase") == "forward" and node.op == "call_function"
        if early and by_primal and not by_tangent and node in backward:
            users = (user for user in node.users if user in backward and phase_of(user) == "backward")
            if node in gradients or any(users):
                used_late.append(node)
    return used_late


def extract(
    joint: fx.GraphModule,
    inputs: Sequence[fx.Node],
    body: Iterable[fx.Node],
    outputs: Sequence[fx.Node | None],
    name: str,
    *,
    same: Mapping[fx.Node, fx.Node] | None = None,
) -> fx.GraphModule:
    """Copy a part of a joint graph into a new graph, with one placeholder for each node in ``inputs``.

    ``body`` are the other nodes of the new graph, in order. ``same`` maps nodes to equal nodes that replace them. The
    new graph returns ``outputs``, including None and plain values among them. ``name`` is the class name of the new
    module.
    """
    graph = fx.Graph()
    same = same or {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        if node not in copies and node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, lambda each: copies[same.get(each, each)])
    graph.output(tuple(copies[same.get(node, node)] if isinstance(node, fx.Node) else node for node in outputs))
    return graph_module(joint, graph, name)
