"""What no used output reaches gets no gradient: None, and not zeros."""

from __future__ import annotations

import pytest
import torch

from aotlab.verification.mutants import MUTANTS
from tests.engine_helpers import leaf, same


class Two(torch.autograd.Function):
    """One autograd node with two outputs, of which the first reaches one input only."""

    @staticmethod
    def forward(ctx, x, y):
        """Compute both."""
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x * 2, x * y

    @staticmethod
    def backward(ctx, first, second):
        """Give to each input what its output got."""
        (x,) = ctx.saved_tensors
        return None if first is None else first * 2, None if second is None else second * x


def apart(x, y):
    """Return outputs with an autograd node each, and one behind both."""
    shared = x.sin()
    return shared * 2, shared * y


@pytest.mark.parametrize("function", [Two.apply, apart], ids=["one node", "several"])
@pytest.mark.parametrize("backward", ["first", "all"])
def test_none_and_not_zeros(function, backward):
    """Whether one node has both outputs or each has its own."""
    same(lambda x, y: function(x, y), leaf(3), leaf(3, seed=1), backward=backward)


def test_zeros_would_be_seen():
    """The test above is red if an output that was not used counts as used with a gradient of zeros."""
    mutant = next(each for each in MUTANTS if each.name == "undefined tangents as zeros")
    with mutant.installed(), pytest.raises(AssertionError, match=r"`y`\.grad is"):
        same(lambda x, y: Two.apply(x, y), leaf(3), leaf(3, seed=1), backward="first")
