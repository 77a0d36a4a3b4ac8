"""Copies that Inductor's passes over a joint graph must not leave out.

    def f(x, w):
        return x.clone() * w        # eager keeps the copy, which does not change when ``x`` is written

To the passes a copy of what nobody writes in the graph is nothing, and the backward would get ``x`` itself, which the
caller may write. So where the backward uses a copy of something within the caller's reach, the passes see an op that
they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab.ir.graphs import is_view, output_args, phase_of

_ATEN = torch.ops.aten
#: Ops of new memory whose result may be what they are given, element by element.
_COPIES = {
    _ATEN.clone.default, _ATEN._to_copy.default, torch.ops.prims.convert_element_type.default, _ATEN.repeat.default,
    _ATEN.constant_pad_nd.default, _ATEN.cat.default, _ATEN.pow.Tensor_Scalar, _ATEN.copy.default,
    _ATEN.slice_scatter.default, _ATEN.ceil.default, _ATEN.floor.default, _ATEN.round.default, _ATEN.trunc.default,
    _ATEN.mul.Tensor, _ATEN.div.Tensor, _ATEN.add.Tensor, _ATEN.sub.Tensor,
}  # fmt: skip


class _Unknown:
    """Stands for an op while the passes look at a graph."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__ = self.__qualname__ = f"kept_{op.__name__}"
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


@contextmanager
def copies_kept(joint: fx.GraphModule) -> Iterator[None]:
    """Hide the copies in a joint graph that the backward uses, of inputs and outputs."""
    graph = joint.graph
    outputs = [node for node in output_args(graph) if node is not None and phase_of(node) == "forward"]
    within_reach = {_key(node) for node in [*graph.find_nodes(op="placeholder"), *outputs]} - {None}
    for node in graph.nodes:
        if node.target in _COPIES and phase_of(node) == "forward" and _key(node) not in within_reach:
            like = [each for each in node.all_input_nodes if _key(each) in within_reach and _alike(each, node)]
            if like and _is_used_late(node):
                node.target = _Unknown(node.target)
    try:
        yield
    finally:
        for node in graph.nodes:
            if isinstance(node.target, _Unknown):
                node.target = node.target.op
        joint.recompile()


def _key(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return internals.storage_key(value) if isinstance(value, Tensor) and value.layout == torch.strided else None


def _alike(node: fx.Node, other: fx.Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    return bool(one.shape == two.shape and one.dtype == two.dtype and one.device == two.device)


def _is_used_late(node: fx.Node) -> bool:
    """Tell whether a node, or a view of it, is used by the backward."""
    return any(
        phase_of(user) == "backward" or (is_view(user) and _is_used_late(user))
        for user in node.users
        if user.op == "call_function"
    )
