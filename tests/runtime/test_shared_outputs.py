"""Outputs that share memory with each other or with inputs, in ways that take more than one look to tell."""

import pytest
import torch

from tests.engine_helpers import compiled, leaf, nonleaf, same
from tests.functions import Viewed


def whole_and_views(x):
    """Return what was made under inference mode, and views of it from outside."""
    with torch.inference_mode():
        y = x * x
    return y, y.unsqueeze(0), y[1:]


def views_only(x):
    """Return views of what was made under inference mode, and something else."""
    with torch.inference_mode():
        y = x * x
        first, second = y.unbind(0)
    return first, y.t()[1:], second, x.sin()


@pytest.mark.parametrize("function", [whole_and_views, views_only])
@pytest.mark.parametrize("make", [lambda: leaf(2, 2), lambda: nonleaf(2, 2), lambda: leaf(2, 2).detach()])
def test_views_of_inference_tensors(function, make):
    """They are inference tensors over one memory: eager makes them."""
    x = make()
    same(function, x, eagerly=True)
    expected, found = function(x), compiled(function)(x)
    assert [t.is_inference() for t in expected] == [t.is_inference() for t in found]
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def written_through_all(x):
    """Return an intermediate whose new value is an alias of what was written over all of it."""
    y = torch.stack([x, x])
    y[:, 0:].relu_()
    return y, y.view(-1, 2), y.detach()


@pytest.mark.parametrize("backward", ["all", "each", None])
@pytest.mark.parametrize("make", [lambda: leaf(2, 2), lambda: nonleaf(2, 2), lambda: leaf(2, 2).detach()])
def test_intermediates_that_are_not_whole_results(make, backward):
    """What the outputs are views of need not be what an op made: an alias of it or a part will do."""
    same(written_through_all, make(), backward=backward)


def test_the_gradient_of_an_unfolded_output_has_memory_for_each_element():
    """Two elements of it lie at one place, and have two gradients."""
    assert same(lambda x: Viewed.apply(x.unfold(0, 2, 1)), leaf(3), eagerly=True)


def last_scores(x):
    """Take a part of a product of several matrices, write it, and return it."""
    scores = (x @ x.transpose(1, 2))[:, -1]
    scores.mul_(0.5)
    return scores


def both_of_a_linear_layer(x):
    """Return what a linear layer makes of matrices, and a written row of it."""
    out = torch.nn.functional.linear(x, x[0])
    row = out[0]
    row.tanh_()
    return out, row


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("function", [last_scores, both_of_a_linear_layer])
def test_written_parts_of_products_of_several_matrices(function, requires_grad):
    """Such a product is an unsafe view; what shares memory with it after a write has no base, and runs eagerly."""
    eagerly = requires_grad or function is both_of_a_linear_layer
    same(function, torch.rand(2, 3, 4, requires_grad=requires_grad), eagerly=eagerly)
