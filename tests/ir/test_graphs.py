"""Walking, describing and printing fx graphs."""

from __future__ import annotations

import operator

import torch
from torch import fx

from aotlab.errors import UserLine
from aotlab.ir.graphs import (
    NodeRecord,
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
    """What goes in, what comes out, how many ops."""
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
    """A graph as a Python function with shapes behind the values, under the name that was asked for."""
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
