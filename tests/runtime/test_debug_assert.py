"""``config.debug_assert``: a compiler whose result differs from its graph is detected.

The error names the output.
"""

from __future__ import annotations

import io
import re

import pytest
import torch

import aotlab
from aotlab.cli import doctor
from aotlab.errors import GraphInvariantError
from tests.engine_helpers import compiled, heard_events, leaf, nonleaf, same


@pytest.fixture(autouse=True)
def debug_assert():
    """Switch the assertions on."""
    with aotlab.config.patch(debug_assert=True):
        yield


def lying(change):
    """Make a compiler whose callables change the results of their graph."""

    def compiler(gm, inputs):
        return lambda *arguments: change(tuple(gm(*arguments)), arguments)

    return compiler


def first(change):
    """Change the first output only."""
    return lambda outs, arguments: (change(outs[0], arguments), *outs[1:])


LIES = {
    "shape": (first(lambda o, a: o[:1]), "has shape (1, 3), but (2, 3) in the graph"),
    "dtype": (first(lambda o, a: o.double()), "has dtype torch.float64, but torch.float32 in the graph"),
    "strides": (first(lambda o, a: o.t().contiguous().t()), "has strides (1, 2), but (3, 1) in the graph"),
    "device": (first(lambda o, a: o.to("meta")), "has device meta, but cpu in the graph"),
    "input": (
        first(lambda o, a: a[0]),
        "shares memory with input 0 of the graph, but is a new tensor in the graph",
    ),
    "two in one": (lambda outs, a: (outs[0], outs[0], *outs[2:]), "shares memory with `out[0]`"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "forward"])
@pytest.mark.parametrize("lie", LIES)
def test_outputs_of_the_forward(lie, grad):
    """A wrong shape, dtype, stride, device or alias of an output is reported before anything is written."""
    change, text = LIES[lie]
    f = aotlab.aot_function(lambda x, w: (x.clone() * w, x + w, x.add_(1)), lying(change), aotlab.nop)
    x, w = torch.ones(2, 3), leaf(2, 3) if grad else leaf(2, 3).detach()
    reference = aotlab.aot_function(lambda x, w: (x * w, x + w), lying(change), aotlab.nop)
    with pytest.raises(GraphInvariantError) as caught:
        reference(x, w)
    assert text in str(caught.value)
    assert "`out[1]`" in str(caught.value) if lie == "two in one" else "`out[0]`" in str(caught.value)
    assert ("forward" if grad else "inference") in str(caught.value)
    if lie in ("shape", "dtype", "device"):
        with pytest.raises(GraphInvariantError):
            f(x, w)
        assert x.tolist() == torch.ones(2, 3).tolist()


@pytest.mark.parametrize("lie", ["dtype", "strides", "input", "two in one"])
def test_sizes_that_vary(lie):
    """Static properties are compared with the trace at all sizes."""
    change, text = LIES[lie]
    for compiler, caught in ((aotlab.nop, False), (lying(change), True)):
        g = aotlab.aot_function(lambda x, w: (x * w, x + w), compiler, aotlab.nop, dynamic=True)
        for rows in (2, 4):
            arguments = torch.ones(rows, 3), leaf(rows, 3)
            if caught:
                with pytest.raises(GraphInvariantError, match=re.escape(text.partition(" (")[0])):
                    g(*arguments)
            else:
                assert torch.equal(g(*arguments)[0], arguments[0] * arguments[1])


def test_a_mutated_input():
    """A wrong new value of a mutated input is reported too."""
    f = aotlab.aot_function(lambda x: x.mul_(2).sum(), lying(first(lambda o, a: o.double())))
    x = torch.ones(2)
    with pytest.raises(GraphInvariantError, match="mutated input x"):
        f(x)
    assert x.tolist() == [1.0, 1.0]


def test_an_intermediate_base():
    """The intermediate base of the user's outputs is checked too."""
    f = aotlab.aot_function(lambda x: [(x * 2)[0].t(), 1] if x.dim() else x, lying(first(lambda o, a: o.double())))
    with pytest.raises(GraphInvariantError, match="intermediate base 0"):
        f(torch.ones(2, 3, 4))


def test_requires_grad():
    """An output whose requires_grad differs from the trace is reported."""

    def compiler(gm, inputs):
        def call(*arguments):
            with torch.enable_grad():
                return tuple(o.detach().requires_grad_() for o in gm(*arguments))

        return call

    f = aotlab.aot_function(lambda x: x * 2, compiler)
    with pytest.raises(GraphInvariantError, match="requires_grad"):
        f(torch.ones(2))


