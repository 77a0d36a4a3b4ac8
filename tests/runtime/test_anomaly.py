"""Anomaly mode: a nan in a compiled backward is eager's error and names the user's line."""

from __future__ import annotations

import contextlib
import re
import warnings

import pytest
import torch

from aotlab.errors import UserLine
from aotlab.stages.runtime.anomaly import Step, _complain
from tests.engine_helpers import compiled, global_torch_state, leaf, nonleaf

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


def second_gradient(x):
    """Return nan for the second argument of an op."""
    y = torch.full((3,), float("inf")) * x  # the line
    return (y * 0).sum()


def helper(x):
    """Compute a nan in another function."""
    return (x - x) / (x - x)  # the line


def in_helper(x):
    """Call it."""
    return helper(x * 2).sum()


def mutated(x):
    """Make it in place."""
    x.mul_(0)
    x.sqrt_()  # the line
    return (x * 0).sum()


class Bad(torch.autograd.Function):
    """Returns nan from the user's own backward."""

    @staticmethod
    def forward(ctx, x):
        """Double."""
        return x * 2  # the line: what the Function computes, where eager names the line that applies it

    @staticmethod
    def backward(ctx, gradient):
        """Return nan."""
        return gradient * float("nan")


def custom(x):
    """Apply it."""
    return Bad.apply(x).sum()


def two_outputs(x):
    """Return two outputs that hang on each other; the nan is behind the first."""
    y = (x - x).sqrt()  # the line
    return y * 0, (y * 0).exp().sum()


PROGRAMS = [root_of_zero, masked, second_gradient, in_helper, mutated, custom, two_outputs]


def run(function, x, forward, backward, check_nan=True):
    """Run forward and backward under anomaly mode or not; return the error, what was warned, and the gradient."""
    modes = [
        torch.autograd.detect_anomaly(check_nan=check_nan) if on else contextlib.nullcontext()
        for on in (forward, backward)
    ]
    error = None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with modes[0]:
            out = function(x)
        out = out[0].sum() + out[1] if isinstance(out, tuple) else out
        with modes[1]:
            try:
                out.backward()
            except RuntimeError as caught:
                error = str(caught)
    texts = [str(w.message) for w in found if str(w.message).startswith("Error detected in")]
    return error, texts, x.grad if x.is_leaf else None


def line_of(program):
    """Return the number of the line that is marked in a program, or in what it calls."""
    source = {in_helper: helper, custom: Bad.forward}.get(program, program)
    with open(__file__) as file:
        lines = file.read().splitlines()
    start = source.__code__.co_firstlineno
    return next(n for n in range(start, start + 20) if "# the line" in lines[n - 1])


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_the_error_and_the_line(program, frontend):
    """The name of the function, the place, and the user's line; no gradient is accumulated; the next call too."""
    if program is custom and frontend == "dynamo":
        pytest.skip("Dynamo replaces the Function by another, with another name")
    torch._dynamo.reset()
    make = nonleaf if program is mutated else leaf
    error, texts, gradient = run(program, make(3), True, True)
    assert error is not None
    assert "returned nan values in its" in error
    g = compiled(program, frontend=frontend)
    before = global_torch_state()
    for _ in range(2):
        found, warned, own = run(g, make(3), True, True)
        assert found == error
        name = re.match(r"Function '(\w+)'", error)[1]
        first = warned[0]
        assert first.startswith(f"Error detected in {name}. Traceback of forward call that caused the error:")
        assert f'File "{__file__}", line {line_of(program)}, in' in first
        if program is not custom:
            assert any(f'File "{__file__}", line {line_of(program)}, in' in text for text in texts)
        assert (own is None) == (gradient is None)
    assert global_torch_state() == before


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("check_nan", [False, True])
def test_where_the_mode_is_on(forward, backward, check_nan):
    """Around the forward only, the backward only, both, neither, and without looking for nan: raised where eager is."""
    expected = run(root_of_zero, leaf(3), forward, backward, check_nan)
    actual = run(compiled(root_of_zero), leaf(3), forward, backward, check_nan)
    assert actual[0] == expected[0]
    assert (actual[0] is not None) == (backward and check_nan)
    assert bool(actual[1]) == bool(expected[1])
    if expected[2] is None:
        assert actual[2] is None
    else:
        assert torch.equal(actual[2].isnan(), expected[2].isnan())


