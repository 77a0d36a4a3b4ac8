"""The Inductor backend: few compilations, one kernel cache for the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotlab
from aotlab.backends.inductor_backend import InductorBackend, kernels_in
from aotlab.errors import TransformError
from aotlab.ir.fx_graphs import is_random
from aotlab.ir.metadata import MutationType
from aotlab.report import Report
from aotlab.verification import verify
from tests.engine_helpers import heard_events, leaf, metadata, record, refusing

OUTPUT_CODE = '''
cpp_fused_sin_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r"""
extern "C" void kernel() {}
""")

triton_poi_fused_1 = async_compile.triton('triton_poi_fused_1', """
@triton.jit
def triton_poi_fused_1(): pass
""", device_str='cuda')

other = 3

def call(args):
    extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    buf1 = torch.ops.aten.topk.default(buf0, 2)
'''


def test_kernels_in_output_code():
    """Kernels that Inductor wrote, by language, and library calls."""
    kernels = kernels_in(OUTPUT_CODE, {})
    assert [(k.name, k.language) for k in kernels] == [
        ("cpp_fused_sin_0", "c++"),
        ("triton_poi_fused_1", "triton"),
        ("extern_kernels.mm", "extern"),
        ("torch.ops.aten.topk.default", "extern"),
    ]
    assert kernels[0].source.startswith('extern "C"')
    assert "triton.jit" in kernels[1].source
    assert not any(kernel.nodes for kernel in kernels)


def test_a_kernel_has_the_nodes_of_all_its_calls_and_a_library_call_its_own():
    """Calls go by names and numbers: a kernel may be called for several nodes, as a library is."""
    source = OUTPUT_CODE.replace("    extern", "    # [Provenance debug handles] extern_kernels.mm:1\n    extern")
    source += "    # [Provenance debug handles] extern_kernels.mm:12\n    extern_kernels.mm(buf0, arg1_1, out=buf2)\n"
    origins = {"cpp_fused_sin_0:2": ["sin"], "cpp_fused_sin_0:3": ["sin_1", "view"], "cpp_fused_sin_01:4": ["other"]}
    origins |= {"extern_kernels.mm:1": ["mm"], "extern_kernels.mm:12": ["mm_1"]}
    nodes = [kernel.nodes for kernel in kernels_in(source, origins)]
    assert nodes == [("sin", "sin_1", "view"), (), ("mm",), (), ("mm_1",)]


def test_random_ops_are_not_decomposed_where_they_draw_as_in_eager():
    """In the place of eager's kernels the decompositions would draw other numbers."""
    table = InductorBackend(draws="eager").decompositions()
    assert len(table) > 100
    assert not [op for op in table if is_random(op)]
    assert [op for op in InductorBackend().decompositions() if is_random(op)]
    assert is_random(torch.ops.aten.rand.default)
    assert not is_random(torch.ops.aten.sin.default)


def test_inference_with_mutation_in_the_graph():
    """One inference graph writes its input itself; kernels are listed."""

    def f(x, w):
        x.add_(1)
        return (x @ w).relu(), x.t()

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    expected = x.clone()
    wanted = f(expected, w)
    g = aotlab.compile(f, backend="inductor")
    pointer = x.data_ptr()
    out = g(x, w)
    torch.testing.assert_close(out[0], wanted[0])
    torch.testing.assert_close(x, expected)
    assert (x.data_ptr(), out[1].data_ptr()) == (pointer, pointer)
    assert out[0].stride() == wanted[0].stride()
    assert metadata(g).input_info[0].mutation_type is MutationType.MUTATED_IN_GRAPH
    assert "copy_" not in g.entries[0].source
    (graph,) = record(g, "compile").graphs
    assert graph.kind == "inference"
    assert {k.language for k in graph.kernels} >= {"c++", "extern"} or len(graph.kernels) > 0
    assert graph.wrapper
    assert "async_compile" in graph.wrapper
    again = g(x, w)
    torch.testing.assert_close(again[0], f(expected, w)[0])
    assert len(g.entries) == 1


