"""Dedupe: a tensor that is passed twice becomes one input, by two strategies."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotlab
from aotlab.capture import call as capture
from aotlab.capture import dedupe
from aotlab.frontends.direct import FunctionTarget
from tests.engine_helpers import compiled, leaf, metadata, nonleaf, record, same


def run(strategy, *args):
    """Dedupe a call."""
    _, call = capture.run(FunctionTarget(lambda *args: None), args, {})
    return dedupe.run(call, strategy)


def test_record():
    """Which remain, which serves which, under both strategies."""
    x, y = torch.ones(1), torch.ones(1)
    dropped = run("drop", x, 3, y, x, y, x)
    assert dropped.kept == (0, 2)
    assert dropped.positions == (0, 2, 3, 4, 5)
    assert dropped.source == (0, 1, 0, 1, 0)
    assert dropped.names == ("args[0]", "args[2]")
    assert dropped.placeholders == (0, 2)
    kept = run("keep", x, 3, y, x, y, x)
    assert (kept.kept, kept.source) == (dropped.kept, dropped.source)
    assert kept.placeholders == (0, 2, 3, 4, 5)


def test_views_are_not_duplicates():
    """Two tensor objects over the same memory are two inputs."""
    x = torch.ones(2)
    assert run("drop", x, x.view(2), x.detach()).kept == (0, 1, 2)


def f(a, b, c):
    """Write one of two, look at identity, alias and differentiate."""
    a.mul_(c)
    return a is b, b + a, b.t(), b


def test_duplicates_under_mutation():
    """A write to one is a write to the other; ``is`` holds; gradients add up."""
    x, c = nonleaf(2, 3), leaf(2, 3, seed=1)
    same(f, x, x, c)
    plain = torch.randn(2, 3)
    same(f, plain, plain, torch.randn(2, 3))
    same(lambda a, b: (a * b, a is b), leaf(3), leaf(3))
    y = leaf(3)
    same(lambda a, b: (a * b, a is b), y, y)


def test_duplicates_nested():
    """The same tensor in a list, a dict and as a keyword."""
    x = leaf(3)
    same(lambda a, rest, k: a * rest["w"][0] * k, x, {"w": [x]}, kwargs={"k": x})


def test_the_keep_strategy_gives_the_same_results():
    """With a placeholder for each argument results and gradients are eager's too; the duplicate's gets no gradient."""

    class Flat(nn.Module):
        def forward(self, a, b, c):
            out = f(a, b, c)
            return out[1], out[2], out[3]

    made = []

    def make(module):
        compiled_module = aotlab.aot_module_simplified(module, (), aotlab.nop)
        made.append(compiled_module)
        return compiled_module

    x, c = nonleaf(2, 3), leaf(2, 3, seed=1)
    same(Flat(), x, x, c, make=make)
    graph = record(made[0], "trace").module.graph
    names = [n for n in graph.nodes if n.op == "placeholder" and "primals" in n.name]
    assert len(names) == 3
    assert [len(n.users) for n in names][1] == 0
    assert len(metadata(made[0]).input_info) == 2
    plain = torch.randn(2, 3)
    same(Flat(), plain, plain, torch.randn(2, 3), make=make)


def test_tied_weights():
    """Tied weights of a module are one input, and get one gradient."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, i):
            return self.out(self.embed(i).tanh())

    same(Tied(), torch.tensor([0, 3, 3]))
    g = compiled(Tied())
    g(torch.tensor([1]))
    assert record(g, "dedupe").names == ("embed.weight", "i")


def test_argument_that_is_a_parameter():
    """A parameter that is passed as an argument as well is one input."""
    module = nn.Linear(3, 3)

    class Regularized(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = module

        def forward(self, x, w):
            return self.layer(x).sum() + w.square().sum(), w is self.layer.weight

    g = compiled(Regularized())
    x = torch.randn(2, 3)
    out, is_same = g(x, module.weight)
    out.backward()
    assert is_same
    gradient = module.weight.grad.clone()
    module.zero_grad()
    Regularized()(x, module.weight)[0].backward()
    assert torch.equal(gradient, module.weight.grad)


@pytest.mark.parametrize("count", [2, 5])
def test_many_duplicates(count):
    """One tensor in many places."""
    x = leaf(3)
    same(lambda *args: sum(a * (i + 1) for i, a in enumerate(args)), *([x] * count))
