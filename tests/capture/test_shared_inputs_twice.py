"""Second derivatives of functions whose outputs have nothing in common but inputs, which several ops use."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import grad

from tests.engine_helpers import behind_dynamo, compiled

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


def square_beside(x, w):
    """Use one input twice in the second output, of another shape than the other input."""
    return x * w, w * w


def cube_beside(x, w):
    """Use it three times."""
    return (x * w).sum(1), w * w * w


def scaled_beside(x, w):
    """Use it in two ways."""
    return x * w, (w * w).sum() * w


def gradient_beside(x, w):
    """Return autograd's gradient of the first output, beside the output."""
    first = x.sin() * x
    return first * w, grad(first, x, w.cos().expand_as(x), create_graph=True)[0]


def written_between(x, w):
    """Write one of the outputs."""
    return (x * w).mul_(w), w.exp() * w.sin() * w


def of_second_order(function):
    """Compute gradients of gradients."""
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    given = [x, w]
    first = grad(sum((out * out.cos()).sum() for out in function(x, w)), given, create_graph=True)
    return [*first, *grad(sum(each.square().sum() for each in first), given)]


@pytest.mark.parametrize("make", [compiled, behind_dynamo])
@pytest.mark.parametrize("function", [square_beside, cube_beside, scaled_beside, gradient_beside, written_between])
def test_gradients_of_gradients(function, make):
    """Each way to the shared input has its part in the second derivative; their sum may be rounded otherwise."""
    torch.manual_seed(0)
    expected = of_second_order(function)
    torch.manual_seed(0)
    found = of_second_order(make(function))
    assert all(torch.equal(a, b) for a, b in zip(expected[:2], found[:2], strict=True))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