def test_kernels_name_the_nodes_that_they_were_fused_of():
    """A matmul that a library computes, and pointwise ops in one kernel with the sum after them; also if cached."""

    def f(x, w):
        return (x @ w).relu().mul(3).sum()

    for _ in range(2):
        g = aotlab.compile(f, backend="inductor")
        with aotlab.Report.record() as recording:
            g(torch.ones(4, 8), leaf(8, 6)).backward()
        (graph,) = recording.report().frames[0].graphs
        known = {(node.part, node.name): node.target for node in graph.nodes if node.stage == "compile"}
        targets = {(k.language, k.kind): {known[k.kind, name] for name in k.nodes} for k in graph.kernels}
        assert targets["extern", "forward"] == {"aten.mm.default"}
        assert targets["c++", "forward"] == {"aten.relu.default", "aten.mul.Tensor", "aten.sum.default"}
        assert targets["extern", "backward"] == {"aten.mm.default"}
        assert {"aten.where.self", "aten.mul.Tensor"} <= targets["c++", "backward"]


def test_kernels_name_their_nodes_where_a_number_varies():
    """The entry for all numbers passes them as tensors. Its kernels have the same names as the first entry's."""
    g = aotlab.compile(lambda x, s: (x * s).relu())
    with aotlab.Report.record() as recording:
        for number in (2.0, 3.5):
            g(leaf(5), number).sum().backward()
    frame = recording.report().frames[0]
    assert len(g.entries) == len(frame.graphs) == 2
    for graph in frame.graphs:
        assert {"relu", "where"} <= {name for kernel in graph.kernels for name in kernel.nodes}


@pytest.mark.tier("quick")
def test_training_step_with_aliasing():
    """One training step: mutation, views of inputs and intermediates, gradients."""

    def f(x, w):
        x.mul_(w)
        z = (x * 2).sin()
        return x.t(), z[0], z

    def step(function):
        a, w = leaf(8, 8), leaf(8, 8, seed=1)
        x = a * 1
        view, row, z = function(x, w)
        (view.sum() + row.sum() + (z * z).sum()).backward()
        return x, view, row, z, a.grad, w.grad

    g = aotlab.compile(f, backend="inductor")
    actual = step(g)
    expected = step(f)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
        assert ours.requires_grad == theirs.requires_grad
    assert actual[1].untyped_storage()._cdata == actual[0].untyped_storage()._cdata
    assert actual[2].untyped_storage()._cdata == actual[3].untyped_storage()._cdata
    step(g)
    assert len(g.entries) == 1


def test_kernels_of_both_graphs():
    """A training step that is one autograd node compiles both graphs at once, and the record shows their kernels."""
    g = aotlab.compile(lambda x, w: (x * w).sin(), backend="inductor")
    with heard_events():
        g(leaf(8, 8), leaf(8, 8, seed=1)).sum().backward()
    forward, backward = record(g, "compile").graphs
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert [len(graph.kernels) > 0 for graph in (forward, backward)] == [True, True]
    assert all(k.source for graph in (forward, backward) for k in graph.kernels)
    assert forward.code


def test_constants_of_a_graph():
    """A tensor made of a number inside the function is a real tensor in the graph, among fake ones."""

    def f(x):
        x = x * 1
        x[0] = 9
        return x + torch.tensor(1.0)

    g = aotlab.compile(f, backend="inductor")
    torch.testing.assert_close(g(torch.ones(3)), f(torch.ones(3)))
    ours, theirs = leaf(3), leaf(3)
    g(ours).sum().backward()
    f(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert (g.calls.compiled, g.calls.eager) == (2, 0)


def test_complex_numbers():
    """Graphs contain a call of `complex` where text would lose the sign of a zero. Inductor only accepts numbers."""

    def f(x):
        return x * complex(-0.0, 3) + 2j

    g = aotlab.compile(f, backend="inductor")
    x = torch.ones(3, dtype=torch.complex64)
    torch.testing.assert_close(g(x), f(x))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    g(ours).abs().sum().backward()
    f(theirs).abs().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert (g.calls.compiled, g.calls.eager) == (2, 0)


def test_batched_gradients():
    """Kernels need the memory of their arguments. The tensors of vmap have no memory, so the graph itself is run."""
    x = leaf(3)
    f = lambda x: x.sin() * x  # noqa: E731
    y, expected = aotlab.compile(f, backend="inductor")(x), f(x)
    found, right = (
        torch.autograd.grad(each, x, torch.eye(3), is_grads_batched=True, retain_graph=True)[0]
        for each in (y, expected)
    )
    torch.testing.assert_close(found, right)
    batch = torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(3))
    torch.testing.assert_close(batch, found)


