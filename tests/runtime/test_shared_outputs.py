"""Outputs that share memory with each other or with inputs in ways that are hard to detect."""

import pytest
import torch

from tests.engine_helpers import compiled, leaf, nonleaf, same
from tests.functions import Viewed


def whole_and_views(x):
    """Return a tensor that was made under inference mode, and views of it that were made outside."""
    with torch.inference_mode():
        y = x * x
    return y, y.unsqueeze(0), y[1:]


def views_only(x):
    """Return views of a tensor that was made under inference mode, and another result."""
    with torch.inference_mode():
        y = x * x
        first, second = y.unbind(0)
    return first, y.t()[1:], second, x.sin()


@pytest.mark.parametrize("function", [whole_and_views, views_only])
@pytest.mark.parametrize("make", [lambda: leaf(2, 2), lambda: nonleaf(2, 2), lambda: leaf(2, 2).detach()])
def test_views_of_inference_tensors(function, make):
    """Views of inference tensors are inference tensors that share memory; such calls run eagerly."""
    x = make()
    same(function, x, eagerly=True)
    expected, found = function(x), compiled(function)(x)
    assert [t.is_inference() for t in expected] == [t.is_inference() for t in found]
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def written_through_all(x):
    """Return an intermediate that was overwritten as a whole through an alias, and two aliases of it."""
    y = torch.stack([x, x])
    y[:, 0:].relu_()
    return y, y.view(-1, 2), y.detach()


@pytest.mark.parametrize("backward", ["all", "each", None])
@pytest.mark.parametrize("make", [lambda: leaf(2, 2), lambda: nonleaf(2, 2), lambda: leaf(2, 2).detach()])
def test_intermediates_that_are_not_whole_results(make, backward):
    """The base of outputs may be an alias or a part of an op's result."""
    same(written_through_all, make(), backward=backward)


def test_the_gradient_of_an_unfolded_output_has_memory_for_each_element():
    """The gradient of an unfolded output has separate memory for each element, although the elements overlap."""
    assert same(lambda x: Viewed.apply(x.unfold(0, 2, 1)), leaf(3), eagerly=True)


def last_scores(x):
    """Take a part of a product of several matrices, write it, and return it."""
    scores = (x @ x.transpose(1, 2))[:, -1]
    scores.mul_(0.5)
    return scores


def both_of_a_linear_layer(x):
    """Return a linear layer's result, and a written row of it."""
    out = torch.nn.functional.linear(x, x[0])
    row = out[0]
    row.tanh_()
    return out, row


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("function", [last_scores, both_of_a_linear_layer])
def test_written_parts_of_products_of_several_matrices(function, requires_grad):
    """A batched matrix product is an unsafe view.

    After a write, tensors that share its memory have no base, and the call runs eagerly.
    """
    eagerly = requires_grad or function is both_of_a_linear_layer
    same(function, torch.rand(2, 3, 4, requires_grad=requires_grad), eagerly=eagerly)
