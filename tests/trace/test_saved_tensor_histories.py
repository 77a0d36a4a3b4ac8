"""Gradients that depend on a result or an intermediate through a tensor that an autograd node saved with its history.

The trace cannot see all of these tensors: checkpoints recompute them, writes to views hide them, and custom Functions
store them as attributes. A value that was saved before a write is a clone, and the clone's node may belong to another
result's graph.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from aotlab.errors import DoubleBackwardError
from tests.engine_helpers import behind_dynamo, by_min_cut, compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


WAYS = pytest.mark.parametrize("make", [compiled, behind_dynamo, by_min_cut])
LEAVES = pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "nonleaf"])


def again(function, *args):
    """Compute again in the backward."""
    return checkpoint(function, *args, use_reentrant=False)


class Exp(torch.autograd.Function):
    """Keeps its result, as an attribute inside a list."""

    @staticmethod
    def forward(ctx, x):
        """Keep it."""
        y = x.exp()
        ctx.kept = [y]
        return y

    @staticmethod
    def backward(ctx, gradient):
        """Use it."""
        return gradient * ctx.kept[0]


class SavesResults(torch.autograd.Function):
    """Saves both of its results."""

    @staticmethod
    def forward(ctx, x):
        """Save them."""
        y = x.exp()
        z = y * 2
        ctx.save_for_backward(y, z)
        return y, z

    @staticmethod
    def backward(ctx, first, second):
        """Use them."""
        y, z = ctx.saved_tensors
        return first * y + second * z


def twice(y):
    """Return a tensor and a tensor that is computed from it."""
    return y, y * 0.5


def factor(x):
    """Return a result and a product with it, from one checkpoint."""

    def inside(q):
        e = q.exp()
        return e, e * q

    return again(inside, x)


def row_written(x):
    """Write a row by an op that keeps its result."""
    y = x * 1
    y[0].exp_()
    return twice(y)


def row_returned(x):
    """Return the base of what was written, and something that was made before."""
    y = x * 1
    z = y + x
    y.view(-1).sigmoid_()
    return z, y


def row_and_whole(x):
    """Write a row, and return it beside the whole."""
    y = x * 1
    row = y[0]
    row.exp_()
    return y, row


def turned(x):
    """Return a turned view that was written, and nothing else."""
    y = (x * 1).t()
    y.tanh_()
    return (y,)


RESULTS = {
    "exp": lambda x: twice(x.exp()),
    "checkpoint": lambda x: twice(again(torch.exp, x.tanh())),
    "checkpoint alone": lambda x: (again(torch.exp, x),),
    "checkpoint, nested": lambda x: twice(again(lambda q: again(torch.exp, q), x)),
    "checkpoint, two results": factor,
    "checkpoint of a result": lambda x: (lambda y: (y, again(lambda q: q * q.exp(), y)))(x * 2),
    "checkpoint of two": lambda x: (lambda y: (y, again(torch.mul, y, x)))(x.sin()),
    "checkpoint and attention": lambda x: twice(again(torch.softmax, x, -1)),
    "attribute": lambda x: twice(Exp.apply(x)),
    "attribute in a checkpoint": lambda x: twice(again(Exp.apply, x)),
    "saved results": lambda x: SavesResults.apply(x),
    "saved results in a checkpoint": lambda x: again(SavesResults.apply, x),
    "row written": row_written,
    "all written by a view": row_returned,
}


def with_respect_to_results(function, leaf, order=3):
    """Return derivatives with respect to the argument and to the results."""
    torch.manual_seed(0)
    given = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    x = given if leaf else given * 1
    results = function(x)
    scalar = sum(result.square().sum() for result in results)
    found = [result.detach().clone() for result in results]
    for _ in range(order):
        gradients = grad(scalar, [x, *results], create_graph=True, allow_unused=True)
        found += gradients
        scalar = sum(each.square().sum() for each in gradients if each is not None)
    return found


def equal(expected, found):
    """Compare; `None` is no zero."""
    assert len(expected) == len(found)
    for e, f in zip(expected, found, strict=True):
        assert (e is None) == (f is None)
        if e is not None:
            torch.testing.assert_close(f, e, rtol=1e-10, atol=1e-12)


@LEAVES
@WAYS
@pytest.mark.parametrize("name", RESULTS)
def test_with_respect_to_results(name, make, leaf):
    """A gradient depends on a result that a node keeps, whether or not one can see that it does."""
    expected = with_respect_to_results(RESULTS[name], leaf)
    assert any(each is not None and each.any() for each in expected[-1:])
    if make is behind_dynamo and name.startswith(("attribute", "saved results")):  # custom Functions
        with pytest.raises(DoubleBackwardError, match="that Dynamo captured"):
            with_respect_to_results(make(RESULTS[name]), leaf)
        return
    equal(expected, with_respect_to_results(make(RESULTS[name]), leaf))


def written(x):
    """Write an intermediate, and differentiate inside the function."""
    y = x * 1
    y.mul_(x)
    return y, grad(y.tanh().sum(), x, create_graph=True)[0]


def written_by_norm(x):
    """Write what two nodes made."""
    y = x.norm() * x
    y.mul_(x)
    return y, y * 2, grad((y * y).tanh().sum(), x, create_graph=True)[0]


def written_row(x):
    """Write a row of it."""
    y = x * 1
    y[0].mul_(x[1])
    return y, grad((y * x).sin().sum(), x, create_graph=True)[0]


def unconnected(x):
    """Divide by a gradient that is zeros, and requires grad as a leaf of the function's own."""
    y = x.sin()
    row = x[:1].expand(3, 3)
    y.t().mul_(row)
    zeros = grad(x.detach().requires_grad_().sum(), x, create_graph=True, allow_unused=True, materialize_grads=True)[0]
    return y, row, x / (zeros * zeros + 1)


