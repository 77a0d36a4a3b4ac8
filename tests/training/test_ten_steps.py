"""What people do around the forward and the backward in ten steps of a training: bit for bit as in eager."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

from aotlab.errors import DataDependentError
from tests.engine_helpers import refusing
from tests.training.steps import both, check, everything


class Net(nn.Module):
    """Two layers with something that differs between training and evaluation in between."""

    def __init__(self, *between):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.between = nn.Sequential(*between)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        """Compute two numbers for each row."""
        return self.last(self.between(self.first(x)).tanh())


def sgd(module, **more):
    """Make an optimizer with momentum."""
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, "momentum": 0.9, **more})


def loss_of(out):
    """Make a loss."""
    return out.square().mean()


def accumulated(compile_):
    """Add up the gradients of four small batches before each step."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        losses = []
        for _ in range(4):
            loss = loss_of(run(torch.randn(3, 4))) / 4
            loss.backward()
            losses.append(loss)
        optimizer.step()
        return losses

    return step, everything(model, optimizer)


def accumulated_at_once(compile_):
    """Add up the losses of four small batches, and go back through four calls at once."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        loss = sum(loss_of(run(torch.randn(3, 4))) for _ in range(4))
        loss.backward()
        optimizer.step()
        return loss

    return step, everything(model, optimizer)


def clipped_by_norm(compile_):
    """Hold the norm of all gradients below a bound."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        loss = loss_of(run(torch.randn(3, 4)))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss, norm

    return step, everything(model, optimizer)


def clipped_by_value(compile_):
    """Hold each number in a gradient below a bound."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        loss_of(run(torch.randn(3, 4))).backward()
        clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()

    return step, everything(model, optimizer)


def two_losses(compile_):
    """Go back from two losses of one output, one after the other, the first with ``retain_graph``."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        out = run(torch.randn(3, 4))
        out.square().mean().backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        out.abs().mean().backward()
        optimizer.step()
        return first

    return step, everything(model, optimizer)


class Twofold(nn.Module):
    """A trunk and two heads, of which each gives a loss."""

    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        """Return both losses."""
        y = self.trunk(x).relu()
        return self.one(y).square().mean(), self.two(y).abs().mean()


def two_heads(compile_):
    """Go back from two results of a call, one after the other, the first with ``retain_graph``."""
    model = Twofold()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        one, two = run(torch.randn(3, 4))
        one.backward(retain_graph=n % 3 < 2)
        between = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if n % 3 < 2:
            two.backward()
        optimizer.step()
        return one, two, between

    return step, everything(model, optimizer)


def averaged(compile_):
    """Keep a running average of parameters and buffers, and evaluate it."""
    model = Net(nn.BatchNorm1d(8))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    run, run_average, optimizer = compile_(model), compile_(average.module), sgd(model)

    def step(n):
        optimizer.zero_grad()
        loss_of(run(torch.randn(3, 4))).backward()
        optimizer.step()
        average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            return run_average(torch.randn(3, 4)), dict(average.named_buffers()), dict(average.named_parameters())

    return step, everything(model, optimizer)


class Codebook(nn.Module):
    """Keeps running averages of what it sees in buffers, which it writes under ``no_grad`` and reads afterwards."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        """Return the distance from the average."""
        y = self.layer(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
                self.count += 1
        return (y - self.mean / (1 - 0.9**self.count)).square().mean()


def averages_within(compile_):
    """Let the module itself keep a running average in its buffers; evaluate it now and then."""
    model = Codebook()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        model.train(n % 4 != 3)
        optimizer.zero_grad()
        loss = run(torch.randn(3, 4))
        loss.backward()
        optimizer.step()
        return loss

    return step, everything(model, optimizer)


def batch_statistics(compile_):
    """Let batch norm count and average, with running statistics and without."""
    model = Net(nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False))
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        model.train(n % 3 != 2)
        optimizer.zero_grad()
        loss_of(run(torch.randn(3, 4))).backward()
        optimizer.step()
        return [m.num_batches_tracked for m in model.between]

    return step, everything(model, optimizer)


def frozen_statistics(compile_):
    """Keep batch norm in evaluation inside of a module in training, as when a trained one is tuned."""
    model = Net(nn.BatchNorm1d(8), nn.Dropout(0.3))
    model.between[0].eval().requires_grad_(False)
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        loss_of(run(torch.randn(3, 4))).backward()
        optimizer.step()

    return step, everything(model, optimizer)


class Tied(nn.Module):
    """One weight embeds, and tells words apart at the end."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, wanted):
        """Return the loss."""
        return nn.functional.cross_entropy(self.head(self.middle(self.embed(words)).tanh()), wanted)


def tied(compile_):
    """Train a weight that is in two places as one; untie it halfway."""
    model = Tied()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        if n == 6:
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
            optimizer.add_param_group({"params": [model.head.weight]})
        optimizer.zero_grad()
        loss = run(torch.randint(7, (5,)), torch.randint(7, (5,)))
        loss.backward()
        optimizer.step()
        return loss, model.head.weight is model.embed.weight

    return step, everything(model, optimizer)


