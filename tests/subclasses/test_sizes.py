"""Wrappers with dynamic sizes: one entry for all sizes, which are the sizes of the parts."""

from __future__ import annotations

import pytest
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from tests.subclasses.kinds import Quantized, beside_eager, leaf, plain, two

SHAPES = [(3, 4), (5, 6), (7, 8)]
PROGRAMS = {
    "alone": (lambda t: (t * 2).sin(), lambda s: (two(0, s),)),
    "with gradients": (lambda t: (t * 2).sin(), lambda s: (leaf(two(0, s)),)),
    "a gradient of a tensor": (lambda t, x: (t * x).sin() + 1, lambda s: (leaf(two(0, s)), leaf(plain(5, s)))),
    "nested": (lambda t: (t * 2).sin(), lambda s: (leaf(TwoTensor(two(0, s), two(1, s))),)),
    "made inside": (lambda a, b: TwoTensor(a * 2, b), lambda s: (plain(0, s), plain(1, s))),
    "quantized": (
        lambda x, w: functional.linear(x, w).relu(),
        lambda s: (leaf(plain(0, s)), leaf(Quantized.of(plain(1, (5, s[1]))))),
    ),
    "written": (lambda t: (t.add_(1), t * 2)[1], lambda s: (two(0, s),)),
    "written, with a history": (lambda t: (t.add_(1), t.shape[0])[1], lambda s: (leaf(two(0, s)) * 1,)),
    "a view": (lambda t: (t.t(), t[1:]), lambda s: (leaf(two(0, s)),)),
    "a size": (lambda t: (t * t.shape[0], t.sum(0).view(-1, 2)), lambda s: (leaf(two(0, s)),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_at_once(name):
    """With dynamic sizes the first entry serves all sizes."""
    compiled = beside_eager(*PROGRAMS[name], steps=SHAPES, dynamic=True)
    assert "size(0)" in str(compiled.entries[0].state.rules)


@pytest.mark.parametrize("name", PROGRAMS)
def test_once_they_were_others(name):
    """Without ``dynamic=True`` the second entry serves all sizes."""
    beside_eager(*PROGRAMS[name], steps=SHAPES, entries=2)


def test_a_view_by_sizes():
    """A view by sizes is specialized to the sizes of each call: one entry each."""
    beside_eager(lambda t: t.view(t.shape[1], -1), lambda s: (two(0, s),), steps=SHAPES, entries=3, dynamic=True)
