"""The invariants between stages: each is seen to be caught when broken."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from aotlab.errors import GraphInvariantError
from aotlab.ir.checks import check_graph


def graph_with(build):
    """Build a module of one placeholder ``x`` with a value."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    out = build(graph, x)
    graph.output((out,))
    return fx.GraphModule(nn.Module(), graph)


def test_a_functional_graph_passes():
    """Pure ops after placeholders."""
    check_graph(graph_with(lambda g, x: g.call_function(torch.ops.aten.sin.default, (x,))), "joint")


def test_a_write_is_caught():
    """An op that writes its argument, also to a placeholder, unless writes to inputs are allowed there."""
    to_value = graph_with(
        lambda g, x: g.call_function(torch.ops.aten.add_.Tensor, (g.call_function(torch.ops.aten.sin.default, (x,)), 1))
    )
    to_input = graph_with(lambda g, x: g.call_function(torch.ops.aten.copy_.default, (x, x)))
    for module in (to_value, to_input):
        with pytest.raises(GraphInvariantError, match=r"joint graph.*writes to its argument"):
            check_graph(module, "joint")
    check_graph(to_input, "inference", writes_inputs=True)
    with pytest.raises(GraphInvariantError):
        check_graph(to_value, "inference", writes_inputs=True)


def test_a_late_placeholder_is_caught():
    """Placeholders stand first."""

    def build(graph, x):
        sin = graph.call_function(torch.ops.aten.sin.default, (x,))
        late = graph.placeholder("late")
        late.meta["val"] = torch.ones(2)
        return sin

    with pytest.raises(GraphInvariantError, match="`late` stands after an op"):
        check_graph(graph_with(build), "forward")


def test_a_placeholder_without_a_value_is_caught():
    """Every placeholder has ``meta["val"]``."""
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(GraphInvariantError, match="`x` has no value"):
        check_graph(fx.GraphModule(nn.Module(), graph), "forward")


def test_a_use_before_the_definition_is_caught():
    """Fx's own lint runs."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(1)
    first = graph.call_function(torch.ops.aten.sin.default, (x,))
    second = graph.call_function(torch.ops.aten.cos.default, (first,))
    graph.output((second,))
    second.append(first)
    with pytest.raises((RuntimeError, GraphInvariantError)):
        check_graph(fx.GraphModule(nn.Module(), graph), "forward")
