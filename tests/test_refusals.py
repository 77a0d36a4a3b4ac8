"""A call that is known to run eagerly costs little, and the user's changes that let it compile are still noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotlab
from aotlab.guards.refusals import Refusals, glance

pytestmark = pytest.mark.filterwarnings("ignore")


class Switched(nn.Module):
    """A module that runs eager-only code while it is ``slow``."""

    def __init__(self):
        super().__init__()
        self.slow = True

    def forward(self, x):
        """Return twice the argument."""
        if self.slow:
            x = x.clone().apply_(lambda value: value)
        return x * 2


def looks(compiled, calls):
    """Count how many of some calls looked at all that the function reaches."""
    count = 0
    target = compiled._target
    reached = target.reached

    def counted():
        nonlocal count
        count += 1
        return reached()

    target.reached = counted
    for _ in range(calls):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    del target.reached
    return count


def test_a_known_refusal_is_not_looked_at_each_time():
    """Two looks, then one after 4 calls, after 8, and so on."""
    compiled = aotlab.compile(Switched(), backend="eager").compiled
    assert looks(compiled, 2) == 2
    assert looks(compiled, 4) == 0
    assert looks(compiled, 1) == 1
    assert looks(compiled, 8) == 0
    assert looks(compiled, 1) == 1
    assert compiled.calls.eager == 16


def test_what_is_changed_is_seen():
    """After one refusal at the next call; later, after a few."""
    module = Switched()
    compiled = aotlab.compile(module, backend="eager").compiled
    compiled(torch.ones(2))
    module.slow = False
    compiled(torch.ones(2))
    assert compiled.calls.compiled == 1
    module.slow = True
    for _ in range(4):
        compiled(torch.ones(2))
    module.slow = False
    for _ in range(8):
        compiled(torch.ones(2))
    assert compiled.calls.compiled > 1


def test_other_calls_are_looked_at():
    """Another shape, grad mode, training flag or keyword is another kind of call."""
    refusals, module = Refusals(), Switched()
    for _ in range(2):
        refusals.refused(glance(module, (torch.ones(2), 1), {"a": [None]}), by_dynamo=False)

    def is_known(*args, **kwargs):
        return refusals.known(glance(module, args, kwargs))

    assert is_known(torch.zeros(2), 1, a=[None])
    assert not is_known(torch.zeros(3), 1, a=[None])
    assert not is_known(torch.zeros(2), True, a=[None])
    assert not is_known(torch.zeros(2), 1, a=None)
    assert not is_known(torch.zeros(2), 1, b=[None])
    with torch.no_grad():
        assert not is_known(torch.zeros(2), 1, a=[None])
    module.eval()
    assert not is_known(torch.zeros(2), 1, a=[None])
    module.train()
    assert is_known(torch.zeros(2), 1, a=[None])


def test_kinds_are_bounded():
    """A function that is refused for ever new shapes does not remember all."""
    refusals = Refusals()
    for size in range(200):
        refusals.refused(glance(None, (torch.ones(size),), {}), by_dynamo=True)
    assert len(refusals._kinds) <= 64
