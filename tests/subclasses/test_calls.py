"""Wrappers as arguments, results and intermediates equal eager bit for bit.

Upstream's AOTAutograd raises if it is called.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from tests.subclasses.kinds import Quantized, Tagged, beside_eager, leaf, plain, same, two


def nested(i=0):
    """Make a wrapper of wrappers."""
    return TwoTensor(two(i), two(i + 1))


def under_no_grad(t):
    """Compute without gradients inside."""
    with torch.no_grad():
        y = t * 2
    return y, t.sin()


def written_in_between(t):
    """Write a copy through a view."""
    y = t.clone()
    y[0].mul_(3)
    return y * 2


PROGRAMS = {
    "alone": (lambda t: (t * 2).sin(), lambda: (two(),)),
    "several": (lambda t, u: (t * u, t + 1, u.exp()), lambda: (two(), two(1))),
    "with a tensor": (lambda t, w: (t @ w).relu(), lambda: (two(), plain(9, (4, 2)))),
    "nested": (lambda t: (t * 2).sin(), lambda: (nested(),)),
    "nested, with a wrapper of tensors": (lambda t, u: t + u.a, lambda: (nested(), nested(5))),
    "in containers": (lambda o, x: {"r": [o["t"] * x, x + 1], "n": 3}, lambda: ({"t": two(), "k": 2}, plain(8))),
    "by name": (lambda t, *, by: t * by["u"], lambda: (two(), two(1))),
    "made inside": (lambda a, b: TwoTensor(a * 2, b.sin()), lambda: (plain(1), plain(2))),
    "made inside, of the arguments": (lambda a, b: TwoTensor(a, b), lambda: (plain(1), plain(2))),
    "made inside, returned in part": (lambda a, b: (TwoTensor(a, b) * 3).a, lambda: (plain(1), plain(2))),
    "an attribute": (lambda t: t.a * 2, lambda: (two(),)),
    "returned": (lambda t: (t, t * 2), lambda: (two(),)),
    "a view returned": (lambda t: (t.t(), t[0][1:]), lambda: (two(),)),
    "detached": (lambda t: (t.detach(), t * 2), lambda: (two(),)),
    "a result and a view of it": (lambda t: (lambda y: (y, y.t()))(t * 2), lambda: (two(),)),
    "views of a result": (lambda t: (lambda y: (y[0], y[1:], y.t()[2]))(t * 2), lambda: (two(),)),
    "a result twice": (lambda t: (lambda y: (y, y))(t * 2), lambda: (two(),)),
    "an unused argument": (lambda t, u: t * 2, lambda: (two(), two(1))),
    "no_grad inside": (under_no_grad, lambda: (two(),)),
    "written in between": (written_in_between, lambda: (two(),)),
    "factories": (lambda t: t * torch.ones(4) + torch.zeros_like(t), lambda: (two(),)),
    "reductions": (lambda t: (t.sum(), t.softmax(-1), t.mean(0, keepdim=True)), lambda: (two(),)),
    "quantized": (lambda x, w: functional.linear(x, w).relu(), lambda: (plain(), Quantized.of(plain(1, (5, 4))))),
    "tagged": (lambda x, w: functional.linear(x, w).relu(), lambda: (plain(), Tagged(plain(1, (5, 4)), "w"))),
    "quantized inside": (lambda w: Quantized.of(w * 2, 4), lambda: (plain(1, (5, 4)),)),
    "two kinds": (lambda t, w: t @ w.t(), lambda: (two(), Tagged(plain(1, (5, 4)), "w"))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_gradients(name):
    """Programs with wrappers that do not require grad agree with eager."""
    function, make = PROGRAMS[name]
    if name == "by name":
        assert same(
            aotlab.compile(function, backend="eager")(two(), by={"u": two(1)}), function(two(), by={"u": two(1)})
        )
        return
    beside_eager(function, make)


def test_under_no_grad():
    """A wrapper that requires grad is called under no_grad, and then in grad mode with another entry."""
    compiled = aotlab.compile(lambda t: (t * 2, t.t()), backend="eager")
    with torch.no_grad():
        result = compiled(leaf(two()))
    assert same(result, (two() * 2, leaf(two()).detach().t())) or not result[0].requires_grad
    assert compiled(leaf(two()))[0].requires_grad
    assert len(compiled.calls.per_entry) == 2


def test_inference_mode():
    """Calls under inference mode agree with eager, also for wrappers that require grad."""
    with torch.inference_mode():
        for make in (two, lambda: leaf(two())):
            compiled = aotlab.compile(lambda t: (t * 2, t.t()), backend="eager")
            ours, theirs = compiled(make()), (make() * 2, make().t())
            assert all(torch.equal(x.a, y.a) and torch.equal(x.b, y.b) for x, y in zip(ours, theirs, strict=True))
            assert compiled.calls.compiled == 1


def test_one_wrapper_twice():
    """A wrapper that is passed twice is one tensor to the function; two wrappers are two."""
    compiled = aotlab.compile(lambda t, u: (t * u, t is u), backend="eager")
    t = two()
    assert same(compiled(t, t), (t * t, True))
    assert same(compiled(t, two(1)), (t * two(1), False))
    assert len(compiled.calls.per_entry) == 2


def test_wrappers_of_one_tensor():
    """Two wrappers may share an inner tensor with each other and with a plain argument."""
    a, b = plain(1), plain(2)
    beside_eager(lambda t, u, x: t * u + x, lambda: (TwoTensor(a, b), TwoTensor(b, a), a))


MODULES = {"TwoTensor": lambda w: TwoTensor(w, w + 1), "Quantized": Quantized.of, "Tagged": lambda w: Tagged(w, "w")}


@pytest.mark.parametrize("kind", MODULES)
def test_parameters_and_buffers(kind):
    """Wrappers as a module's parameter and buffer are supported, and may be replaced."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 5)
            self.linear.weight = torch.nn.Parameter(MODULES[kind](plain(3, (5, 4))), requires_grad=False)
            self.register_buffer("shift", two(4, (3, 5)))

        def forward(self, x):
            return self.linear(x) + self.shift

    net = Net()
    compiled = aotlab.compile(net, backend="eager")
    for shift in (net.shift, two(5, (3, 5))):
        net.shift = shift
        assert same(compiled(plain()), net(plain()))
    assert compiled.compiled.calls.compiled == 2
    assert len(compiled.compiled.entries) == 1


