"""Copy a part of a joint graph into a graph of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from aotlab._torch import graph_module


def extract(
    joint: fx.GraphModule,
    inputs: Sequence[fx.Node],
    body: Iterable[fx.Node],
    outputs: Sequence[fx.Node | None],
    name: str,
    *,
    same: Mapping[fx.Node, fx.Node] | None = None,
) -> fx.GraphModule:
    """Copy nodes into a graph of its own.

    Parameters
    ----------
    inputs
        The nodes that become placeholders.
    body
        The others, in an order in which each comes after those that it uses.
    outputs
        What the graph returns; None stays None, and so does a plain value, as upstream's graphs return some.
    name
        The class name of the module.
    same
        Nodes that are replaced by others, which stand for them.
    """
    graph = fx.Graph()
    same = same or {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copy = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        copies[node] = copy
    for node in body:
        if node not in copies and node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, lambda each: copies[same.get(each, each)])
    graph.output(tuple(copies[same.get(node, node)] if isinstance(node, fx.Node) else node for node in outputs))
    return graph_module(joint, graph, name)
