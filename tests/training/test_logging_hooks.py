"""Hooks that log gradients during ten steps of a training: each is called when, and with what, eager calls it."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab.errors import HooksError
from tests.engine_helpers import refusing
from tests.training.steps import both, check, everything
from tests.training.test_ten_steps import Net, loss_of, sgd


def trained(hang, between=()):
    """Make a training with hooks: ``hang(model, log)`` hangs them; it may return one for the model's result."""

    def build(compile_):
        model = Net(*between)
        log = []
        on_result = hang(model, log)
        run, optimizer = compile_(model), sgd(model)

        def step(n):
            log.clear()
            optimizer.zero_grad()
            out = run(torch.randn(3, 4))
            if on_result is not None:
                out.register_hook(on_result)
            loss_of(out).backward()
            optimizer.step()
            return list(log)

        return step, everything(model, optimizer)

    return build


def on_parameters(model, log):
    """Log each parameter's gradient before it is accumulated."""
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: log.append((name, g.norm().item(), g.stride())))


def that_change(model, log):
    """Log a gradient, and put another one in its place."""

    def halve(gradient):
        log.append(gradient.clone())
        return gradient / 2

    model.first.weight.register_hook(halve)
    model.last.bias.register_hook(halve)


def after_accumulation(model, log):
    """Log gradients as they are once they were added."""
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: log.append((name, p.grad.clone())))


def that_step(model, log):
    """Step inside of the backward, parameter by parameter, and let each gradient go at once."""
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        log.append(parameter.detach().clone())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def on_the_result(model, log):
    """Log the gradient of what the model returns."""
    return lambda gradient: log.append((gradient.clone(), gradient.stride()))


def forward_hooks(model, log):
    """Scale a layer's input and another layer's output."""
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.last.register_forward_hook(lambda module, args, out: out + args[0].mean())


HOOKS = {each.__name__: each for each in (
    on_parameters, that_change, after_accumulation, that_step, on_the_result, forward_hooks
)}  # fmt: skip


@both
@pytest.mark.parametrize("name", HOOKS)
def test_hooks(name, way):
    """The logs, their order and the changes that hooks make are eager's."""
    check(trained(HOOKS[name]), way)


def on_modules(model, log):
    """Log the gradients of each module's inputs and outputs."""

    def hook(module, inputs, outputs):
        log.append((type(module).__name__, [None if g is None else g.clone() for g in (*inputs, *outputs)]))

    for module in model.modules():
        module.register_full_backward_hook(hook)


def before_modules(model, log):
    """Log and change the gradients of modules' outputs before their backward."""

    def hook(module, outputs):
        log.append((type(module).__name__, [g.clone() for g in outputs]))
        return tuple(g / 2 for g in outputs)

    model.last.register_full_backward_pre_hook(hook)


@pytest.mark.parametrize("hang", [on_modules, before_modules])
def test_hooks_of_modules_behind_dynamo(hang):
    """Behind Dynamo hooks on the backward of modules are called as in eager."""
    check(trained(hang), "dynamo")


@pytest.mark.parametrize("hang", [on_modules, before_modules])
def test_hooks_of_modules_are_refused_directly(hang):
    """A direct call would run them while tracing only: it says so before anything happened."""
    model = Net()
    log = []
    hang(model, log)
    with refusing(HooksError, match="has backward hooks"):
        aotlab.compile(model, backend="eager")(torch.randn(3, 4))
    assert log == []