def test_a_wrapper_in_a_closure():
    """A wrapper in a closure is read again at each call."""
    t = two()

    def function(x):
        return x * t

    compiled = aotlab.compile(function, backend="eager")
    assert same(compiled(plain()), function(plain()))
    t = two(1)
    assert same(compiled(plain()), function(plain()))
    assert len(compiled.entries) == 1


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["alone", "with a tensor", "nested", "views of a result", "quantized", "made inside"])
def test_inductor(name):
    """Inductor's results agree with eager."""
    function, make = PROGRAMS[name]
    beside_eager(function, make, backend="inductor", close=True)


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_kept(grad):
    """No call keeps its arguments or their parts alive."""
    compiled = aotlab.compile(lambda t: (t.t(), t * 2), backend="eager")
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            t = two().requires_grad_(grad)
            alive = [weakref.ref(each) for each in (t, t.a, t.b)]
            compiled(t)
            del t
            assert [each() for each in alive] == [None] * 3
    finally:
        gc.enable()


def test_names_of_the_generated_code():
    """Arguments may have the names that the generated code uses for itself."""

    def computed(detect_writes, take_wrapper, view_again, body, isinstance, id, tree):
        return detect_writes * take_wrapper + view_again * body + isinstance * id + tree

    beside_eager(computed, lambda: tuple(two(i) for i in range(7)))
