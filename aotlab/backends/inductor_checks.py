"""What eager's kernels refuse and Inductor's would take: checks put before it, and results kept that nobody uses.

    def f(x, i):
        x.index_select(0, i)     # eager: index out of range, if i is negative; Inductor counts from the end
        torch._assert_async(x.sum() > 0)     # Inductor leaves this out
        return x * 2

A graph that raises is as good as eager's error: eager then runs the call (`aotlab.runtime.failing`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from aotlab.ir.graphs import STAYS, output_args, return_from

_aten = torch.ops.aten
#: Ops that take no negative index, and the position of their index.
_NOT_NEGATIVE = {
    _aten.index_select.default: 2,
    _aten.index_add.default: 2,
    _aten.index_copy.default: 2,
}
#: Ops that Inductor's own decomposition computes otherwise than eager: with targets that end early, by torch 2.13.
_COMPUTED_OTHERWISE = (_aten.multilabel_margin_loss_forward.default,)

Decomposition = Callable[..., Any]


def with_checks(table: dict[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Return a table of decompositions whose results raise where eager's kernels do."""
    found = {op: function for op, function in table.items() if op not in _COMPUTED_OTHERWISE}
    found[_aten._assert_async.default] = lambda condition: _aten._assert_async.msg(condition, "assertion failed")
    for op, position in _NOT_NEGATIVE.items():
        found[op] = _after_check(table.get(op), lambda *args, at=position: args[at] >= 0)
    loss = _aten.binary_cross_entropy.default
    found[loss] = _after_check(table.get(loss), lambda x, *_: (x >= 0) & (x <= 1))
    return found


def _after_check(decomposition: Decomposition | None, condition: Callable[..., Tensor]) -> Decomposition:
    """Make a decomposition that asks for a condition first, where kernels can say that it does not hold."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if args[0].device.type == "cpu":
            _aten._assert_async.msg(condition(*args).all(), "a value that eager refuses")
        return NotImplemented if decomposition is None else decomposition(*args, **kwargs)

    return checked


def keep_unused(module: fx.GraphModule) -> int:
    """Return results that nobody uses, of ops that stay, behind the outputs of a graph; return how many there were.

    Inductor leaves out whatever leads to no output.
    """
    outputs = output_args(module.graph)
    kept = [node for node in module.graph.nodes if STAYS in node.meta and not node.users]
    more = [result for node in kept for result in _tensors_of(module, node)[:1]]
    return_from(module.graph, (*outputs, *more))
    return len(outputs)


def _tensors_of(module: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [node]
    if not isinstance(value, (tuple, list)):
        return []
    for i, item in enumerate(value):
        if isinstance(item, Tensor):
            with module.graph.inserting_after(node):
                result = module.graph.call_function(operator.getitem, (node, i))
            result.meta.update(node.meta, val=item)
            return [result]
    return []


def drop_unused(module: fx.GraphModule, count: int) -> None:
    """Take back what `keep_unused` did to a graph that had ``count`` outputs: its passes may have replaced nodes."""
    outputs = output_args(module.graph)
    return_from(module.graph, outputs[:count])
    for node in outputs[count:]:
        if node is not None:
            node.meta[STAYS] = True