def frozen(compile_):
    """Freeze and thaw layers between steps; gradients that were there stay there."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        model.first.requires_grad_(n // 2 % 2 == 0)
        model.last.bias.requires_grad_(n < 5)
        if n % 3 == 0:
            optimizer.zero_grad()
        loss = loss_of(run(torch.randn(3, 4)))
        loss.backward()
        optimizer.step()
        return loss

    return step, everything(model, optimizer)


def all_frozen(compile_):
    """Tune one layer of a module in which at first nothing requires grad."""
    model = Net().requires_grad_(False)
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        if n == 4:
            model.last.requires_grad_()
        out = run(torch.randn(3, 4))
        if out.requires_grad:
            optimizer.zero_grad()
            loss_of(out).backward()
            optimizer.step()
        return out

    return step, everything(model, optimizer)


def zeroed(to_none):
    """Make a training that sets gradients to None, or fills them with zeros, and adds into the same memory."""

    def build(compile_):
        model = Twofold()
        run, optimizer = compile_(model), sgd(model)
        seen = []

        def step(n):
            optimizer.zero_grad(set_to_none=to_none)
            before = [None if p.grad is None else p.grad for p in model.parameters()]
            one, two = run(torch.randn(3, 4))
            (one if n % 2 else one + two).backward()
            seen.extend(old is None or old is p.grad for old, p in zip(before, model.parameters(), strict=True))
            optimizer.step()
            return seen

        return step, everything(model, optimizer)

    return build


def scaled(compile_):
    """Scale a loss, and leave a step out where a gradient is not finite."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(n):
        optimizer.zero_grad()
        x = torch.randn(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(run(x * (float("inf") if n in (3, 7) else 1.0)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss, norm, scaler.get_scale(), scaler.state_dict()

    return step, everything(model, optimizer)


def scheduled(compile_):
    """Take another learning rate at each step."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)

    def step(n):
        optimizer.zero_grad()
        loss_of(run(torch.randn(3, 4))).backward()
        optimizer.step()
        scheduler.step() if n < 9 else None
        return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]

    return step, everything(model, optimizer)


def switched(compile_):
    """Evaluate the module between the steps: dropout and batch norm do something else then."""
    model = Net(nn.BatchNorm1d(8), nn.Dropout(0.5))
    run, optimizer = compile_(model), sgd(model)
    held_out = torch.randn(5, 4)

    def step(n):
        model.train()
        optimizer.zero_grad()
        loss_of(run(torch.randn(3, 4))).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            one, two = run(held_out), run(held_out)
        with torch.inference_mode():
            three = run(held_out)
        return one, two, three.clone()

    return step, everything(model, optimizer)


def penalized(compile_):
    """Write weight decay into the loss, so that parameters get gradients from inside and from outside."""
    model = Net()
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        loss = loss_of(run(torch.randn(3, 4))) + 1e-2 * parameters_to_vector(model.parameters()).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    return step, everything(model, optimizer)


def followed(compile_):
    """Let a copy of the module follow it slowly, and give the targets, as in learning without labels."""
    model = Net(nn.BatchNorm1d(8))
    teacher = copy.deepcopy(model).requires_grad_(False)
    run, run_teacher, optimizer = compile_(model), compile_(teacher), sgd(model)

    def step(n):
        x = torch.randn(3, 4)
        optimizer.zero_grad()
        loss = (run(x) - run_teacher(x + 0.1).detach()).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss, dict(teacher.named_parameters()), dict(teacher.named_buffers())

    return step, everything(model, optimizer)


def unequal(compile_):
    """Take a smaller batch at the end of each round."""
    model = Net(nn.BatchNorm1d(8))
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        loss_of(run(torch.randn(2 if n % 4 == 3 else 5, 4))).backward()
        optimizer.step()

    return step, everything(model, optimizer)


TRAININGS = {
    "accumulated": accumulated,
    "accumulated at once": accumulated_at_once,
    "clipped by norm": clipped_by_norm,
    "clipped by value": clipped_by_value,
    "two losses": two_losses,
    "two heads": two_heads,
    "averaged": averaged,
    "averages within": averages_within,
    "batch statistics": batch_statistics,
    "frozen statistics": frozen_statistics,
    "tied": tied,
    "frozen": frozen,
    "all frozen": all_frozen,
    "set to none": zeroed(True),
    "set to zero": zeroed(False),
    "scaled": scaled,
    "scheduled": scheduled,
    "switched": switched,
    "penalized": penalized,
    "followed": followed,
    "unequal": unequal,
}


#: The reasons why some trainings are compiled more than once when they are called directly.
COMPILED_AGAIN = {
    "averages within": ["`training`.* is False"],
    "batch statistics": ["`training`.* is False"],
    "tied": ["`head.weight` and `embed.weight` are two tensors"],
    "frozen": ["`first.weight` has requires_grad=False", *["`last.bias` has requires_grad=False"] * 2],
    "all frozen": ["`last.weight` has requires_grad=True"],
    "switched": ["grad mode is False", "inference mode is True"],
    "unequal": [r"`x` has shape \(2, 4\)"],
}


@both
@pytest.mark.parametrize("name", TRAININGS)
def test_ten_steps(name, way):
    """Losses, parameters, gradients, buffers, optimizer state and generator state are eager's."""
    found = check(TRAININGS[name], way)
    if way == "direct":
        patterns = COMPILED_AGAIN.get(name, [])
        assert len(found.recompiles) == len(patterns), found.recompiles
        for pattern, reason in zip(patterns, found.recompiles, strict=True):
            assert re.search(pattern, reason), reason
    assert found.said == []


def plain_average(compile_):
    """Let batch norm take the plain average of all batches, for which it asks how many there were."""
    model = Net(nn.BatchNorm1d(8, momentum=None))
    run, optimizer = compile_(model), sgd(model)

    def step(n):
        optimizer.zero_grad()
        loss_of(run(torch.randn(3, 4))).backward()
        optimizer.step()

    return step, everything(model, optimizer)


def test_a_plain_average_of_all_batches():
    """The number of batches is a value in Python: behind Dynamo the graph breaks there, a direct call is refused."""
    check(plain_average, "dynamo")
    with refusing(DataDependentError, match=r"needs the value of `self.between.0.num_batches_tracked`"):
        check(plain_average, "direct")
