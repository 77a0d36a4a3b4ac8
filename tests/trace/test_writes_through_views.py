"""Writes through views and windows, inside the function and by its caller: compiled as eager writes, or run eagerly."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.engine_helpers import compiled, leaf, nonleaf, same


def test_a_lone_view_may_be_written_by_the_caller():
    """An output that is a view of an intermediate can be changed in place, as in eager."""
    x = leaf(2, 3)
    out = compiled(lambda x: x.sin().reshape(-1))(x)
    out += 1
    out.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_an_output_that_was_written_through_a_view_is_no_view():
    """An output that the graph makes as a view of another output can be written in place by the caller, as in eager."""

    def f(w):
        x = torch.ones(3)
        y = x.view(3)
        y.add_(1)
        return x, y, (w * y).sum()

    w = leaf(3)
    for function in (f, compiled(f)):
        x, y, _ = function(w)
        assert y._base is x
        assert not x._is_view()
        x.mul_(w)
        assert y.grad_fn is not None


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.unsafe_split(2)[0],
        lambda x: torch.unsafe_split(x, 2)[1],
        lambda x: x.unsafe_chunk(2)[0],
        lambda x: torch.unsafe_split_with_sizes(x, [1, 3])[1],
        lambda x: torch.ops.aten.unsafe_split.Tensor(x, 2)[0],
        lambda x: torch.ops.aten._unsafe_view(x, [2, 2]),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_views_that_are_called_copies(view, grad):
    """`unsafe_split` and similar ops share memory, although their schema denies it; a write through them was lost."""

    def f(x):
        y = view(x)
        y.mul_(2)
        return y, x

    same(f, leaf(4) * 1 if grad else torch.arange(4.0), eagerly=True)


def test_an_lstm_is_still_compiled():
    """Torch's LSTM calls `unsafe_split` below Python and does not write to the parts, so it is compiled."""
    cell = nn.LSTM(2, 3)
    g = compiled(cell)
    g(torch.ones(4, 1, 2))[0].sum().backward()
    assert g.compiled.calls.compiled == 1


@pytest.mark.parametrize("own", [False, True], ids=["input", "intermediate"])
def test_a_write_beyond_the_view_in_between(own):
    """A window may extend beyond the view from which it was made; a write to it reaches its whole memory."""

    def f(a):
        a = a * 2 if own else a
        a[:, 0].as_strided((2,), (1,)).neg_()
        return a * 1

    def quiet(a):
        a = a * 2 if own else a
        return a[:, 0].as_strided((2,), (1,)) * 3

    same(f, torch.arange(4.0).view(2, 2), eagerly=True)
    same(quiet, torch.arange(4.0).view(2, 2))


ALIASES = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_a_write_through_an_alias_keeps_strides(alias):
    """A write through an alias without a base keeps the tensor's strides; such calls run eagerly."""

    def f(a):
        made = torch.cat([a, a], 0)
        alias(made.permute(1, 0).unfold(0, 1, 1)).mul_(2)
        return made, made.as_strided((2,), (1,))

    same(f, torch.arange(4.0).view(2, 2), eagerly=True)


def test_one_of_several_views_between_a_write_and_a_detachment():
    """The epilogue makes views before or after all changes. A view that is made between two changes runs eagerly."""

    def several(a):
        a.detach().mul_(3)
        view = a.split(1)[0]
        a.detach_()
        return view

    def one(a):
        a.detach().mul_(3)
        view = a[0]
        a.detach_()
        return view

    same(several, leaf(2, 2), eagerly=True, backward=None)
    same(one, leaf(2, 2), eagerly=True, backward=None)


def _window_of_an_intermediate(a):
    v = a * 1.5
    window = v.diagonal().as_strided((2,), (1,))
    v.neg_()
    return window * 2


def _window_of_an_input(a):
    window = a.diagonal().as_strided((2,), (1,))
    a.neg_()
    return window * 2


def _window_in_place(a):
    part = a[..., ::2].view(-1)
    part.as_strided_((2,), (1,))
    return part


def _window_of_all(a):
    v = a * 1.5
    window = v.t().as_strided((3,), (1,))
    v.neg_()
    return window * 2


@pytest.mark.parametrize(
    "program",
    [_window_of_an_intermediate, _window_of_an_input, _window_in_place, _window_of_all],
    ids=lambda f: f.__name__,
)
def test_windows_of_non_dense_tensors(program):
    """Windows of non-dense tensors run eagerly if the base is written.

    The write regenerates their history by another path than the program's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(program, nonleaf(2, 2), eagerly=True, messages=False)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "view", [lambda x: x.unfold(0, 2, 1), lambda x: x.as_strided((2, 2), (1, 1)), lambda x: x.as_strided((3,), (0,))]
)
def test_a_write_to_an_argument_whose_elements_share_memory(view, grad):
    """In eager, `mul_` may write an element several times; the epilogue would write it once."""

    def f(a):
        with torch.no_grad():
            a.mul_(2)

    values = []
    for function in (f, compiled(f)):
        base = leaf(4, seed=1).detach().requires_grad_(grad)
        a = view(base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = None
            try:
                function(a)
            except RuntimeError as raised:
                error = str(raised)
        values.append((base.tolist(), error))
    assert values[0] == values[1]
