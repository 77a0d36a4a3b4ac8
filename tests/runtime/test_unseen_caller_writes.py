"""Writes of the caller between call and backward that move no version: eager's backward finds them in what it kept."""

from __future__ import annotations

import inspect

import pytest
import torch

from aotlab.verification.fuzz.compare import differences
from tests.engine_helpers import compiled


def squared(a):
    """Keep what was written."""
    a.mul_(2)
    return (a * a).sum()


def part(a):
    """Keep a part of what was written."""
    a.mul_(2)
    return a[1] * a[1]


def through_a_part(a):
    """Keep the whole of which a part was written."""
    a[0].mul_(2)
    return (a * a).sum()


def unseen(a, b):
    """Keep what was written under no_grad, as others lie there too."""
    with torch.no_grad():
        a.mul_(2)
    return (a * b).sum(), a.view(-1).exp().sum()


def by_another(a, b):
    """Keep what was written by adding another argument."""
    a.add_(b)
    return a[0] * a[0], a.t().sin()


def alone():
    """Make an argument with memory of its own."""
    leaf = torch.arange(1.0, 5.0).view(2, 2).requires_grad_()
    return leaf * 1, torch.full((2, 2), 2.0), {"leaf": leaf}


def overlapping():
    """Make arguments that share a part of their memory."""
    leaf = torch.arange(1.0, 13.0).requires_grad_()
    whole = leaf * 1
    return whole[2:6].view(2, 2), whole[4:8].view(2, 2), {"leaf": leaf, "whole": whole}


def with_gaps():
    """Make an argument with strides of its own."""
    leaf = torch.arange(1.0, 13.0).requires_grad_()
    whole = leaf * 1
    return whole.view(3, 4)[:2, 1:3], torch.ones(2, 2), {"leaf": leaf, "whole": whole}


MAKES = [alone, overlapping, with_gaps]


@pytest.mark.parametrize(
    ("make", "write"), [(alone, "data"), *((make, w) for make in MAKES for w in ("detach", "counted"))]
)
@pytest.mark.parametrize("program", [squared, part, through_a_part, unseen, by_another])
def test_a_written_input_is_kept_as_eager_keeps_it(program, make, write):
    """What the caller does to it then has the same effect on the gradients, or is the same error."""

    def inputs():
        a, b, watched = make()
        return (a, b)[: len(inspect.signature(program).parameters)], {**watched, "b": b}

    def steps(out, a):
        target = {"data": lambda: a.data, "detach": a.detach, "counted": lambda: a}[write]
        return [lambda: target().mul_(3)]

    assert differences(program, compiled(program), [inputs, inputs], before=steps, exact=False) == []
