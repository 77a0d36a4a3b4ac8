"""Attention that a model writes itself, on Inductor, which replaces it by a library's kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab.backends.inductor_backend import _adapted


def heads(value: Tensor) -> Tensor:
    """Divide the last dimension into four heads."""
    return value.view(2, 32, 4, 16).transpose(1, 2)


def attention(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Make queries, keys and values by one product. So they share memory, and the saved values are views of it."""
    q, k, v = [heads(each) for each in (x @ w).split(64, 2)]
    return (torch.softmax((q @ k.transpose(-2, -1)) / 8.0, -1) @ v,)


def attention_and_queries(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Return the queries too, which are saved as well."""
    q, k, v = [heads(each) for each in (x @ w).split(64, 2)]
    return torch.softmax((q @ k.transpose(-2, -1)) / 8.0, -1) @ v, q


def arguments() -> tuple[Tensor, Tensor]:
    """Make a batch and a weight."""
    return torch.randn(2, 32, 64) / 8, torch.randn(64, 192, requires_grad=True)


@pytest.mark.parametrize("function", [attention, attention_and_queries])
def test_as_eager(function: Callable[..., tuple[Tensor, ...]]) -> None:
    """Results have eager's strides, and the backward gets the saved views with the strides that it was compiled for."""
    x, w = arguments()
    expected = function(x, w)
    (wanted,) = torch.autograd.grad(sum(each.square().sum() for each in expected), w)
    results = aotlab.compile(function, backend="inductor")(x, w)
    (gradient,) = torch.autograd.grad(sum(each.square().sum() for each in results), w)
    for result, each in zip((*results, gradient), (*expected, wanted), strict=True):
        assert result.stride() == each.stride()
        torch.testing.assert_close(result, each, rtol=1e-4, atol=1e-4)


def test_results_that_share_memory() -> None:
    """A result in the memory of a visible result is copied with its strides. Saved values may share memory."""
    base = torch.arange(24.0).view(2, 3, 4)
    results = [base[0], base[:, 1], torch.ones(6).view(2, 3)[0], torch.ones(2)]
    results.append(results[2])
    call = _adapted(lambda _: tuple(results), (), [0, 1, 2, 3, 4], visible=1)
    for _ in range(2):
        found = call([])
        assert [new is old for new, old in zip(found, results, strict=True)] == [True, False, True, True, True]
        assert found[1].stride() == results[1].stride() == (12, 1)
        assert found[1].equal(results[1])
        assert found[1].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
