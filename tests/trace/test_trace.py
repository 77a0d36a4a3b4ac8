"""The trace: one run of the function gives the joint graph, its metadata and its user lines."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from aotlab.ir.fx_graphs import line_of
from tests.engine_helpers import (
    compiled,
    leaf,
    metadata,
    nonleaf,
    record,
    same,
    targets,
    traced,
)


def test_joint_graph_content():
    """The joint graph takes primals and tangents and returns outputs, then one gradient per primal."""
    f = traced(lambda x, y: x.sin() * y, leaf(2), torch.randn(2))
    module = record(f, "trace").module
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    assert names == ["primals_1", "primals_2", "tangents_1"]
    output = next(n for n in module.graph.nodes if n.op == "output").args[0]
    assert len(output) == 3
    assert output[2] is None
    x, y, t = torch.randn(2), torch.randn(2), torch.randn(2)
    out, grad, none = module(x, y, t)
    assert torch.equal(out, x.sin() * y)
    assert torch.equal(grad, t * y * x.cos())
    assert none is None


def test_joint_graph_is_functional_and_has_metadata():
    """No op of a training graph writes anything; all values have ``val`` and ``tensor_meta``."""

    def f(x, y):
        x.mul_(y)
        x[0].add_(1)
        return x.t()

    module = record(traced(f, nonleaf(2, 3), leaf(2, 3)), "trace").module
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    assert calls
    assert not [n for n in calls if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        assert isinstance(node.meta["val"], torch.Tensor), node
        assert node.meta["tensor_meta"].shape == node.meta["val"].shape
        assert node.meta["tensor_meta"].dtype == node.meta["val"].dtype


def test_user_lines_on_forward_and_backward_nodes():
    """Each node knows the user's line; a node of the backward that of the forward op that it differentiates."""

    def f(x):
        y = x.sin()
        z = y.exp()
        return z.sum()

    module = record(traced(f, leaf(3)), "trace").module
    first = f.__code__.co_firstlineno
    seen = {
        (n.meta["phase"], str(n.target).split(".")[1]): line_of(n).line - first
        for n in module.graph.nodes
        if n.op == "call_function"
    }
    assert seen["forward", "sin"] == 1
    assert seen["forward", "exp"] == 2
    assert seen["forward", "sum"] == 3
    assert seen["backward", "cos"] == 1
    assert seen["backward", "expand"] == 3
    backward = [n for n in module.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"]
    assert {n.meta["phase"] for n in backward} == {"backward"}
    assert all(line_of(n).code for n in backward)


def test_dead_code_is_not_in_the_graph():
    """What nothing uses is left out."""

    def f(x):
        x.exp()
        return x.sin()

    assert targets(record(traced(f, torch.randn(2)), "trace").module) == ["aten.sin.default"]


def test_the_function_runs_once():
    """One compilation runs the user's function once, never twice."""
    runs = threading.Semaphore(0)

    def f(x):
        runs.release()  # counts, and is not seen by the guards: a lock of the standard library's
        return (x * 2).t(), x.mul_(2)

    g = compiled(f)
    g(nonleaf(2, 3))[0].sum().backward()
    g(nonleaf(2, 3))
    assert runs._value == 1


def test_grad_mode_left_changed():
    """The metadata says which grad mode the function leaves behind."""

    def off(x):
        y = x * 2
        torch.set_grad_enabled(False)
        return y

    f = compiled(off)
    f(leaf(3))
    torch.set_grad_enabled(True)
    assert metadata(f).grad_enabled_mutation is False


def test_functional_custom_ops_work():
    """A functional custom op with a Meta kernel and a registered gradient is traced."""

    @torch.library.custom_op("aotlab_tests::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple.register_fake(lambda x: torch.empty_like(x))
    triple.register_autograd(lambda ctx, gradient: gradient * 3)
    same(lambda x: triple(x) * 2, leaf(3))
    same(lambda x: triple(x) * 2, torch.randn(3))


@pytest.mark.parametrize("autocast", [False, True])
def test_traced_tensors_die_with_their_function(autocast):
    """Nothing of a trace outlives the compiled function, autocast's cache of casted weights included."""
    from torch._subclasses.fake_tensor import FakeTensor

    def alive():
        gc.collect()
        return {id(item) for item in gc.get_objects() if issubclass(type(item), FakeTensor)}

    before = alive()  # those of other tests, which may die meanwhile
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        f = compiled(nn.Linear(3, 3))
        f(leaf(2, 3)).float().sum().backward()
        assert alive() - before != set()
        del f
        assert alive() - before == set()


def test_calls_inside_other_traces():
    """A compiled function that is called inside another one becomes part of that one's graph."""
    inner = compiled(lambda x: x.sin())
    f = traced(lambda x: inner(x) * 2, leaf(2))
    assert "aten.sin.default" in targets(record(f, "trace").module)
    same(lambda x: inner(x) * 2, leaf(2))


@pytest.mark.parametrize("arguments", [(0.5, False), (0.0, True)], ids=["eval", "p=0"])
def test_dropout_that_does_nothing(arguments):
    """Dropout in eval mode is the identity: the input itself, which a write to the result reaches."""
    same(lambda x: torch.nn.functional.dropout(x, arguments[0], training=arguments[1]), torch.randn(3))
    same(lambda x: torch.nn.functional.dropout(x, arguments[0], training=arguments[1]), leaf(3))
    same(lambda x: torch.nn.functional.dropout(x, arguments[0], training=arguments[1]).add_(1), torch.randn(3))
    same(nn.Sequential(nn.Linear(2, 2), nn.Dropout(arguments[0]).train(arguments[1])), leaf(1, 2))
