"""The edges of autograd's graph: a node and the number of one of its results, to which that result's gradient goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: An autograd node and the number of one of its forward outputs: where the gradient of that output goes.
Edge = tuple[Any, int]


def edge_of(tensor: Tensor) -> Edge:
    """Return where the gradient of ``tensor`` goes."""
    if tensor.grad_fn is None:
        # what torch's own function does for a leaf costs an op, and there may be hundreds of parameters
        looked: Any = non_leaf(tensor, partial(torch.empty, 0))
        found: Edge = looked.grad_fn.next_functions[0]  # in two steps: torch 2.11's node goes with what it made
        return found
    return tensor.grad_fn, tensor.output_nr


class _NonLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def non_leaf(leaf: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Hang what ``make`` returns on ``leaf``, by an identity for autograd that records no op.

    So it may be mutated in place, while gradients are taken with respect to the value before.
    """
    with torch.enable_grad():
        made: Tensor = _NonLeaf.apply(leaf, make)  # type: ignore[no-untyped-call]  # untyped in torch
    return made


def next_edges(node: Any) -> list[Edge]:
    """Return where a node sends gradients, each place once."""
    return list(dict.fromkeys(edge for edge in node.next_functions if edge[0] is not None))


def walk(starts: Iterable[Any], following: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return the nodes that can be reached from some, these included, each once."""
    found: dict[Any, None] = {}
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += following(node)
    return list(found)


def leading_to(nodes: Iterable[Any], targets: Iterable[Any], stops: Collection[Edge]) -> list[Any]:
    """Return those of ``nodes`` from which gradients get to some, these included, without passing the ``stops``."""
    before: dict[Any, list[Any]] = {}
    for node in nodes:
        for edge in next_edges(node):
            if edge not in stops:
                before.setdefault(edge[0], []).append(node)
    return walk(targets, lambda node: before.get(node, ()))


def edges_behind(starts: Collection[Edge]) -> set[Edge]:
    """Return the edges that gradients of ``starts`` pass, these included."""
    nodes = walk([node for node, _ in starts], lambda node: [target for target, _ in next_edges(node)])
    return {*starts, *(edge for node in nodes for edge in next_edges(node))}
