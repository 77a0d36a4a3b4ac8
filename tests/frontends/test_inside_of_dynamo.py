"""A function compiled by aotlab inside a function that Dynamo captures.

It becomes a part of the graph, and its guards are checked there.
"""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

import aotlab
from aotlab.verification import compare
from tests.engine_helpers import leaf

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("error::RuntimeWarning"),  # nothing is said to run eagerly
]

held = types.SimpleNamespace(scale=1.0)
#: Whether Dynamo knows less of wrapped functions and of attributes.
OLD = torch.__version__.startswith("2.11")


def writes(x, w):
    """Write an argument, return a view of it, and read an attribute of a global."""
    x.mul_(2)
    return (x @ w).sin() * held.scale, x.t()


class Net(nn.Module):
    """Writes a buffer, and reads an attribute."""

    def __init__(self):
        """Draw the weights."""
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = 2.0
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        """Count."""
        with torch.no_grad():
            self.seen.add_(x.detach().sum(0))
        y = self.layer(x) * self.scale
        return y.relu() if self.training else y


class Outer(nn.Module):
    """A class with a compiled module and a compiled function."""

    def __init__(self, inner, activation):
        """Keep both."""
        super().__init__()
        self.inner = inner
        self.activation = activation

    def forward(self, x):
        """Call both."""
        return self.activation(self.inner(x)) * 2


def holder_of(by):
    """Make a class with a compiled method, a static one and one of the class."""

    class Holder:
        factor = 2.0

        @by
        def method(self, x, w):
            return writes(x, w)[0] * self.factor

        @staticmethod
        @by
        def static(x, w):
            return writes(x, w)

        @classmethod
        @by
        def of_the_class(cls, x, w):
            return writes(x, w)[0] * cls.factor

    return Holder


def by(frontend):
    """Return a decorator that compiles."""
    return aotlab.compile(backend="eager", frontend=frontend)


def as_it_is(function):
    """Compile nothing."""
    return function


def program(name, by):
    """Make the outer function."""
    make, call = FUNCTIONS[name]
    inner = make(by)
    return lambda x, w: call(inner, x, w)


#: How a function is compiled, and what calls it.
FUNCTIONS = {
    "function": (lambda by: by(writes), lambda f, x, w: f(x, w)),
    "keywords": (lambda by: by(writes), lambda f, x, w: f(w=w, x=x)),
    "partial": (lambda by: by(writes), lambda f, x, w: functools.partial(f, w=w)(x)),
    "of an intermediate": (lambda by: by(writes), lambda f, x, w: f(x * 1, w)[1].t() + x),
    "twice": (lambda by: by(writes), lambda f, x, w: f(x * 1, w)[0] + f(x * 2, w.cos())[0]),
    "two deep": (lambda by: by(by(writes)), lambda f, x, w: f(x, w)),
    "in a list": (lambda by: [by(writes)], lambda f, x, w: f[0](x, w)),
    "under vmap": (lambda by: by(lambda a: a.sin() @ a), lambda f, x, w: torch.func.vmap(f)(x) @ w[:2]),
    "grad": (lambda by: by(lambda a, b: (a.sin() @ b).sum()), lambda f, x, w: torch.func.grad(f)(x, w)),
    "checkpoint": (
        lambda by: by(lambda a, b: (a @ b).sin()),
        lambda f, x, w: torch.utils.checkpoint.checkpoint(f, x, w, use_reentrant=False),
    ),
    "method": (lambda by: holder_of(by), lambda f, x, w: f().method(x, w)),
    "static method": (lambda by: holder_of(by), lambda f, x, w: f.static(x, w)),
    "method of the class": (lambda by: holder_of(by), lambda f, x, w: f.of_the_class(x, w)),
    "aot_function": (
        lambda by: aotlab.aot_function(writes, aotlab.nop) if by is not as_it_is else writes,
        lambda f, x, w: f(x, w),
    ),
}
AROUND = {
    "by us": functools.partial(aotlab.compile, backend="eager", frontend="dynamo"),
    "by us, as a backend": functools.partial(torch.compile, backend="aotlab", options={"compiler": "eager"}),
    "by torch": functools.partial(torch.compile, backend="aot_eager"),
}