def unconnected_twice(x):
    """Use that leaf for two results."""
    zeros = grad(x.detach().requires_grad_().sum(), x, create_graph=True, allow_unused=True, materialize_grads=True)[0]
    return x @ (zeros + 1), x / (zeros * zeros + 1)


@pytest.mark.parametrize("which", [slice(None), slice(1), slice(1, None)], ids=["all", "first", "others"])
@LEAVES
@pytest.mark.parametrize("make", [compiled, by_min_cut])
@pytest.mark.parametrize("function", [unconnected, unconnected_twice])
def test_zeros_that_require_grad(function, make, leaf, which):
    """A leaf of the function's own is behind several results."""

    def use(function):
        torch.manual_seed(0)
        given = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
        x = given if leaf else given * 1
        results = function(x)[which]
        found, scalar = [], sum(result.pow(3).sum() for result in results)
        for _ in range(3):
            gradients = grad(scalar, x, create_graph=True)
            found += gradients
            scalar = sum(each.pow(3).sum() for each in gradients)
        return found

    equal(use(function), use(make(function)))


@pytest.mark.parametrize("make", [compiled, by_min_cut])
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (written, "the compiled call cannot send it"),
        (written_by_norm, "the compiled call cannot send it"),
        (written_row, "the compiled call cannot send it"),
        (row_and_whole, "a view that was written"),
        (turned, "a view that was written"),
    ],
)
def test_what_a_write_kept_is_an_error(function, why, make):
    """A double backward through a value that was saved before a write raises.

    The value's history may belong to another result's graph, and a gradient could be wrong.
    """
    x = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(DoubleBackwardError, match=why):
        grad(sum(result.sum() for result in make(function)(x)), x, create_graph=True)


def used_before_and_after(x):
    """Use an argument, write it, and use it again."""
    before = x.sin()
    x.exp_()
    return x * before


def rows_used(x):
    """Write a row of it."""
    before = grad((x * x).tanh().sum(), x, create_graph=True)[0]
    x[0].mul_(2)
    return x.sin(), x * before


@pytest.mark.parametrize(
    ("function", "make"),
    [(used_before_and_after, behind_dynamo)]  # which does not take up torch.autograd.grad
    + [(function, make) for function in (used_before_and_after, rows_used) for make in (compiled, by_min_cut)],
)
def test_asked_for_some_gradients_alone(function, make):
    """A gradient with respect to the written argument alone does not need the value that was saved before the write.

    This raised an error before.
    """

    def use(function):
        torch.manual_seed(0)
        given = torch.rand(3, 3, dtype=torch.float64, requires_grad=True)
        x = given * 1
        results = function(x)
        results = results if isinstance(results, tuple) else (results,)
        found, scalar = [], sum(result.pow(3).sum() for result in results)
        for _ in range(3):
            (each,) = grad(scalar, x, create_graph=True)
            found.append(each)
            scalar = each.pow(3).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad(sum(result.sum() for result in results), given, create_graph=True)
        return found

    equal(use(function), use(make(function)))
