"""Compile: records of compiled graphs, boxing, and the settings under which compilers run."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab.backends.base import Backend, KernelSource
from tests.engine_helpers import compiled, heard_events, leaf, record, traced


def test_compiled_graph_records():
    """One record per graph, in order, with kind, name, backend, time."""
    with heard_events():  # else the eager backend leaves the backward for later
        graphs = record(traced(lambda x: x.sin(), leaf(2)), "compile").graphs
    assert [g.kind for g in graphs] == ["forward", "backward"]
    assert [g.backend for g in graphs] == ["eager", "eager"]
    assert all(g.compile_ns > 0 for g in graphs)
    numbers = {g.name.split("__")[1].split("_")[0] for g in graphs}
    assert len(numbers) == 1
    assert [g.kind for g in record(traced(lambda x: x.sin(), torch.ones(2)), "compile").graphs] == ["inference"]


def test_code_and_nodes_while_somebody_listens():
    """Readable code and node records are only made while someone listens to events."""
    with heard_events():
        f = traced(lambda x: x.sin(), leaf(2))
    forward, backward = record(f, "compile").graphs
    assert "torch.ops.aten.sin.default(primals_1)" in forward.code
    assert "# float32[2]" in forward.code
    assert [n.target for n in forward.nodes if n.op == "call_function"] == ["aten.sin.default"]
    assert {n.phase for n in backward.nodes if n.op == "call_function"} == {"backward"}
    assert forward.wrapper is None
    assert forward.kernels == ()


def test_compilers_run_under_no_grad_without_autocast():
    """Whatever the call's settings are, the compiler sees neither grad mode nor autocast."""
    seen = []

    def compiler(gm, inputs):
        seen.append((torch.is_grad_enabled(), torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype))
        return gm

    with torch.autocast("cpu", dtype=torch.bfloat16):
        aotlab.aot_function(lambda x: (x @ x).sin(), compiler)(leaf(2, 2)).sum().backward()
    # the third is the backward under autocast, which casts as eager's does
    assert seen == [(False, torch.float32)] * 3


def test_compilers_that_return_other_things():
    """A compiler may return a list-returning function, a GraphModule, or its forward."""
    for make in (lambda gm: gm, lambda gm: gm.forward, lambda gm: lambda *a: list(gm(*a))):
        f = aotlab.aot_function(lambda x: (x.sin(), x * 2), lambda gm, i, make=make: make(gm))
        x = leaf(2)
        out = f(x)
        (out[0].sum() + out[1].sum()).backward()
        assert torch.equal(x.grad, x.detach().cos() + 2)


def test_a_backend_of_the_users():
    """A Backend says how it is called, which ops it replaces, and which kernels it made."""

    class Mine(Backend):
        name = "mine"

        def __init__(self):
            self.requests = []

        def decompositions(self):
            return {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}

        def compile(self, request):
            self.requests.append(request)
            return request.module.forward

        def kernels(self, compiled):
            return (KernelSource(name="k", language="python", source="pass"),)

        def source(self, compiled):
            return "# wrapper"

    mine = Mine()
    f = aotlab.compile(torch.nn.functional.silu, backend=mine)
    f(leaf(3)).sum().backward()
    forward, backward = mine.requests
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert forward.graph_id == backward.graph_id
    assert forward.shared is backward.shared
    assert forward.visible_outputs == 1
    assert backward.visible_outputs == 0
    assert len(backward.example_inputs) == 2
    assert backward.static_inputs == ()  # the saved input is the caller's, and the other one the gradient
    graph = record(f, "compile").graphs[0]
    assert (graph.backend, graph.wrapper, graph.kernels[0].name) == ("mine", "# wrapper", "k")
    assert graph.kernels[0].graph.endswith("_forward")
    aotlab.compile(lambda x: (x * 2).sin(), backend=mine)(leaf(3)).sum().backward()
    assert mine.requests[-1].static_inputs == (0,)
    module = aotlab.compile(torch.nn.Linear(2, 2), backend=mine)
    module(torch.ones(1, 2))
    assert mine.requests[-2].static_inputs == (0, 1)


def test_the_abstract_backend():
    """A backend without compile() says so."""
    with pytest.raises(NotImplementedError, match=r"has no compile\(\)"):
        aotlab.compile(torch.sin, backend=Backend())(torch.ones(1))


def test_context_is_reset_after_an_error():
    """A compiler that raises leaves the compilation context as it was."""
    before = aotlab.get_aot_compilation_context()

    def broken(gm, inputs):
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        aotlab.aot_function(torch.sin, broken)(torch.ones(1))
    assert aotlab.get_aot_compilation_context() == before
    assert compiled(torch.sin)(torch.zeros(1)).item() == 0.0
