"""Replace symbolic floats in a graph by zero-dim tensors, because Inductor does not accept floats as inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from aotlab._torch import FakeTensorMode
from aotlab.ir.fx_graphs import drop_unused, placeholders

_ATEN = torch.ops.aten
#: Maps a function of Python numbers to the corresponding op on tensors, or to None if the result is the tensor itself.
_STEPS: dict[Any, Any] = {
    operator.add: _ATEN.add.Tensor, operator.sub: _ATEN.sub.Tensor, operator.mul: _ATEN.mul.Tensor,
    operator.truediv: _ATEN.div.Tensor, operator.neg: _ATEN.neg.default, operator.abs: _ATEN.abs.default,
    abs: _ATEN.abs.default, torch.sym_float: None,
}  # fmt: skip
#: Ops that accept a number or a tensor as second argument.
_SAME = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "div.Tensor_mode")
#: Ops with a ``Scalar`` overload for a number and a ``Tensor`` overload for a tensor.
_BY_SCALAR = ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod", "masked_fill")
_OPS: dict[Any, Any] = {
    **{op: op for op in (operator.attrgetter(name)(_ATEN) for name in _SAME)},
    **{getattr(_ATEN, name).Scalar: getattr(_ATEN, name).Tensor for name in _BY_SCALAR},
    _ATEN.pow.Tensor_Scalar: _ATEN.pow.Tensor_Tensor, _ATEN.pow.Scalar: _ATEN.pow.Tensor_Tensor,
    _ATEN.clamp_min.default: _ATEN.clamp_min.Tensor, _ATEN.clamp_max.default: _ATEN.clamp_max.Tensor,
    _ATEN.where.ScalarOther: _ATEN.where.self, _ATEN.where.ScalarSelf: _ATEN.where.self,
}  # fmt: skip
_FILLS = (_ATEN.full.default, _ATEN.scalar_tensor.default)


def _is_float(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.SymFloat)


def takes_numbers(module: fx.GraphModule) -> bool:
    """Tell whether zero-dim tensors can replace all symbolic floats in a graph.

    They cannot if an op that takes a float computes an integer from it, or has no counterpart in the tables above.
    """
    if not any(map(_is_float, placeholders(module.graph))):
        return True
    for node in module.graph.nodes:
        if node.op != "call_function" or not any(map(_is_float, node.all_input_nodes)):
            continue
        if isinstance(node.meta.get("val"), torch.SymInt):
            return False
        is_supported = node.target in _STEPS or node.target in _FILLS or node.target in _OPS
        if not is_supported or any(_is_float(each) for name, each in node.kwargs.items() if name != "alpha"):
            return False
    return True


def numbers_as_tensors(module: fx.GraphModule, mode: FakeTensorMode) -> list[int]:
    """Replace symbolic floats by zero-dim tensors; return the positions of the inputs that were floats."""
    floats = [n for n, node in enumerate(placeholders(module.graph)) if _is_float(node)]
    if not floats:
        return []
    writer = _Writer(module.graph, mode)
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and _is_float(node):
            with mode:
                node.meta["val"] = torch.empty((), dtype=torch.float64)
            writer.numbers.add(node)
        elif node.op == "call_function":
            writer.visit(node)
    drop_unused(module.graph)
    module.recompile()
    return floats


class _Writer:
    """Replaces the ops of a graph on symbolic floats by ops on zero-dim tensors, for `numbers_as_tensors`.

    ``mode`` is the fake tensor mode of the graph, in which the values of the new nodes are computed.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self._graph = graph
        self._mode = mode
        self.numbers: set[fx.Node] = set()  # nodes of tensors that replace numbers

    def visit(self, node: fx.Node) -> None:
        """Replace a node that takes or returns a number by ops on tensors."""
        if not _is_float(node) and not any(map(self._is_number, node.all_input_nodes)):
            return
        if _is_float(node) and node.target not in _STEPS:
            return  # `item` returns a number in any case; nodes that use it convert it to a tensor
        with self._graph.inserting_before(node):
            if _is_float(node):
                operands = [self._tensor(each) for each in node.args]
                made = operands[0] if _STEPS[node.target] is None else self._call(_STEPS[node.target], *operands)
                self.numbers.add(made)
            elif node.target in _FILLS:
                size: Any = node.args[0] if node.target is _FILLS[0] else []
                dtype, device = node.meta["val"].dtype, node.meta["val"].device
                ones = self._call(_ATEN.full.default, size, 1, dtype=dtype, device=device)
                made = self._call(_ATEN.mul.Tensor, ones, self._cast(node.args[-1], dtype))
            else:
                made = self._op(node)
        made.meta = {**node.meta, "val": made.meta["val"]}
        node.replace_all_uses_with(made)

    def _is_number(self, value: Any) -> bool:
        return _is_float(value) or (isinstance(value, fx.Node) and value in self.numbers)

    def _op(self, node: fx.Node) -> fx.Node:
        result, kwargs = node.meta["val"], dict(node.kwargs)
        values = [each.meta["val"] for each in node.all_input_nodes if not self._is_number(each)]
        dtype = result.dtype
        if dtype is torch.bool:
            dtype = torch.result_type(next(value for value in values if isinstance(value, Tensor)), 1.0)
        args = [self._cast(each, dtype) if self._is_number(each) else each for each in node.args]
        if self._is_number(kwargs.get("alpha")):
            args[1] = self._call(_ATEN.mul.Tensor, args[1], self._cast(kwargs.pop("alpha"), dtype))
        return self._call(_OPS[node.target], *args, **kwargs)

    def _tensor(self, value: Any) -> Any:
        """Return a number as a zero-dim tensor of dtype float64, which has the precision of Python's floats."""
        if not isinstance(value, fx.Node) or value in self.numbers:
            return value
        return self._call(_ATEN.scalar_tensor.default, value, dtype=torch.float64)

    def _cast(self, value: Any, dtype: torch.dtype) -> fx.Node:
        return self._call(torch.ops.prims.convert_element_type.default, self._tensor(value), dtype)

    def _call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        example_values: Any = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        with self._mode:
            node.meta["val"] = op(*example_values[0], **example_values[1])
        return node
