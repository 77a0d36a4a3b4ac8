"""Outputs that are views of values that the function computed."""

from __future__ import annotations

import pytest
import torch

from aotlab.ir.metadata import OutputType
from tests.engine_helpers import compiled, leaf, metadata, same, traced


def test_several_views_of_one_intermediate():
    """Views of one intermediate share one storage, and gradients of all add up."""

    def f(x):
        y = x * 2
        return y.t(), y[0], y.view(-1)[1:]

    same(f, leaf(2, 3))
    same(f, torch.randn(2, 3))
    types = [o.output_type for o in metadata(traced(f, leaf(2, 3))).output_info]
    assert types == [
        OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT,
        OutputType.ALIAS_OF_INTERMEDIATE,
        OutputType.ALIAS_OF_INTERMEDIATE,
    ]
    assert len(metadata(traced(f, leaf(2, 3))).intermediate_bases) == 1


def test_base_is_also_returned():
    """Where the intermediate itself is returned, the others are its views and no base is added."""

    def f(x):
        y = x.sin()
        return y[1:], y, y.t()

    same(f, leaf(2, 3))
    same(f, torch.randn(2, 3))
    meta = metadata(traced(f, leaf(2, 3)))
    assert [o.output_type for o in meta.output_info] == [
        OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
        OutputType.NON_ALIAS,
        OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
    ]
    assert meta.intermediate_bases == ()
    assert [o.base_idx for o in meta.output_info] == [1, None, 1]


@pytest.mark.parametrize("split", [lambda y: y.unbind(0), lambda y: y.split(1), lambda y: y.chunk(2, dim=1)])
def test_multi_output_views_of_intermediates(split):
    """unbind, split and chunk of an intermediate share its storage as in eager."""
    same(lambda x: split(x * 2), leaf(2, 4))
    same(lambda x: split(x * 2), torch.randn(2, 4))
    same(lambda x: (split(x * 2)[0], x), leaf(2, 4))


def test_a_single_view_of_an_intermediate():
    """A lone window keeps its offset and the size of its storage."""
    same(lambda x: (x * 2)[1:], leaf(4))
    same(lambda x: (x * 2)[1:], torch.randn(4))
    same(lambda x: (x * 2).t(), leaf(2, 3))
    same(lambda x: (x * 2).expand(3, 4), leaf(4))


def test_detached_alias_of_an_intermediate():
    """A detached view and the intermediate it came from share memory; only one has a gradient."""

    def f(x):
        y = x * 2
        return y, y.detach(), y.detach()[1:]

    same(f, leaf(4))
    same(lambda x: (x * 2).detach(), leaf(4))
    same(lambda x: ((x * 2).detach(), x * 3), leaf(4))


def test_intermediate_mutated_through_a_view():
    """An intermediate that is written through its view before it is returned has the final values."""

    def f(x):
        y = x.clone()
        y[0].mul_(2)
        y.add_(1)
        view = y.t()
        view[1].add_(1)
        return y, view

    same(f, leaf(2, 3))
    same(f, torch.randn(2, 3))


def test_two_intermediates_stay_apart():
    """Outputs of different storages do not come to share one."""

    def f(x):
        y, z = x * 2, x * 3
        return y[0], z[0], y[1], z[1]

    same(f, leaf(2, 3))
    meta = metadata(traced(f, leaf(2, 3)))
    assert [o.base_idx for o in meta.output_info] == [0, 1, 0, 1]
    assert sum(o.aliases_intermediate for o in meta.output_info) == 4


def test_same_output_twice():
    """The same object in two places of the result is one object again."""

    def f(x):
        y = x * 2
        view = y[0]
        return y, y, {"again": y, "view": view, "view again": view}

    same(f, leaf(2, 3))
    same(lambda x: (x * 2,) * 2, torch.randn(3))


def test_dtype_views_of_intermediates():
    """An intermediate beside its bytes as another dtype."""
    same(lambda x: (x * 2).view(torch.int32), torch.randn(4))

    def f(x):
        y = x * 2
        return y, y.view(torch.int32)

    same(f, torch.randn(4))


def test_unsafe_views():
    """Reshape after a matrix product (``_unsafe_view``) is no alias."""
    same(lambda x, w: x @ w, leaf(2, 3, 4), leaf(4, 5))
    meta = metadata(traced(lambda x, w: x @ w, leaf(2, 3, 4), leaf(4, 5)))
    assert meta.output_info[0].output_type is OutputType.UNSAFE_VIEW_ALIAS


def test_views_made_before_and_returned_after_detach():
    """Aliases of an intermediate with and without history, offsets included."""

    def f(x):
        y = (x * 2).view(-1)
        return y[2:], y.detach()[1:], y[:1].detach()

    same(f, leaf(2, 3))


def test_constants_made_inside():
    """Tensors that do not depend on the arguments are new at every call."""

    def f(x):
        return x + torch.ones(3), torch.zeros(2), torch.arange(4), torch.tensor([1.0, 2.0]), torch.tensor(3)

    same(f, leaf(3))
    made = compiled(f)
    one, two = made(leaf(3)), made(leaf(3))
    one[1].add_(1)
    one[3].add_(1)
    assert torch.equal(two[1], torch.zeros(2))
    assert torch.equal(made(leaf(3))[3], torch.tensor([1.0, 2.0]))
