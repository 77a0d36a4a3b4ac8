"""The edges of autograd's graph: a node and the number of one of its results, to which that result's gradient goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

#: An autograd node and the number of one of its forward outputs: where the gradient of that output goes.
Edge = tuple[Any, int]


def edge_of(tensor: Tensor) -> Edge:
    """Return where the gradient of ``tensor`` goes."""
    if tensor.grad_fn is None:
        # what torch's own function does for a leaf costs an op, and there may be hundreds of parameters
        with torch.enable_grad():
            looked = _Look.apply(tensor)  # type: ignore[no-untyped-call]  # untyped in torch
            # in two steps: torch 2.11's node is gone as soon as what it made is
            found: Edge = looked.grad_fn.next_functions[0]
        return found
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


class _Look(torch.autograd.Function):
    """Hangs a node behind a tensor, to see what its gradient goes to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def next_edges(node: Any) -> list[Edge]:
    """Return where a node sends gradients, each place once."""
    return list(dict.fromkeys(edge for edge in node.next_functions if edge[0] is not None))


def edges_behind(starts: Iterable[Edge]) -> set[Edge]:
    """Return the edges that gradients of ``starts`` pass, these included."""
    found = set(starts)
    todo = [node for node, _ in found]
    entered: set[Any] = set()
    while todo:
        node = todo.pop()
        if node not in entered:
            entered.add(node)
            edges = next_edges(node)
            found.update(edges)
            todo += [following for following, _ in edges]
    return found


def users_of(edge: Edge, roots: Sequence[Edge]) -> list[Any]:
    """Return the nodes behind ``roots`` that send a gradient to ``edge``."""
    found = []
    entered: set[Any] = set()
    todo = [node for node, _ in roots]
    while todo:
        node = todo.pop()
        if node is None or node in entered:
            continue
        entered.add(node)
        following = next_edges(node)
        if edge in following:
            found.append(node)
        todo += [target for target, _ in following]
    return found
