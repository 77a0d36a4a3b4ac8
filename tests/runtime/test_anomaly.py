"""Anomaly mode: calls in it run eagerly, and the backward of an earlier compiled call runs as usual."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

from tests.engine_helpers import behind_dynamo, compiled, leaf, nonleaf

FRONTENDS = ["direct", "dynamo"]


def root_of_zero(x):
    """Take the root of zero: 0 * inf in its backward."""
    y = x * 2
    z = (y - y).sqrt()  # the line
    return (z * 0).sum()


def masked(x):
    """Hide the nan from the gradient of the input; eager raises all the same."""
    y = (x - x).pow(0.5)  # the line
    w = torch.where(x > 100, y, x * 0)
    return w.sum()


def mutated(x):
    """Make it in place."""
    x.mul_(0)
    x.sqrt_()  # the line
    return (x * 0).sum()


def hooked(x):
    """Let a hook on an intermediate make the nan."""
    y = x * 2  # the line
    y.register_hook(lambda gradient: gradient * float("nan"))
    return y.sin().sum()


PROGRAMS = [root_of_zero, masked, mutated, hooked]


def run(function, make, *, forward=True, backward=True, check_nan=True):
    """Run forward and backward with or without anomaly mode; return the error and the warning about it."""
    modes = [
        torch.autograd.detect_anomaly(check_nan=check_nan) if on else contextlib.nullcontext()
        for on in (forward, backward)
    ]
    error = None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with modes[0]:
            out = function(make(3))
        with modes[1]:
            try:
                out.backward()
            except RuntimeError as caught:
                error = str(caught)
    return error, [str(w.message) for w in found]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_call_under_the_mode(program, frontend):
    """In anomaly mode a call runs eagerly, with eager's error, the line in a warning, and one notice.

    Without the mode it is compiled.
    """
    torch._dynamo.reset()
    make = nonleaf if program is mutated else leaf
    error, _ = run(program, make)
    assert error is not None
    assert "returned nan values in its" in error
    if program is hooked and frontend == "dynamo" and torch.__version__.startswith("2.11"):
        # Dynamo turns a hook into a custom Function with its own node, also without us.
        error = error.replace("MulBackward0", "_AppliedBackward")
    g = compiled(program) if frontend == "direct" else behind_dynamo(program)
    with open(__file__) as file:
        number = next(
            n for n, line in enumerate(file, 1) if n > program.__code__.co_firstlineno and "# the line" in line
        )
    notices = []
    for _ in range(3):
        found, warned = run(g, make)
        assert found == error
        if frontend == "direct":  # Dynamo's graph is in no file
            assert any(f'File "{__file__}", line {number}, in' in text for text in warned)
        notices += [text for text in warned if "anomaly mode, which" in text]
    assert len(notices) == 1
    g(make(3)).backward()
    if frontend == "direct":
        assert (g.calls.eager, g.calls.compiled) == (3, 1)
        run(g, make)
        assert g.calls.eager == 4
        g(make(3))
        assert g.calls.compiled == 2
        assert len(g.entries) == 1


def test_without_gradients():
    """A call without gradients stays compiled in anomaly mode."""
    g = compiled(lambda x: x.sin())
    g(torch.ones(2))
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        g(torch.ones(2))
    assert g.calls.compiled == 2


@pytest.mark.parametrize("check_nan", [False, True])
def test_a_backward_under_the_mode(check_nan):
    """Anomaly mode checks the gradients that a compiled call returns as the gradients of a single node."""
    error, _ = run(compiled(root_of_zero), leaf, forward=False, check_nan=check_nan)
    assert (error is not None) == check_nan
    assert error is None or "returned nan values in its 0th output" in error


def test_gradients():
    """A backward in anomaly mode has the usual gradients, of all orders, and with hooks."""

    def f(x, w):
        y = x @ w
        y.register_hook(lambda gradient: gradient * 2)
        return y.sin(), (x.exp() @ w).sum()

    gradients = []
    for function in (f, compiled(f)):
        for chosen in (0, 1):
            x, w = leaf(3, 3), leaf(3, 3, seed=1)
            out = function(x, w)[chosen].sum()
            with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                first = torch.autograd.grad(out, (x, w), create_graph=True)
                second = torch.autograd.grad(sum(g.sin().sum() for g in first), (x, w))
            gradients += [*first, *second]
    middle = len(gradients) // 2
    assert all(torch.equal(a, b) for a, b in zip(gradients[:middle], gradients[middle:], strict=True))


def test_other_errors():
    """An error of the user's backward is raised unchanged in anomaly mode too."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            raise LookupError("mine")

    out = compiled(lambda x: Raises.apply(x).sum())(leaf(2))
    with pytest.raises(LookupError, match="mine"), torch.autograd.detect_anomaly():
        out.backward()