def count(graphs):
    """Return a backend that counts its graphs and runs them."""

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    return backend


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, frontend, around):
    """Values, gradients, mutation and aliasing are eager's."""
    args = leaf(2, 3).detach(), leaf(3, 3)
    if OLD and (name, frontend) == ("under vmap", "dynamo"):
        pytest.skip("Dynamo of torch 2.11 leaves vmap of what it compiled to eager, which a notice says")
    if torch.__version__.startswith("2.15") and (name, frontend) == ("method of the class", "dynamo"):
        pytest.skip("Dynamo of torch 2.15 alone fails at a method of a class that it compiled")
    outer = AROUND[around](program(name, by(frontend)))
    result = compare(program(name, as_it_is), args, candidate=lambda _: outer, calls=2)
    assert result.first is None, result.first


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "method of the class"])
def test_one_graph(name, frontend):
    """Dynamo captures one graph, without a break, and a second call finds its guards to hold.

    But for methods that are bound outside: those of anything but Python's functions it leaves out of its graphs.
    """
    if OLD and (name, frontend) in (("under vmap", "dynamo"), ("two deep", "direct")):
        pytest.skip("Dynamo of torch 2.11 breaks off there")
    graphs = []
    function = torch.compile(program(name, by(frontend)), backend=count(graphs), fullgraph=True)
    for _ in range(2):
        function(torch.ones(2, 3), torch.ones(3, 3, requires_grad=True))
    assert len(graphs) == 1


MODULES = {
    "compiled": lambda by: lambda net, m: lambda x: m(x) * 2,
    "itself": lambda by: lambda net, m: m,
    "inside of another": lambda by: lambda net, m: Outer(m, by(torch.sigmoid)),
    "in a sequence": lambda by: lambda net, m: nn.Sequential(m, nn.Tanh()),
}


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, frontend):
    """Dynamo guards a module's flag and attributes. Weights are read again at each call."""
    if OLD and (name, frontend) == ("inside of another", "direct"):
        pytest.skip("Dynamo of torch 2.11 breaks off at a compiled function that is an attribute")
    torch.manual_seed(0)
    plain = Net()
    net = Net()
    net.load_state_dict(plain.state_dict())
    graphs = []
    inside = MODULES[name](by(frontend))(net, by(frontend)(net))
    function = torch.compile(inside, backend=count(graphs), fullgraph=True)
    eager = MODULES[name](as_it_is)(plain, plain)
    x = torch.linspace(-1, 1, 6).view(2, 3)

    def both_agree():
        for each in (net, plain):
            each.zero_grad()
        ours, theirs = function(x), eager(x)
        assert torch.equal(ours, theirs)
        ours.sum().backward()
        theirs.sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), plain.parameters(), strict=True))
        assert torch.equal(net.seen, plain.seen)

    def change(how):
        before = len(graphs)
        how(net)
        how(plain)
        both_agree()
        return len(graphs) - before

    both_agree()
    assert len(graphs) == 1
    assert change(lambda n: n.layer.weight.data.mul_(2)) == 0
    assert change(lambda n: n.eval()) == 1
    assert change(lambda n: setattr(n, "scale", 3.0)) == 1


def test_what_a_function_reads_is_guarded():
    """If a value that the inner function reads changes, the outer function is compiled again."""
    graphs = []
    inner = by("direct")(writes)
    function = torch.compile(lambda x, w: inner(x, w)[0], backend=count(graphs))
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    first = function(x.clone(), w)
    held.scale = 3.0
    try:
        assert torch.equal(function(x.clone(), w), first * 3)
    finally:
        held.scale = 1.0
    assert len(graphs) == 2


def test_what_cannot_be_compiled_directly():
    """A refusal of the direct frontend does not matter there, because the inner function's engine is not used."""
    inner = by("direct")(lambda x: (x * 2).sum().backward())

    def outer(x):
        inner(x)
        return x.grad + 1

    x = torch.ones(3, requires_grad=True)
    assert torch.equal(torch.compile(outer, backend="eager")(x), torch.full((3,), 3.0))


def test_calls_outside_stay_compiled():
    """Outside, the inner function's entries serve its calls, and its counters count only those calls."""
    inner = by("direct")(writes)
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    inner(x, w)
    torch.compile(lambda x, w: inner(x, w)[0], backend="eager", fullgraph=True)(x, w)
    inner(x, w)
    assert (inner.calls.total, inner.calls.compiled, len(inner.entries)) == (2, 2, 1)


def test_a_break_inside():
    """A break of Dynamo's in the inner function is one of the outer's, and right."""

    def breaks(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y * 2

    graphs = []
    inner = by("direct")(breaks)
    function = torch.compile(lambda x: inner(x) + 1, backend=count(graphs))
    x = torch.ones(3)
    assert torch.equal(function(x), breaks(x) + 1)
    assert len(graphs) in (2, 3)
