"""The differences from eager that README documents. If one disappears, its test fails and README can be corrected."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from tests.engine_helpers import compiled


def in_one_region(call, between):
    """Call twice under one autocast."""
    torch.manual_seed(0)
    w, a, b = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = call(a, w)
        with torch.no_grad():
            between(w)
        second = call(b, w)
        loss = (first.float().square() + second.float().square()).sum()
    return second.detach(), grad(loss, w)[0]


def multiply(x, w):
    """Cast both."""
    return x @ w


def twice(x, w):
    """Use the cast at two places."""
    return (x @ w).sin() @ w


def several(x, w):
    """Also use the leaf itself in several ways."""
    return x @ w + (w.sum() + w.mean()) * 0


def test_the_cache_of_autocast():
    """Several uses in a call are summed first; a leaf that is used otherwise, too, is cast by each call."""
    ours = compiled(twice)
    theirs, mine = in_one_region(twice, lambda w: None), in_one_region(ours, lambda w: None)
    assert torch.equal(theirs[0], mine[0])
    assert not torch.equal(theirs[1], mine[1])
    torch.testing.assert_close(theirs[1], mine[1], rtol=0.01, atol=0.05)
    ours = compiled(several)
    stale, fresh = in_one_region(several, lambda w: w.mul_(2)), in_one_region(ours, lambda w: w.mul_(2))
    assert torch.equal(stale[0] * 2, fresh[0])


def test_a_checkpoint_computes_again_inside_of_the_region():
    """In an autocast region, eager's checkpoint recomputes from the cached cast.

    Ours recomputes from the leaf's current value.
    """

    def region(call):
        torch.manual_seed(0)
        w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(x, w).sum()
            w.data.mul_(2)
            loss.backward()
        return loss.detach(), x.grad

    def sine(x, w):
        return checkpoint(lambda a, b: (a @ b).sin(), x, w, use_reentrant=False)

    (loss, theirs), (ours, mine) = region(sine), region(compiled(sine))
    assert torch.equal(loss, ours)
    assert not torch.equal(theirs, mine)


def test_attention_without_gradients():
    """Without gradients, eager's fused attention kernel returns other strides; values are close."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(4, 7, 16)
    with torch.no_grad():
        theirs, mine = attention(x, x, x)[0], compiled(attention)(x, x, x)[0]
    torch.testing.assert_close(theirs, mine)
    assert theirs.stride() != mine.stride()


@pytest.mark.skipif(torch.__version__ >= torch.torch_version.TorchVersion("2.15"), reason="2.15 has another formula")
def test_third_derivatives_of_a_determinant():
    """Third derivatives of a determinant are nan for some matrices."""

    def third(function):
        torch.manual_seed(0)
        x = torch.randn(3, requires_grad=True)
        value = function(x)
        for _ in range(3):
            (gradient,) = grad(value, x, create_graph=True)
            value = gradient.square().sum()
        return gradient.detach()

    def determinant(x):
        return torch.linalg.det(x.view(3, 1) @ x.view(1, 3) + torch.eye(3))

    assert third(determinant).isfinite().all()
    assert not third(compiled(determinant)).isfinite().all()


@pytest.mark.parametrize("function", [lambda x: x.cumprod(0), lambda x: x.prod()])
def test_gradients_of_gradients_with_respect_to_a_product_itself(function):
    """Eager's formula for the gradient of `prod` uses its result if no element is zero, and ours uses only x.

    A second derivative with respect to the result therefore differs; the derivative with respect to x agrees.
    """

    def use(function):
        x = torch.arange(1.0, 4.0, dtype=torch.float64, requires_grad=True)
        y = function(x)
        (first,) = grad(y.sum(), x, create_graph=True)
        return grad(first.square().sum(), [x, y], allow_unused=True)

    (theirs, of_result), (mine, not_of_it) = use(function), use(compiled(function))
    torch.testing.assert_close(theirs, mine)
    assert of_result is not None
    assert not_of_it is None
