"""Writes between call and backward that change no version counter: eager's backward reads the written values."""

from __future__ import annotations

import inspect

import pytest
import torch

from aotlab.maintenance.fuzz.compare import differences
from tests.engine_helpers import compiled


def squared(a):
    """Save a written tensor."""
    a.mul_(2)
    return (a * a).sum()


def part(a):
    """Save a part of a written tensor."""
    a.mul_(2)
    return a[1] * a[1]


def through_a_part(a):
    """Save a tensor of which a part was written."""
    a[0].mul_(2)
    return (a * a).sum()


def unseen(a, b):
    """Save a tensor that was written under no_grad."""
    with torch.no_grad():
        a.mul_(2)
    return (a * b).sum(), a.view(-1).exp().sum()


def by_another(a, b):
    """Save a tensor after another argument was added to it."""
    a.add_(b)
    return a[0] * a[0], a.t().sin()


def alone():
    """Return an argument with its own memory."""
    leaf = torch.arange(1.0, 5.0).view(2, 2).requires_grad_()
    return leaf * 1, torch.full((2, 2), 2.0), {"leaf": leaf}


def overlapping():
    """Make arguments that share a part of their memory."""
    leaf = torch.arange(1.0, 13.0).requires_grad_()
    whole = leaf * 1
    return whole[2:6].view(2, 2), whole[4:8].view(2, 2), {"leaf": leaf, "whole": whole}


def with_gaps():
    """Return an argument with gaps between its elements."""
    leaf = torch.arange(1.0, 13.0).requires_grad_()
    whole = leaf * 1
    return whole.view(3, 4)[:2, 1:3], torch.ones(2, 2), {"leaf": leaf, "whole": whole}


MAKES = [alone, overlapping, with_gaps]


@pytest.mark.parametrize(
    ("make", "write"), [(alone, "data"), *((make, w) for make in MAKES for w in ("detach", "counted"))]
)
@pytest.mark.parametrize("program", [squared, part, through_a_part, unseen, by_another])
def test_a_written_input_is_kept_as_eager_keeps_it(program, make, write):
    """A later write by the caller changes the gradients, or raises, as in eager."""

    def inputs():
        a, b, watched = make()
        return (a, b)[: len(inspect.signature(program).parameters)], {**watched, "b": b}

    def steps(out, a):
        target = {"data": lambda: a.data, "detach": a.detach, "counted": lambda: a}[write]
        return [lambda: target().mul_(3)]

    assert differences(program, compiled(program), [inputs, inputs], before=steps, exact=False) == []
