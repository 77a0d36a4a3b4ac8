"""Views that were made before a write to their base: most of these programs run eagerly."""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import compiled, leaf, nonleaf, same


def used(x, c):
    """Use a view of an intermediate after a write: eager makes its history again by sizes and strides."""
    y = x * 2
    v = y.view(-1)
    y.add_(c)
    return v.sum()


def returned(x, c):
    """Return one."""
    y = x * 2
    v = y.view(-1)
    y.add_(c)
    return v


def of_the_input(x, c):
    """View the input."""
    v = x.t()
    x.add_(c)
    return v.sum()


def before_the_history(x, c):
    """Make a view before its base has an autograd history."""
    y = x.detach() * 2
    v = y.view(-1)
    y.add_(c)
    return v.sum()


def unseen(x, c):
    """Write where autograd does not see it."""
    y = x + c
    v = y.view(-1)
    with torch.no_grad():
        y.add_(c)
    return v.sum()


def of_several(x, c):
    """Write several tensors at once."""
    y, z = x + c, x * c
    v, w = y.view(-1), z.t()
    torch._foreach_add_([y, z], [c, c])
    return v.sum(), w.sum()


def moved(x, c):
    """Return a view of an input from before its sizes changed."""
    v = x[0]
    x.t_()
    return v, x * c


def one_of_several(x, c):
    """Return one of several views of an input, from before a write."""
    v, _ = x.unbind(0)
    x.add_(c)
    return v


def written_itself(x, c):
    """Return a part of an input that the function wrote."""
    v = x[0]
    v.mul_(c[0])
    return v, v * 2


def of_an_input(x, c):
    """Return a view of an input from before a write, and one from after it."""
    v = x[0]
    x.add_(c)
    return v, x[1]


@pytest.mark.parametrize(
    "program",
    [
        used,
        returned,
        of_the_input,
        before_the_history,
        unseen,
        of_several,
        moved,
        one_of_several,
    ],
)
def test_runs_eagerly(program):
    """Its history is made again in an order that a trace does not know."""
    same(program, nonleaf(2, 2), leaf(2, 2), eagerly=True)


@pytest.mark.parametrize("program", [written_itself, of_an_input])
def test_is_compiled(program):
    """The history of a view of the written input is made again from the base, as in eager."""
    same(program, nonleaf(2, 2), leaf(2, 2))


def window(x, c):
    """Write a view, beside another."""
    y = x + c
    v, w = y.view(-1), y[0]
    w.add_(c[0])
    return v.sum(), v, v[1:]


def filled(x, c):
    """Write an intermediate by its parts, which are there before the first write."""
    y = x * c
    v, w = y[0], y[1]
    v.mul_(c[0])
    w.mul_(c[1])
    return y, w


def without_a_use(x, c):
    """Write a base after the last use of its view."""
    y = x * 2
    v = y.view(-1)
    out = v.square().sum()
    with torch.no_grad():
        y.detach().clone().add_(1)
    return out, v.shape


@pytest.mark.parametrize("program", [window, filled, written_itself, without_a_use, of_an_input])
def test_stays_compiled(program):
    """The epilogue makes such views of inputs before its write; of intermediates a write to a part tells all."""
    of_input = program in (written_itself, of_an_input)
    if not of_input:
        same(program, nonleaf(2, 2), leaf(2, 2))
    same(program, torch.ones(2, 2), leaf(2, 2), eagerly=of_input)
    same(program, torch.ones(2, 2), torch.ones(2, 2))


class Doubled(torch.autograd.Function):
    """Doubles a tensor."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def to_a_function(x, c):
    """Pass a view from before a write to a custom Function."""
    v = x.view(-1)
    with torch.no_grad():
        x.mul_(3)
    return Doubled.apply(v)


def test_a_custom_function_makes_the_history_again():
    """While `apply` makes the history of its argument again, autograd holds a lock, and nothing may read the history.

    `fuzz --related --seed 77` found that the trace waited for the lock forever.
    """
    same(to_a_function, nonleaf(4), leaf(4))
    same(to_a_function, nonleaf(2, 2).t(), leaf(2, 2), eagerly=True)


def test_under_no_grad_nobody_asks_for_a_history():
    """There a view may be used after a write, as when a parameter is updated."""

    def program(x):
        with torch.no_grad():
            v = x.view(-1)
            v.mul_(2)
            x.add_(1)
            v.add_(v.mean())
        return x * 2

    same(program, leaf(2, 2))


def test_gradients_are_laid_out_as_in_eager():
    """A gradient for a view from before a write to a part is copied into eager's strides, and no alias of it."""

    def found(function):
        x, c, sent = leaf(2, 2), leaf(2, 2, seed=1), torch.ones(()).expand(4)
        got = torch.autograd.grad(function(x * 1, c)[1], (x, c), sent)
        return [(g.stride(), g.tolist(), g.untyped_storage() is sent.untyped_storage()) for g in got]

    assert found(compiled(window)) == found(window)


def test_a_view_that_a_write_makes_invalid():
    """Autograd refuses to read the history of such a view, in eager too. The notice names the view and its base."""

    def program(w):
        with torch.no_grad():
            v = w[0]
            v.mul_(2)
            w[1] = 0
        return (w * 3).sum(), v

    function, w = compiled(program), leaf(2, 3)
    with pytest.warns(RuntimeWarning, match=r"`out\[1\]` is a view of `w` that was made before a write"):
        total, view = function(w)
    assert view.data_ptr() == w.data_ptr()
    assert torch.equal(total, (w * 3).sum())
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        view.is_leaf  # noqa: B018
