"""Lifted inputs with sizes that vary: one graph serves all sizes, and the tensors are read again at each call."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import aotlab
from tests.engine_helpers import leaf

BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))]


def use(x, weight, total):
    """Read one tensor, write another, and use sizes of both."""
    total.add_(x.detach().sum(0))
    total[1:].mul_(0.5)
    return (x * weight / weight.shape[0]).sum(1) + total.sum() * x.shape[0]


def closure():
    """Use variables of a function outside."""
    weight = total = None

    def put(*given):
        nonlocal weight, total
        weight, total = given

    return lambda x: use(x, weight, total), put


def module_globals():
    """Use globals of a module."""
    scope = {"use": use}
    exec("def f(x): return use(x, weight, total)", scope)
    return scope["f"], lambda weight, total: scope.update(weight=weight, total=total)


class Holder:
    """An object with two tensors."""

    weight = total = None

    def put(self, weight, total):
        """Replace both."""
        self.weight, self.total = weight, total

    def step(self, x):
        """Use both."""
        return use(x, self.weight, self.total)

    def __call__(self, x):
        """Use both."""
        return self.step(x)


class Layer(nn.Module):
    """A module with a parameter and a buffer, whose sizes do not vary, and tensors that are neither."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("calls", torch.zeros(1))
        self.weight = self.total = None

    def put(self, weight, total):
        """Replace the tensors."""
        self.weight, self.total = weight, total

    def forward(self, x):
        """Use them all."""
        self.calls.add_(1)
        return use(x, self.weight, self.total) * self.scale + self.calls


def bound_method():
    """Use a method of an object."""
    held = Holder()
    return held.step, held.put


def of_an_object():
    """Use attributes of an object in a closure."""
    held = SimpleNamespace(inner=Holder())
    return lambda x: held.inner(x), held.inner.put


def partial():
    """Bind an argument."""
    held = Holder()
    return functools.partial(lambda holder, x: holder.step(x), held), held.put


def default():
    """Use the default of a parameter."""
    held = Holder()

    def f(x, holder=held):
        return holder.step(x)

    return f, held.put


def items():
    """Use items of a list in a dictionary."""
    held = {"both": [None, None]}
    return lambda x: use(x, *held["both"]), lambda *given: held["both"].__setitem__(slice(None), given)


def module():
    """Use a module itself."""
    layer = Layer()
    return layer, layer.put


def method_of_a_module():
    """Use a method of the module."""
    layer = Layer()
    return layer.forward, layer.put


def around_a_module():
    """Put a function around it."""
    layer = Layer()
    return lambda x: layer(x) * 2, layer.put


PLACES = (
    closure, module_globals, bound_method, of_an_object, partial, default, items, module,
    method_of_a_module, around_a_module,
)  # fmt: skip


def outcome(place, build, sizes):
    """Call the function with tensors of several sizes in its places; return all that can be seen."""
    function, put = place()
    call = build(function)
    seen = []
    for seed, (rows, columns) in enumerate(sizes):
        weight, total = leaf(columns, seed=seed), torch.ones(columns)
        put(weight, total)
        x = leaf(rows, columns, seed=10 + seed)
        out = call(x)
        written = total._version > 0
        out.square().sum().backward()
        seen.append((out.detach(), x.grad, weight.grad, total.clone(), torch.tensor(written)))
    return seen, call


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_sizes_of_places(place, dynamic, backend):
    """Values, gradients and writes are eager's, by one entry, or by one more once sizes have changed."""
    sizes = ((2, 5), (4, 3), (7, 6), (3, 9))
    expected, _ = outcome(place, lambda function: function, sizes)
    found, call = outcome(place, lambda function: aotlab.compile(function, backend=backend, dynamic=dynamic), sizes)
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if backend == "eager" else {}))
    function = getattr(call, "compiled", call)
    assert len(function.entries) == (1 if dynamic else 2), function.recompiles
    assert (function.calls.eager, function.calls.by_dynamo) == (0, 0)


def test_parameters_and_buffers():
    """Sizes of parameters and buffers are specialized, as upstream does, so that kernels may rely on them."""
    net = nn.Module()
    call = aotlab.compile(lambda x: x.sum() * net.weight * net.mean, backend="eager", dynamic=True)
    for size in (2, 3, 4):
        net.weight, mean = nn.Parameter(torch.ones(size)), torch.full((size,), 2.0)
        net.register_buffer("mean", mean)
        assert call(torch.ones(3)).tolist() == [6.0] * size
    assert len(call.entries) == 3


def test_a_part_of_what_is_in_a_place():
    """An argument may be a lifted input, or a part of one, of any size."""
    held = {"w": None}

    def f(x):
        x.add_(1)
        return x * held["w"].sum() + held["w"].shape[0]

    for dynamic in (True, None):
        call = aotlab.compile(f, backend="eager", dynamic=dynamic)
        for size in (3, 5, 4):
            for part in (slice(None), slice(1, None)):
                seen = []
                for function in (f, call):
                    held["w"] = torch.arange(float(size))
                    seen.append((function(held["w"][part]), held["w"].clone()))
                torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_cache_that_grows(dynamic, backend):
    """A tensor in a place that grows outside of the function, call by call, is compiled for all lengths."""
    held = {}

    def f(x):
        keys = torch.cat([held["keys"], x])
        return keys, (x @ keys.t()).softmax(-1) @ keys

    def outcome(call):
        held["keys"] = torch.ones(2, 4)
        seen = []
        for n in range(6):
            held["keys"], out = call(leaf(1, 4, seed=n).detach())
            seen.append(out)
        return seen

    call = aotlab.compile(f, backend=backend, dynamic=dynamic)
    torch.testing.assert_close(outcome(call), outcome(f), **({"rtol": 0, "atol": 0} if backend == "eager" else {}))
    assert (len(call.entries), call.calls.eager) == (1 if dynamic else 2, 0), call.recompiles
