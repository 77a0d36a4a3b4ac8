"""Walking, describing, checking and printing fx graphs; each invariant is seen to be caught when it is broken."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from aotlab.errors import GraphInvariantError, UserLine
from aotlab.ir.fx_graphs import (
    NodeRecord,
    check_graph,
    line_of,
    node_records,
    op_count,
    output_args,
    placeholders,
    readable,
    target_name,
)
from tests.engine_helpers import leaf, record, traced


def program(x, y):
    """Three ops, one of several outputs."""
    top, _ = torch.topk(x * y, 1)
    return top, None


def module():
    """Trace it."""
    return record(traced(lambda x, y: program(x, y)[0], leaf(3), torch.ones(3)), "trace").module


def test_placeholders_outputs_and_counts():
    """Placeholders, outputs, and the number of ops."""
    graph = module().graph
    assert [n.name for n in placeholders(graph)] == ["primals_1", "primals_2", "tangents_1"]
    outputs = output_args(graph)
    assert len(outputs) == 3
    assert outputs[2] is None
    assert op_count(graph) == len([n for n in graph.nodes if n.op == "call_function"])


def test_node_records():
    """Each node as a record without the graph: name, op, target, phase, spec, inputs, users, line."""
    records = node_records(module().graph)
    by_name = {r.name: r for r in records}
    product = by_name["mul"]
    assert isinstance(product, NodeRecord)
    assert (product.op, product.target, product.phase) == ("call_function", "aten.mul.Tensor", "forward")
    assert product.inputs == ("primals_1", "primals_2")
    assert product.spec.shape == (3,)
    assert product.line.code == "top, _ = torch.topk(x * y, 1)"
    assert product.line.function == "program"
    assert by_name["topk"].spec is None
    assert by_name["primals_1"].op == "placeholder"
    assert {r.phase for r in records if r.op == "call_function"} == {"forward", "backward"}
    assert all(by_name[name].users > 0 for r in records for name in r.inputs)


def test_readable():
    """A readable graph is a Python function with the requested name and with shapes behind the values."""
    text = readable(module(), "joint")
    lines = text.splitlines()
    assert lines[0].startswith("def joint(")
    assert any(
        line.strip().startswith("mul = torch.ops.aten.mul.Tensor(") and line.endswith("# float32[3]") for line in lines
    )
    compile(text, "readable", "exec")


def test_target_names():
    """Ops, builtins, Python functions and attribute paths."""
    assert target_name(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert target_name(operator.getitem) == "operator.getitem"
    assert target_name("_tensor_constant0") == "_tensor_constant0"


def test_line_of():
    """A line that is stored as a way to look it up is looked up once."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert line_of(node) is None
    calls = []

    def look():
        calls.append(1)
        return UserLine(file="a.py", line=3)

    node.meta["user_line"] = look
    assert line_of(node) == line_of(node) == UserLine(file="a.py", line=3)
    assert calls == [1]


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
    """Placeholders must come first."""

    def build(graph, x):
        sin = graph.call_function(torch.ops.aten.sin.default, (x,))
        late = graph.placeholder("late")
        late.meta["val"] = torch.ones(2)
        return sin

    with pytest.raises(GraphInvariantError, match="`late` comes after an op"):
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