@pytest.mark.parametrize("autocast", [False, True])
def test_no_nan(autocast):
    """Without a nan nothing is said and gradients are eager's, also under autocast and for one output of two."""

    def f(x, w):
        return (x @ w).sin(), (x.exp() @ w).sum()

    gradients = []
    for function in (f, compiled(f)):
        for chosen in (0, 1):
            x, w = leaf(3, 3), leaf(3, 3, seed=1)
            with torch.autograd.detect_anomaly(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                function(x, w)[chosen].sum().backward()
            gradients.append((x.grad, w.grad))
    for a, b in zip(gradients[:2], gradients[2:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))


def test_a_nan_that_comes_in():
    """A tangent that is nan: the first node that hands it on is named, as in eager."""
    errors = []
    for function in (lambda x: x.sin() * 2, compiled(lambda x: x.sin() * 2)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError) as caught, torch.autograd.detect_anomaly():
                function(leaf(2)).backward(torch.full((2,), float("nan")))
        errors.append(str(caught.value))
    assert errors[1] == errors[0]


def test_other_errors_under_anomaly_mode():
    """An error of the user's backward is the user's, also in anomaly mode."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            raise LookupError("mine")

    for function in (lambda x: Raises.apply(x).sum(), compiled(lambda x: Raises.apply(x).sum())):
        with pytest.raises(LookupError, match="mine"), torch.autograd.detect_anomaly():
            function(leaf(2)).backward()


def from_a_hook(x):
    """Let a hook on an intermediate make the nan."""
    y = x * 2  # the line
    y.register_hook(lambda gradient: gradient * float("nan"))
    return y.sin()


def through_a_hooked_view(x):
    """Take the root of zero behind a view with a hook, of which another view is returned."""
    v = x.view(-1)
    v.register_hook(lambda gradient: gradient * 2)
    w = (v - v).sqrt()  # the line
    return (w * 0).sum(), v[0]


@pytest.mark.parametrize("program", [from_a_hook, through_a_hooked_view], ids=lambda f: f.__name__)
def test_with_hooks(program):
    """A nan that a hook makes, or one behind a hook: the same name and line; switching the mode compiles nothing."""
    g = compiled(program)
    g(leaf(3))
    for forward in (True, False):
        error, _, _ = run(
            lambda x: program(x) if program is not from_a_hook else program(x).sum(), leaf(3), forward, True
        )
        found, warned, _ = run(lambda x: g(x) if program is not from_a_hook else g(x).sum(), leaf(3), forward, True)
        assert error is not None
        assert found == error
        assert f'File "{__file__}", line {line_of(program)}, in' in warned[0]
    assert len(g.entries) == 1


def test_nothing_is_done_without_the_mode():
    """A backward without anomaly mode does not walk."""
    g = compiled(root_of_zero)
    x = leaf(3)
    g(x).backward()
    assert x.grad.isnan().all()


def test_the_words():
    """With and without a known line."""
    line = UserLine(file="a.py", line=3, function="f", code="y = x.log()")
    with (
        pytest.warns(UserWarning, match=r'(?s)Error detected in LogBackward0\. Traceback.*"a\.py", line 3, in f'),
        pytest.raises(RuntimeError, match="Function 'LogBackward0' returned nan values in its 1th output"),
    ):
        _complain(Step(name="LogBackward0", line=line, returned=()), 1)
    with pytest.warns(UserWarning, match="No forward pass information"), pytest.raises(RuntimeError):
        _complain(Step(name="LogBackward0", line=None, returned=()), 0)


def slope_of_a_root(x):
    """Take a root, whose second derivative at zero is infinite."""
    y = x * 2
    return y.sqrt().sum()  # the line


def slope_of_a_power(x):
    """Take a power that has two derivatives at zero and no third."""
    y = x * 1
    return y.pow(2.5).sum()  # the line


def slopes(function, order):
    """Differentiate as often, in anomaly mode; return the error and the warnings, and what was found before."""
    x, found = torch.tensor([0.0, 1.0], requires_grad=True), []
    out = None
    with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        out = function(x)
        try:
            for _ in range(order):
                (g,) = torch.autograd.grad(out, x, create_graph=True)  # the call
                found.append(g.detach())
                out = (g * torch.tensor([0.0, 1.0])).sum()
        except RuntimeError as error:
            return str(error), [str(each.message) for each in caught], found
    raise AssertionError("there is no nan")


def marked(function, mark):
    """Return what is shown of the line of a function that bears a mark."""
    with open(__file__) as file:
        lines = file.read().splitlines()
    start = function.__code__.co_firstlineno
    return f'test_anomaly.py", line {next(n for n in range(start, start + 20) if mark in lines[n - 1])}, in'


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("program", "order"), [(slope_of_a_root, 2), (slope_of_a_power, 3)])
def test_derivatives_of_derivatives(program, order, frontend):
    """The error names eager's node; warnings name the calls that made it, and the line of the function."""
    if order == 3 and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 itself fails when it shows which custom Function's node made another")
    expected, told, before = slopes(program, order)
    error, warned, found = slopes(compiled(program, frontend=frontend), order)
    assert error == expected
    assert len(found) == len(before) == order - 1
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    begin = next(n for n, each in enumerate(warned) if "Error detected" in each)
    ours, eagers = warned[begin : begin + order], told[-order:]
    assert [each.split(".")[0] for each in ours] == [each.split(".")[0] for each in eagers]  # the nodes' names
    places = [marked(slopes, "# the call")] * (order - 1) + [marked(program, "# the line")]
    assert all(place in each for place, each in zip(places, eagers, strict=True))
    assert all(place in each for place, each in zip(places, ours, strict=True))
    assert not any("No forward pass" in each for each in warned)


def test_derivatives_without_a_nan():
    """Where there is none, anomaly mode changes nothing, though the call was made without it."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = []
    for function in (slope_of_a_root, compiled(slope_of_a_root)):
        out = function(x)
        with torch.autograd.detect_anomaly(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (g,) = torch.autograd.grad(out, x, create_graph=True)
            found.append((g.detach(), *torch.autograd.grad(g.sum() + out, x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