def test_a_dual_gradient():
    """Kernels know nothing of tangents, and would drop them: the graph itself is run."""
    x = leaf(3)
    f = lambda x: x.sin() * x  # noqa: E731
    outs = aotlab.compile(f, backend="inductor")(x), f(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.full((3,), 2.0))
        found = [torch.autograd.grad(each, x, dual, retain_graph=True)[0] for each in outs]
        torch.testing.assert_close(*[torch.autograd.forward_ad.unpack_dual(each).tangent for each in found])
    with refusing(TransformError, match="create_graph"):
        torch.func.grad(lambda v: torch.autograd.grad(outs[0], x, v, create_graph=True)[0].sum())(torch.ones(3))


def test_results_that_eager_has_apart_do_not_share_memory():
    """Inductor lays the last hidden state of an LSTM into the memory of all of them."""
    lstm = torch.nn.LSTM(2, 3)
    g = aotlab.compile(lstm, backend="inductor")
    for _ in range(2):
        out, (hidden, _) = g(torch.arange(8.0).view(4, 1, 2))
        before = hidden.detach().clone()
        out.detach().zero_()
        assert torch.equal(hidden, before)


@pytest.mark.parametrize(("steps", "kernels"), [(8, 0), (9, 2)])
def test_long_sequences_of_an_lstm_run_by_a_kernel(steps, kernels):
    """Two layers of nine steps are two calls of oneDNN's kernel; two layers of eight steps are unrolled."""
    lstm, x = torch.nn.LSTM(3, 4, 2, batch_first=True), torch.randn(2, steps, 3, requires_grad=True)
    compiled, found = aotlab.compile(lstm), []
    with Report.record() as recording:
        for function in (lstm, compiled):
            out, (hidden, cell) = function(x)
            leaves = [x, *lstm.parameters()]
            found.append([out, hidden, cell, *torch.autograd.grad((out.sum() + hidden * cell).sum(), leaves)])
    torch.testing.assert_close(*found)
    nodes = recording.report().nodes.query("stage == 'partition' and part == 'forward'")
    assert nodes.target.eq("aotlab.onednn_rnn_layer.default").sum() == kernels
    assert compiled.compiled.calls.eager == 0


def test_ops_that_could_be_decomposed_are_called_in_ci(monkeypatch):
    """With the variable ``CI`` set, Inductor treats a kernel of a decomposable op as an internal error."""
    from torch._inductor import config, lowering

    monkeypatch.setenv("CI", "true")
    monkeypatch.delitem(lowering.lowerings, torch.ops.aten.upsample_bilinear2d.default, raising=False)

    def f(x):
        return torch.nn.functional.interpolate(x, size=(7, 9), mode="bilinear").sin()

    x, y = leaf(1, 2, 4, 4), leaf(1, 2, 4, 4)
    with config.patch(force_disable_caches=True):
        out = aotlab.compile(f, backend="inductor")(x)
        out.sum().backward()
    expected = f(y)
    expected.sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_are_trained_by_inductor(channels_last):
    """Convolutions train with Inductor, which converts images to another layout.

    The backward receives saved images in the layout that it expects.
    """
    torch.manual_seed(0)
    image = torch.randn(2, 2, 6, 6)
    if channels_last:
        image = image.to(memory_format=torch.channels_last)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3))
    found = verify(module, image.requires_grad_())
    assert found.first is None, found.first
    assert found.ran_eagerly == 0
