"""Whole training steps behind Dynamo, with the optimizer inside; and what is done about them in direct calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.training.steps import check, everything
from tests.training.test_ten_steps import Net, loss_of

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AMSGrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
}
KINDS = {"default": {}, "one by one": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def whole(make, to_none=True):
    def build(compile_):
        model = Net(nn.BatchNorm1d(8))
        optimizer = make(model.parameters())

        @compile_
        def step_on(x):
            optimizer.zero_grad(set_to_none=to_none)
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            return loss

        return lambda n: step_on(torch.randn(3, 4)), everything(model, optimizer)

    return build


def stepping(make):
    def build(compile_):
        model = Net(nn.BatchNorm1d(8))
        optimizer = make(model.parameters())
        run = compile_(model)
        step_on = compile_(lambda: optimizer.step())

        def step(n):
            optimizer.zero_grad()
            loss = loss_of(run(torch.randn(3, 4)))
            loss.backward()
            step_on()
            return loss

        return step, everything(model, optimizer)

    return build

CASES = [(o, k) for o in OPTIMIZERS for k in KINDS]

@pytest.mark.parametrize(("name", "kind"), CASES)
def test_whole_steps(name, kind):
    """zero_grad, forward, backward and step in one function."""
    make, settings = OPTIMIZERS[name]
    check(whole(lambda p: make(p, **settings, **KINDS[kind])), "dynamo")

@pytest.mark.parametrize(("name", "kind"), CASES)
def test_steps(name, kind):
    """The step alone is compiled."""
    make, settings = OPTIMIZERS[name]
    check(stepping(lambda p: make(p, **settings, **KINDS[kind])), "dynamo")
