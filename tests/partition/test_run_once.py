"""Random draws, writes and custom operators run once, whatever the budget and partitioner."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import aotlab
from aotlab.partition.costs import why_once
from aotlab.partition.default import default_partition
from tests.engine_helpers import compiled, leaf, record, same, targets
from tests.partition.test_min_cut import partition

PARTITIONERS = {"default": default_partition} | {f"min cut at {b}": partition(b) for b in (1.0, 0.5, 0.0)}
PART = pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)

_numbers = itertools.count()
_calls: list[float] = []


@torch.library.custom_op("aotlab_run_once::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Return another value at every run, and record the run, as an impure user operator may do."""
    _calls.append(1.0)
    return x * (1 + next(_numbers) % 7)


@counted.register_fake
def _(x):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(output)


counted.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=_keep)


def drawn_normal(x):
    """Fill with random numbers in place."""
    return (x * torch.empty_like(x).normal_().exp()).sin()


def several_draws(x):
    """Draw in a chain whose middle would be cheap to recompute."""
    y = functional.dropout(x.sin(), 0.5).exp()
    return (y * torch.rand_like(y)).cos() * torch.bernoulli(torch.full_like(y, 0.5))


def unseen_draws(x):
    """Draw under no_grad, and multiply with it."""
    with torch.no_grad():
        noise = torch.randn_like(x).exp()
    return (x * noise).sin().exp()


def permuted(x):
    """Draw a permutation, and take elements by it."""
    return x.sin()[torch.randperm(x.shape[0])].exp().sin()


def leaky(x):
    """Use the randomised activation."""
    return functional.rrelu(x, training=True).exp().sin()


@PART
@pytest.mark.parametrize("function", [drawn_normal, several_draws, unseen_draws, permuted, leaky])
def test_draws(function, partitioner):
    """Results, gradients and generator state are eager's under one seed, and no draw is in the backward."""
    torch.manual_seed(0)
    same(function, leaf(6, 3), make=lambda f: compiled(f, partitioner=partitioner))
    f = compiled(function, partitioner=partitioner)
    f(leaf(6, 3))
    drawing = [
        node.target
        for node in record(f, "partition").backward.graph.nodes
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]
    assert not drawing


@PART
def test_custom_operators(partitioner):
    """A custom operator runs once per call, because its effects are unknown.

    This holds even if saving its result takes the most memory.
    """

    def f(x):
        return (counted(x.sin()).exp() * x).sin().sum()

    x = leaf(5)
    compiled_function = compiled(f, partitioner=partitioner)
    _calls.clear()
    compiled_function(x).backward()
    assert len(_calls) == 1
    assert targets(record(compiled_function, "partition").backward).count("aotlab_run_once.counted.default") == 0


def test_equal_calls_of_custom_operators_are_not_one():
    """Two equal calls of a custom operator remain two calls."""

    def f(x):
        return (counted(x) * counted(x)).sum()

    compiled_function = compiled(f, partitioner=partition(1.0))
    _calls.clear()
    compiled_function(leaf(3))
    assert len(_calls) == 2


@PART
def test_written_buffers(partitioner):
    """Batch norm's statistics are written once, although the backward recomputes the op."""
    model = nn.Sequential(nn.Conv1d(3, 3, 3), nn.BatchNorm1d(3), nn.SiLU(), nn.Conv1d(3, 3, 3), nn.BatchNorm1d(3))
    ours, theirs = copy.deepcopy(model), model
    f = compiled(ours, partitioner=partitioner)
    for seed in range(3):
        x = leaf(2, 3, 8, seed=seed)
        for module in (f, theirs):
            module(x).sum().backward()
    for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(a, b), name


@PART
def test_assertions_run_in_the_forward(partitioner):
    """An assertion on a recomputed value raises once, in the call."""

    def f(x):
        y = x.exp()
        torch._assert_async((y > 0).all())
        return (y * y).sin()

    g = compiled(f, partitioner=partitioner)
    g(leaf(3))
    found = record(g, "partition")
    assert "aten._assert_async.default" in targets(found.forward)
    assert "aten._assert_async.default" not in targets(found.backward)


@PART
def test_writes_in_place_of_intermediates(partitioner):
    """In-place writes to intermediates and their views run once, also under no_grad."""

    def f(x, w):
        y = x * 2
        y[0].mul_(w)
        with torch.no_grad():
            y[1].add_(1)
        return (y.exp() * y.t().contiguous().t()).sin()

    same(f, leaf(3, 3), leaf(3, seed=1), make=lambda f: compiled(f, partitioner=partitioner))


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (torch.ops.aten.rand_like.default, "draw other random numbers"),
        (torch.ops.aten.add_.Tensor, "writes to its argument"),
        (torch.ops.aten._print.default, "has side effects"),
        (torch.ops.aten._assert_async.default, "only because it may raise"),
        (torch.ops.aotlab_run_once.counted.default, "not an op of torch"),
        (torch.ops.higher_order.cond, "runs functions"),
        (torch.ops.aten.sin.default, ""),
        (torch.ops.aten.view.default, ""),
    ],
)
def test_why(op, reason):
    """Each kind of op that must run once has a reason."""
    node = torch.fx.Graph().call_function(op)
    assert (reason in why_once(node)) if reason else why_once(node) == ""


@PART
def test_random_ops_in_upstreams_function(partitioner):
    """In torch's own `aot_function` no draw is repeated either."""
    from functorch.compile import aot_function, nop

    backwards = []

    def keep(graph, inputs):
        backwards.append(targets(graph))
        return graph

    def f(x, w):
        return (functional.dropout(x @ w, 0.5).exp() * torch.rand_like(x)).sin().sum()

    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    y, v = leaf(4, 4), leaf(4, 4, seed=1)
    g = aot_function(f, nop, bw_compiler=keep, partition_fn=partitioner)
    torch.manual_seed(0)
    loss = g(x, w)
    loss.backward()
    torch.manual_seed(0)
    expected = f(y, v)
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(w.grad, v.grad)
    (ops,) = backwards
    assert not [op for op in ops if "dropout.default" in op or "rand" in op]


def test_aotlab_names_it():
    """The package exports the partitioner."""
    assert aotlab.min_cut_rematerialization_partition.__module__ == "aotlab.partition.min_cut"
