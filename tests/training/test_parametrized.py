"""Modules with parametrized weights, and the values that torch caches inside `parametrize.cached()`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.engine_helpers import behind, compiled


class Doubled(nn.Module):
    """Twice a weight."""

    def forward(self, weight):
        """Double it."""
        return weight * 2


def model():
    """Make one."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2))


def steps(use, module):
    """Train in regions: each with two calls, and a change of the weights between them."""
    losses = []
    for _ in range(3):
        with parametrize.cached():
            first = use(torch.ones(2, 3)).sum()
            kept = module[0].weight
            with torch.no_grad():
                module[0].parametrizations.weight.original.mul_(1.1)
            second = use(torch.ones(2, 3)).sum()
            assert module[0].weight is kept
            (first + second).backward()
        losses.append((first.item(), second.item()))
    return losses, [p.grad.tolist() for p in module.parameters()], len(parametrize._cache)


def test_in_a_region_with_a_cache():
    """Calls there run eagerly, so that the region has one weight, eager's, whatever becomes of what it is made from."""
    plain, ours = model(), model()
    candidate = compiled(ours)
    with pytest.warns(RuntimeWarning, match="parametrize.cached"):
        assert steps(candidate, ours) == steps(plain, plain)
    assert (behind(candidate).calls.eager, behind(candidate).calls.compiled) == (6, 0)


def test_outside_of_it():
    """Other calls are compiled, before and after."""
    plain, ours = model(), model()
    candidate = compiled(ours)
    x = torch.ones(2, 3)
    assert torch.equal(candidate(x), plain(x))
    with parametrize.cached(), pytest.warns(RuntimeWarning, match="runs eagerly"):
        assert torch.equal(candidate(x), plain(x))
    assert torch.equal(candidate(x), plain(x))
    assert (behind(candidate).calls.eager, behind(candidate).calls.compiled) == (1, 2)
    assert len(behind(candidate).entries) == 1
