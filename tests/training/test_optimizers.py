"""Whole training steps, optimizer included, are compiled behind Dynamo; direct calls refuse them or run eagerly."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab import config
from aotlab.errors import EscapeError, HigherOrderOpError
from tests.engine_helpers import compiled, refusing
from tests.training.steps import behind_dynamo, check, differences, eagerly, everything, run
from tests.training.test_ten_steps import Net, loss_of

#: Each optimizer with its settings, and whether Dynamo alone gives eager's results. Dynamo captures the capturable
#: arithmetic of Adam, which is meant for GPUs and keeps the step number in a tensor; the fused Adam is the exception.
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}, True),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, True),
    "Adam": (torch.optim.Adam, {"lr": 0.01}, False),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}, False),
}
KINDS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}  # one by one is the CPU's default
optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def whole(make, *, to_none=True):
    """Make a training whose step is one function."""

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
    """Make a training in which the module is compiled, and the step of the optimizer."""

    def build(compile_):
        model = Net(nn.BatchNorm1d(8))
        optimizer = make(model.parameters())
        call, step_on = compile_(model), compile_(lambda: optimizer.step())

        def step(n):
            optimizer.zero_grad()
            loss = loss_of(call(torch.randn(3, 4)))
            loss.backward()
            step_on()
            return loss

        return step, everything(model, optimizer)

    return build


def check_behind_dynamo(build, *, exact):
    """Assert that ten steps are eager's, or those that Dynamo makes without us, of which the losses are then close."""
    if exact:
        return check(build, "dynamo")
    torch.compiler.reset()
    expected = run(build, lambda function: torch.compile(function, backend="eager"))
    with behind_dynamo() as (compile_, functions):
        found = run(build, compile_)
    found.functions = functions
    for n, (one, other) in enumerate(zip(expected.after, found.after, strict=True)):
        assert list(differences(one, other, f"after step {n}: ")) == []
    for one, other in zip(run(build, eagerly).after, found.after, strict=True):
        torch.testing.assert_close(other["result"][0], one["result"][0])
    assert (found.compiled > 0, found.eager) == (True, 0)
    return found


@optimizers
@pytest.mark.parametrize("kind", KINDS)
def test_whole_steps_behind_dynamo(name, kind):
    """zero_grad, forward, backward and step in one function: parameters, state and losses are eager's."""
    make, settings, same = OPTIMIZERS[name]
    build = whole(lambda parameters: make(parameters, **settings, **KINDS[kind]))
    found = check_behind_dynamo(build, exact=same or kind == "fused")
    assert found.recompiles == []


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
@pytest.mark.parametrize("kind", ["default", "fused"])
def test_steps_of_an_optimizer_behind_dynamo(name, kind):
    """The step of the optimizer alone, beside a compiled module."""
    make, settings, same = OPTIMIZERS[name]
    build = stepping(lambda parameters: make(parameters, **settings, **KINDS[kind]))
    assert check_behind_dynamo(build, exact=same or kind == "fused").recompiles == []


def test_gradients_that_are_filled_with_zeros():
    """set_to_none=False inside of the step."""
    check(whole(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), to_none=False), "dynamo")


def scheduled(rate):
    """Make a training whose whole step is compiled, and whose learning rate is another one at each step."""

    def build(compile_):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate(), momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        @compile_
        def step_on(x):
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            return loss

        def step(n):
            loss = step_on(torch.randn(3, 4))
            scheduler.step()
            return loss

        return step, everything(model, optimizer)

    return build


def test_a_rate_that_is_a_tensor_compiles_nothing_again():
    """A learning rate in a tensor is an input of the graph: the scheduler writes it, and nothing is compiled again."""
    found = check_behind_dynamo(scheduled(lambda: torch.tensor(0.1)), exact=False)
    assert (found.recompiles, found.said) == ([], [])
    assert found.compiled == 2 * 10
    assert found.entries <= 3  # forward and backward; the first step, and the others


def test_a_rate_that_is_a_number():
    """After its first change Dynamo reads the number from a tensor: the graph takes it as the number that it is."""
    found = check(scheduled(lambda: 0.1), "dynamo")
    assert found.said == []
    assert found.entries <= 4


def test_whole_steps_are_refused_directly():
    """A whole step is refused before anything changes, and the error names the remedy.

    Or it runs eagerly with one notice.
    """
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, before = torch.randn(3, 4), [p.detach().clone() for p in model.parameters()]
    with refusing(EscapeError, match=r'use frontend="dynamo"'):
        compiled(step)(x)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.state == {}
    with config.patch(fallback="eager"):
        function = compiled(step)
        with pytest.warns(RuntimeWarning, match=r"step` runs eagerly"):
            function(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(x)
    assert function.calls.eager == 2
    assert {int(each["step"]) for each in optimizer.state.values()} == {2}


def test_an_optimizer_with_state_is_refused_for_its_gradients():
    """An optimizer whose state has tensors as keys is refused because its step reads `.grad`.

    The tensors are not printed.
    """
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model(torch.randn(3, 4))).backward()
    optimizer.step()
    with refusing(EscapeError, match=r"reads `\.grad` of a tensor, which is not an argument"):
        compiled(lambda: optimizer.step())()
    with refusing(EscapeError, match=r"`\.grad` of a tensor"):
        compiled(optimizer.step)()


def test_an_update_that_is_given_what_it_writes():
    """A step of one's own compiles directly, if it is given parameters and gradients."""
    from torch.optim.sgd import sgd

    def update(parameters, gradients, momenta):
        with torch.no_grad():
            sgd(parameters, gradients, momenta, weight_decay=0.1, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False,
                maximize=False, foreach=True)  # fmt: skip

    def build(compile_):
        model, step_on = Net(), compile_(update)
        call, momenta = compile_(model), [torch.zeros_like(p) for p in model.parameters()]

        def step(n):
            model.zero_grad()
            loss = loss_of(call(torch.randn(3, 4)))
            loss.backward()
            step_on(list(model.parameters()), [p.grad for p in model.parameters()], momenta)
            return loss, momenta

        return step, everything(model)

    for way in ("direct", "dynamo"):
        check(build, way)


def test_reentrant_checkpoints_are_refused():
    """Directly with an error that says what to pass; behind Dynamo the graph runs eagerly, and is eager's."""
    layer = nn.Linear(3, 3)

    def function(x):
        return checkpoint(layer, x, use_reentrant=True).sum()

    with refusing(HigherOrderOpError, match="pass use_reentrant=False"):
        compiled(lambda x: checkpoint(torch.sin, x, use_reentrant=True))(torch.ones(3, requires_grad=True))
    torch.compiler.reset()
    made = aotlab.compile(function, backend="eager", frontend="dynamo")
    x, y = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
    with pytest.warns(RuntimeWarning, match="use_reentrant=True"):
        made(x).backward()
    function(y).backward()
    assert torch.equal(x.grad, y.grad)
