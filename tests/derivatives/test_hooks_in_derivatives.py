"""Hooks on a call's results see the same gradients in higher-order derivatives as in eager."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd import grad

from tests.engine_helpers import behind_dynamo, compiled

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


PROGRAMS = {
    "through the midst": lambda x, w: (x * w).sin() * 3,
    "a last op that keeps its argument": lambda x, w: (x * w).sin(),
    "an output that is kept": lambda x, w: (x * w).sin().exp(),
    "a view": lambda x, w: (x * w).sin().view(3, 1),
    "a view of what is kept": lambda x, w: (x * w).exp().view(3, 1),
    "nothing is kept": lambda x, w: x + w,
    "two, one is kept": lambda x, w: ((x * w).exp(), (x + w).sin()),
    "two, both are kept": lambda x, w: ((x * w).exp(), (x + w).tanh()),
    "two of one op": lambda x, w: torch.linalg.qr(torch.outer(x, w) + 2 * torch.eye(3)),
    "one is used by the other": lambda x, w: ((y := (x * w).sigmoid()), y.sin()),
    "a written argument": lambda x, w: (x.mul_(w).sin_(), (x * w).tanh()),
    "two of complex numbers": lambda x, w: ((z := torch.complex(x, w).exp()).view(3, 1).real, z.sin().view(3, 1).imag),
    "complex numbers": lambda x, w: torch.view_as_real(torch.complex(x, w).exp()),
}


#: In which three terms and more are summed: the caller's, and those of uses inside.
SUMS = ("one is used by the other", "two of complex numbers")


def only_the_gradient(x, ys):
    """Differentiate a value that depends on the gradient alone."""
    (g,) = grad(sum(y.sum() for y in ys), x, create_graph=True)
    return g, g.square().sum()


def gradient_and_results(x, ys):
    """Differentiate a value that depends on the gradient and on the results."""
    (g,) = grad(sum(y.square().sum() for y in ys), x, create_graph=True)
    return g, g.square().sum() + sum(y.sin().sum() for y in ys)


def third_order(x, ys):
    """Differentiate a value that depends on the second derivative."""
    (g,) = grad(sum(y.square().sum() for y in ys), x, create_graph=True)
    (h,) = grad(g.square().sum(), x, create_graph=True, allow_unused=True, materialize_grads=True)
    return h, h.square().sum() + g.sum()


def watched(function, work, *, doubling: bool):
    """Return the gradients that hooks on the results saw, and the final gradients; the hooks may change them."""
    torch.manual_seed(0)
    x, w = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    seen = []

    def hook(number):
        def call(gradient):
            seen.append((number, None if gradient is None else gradient.detach().clone()))
            return gradient * 2 if doubling else None

        return call

    results = function(x + 0, w)
    results = results if isinstance(results, tuple) else (results,)
    for number, each in enumerate(results):
        each.register_hook(hook(number))
        each.retain_grad()
    g, loss = work(x, results)
    gradients = [g, *grad(loss, [x, w], allow_unused=True)] if loss.requires_grad else [g]
    return seen, [*gradients, *(each.grad for each in results)]


def is_same(one, other, *, exact: bool = True):
    """Tell whether both are None, or equal tensors; not ``exact`` are sums of three terms and more, in any order."""
    alike = torch.equal if exact else torch.allclose
    return one is other or (one is not None and other is not None and alike(one, other))


@pytest.mark.parametrize("make", [compiled, behind_dynamo])
@pytest.mark.parametrize("work", [only_the_gradient, gradient_and_results, third_order])
@pytest.mark.parametrize("name", PROGRAMS)
def test_hooks_on_results(name, work, make):
    """Hooks run as often as in eager, in the same order and with the same gradients, and their changes take effect."""
    for doubling in (False, True):
        expected, values = watched(PROGRAMS[name], work, doubling=doubling)
        seen, found = watched(make(PROGRAMS[name]), work, doubling=doubling)
        assert [number for number, _ in seen] == [number for number, _ in expected]
        pairs = [(a, b) for (_, a), (_, b) in zip(seen, expected, strict=True)] + list(zip(found, values, strict=True))
        assert all(is_same(a, b, exact=name not in SUMS) for a, b in pairs)


def test_a_result_that_is_gone():
    """A hook on a result runs even if the result is no longer referenced."""
    found = []
    for function in (PROGRAMS["two, one is kept"], compiled(PROGRAMS["two, one is kept"])):
        torch.manual_seed(0)
        x, w = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
        seen = []
        first, second = function(x, w)
        first.register_hook(lambda g, seen=seen: seen.append(g.detach().clone()))
        loss = first.sum() + second.sum()
        del first, second
        (g,) = grad(loss, x, create_graph=True)
        found.append([*seen, g, *grad(g.square().sum(), [x, w]), *seen])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["two, both are kept", "two of one op", "a view of what is kept"])
def test_nothing_leads_back(name):
    """Results, and the objects that keep their history, are freed at once, without the garbage collector."""
    function = compiled(PROGRAMS[name])
    x, w = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    function(x, w)
    gc.disable()
    try:
        results = function(x, w)
        places = [weakref.ref(each) for each in results] if isinstance(results, tuple) else [weakref.ref(results)]
        del results
        assert [place() for place in places] == [None] * len(places)
    finally:
        gc.enable()