GRADIENT_LIES = {
    "shape": (
        lambda outs, a: (outs[0].sum(0), *outs[1:]),
        "the gradient of `x`",
        "shape (3,), but (2, 3) in the graph",
    ),
    "dtype": (lambda outs, a: (outs[0], outs[1].double()), "the gradient of `w`", "dtype torch.float64"),
    "tangent": (lambda outs, a: (outs[0], a[-1]), "the gradient of `w`", "shares memory with input"),
    "each other": (lambda outs, a: (outs[0], outs[0]), "the gradient of `w`", "with the gradient of `x`"),
    "saved value": (lambda outs, a: (a[0], outs[1]), "the gradient of `x`", "shares memory with input 0"),
}


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("lie", GRADIENT_LIES)
def test_gradients(lie, frontend):
    """A gradient with a wrong shape, dtype or alias is reported."""
    torch._dynamo.reset()
    change, name, text = GRADIENT_LIES[lie]

    def compiler(gm, inputs):
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        return lying(change)(gm, inputs) if any(n.startswith("tangents") for n in names) else gm

    def program(x, w):
        return (x * w) * 2

    if frontend == "direct":
        f = aotlab.aot_function(program, aotlab.nop, compiler)
    else:
        f = aotlab.compile(program, backend=compiler, frontend="dynamo")
    x, w = leaf(2, 3), leaf(2, 3, seed=1)
    out = f(x, w)
    with pytest.raises(GraphInvariantError) as caught:
        out.backward(torch.ones(2, 3))
    assert name in str(caught.value)
    assert text in str(caught.value)
    assert x.grad is None
    assert w.grad is None


def test_a_backward_of_some_outputs():
    """A backward that is compiled later, for some outputs, is checked too."""

    def compiler(gm, inputs):
        names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
        one = [n for n in names if n.startswith("tangents")]
        return lying(first(lambda o, a: o.double()))(gm, inputs) if len(one) == 1 else gm

    f = aotlab.aot_function(lambda x: (x.sin(), x.cos()), aotlab.nop, compiler)
    out = f(leaf(3))
    with pytest.raises(GraphInvariantError, match="the gradient of `x`"):
        out[0].sum().backward()


PROGRAMS = {
    "views": lambda x: (x.mul_(2), x.t(), (x * 3)[0], x.unbind(0)),
    "shared": lambda x: (x.expand(2, 2, 3), (x + 1).view(-1), x.sum()),
    "passes through": lambda x: (x + x.detach().sum(), x.view(-1)[0], x * 1),
    "broadcast gradient": lambda x: x.sum(),
    "empty": lambda x: (x[:0] * 2, x * 2),
    "saved views": lambda x: (x.t() @ x).exp(),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["shared", "saved views", "views"])
def test_honest_compilers(name, backend):
    """Correct compilers pass, and Inductor may choose the strides of values that the caller does not see."""
    program, make = PROGRAMS[name], nonleaf if name == "views" else leaf
    x, y = make(2, 3), make(2, 3)
    expected = program(x)
    actual = aotlab.compile(program, backend=backend)(y)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (actual, expected)), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b)
            a.sum().backward(retain_graph=True)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_honest_programs(name, grad):
    """Correct programs pass: views, broadcast gradients, tangents that are returned unchanged, and empty outputs."""
    x = nonleaf(2, 3) if grad else nonleaf(2, 3).detach()
    by_eager = torch.__version__.startswith("2.15") and grad and name == "views"  # of an unbind, after a write
    same(PROGRAMS[name], x, eagerly=by_eager)


def test_off_means_off():
    """Without the switch, a wrong result is not detected, and the generated function contains no checks."""
    with aotlab.config.patch(debug_assert=False):
        f = aotlab.aot_function(lambda x: x * 2, lying(first(lambda o, a: o.double())))
        assert f(torch.ones(2)).dtype == torch.float64
        assert "check_" not in f.entries[0].source
        g = compiled(lambda x: x * 2)
        g(torch.ones(2))
    assert "check_" not in g.entries[0].source


def test_doctor_says_so():
    """`aotlab doctor` reports whether the assertions are on."""
    assert doctor.check_assertions().status == "note"
    with aotlab.config.patch(debug_assert=False):
        assert doctor.check_assertions().status == "ok"
        assert "off" in doctor.check_assertions().seen
    out = io.StringIO()
    doctor.run(quick=True, out=out)
    assert "debug assertions on: every output" in " ".join(out.getvalue().split())


def test_graphs_as_readable_python():
    """Forward and backward graphs compile as readable Python code, and their nodes have the user's lines."""
    with heard_events():
        g = compiled(lambda x: (x.sin() * 2).sum())
        g(leaf(3)).backward()
    graphs = g.entries[0].records.compile.graphs
    assert [graph.kind for graph in graphs] == ["forward", "backward"]
    for graph, op in zip(graphs, ("sin", "cos"), strict=True):
        compile(graph.code, "<test>", "exec")
        assert f"torch.ops.aten.{op}.default" in graph.code
        assert {node.line.file for node in graph.nodes if node.line is not None} == {__file__}
    compile(g.entries[0].source, "<test>", "exec")
