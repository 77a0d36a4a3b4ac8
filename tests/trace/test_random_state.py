"""Checkpoints with random numbers: the backward draws those of the forward, from the state that the forward saves."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # as everybody writes it
from torch.utils.checkpoint import checkpoint

import aotlab
from tests.engine_helpers import compiled, leaf, record, same, targets

PARTITIONERS = {"default": aotlab.default_partition, "min cut": aotlab.min_cut_rematerialization_partition}


def checkpointed(function, *args, **settings):
    """Use checkpoint as everybody does."""
    return checkpoint(function, *args, use_reentrant=False, **settings)


def masked(value):
    """Draw a mask."""
    return F.dropout(value.sin()).exp()


def noisy(value):
    """Draw by several ops, some of which say no more than a size."""
    noise = torch.rand_like(value) + torch.randn(value.shape) + torch.empty(value.shape).uniform_()
    return (value * noise).sin()[torch.randperm(len(value))]


def outer(value):
    """Draw before, in and after another checkpoint."""
    inner = checkpointed(masked, F.dropout(value, 0.3))
    return F.dropout(inner, 0.2) * value


def _one(x):
    return checkpointed(masked, x)


def _between_others(x):
    y = F.dropout(x, 0.3)
    z = checkpointed(noisy, y)
    w = torch.rand(20)
    return checkpointed(masked, z * w) + z


def _nested(x):
    return checkpointed(outer, x)


def _two_results(x):
    y = checkpointed(masked, x)
    return y, checkpointed(masked, x * y)


def _other_kinds(x):
    return checkpointed(lambda v: F.alpha_dropout(F.dropout1d(v.sin().view(1, 4, 5)), training=True), x)


PROGRAMS = (_one, _between_others, _nested, _two_results, _other_kinds)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__[1:])
def test_the_same_numbers_in_forward_and_backward(program, partitioner):
    """Results, gradients and the generator's state are eager's."""
    same(program, leaf(20), make=lambda f: compiled(f, partitioner=PARTITIONERS[partitioner]))


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_backward_from_one_of_two_results(wanted):
    """A backward that was derived for some results only uses the forward's numbers too."""

    def gradient(function):
        torch.manual_seed(0)
        x = leaf(20)
        results = function(x)
        results[wanted].sum().backward()
        return x.grad.tolist(), torch.rand(1).item()

    assert gradient(_two_results) == gradient(compiled(_two_results))


def test_later_draws_are_not_disturbed():
    """The backward leaves the generator as it found it."""
    f = compiled(_one)
    for _ in range(2):
        y = f(leaf(20))
        torch.manual_seed(5)
        y.sum().backward()
        after = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), after)


def test_the_state_is_saved_and_no_numbers():
    """As in eager: the state of the generator before the checkpoint, and none of what is drawn in it."""
    f = compiled(_one)
    f(leaf(20)).sum().backward()
    split = record(f, "partition")
    drawing = "aotlab.drawn_aten_bernoulli_p.default"
    assert (targets(split.forward).count(drawing), targets(split.backward).count(drawing)) == (0, 1)
    assert [saved.nbytes for saved in split.saved if not saved.is_input] == [torch.get_rng_state().nbytes]
    assert record(f, "trace").random_ops == ("aten.bernoulli.p",)


def test_a_state_that_nobody_needs_is_not_read():
    """A checkpoint that draws nothing takes the generator's state, and saves nothing of it."""
    f = compiled(lambda x: checkpointed(torch.sin, x))
    f(leaf(20)).sum().backward()
    assert not any("generator" in target for target in targets(record(f, "trace").module))


def _anew(x):
    return checkpointed(masked, x, preserve_rng_state=False)


def _by_values(x):
    return checkpointed(lambda value: torch.bernoulli(value.detach().sigmoid()) * value.sin(), x)


def _another_rate(x):
    seen = []

    def body(value):
        seen.append(0.5 if not seen else 0.25)
        return F.dropout(value, seen[-1]).sin()

    return checkpointed(body, x)


def _in_and_after(x):
    y = checkpointed(lambda value: checkpointed(_anew, F.dropout(value, 0.3)) * torch.rand(20), x)
    return checkpointed(lambda value: torch.poisson(value.detach().exp()) * value, y)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("program", [_anew, _by_values, _another_rate, _in_and_after], ids=lambda f: f.__name__[1:])
def test_what_is_drawn_otherwise(program, partitioner):
    """A checkpoint's second run may draw new numbers, from forward values or at another rate, as in eager."""
    make = partial(compiled, partitioner=PARTITIONERS[partitioner])
    same(program, leaf(20), make=make, eagerly=program in (_anew, _in_and_after))  # their backward draws for itself
