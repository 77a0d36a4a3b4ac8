"""The order in which autograd comes to the leaves of a compiled call, which the hooks on them see, is eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotlab
from aotlab import _torch as internals
from tests.engine_helpers import compiled, record

FRONTENDS = {
    "direct": compiled,
    "dynamo": lambda function: aotlab.compile(function, backend="eager", frontend="dynamo"),
}

MODELS = {
    "one layer": lambda: nn.Linear(3, 3),
    "layers": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_called_in_eagers_order(name, frontend, method):
    """One call of autograd gives the compiled call's gradients to all leaves; it serves them as eager does."""

    def train(make):
        torch.manual_seed(0)
        model = MODELS[name]()
        called = []
        for parameter, tensor in model.named_parameters():
            getattr(tensor, method)(lambda _, parameter=parameter: called.append(parameter))
        candidate = make(model)
        for _ in range(2):
            candidate(torch.ones(2, 5, next(model.parameters()).shape[-1])).sum().backward()
        return called, [tensor.grad.tolist() for tensor in model.parameters()]

    expected = train(lambda model: model)
    assert len(expected[0]) > 2
    assert expected == train(FRONTENDS[frontend])


def test_arguments_that_are_swapped_get_their_own_gradients():
    """The order concerns autograd only: the graph gets each input in its place, and each input its own gradient."""

    def f(weight, x, bias):
        return torch.addmm(bias, x, weight.t())

    f_compiled = compiled(f)
    results = []
    for function in (f, f_compiled):
        torch.manual_seed(0)
        inputs = [torch.randn(shape, requires_grad=True) for shape in ((4, 3), (2, 3), (4,))]
        function(*inputs).square().sum().backward()
        results.append([tensor.grad.tolist() for tensor in inputs])
    assert results[0] == results[1]
    assert "Compiled.apply(backward, saved, (results[0],), bias, x, weight)" in record(f_compiled, "runtime").source


@pytest.mark.parametrize("count", [*range(1, 40), 100])
def test_turns(count):
    """Autograd takes leaves that are ready together in the order that is computed."""

    class Together(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *leaves):
            return torch.zeros(())

        @staticmethod
        def backward(ctx, gradient):
            return (gradient,) * count

    served = []
    leaves = [torch.zeros((), requires_grad=True) for _ in range(count)]
    for number, each in enumerate(leaves):
        each.register_hook(lambda _, number=number: served.append(number))
    Together.apply(*leaves).backward()
    assert served == internals.turns(count)
