"""The edges of the autograd graph. An edge is an autograd node and the index of one of its forward outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: An autograd node and the index of one of its forward outputs. The gradient of that output flows along the edge.
Edge = tuple[Any, int]


def edge_of(tensor: Tensor) -> Edge:
    """Return the edge along which the gradient of ``tensor`` flows."""
    if tensor.grad_fn is None:
        # For a leaf, torch's `get_gradient_edge` runs an op, which is slow with hundreds of parameters. So the edge of
        # a leaf is read from the node of an identity function.
        identity: Any = non_leaf(tensor, partial(torch.empty, 0))
        # `identity` must be alive while its node is read: torch 2.11 frees a node together with its result
        edge: Edge = identity.grad_fn.next_functions[0]
        return edge
    return tensor.grad_fn, tensor.output_nr


class _NonLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def non_leaf(leaf: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return a non-leaf tensor with the value of ``leaf``. ``make`` makes this tensor, without a history.

    For autograd, an identity function computes the tensor from ``leaf``. The recorder records no op for this function.
    Autograd forbids an in-place write to a leaf that requires grad, but the returned tensor may be written. A gradient
    with respect to ``leaf`` is then the gradient with respect to the value before the write.
    """
    with torch.enable_grad():
        result: Tensor = _NonLeaf.apply(leaf, make)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


def next_edges(node: Any) -> list[Edge]:
    """Return the edges along which a node sends gradients. An edge that occurs several times is returned once."""
    return list(dict.fromkeys(edge for edge in node.next_functions if edge[0] is not None))


def walk(starts: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return ``starts`` and all nodes that can be reached from these nodes, each once.

    ``following`` returns the next nodes of a node.
    """
    reached: dict[Any, None] = {}
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in reached:
            reached[node] = None
            todo += following(node)
    return list(reached)


def leading_to(nodes: Iterable[Any], targets: Iterable[Any], stops: Collection[Edge]) -> list[Any]:
    """Return ``targets``, and those of ``nodes`` from which gradients reach a target.

    Gradients do not flow along the edges in ``stops``.
    """
    senders: dict[Any, list[Any]] = {}
    for node in nodes:
        for edge in next_edges(node):
            if edge not in stops:
                senders.setdefault(edge[0], []).append(node)
    return walk(targets, lambda node: senders.get(node, ()))


def edges_behind(starts: Collection[Edge]) -> set[Edge]:
    """Return ``starts`` and all edges along which gradients flow after an edge in ``starts``."""
    nodes = walk([node for node, _ in starts], lambda node: [target for target, _ in next_edges(node)])
    return {*starts, *(edge for node in nodes for edge in next_edges(node))}
