"""Unusual calls with wrappers: some are refused, and others are compiled."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab.errors import RefusedError
from tests.subclasses.kinds import beside_eager, leaf, plain, same, two


class Twice(torch.autograd.Function):
    """Gives a view, and twice the gradient."""

    @staticmethod
    def forward(ctx, x):
        """View it."""
        return x.view(-1)

    @staticmethod
    def backward(ctx, gradient):
        """Double it."""
        return gradient.view(3, 4) * 2


def without_grad(function, *args):
    """Call a function under no_grad."""
    with torch.no_grad():
        return function(*args)


def history():
    """Make a wrapper with a history."""
    return leaf(two()) * 1


def jagged(t):
    """Make a nested tensor of a plain one."""
    return torch.nested.nested_tensor_from_jagged(t * 2, torch.tensor([0, 1, 3]))


BESIDE = "is a tensor subclass, and a value computed from it is also returned or written"
ODD = {
    "written in and out of grad mode": (
        lambda t: (t.mul_(2), without_grad(t.mul_, 2)), history, "is changed both in grad mode and under no_grad",
    ),
    "viewed in and out of grad mode": (
        lambda t: without_grad(t.view, -1).split(6)[1], history, "is viewed both in grad mode and under no_grad",
    ),
    "a detached view": (lambda t: t.view(-1).detach(), two, "is a detached view"),
    "a detached view, of what is written": (lambda t: t.mul_(2).view(-1).detach(), two, "is a detached view"),
    "detached beside itself": (lambda t: (lambda u: (u, u.detach()))(t * 2), two, "is a detached view"),
    "a view and a view of it": (
        lambda t: (lambda v: (v, v.view(-1)))(t[0]), history, BESIDE,
    ),
    "a part of what is written": (
        lambda t: (lambda v: (v[2].mul_(2), v[0].detach())[1])(without_grad((t * 2).split, 1)), two,
        "views memory that is written",
    ),
    "a written one": (lambda t: (t.exp_(), t * 3)[1], history, BESIDE),
    "viewed by a custom Function": (Twice.apply, history, "is made by a custom Function"),
    "a view of another dtype": (lambda t: t.view(torch.int32), two, "is a detached view"),
    "a nested one": (
        jagged, lambda: (jagged(plain()), leaf(plain()))[1], "a `NestedTensor`, and not all of its parts are real",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_refused(name):
    """A refused call changes nothing."""
    function, make, text = ODD[name]
    argument = make()
    with pytest.raises(RefusedError, match=text):
        aotlab.compile(function, backend="eager")(argument)
    assert same(argument.detach(), make().detach())


def left_grad_mode(t):
    """Leave grad mode, and view a result."""
    u = t * 2
    torch.set_grad_enabled(False)
    return u.view(-1)


COMPILED = {
    "whether it is a leaf": lambda t: (t * 2, t.is_leaf, t.grad_fn),
    "detached as it is": lambda t: (t * 2, t.detach()),
    "viewed out of grad mode": lambda t: without_grad(t.view, -1),
    "written out of grad mode, twice": lambda t: (without_grad(t.mul_, 2), without_grad(t.add_, 2), t * 2)[2],
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    """These programs are compiled and agree with eager."""
    beside_eager(COMPILED[name], lambda: (leaf(two()),))


def test_left_grad_mode():
    """A returned view of an earlier result has the earlier result's history."""
    found = []
    for call in (aotlab.compile(left_grad_mode, backend="eager"), left_grad_mode):
        with torch.enable_grad():
            result = call(leaf(two()))
        found.append((result.requires_grad, result.is_leaf, result._base.requires_grad))
    assert found[0] == found[1]


def test_fewer_dims():
    """A wrapper with fewer dimensions gets another entry."""
    compiled = aotlab.compile(lambda t: t * 2, backend="eager")
    for shape in ((3, 4), (3,), (), (3, 4)):
        assert same(compiled(two(0, shape)), two(0, shape) * 2)
    assert compiled.calls.eager == 0


KEPT = {
    "a result": (lambda t, x: t.exp(), lambda out, t: out),
    "a result, reached by another": (lambda t, x: (lambda u: (u, t * x))(t.exp()), lambda out, t: out[0]),
    "an argument": (lambda t, x: t * x, lambda out, t: t),
}


@pytest.mark.parametrize("name", KEPT)
def test_written_before_the_backward(name):
    """A write after the call to a tensor that the backward needs raises as in eager; a write to another is no error."""
    function, chosen = KEPT[name]
    for call in (aotlab.compile(function, backend="eager"), function):
        t, x = history(), leaf(plain(5))
        out = call(t, x)
        without_grad(chosen(out, t).mul_, 2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum(each.sum() for each in (out if isinstance(out, tuple) else (out,))).backward()
    compiled = aotlab.compile(lambda t: t + 1, backend="eager")
    out, t = compiled(base := leaf(two())), base
    without_grad(out.mul_, 2)
    out.sum().backward()
    assert same(t.grad, torch.ones_like(t), versions=False)
