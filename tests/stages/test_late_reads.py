"""What an attribute of a custom Function or a checkpoint's function uses is read by the backward as it is by then."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.engine_helpers import alike, compiled, entry_of, leaf

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
FRONTENDS = pytest.mark.parametrize("frontend", ["direct", "dynamo"])

#: What a Function may keep: of its arguments, its result, or what it makes of them.
KEPT = {
    "x": lambda x, w, y: x,
    "w": lambda x, w, y: w,
    "w[:]": lambda x, w, y: w[:],
    "w.data": lambda x, w, y: w.data,
    "w * 2": lambda x, w, y: w * 2,
    "w.clone()": lambda x, w, y: w.clone(),
    "y": lambda x, w, y: y,
    "y.detach()": lambda x, w, y: y.detach(),
}


def keeping(attributes, saved, *, looks, hidden=False):
    """Make a Function that keeps ``attributes`` as such, saves ``saved``, and may not look at these."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            y = x * w.sin()
            ctx.save_for_backward(*(KEPT[name](x, w, y) for name in saved))
            values = [KEPT[name](x, w, y) for name in attributes]
            if hidden:
                ctx.values = [values]
            elif values:
                ctx.first, ctx.others = values[0], values[1:]
            return y

        @staticmethod
        def backward(ctx, gradient):
            values = list(ctx.values[0]) if hidden else [ctx.first, *ctx.others] if attributes else []
            if looks:
                values += ctx.saved_tensors
            total = gradient
            for n, value in enumerate(values):
                total = total + gradient * value.cos() * (n + 1)
            return total, total * 0.5

    return Keeping


def a_function(draw):
    """Draw a Function."""
    attributes = draw.sample(sorted(KEPT), draw.choice([0, 1, 1, 2]))
    saved = draw.sample(sorted(KEPT), draw.choice([0, 0, 1, 2]))
    return keeping(attributes, saved, looks=draw.random() < 0.7, hidden=draw.random() < 0.2)


def a_program(draw, checkpoints=True):
    """Draw a program of such Functions, plain ops, writes and checkpoints."""
    steps = []
    kinds = ["apply"] * 4 + ["mul", "sin", "view", "write", "quiet", "checkpoint" if checkpoints else "apply"]
    for _ in range(draw.randint(1, 5)):
        steps.append((draw.choice(kinds), draw.randrange(6), draw.randrange(6), a_function(draw)))
    returned = [draw.randrange(8) for _ in range(draw.randint(1, 3))]

    def program(x, w, v):
        made = [x, w, v]
        for kind, i, j, function in steps:
            a, b = made[i % len(made)], made[j % len(made)]
            if kind == "apply":
                made.append(function.apply(a, b))
            elif kind == "mul":
                made.append(a * b)
            elif kind == "sin":
                made.append(a.sin())
            elif kind == "view":
                made.append(a.view(2, 3).view(-1))
            elif kind == "write":
                made[-1].mul_(1.5) if made[-1] is not x else w.add_(1)
            elif kind == "quiet":
                with torch.no_grad():
                    b.add_(0.25)
            else:
                made.append(checkpoint(lambda value, b=b: (value * b).sin() + b.exp(), a, use_reentrant=False))
        return [made[n % len(made)] if n % len(made) else made[-1] * 1 for n in returned]

    return program


def a_use(draw):
    """Draw what the caller does: writes, backwards."""
    actions = []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.6:
            actions.append((draw.choice(["add", "add", "data", "out", "out data"]), draw.randrange(3)))
        actions.append((draw.choice(["backward", "retain", "grad x", "grad w"]), draw.randrange(3)))
    grads = draw.choice([(True, False), (True, True), (True, False)])

    def use(function):
        source = torch.arange(1.0, 7.0).requires_grad_()
        other = (torch.arange(6.0) / 7).requires_grad_(grads[1])
        x, w, v = source + 0, other + 0 if grads[1] else other, torch.linspace(0, 1, 6)
        found = []
        try:
            outputs = function(x, w, v)
        except RuntimeError as error:
            return [type(error).__name__]
        for action, n in actions:
            target = (x, w, v)[n]
            out = outputs[n % len(outputs)]
            try:
                with torch.no_grad():
                    if action == "add":
                        target.add_(1)
                    elif action == "data":
                        target.data.add_(1)
                    elif action == "out":
                        out.add_(1)
                    elif action == "out data":
                        out.data.add_(1)
                if action in ("backward", "retain") and out.requires_grad:
                    torch.autograd.backward(out.sum(), retain_graph=action == "retain")
                    found.append([None if t.grad is None else t.grad.tolist() for t in (source, other)])
                elif action.startswith("grad") and out.requires_grad:
                    asked = x if action == "grad x" or not w.requires_grad else w
                    (gradient,) = torch.autograd.grad(out.sum(), asked, retain_graph=True, allow_unused=True)
                    found.append(None if gradient is None else gradient.tolist())
            except RuntimeError as error:
                return [*found, "again" if "second time" in str(error) else "written"]
        return [*found, [t.tolist() for t in (*outputs, x, w, v)]]

    return use
