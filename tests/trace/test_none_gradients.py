"""Inputs that no used output depends on get the gradient None, not zeros."""

from __future__ import annotations

import warnings
from typing import ClassVar

import pytest
import torch

from tests.engine_helpers import behind, compiled, leaf, same


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


class Logs(torch.autograd.Function):
    """Notes each run of its backward."""

    log: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, value):
        """Double."""
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        """Note it."""
        Logs.log.append("backward")
        return gradient * 2


def _of_an_own_leaf(x):
    return x * Logs.apply(torch.ones(3, requires_grad=True))


def _of_a_quiet_view(x):
    own = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        view = own.view(3)
    return x * 2, Logs.apply(view * 1).sum()


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("program", [_of_an_own_leaf, _of_a_quiet_view])
def test_a_custom_function_out_of_sight_runs_as_often_as_in_eager(program, frontend):
    """Its backward may do anything, also where its gradient is for nobody."""

    def use(call):
        x = leaf(3)
        outputs = call(x)
        Logs.log.clear()
        torch.autograd.backward([y.sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,))])
        return list(Logs.log), x.grad.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = compiled(program, frontend=frontend)
        assert use(program)[0] == ["backward"]
        assert use(program) == use(function) == use(function)
    if frontend == "direct":
        assert behind(function).calls.eager == 2
