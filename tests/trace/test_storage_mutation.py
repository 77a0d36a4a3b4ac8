"""Inputs and intermediates that are given other memory: ``out=``, ``resize_``, ``set_``, storages, ``.data =``."""

from __future__ import annotations

import warnings

import pytest
import torch

from aotlab.errors import EscapeError
from tests.engine_helpers import compiled, leaf, nonleaf, refusing, same
from tests.trace.test_metadata_mutation import behind_dynamo

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")

# --- out=


def test_out_that_fits():
    """A plain write."""

    def f(a, x):
        torch.mul(a, 2, out=x)
        return x + 1

    same(f, torch.randn(2, 3), torch.empty(2, 3))
    behind_dynamo(f, torch.randn(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize(
    "x", [torch.zeros(3, 2).t(), torch.zeros(4, 6)[::2, ::2], torch.zeros(6)[None, :3].expand(2, 3).clone()]
)
def test_out_that_is_not_contiguous(x):
    """An `out` that is not contiguous keeps its strides and the bytes between its elements; the call runs eagerly."""

    def f(a, x):
        torch.mul(a, 2, out=x)
        return x.t()

    same(f, torch.randn(2, 3), x)
    behind_dynamo(f, torch.randn(2, 3), x)


@pytest.mark.parametrize("x", [torch.zeros(0), torch.zeros(7), torch.zeros(1, 1), torch.zeros(9).resize_(0)])
def test_out_that_is_resized(x):
    """Eager gives it the result's shape, and new memory where it is too small."""

    def f(a, x):
        torch.mul(a, 2, out=x)
        return x + 1, x

    same(f, torch.randn(2, 3), x, eagerly=True)


def test_out_that_is_a_view_of_an_input():
    """Fitting it is a write to the input; resized it is left to eager."""

    def f(a, x):
        torch.mul(a, 2, out=x[1:3])
        return x + 1

    same(f, torch.randn(2), torch.zeros(4))
    same(f, torch.randn(3), torch.zeros(4), eagerly=True)


def test_out_that_is_an_intermediate():
    """Made inside, where it fits."""

    def f(a):
        x = torch.empty(2, 3)
        torch.mul(a, 2, out=x)
        return x

    def g(a):
        x = torch.empty(0)
        torch.mul(a, 2, out=x)
        return x, x[0]

    same(f, torch.randn(2, 3))
    same(g, torch.randn(2, 3), eagerly=True)
    behind_dynamo(f, torch.randn(2, 3))


def test_out_with_gradients_is_eagers_error():
    """``out=`` does not differentiate."""

    def f(a, x):
        torch.mul(a, 2, out=x)
        return x

    same(f, leaf(2), torch.zeros(2), eagerly=True)


# --- resize_


def test_resizing_what_requires_grad_is_eagers_error():
    """Torch refuses that itself."""

    def f(x):
        x.resize_(2)
        return x

    same(f, leaf(3), eagerly=True)
    same(f, nonleaf(3), eagerly=True)


# --- set_, storages, .data =, swap_tensors


def fsdp(x):
    """Free an input's memory and take it again, as fully sharded training does."""
    storage = x.untyped_storage()
    storage.resize_(0)
    storage.resize_(12)
    return x.fill_(1) * 2


def swapped(x):
    """Exchange an input for another tensor."""
    torch.utils.swap_tensors(x, torch.ones(3))
    return x * 2


@pytest.mark.parametrize("function", [fsdp, swapped])
def test_other_ways_are_refused_before_anything_happened(function):
    """Each is refused with its line."""

    def f(y, x):
        y.add_(1)
        return function(x)

    y, x = torch.zeros(2), torch.arange(3.0)
    with refusing(EscapeError) as caught:
        compiled(f)(y, x)
    assert caught.value.line is not None
    assert (y._version, x._version, x.tolist()) == (0, 0, [0.0, 1.0, 2.0])


@pytest.mark.parametrize("function", [fsdp])
def test_other_ways_behind_dynamo_run_eagerly(function):
    """Or Dynamo breaks the graph there; the values are right in any case."""
    torch._dynamo.reset()
    x, expected = torch.arange(3.0), torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.compile(function, backend=_backend)(x)
    assert torch.equal(function(expected), out)
    assert torch.equal(expected, x)


def _backend(graph, inputs):
    from aotlab.frontends.dynamo_frontend import backend

    return backend(graph, inputs, options={"compiler": "eager"})


def test_resize_to_the_same_size_does_nothing():
    """Not even to the strides, of an input, a part of one or an intermediate."""
    same(lambda x: x.t().resize_(3, 2), torch.randn(2, 3), eagerly=True)
    same(lambda x: x.resize_(2, 3), torch.randn(3, 2).t(), eagerly=True)
    same(lambda x: (x * 2).resize_(2, 3), torch.randn(3, 2).t(), eagerly=True)
