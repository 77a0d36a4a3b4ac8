"""The requirements of issue 4 on mutation and aliasing, behind Dynamo: whole graphs, and eager's observables."""

from __future__ import annotations

import warnings

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition

import aotlab
from aotlab.events import CompileFailed, GraphBreak, StageFinished
from aotlab.verification import compare
from tests.engine_helpers import heard_events, leaf, nonleaf

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
PARTITIONERS = {"default": aotlab.default_partition, "min cut": min_cut_rematerialization_partition}


def behind_dynamo(function, *args, partitioner=aotlab.default_partition, graphs=1, backward="all", eagerly=None):
    """Assert that two calls are eager's equal, and that all of it was compiled, or why it was not."""
    with heard_events() as heard:
        result = compare(
            function,
            args,
            candidate=lambda f: aotlab.compile(f, backend="eager", frontend="dynamo", partitioner=partitioner),
            backward=backward,
            calls=2,
        )
    assert result.first is None, result.first
    failures = {str(e.error) for e in heard if isinstance(e, CompileFailed)}
    if eagerly is not None:
        assert failures
        assert all(eagerly in failure for failure in failures)
        return
    assert failures == set()
    assert len([e for e in heard if isinstance(e, StageFinished) and e.stage == "runtime"]) == graphs
    assert bool([e for e in heard if isinstance(e, GraphBreak)]) == (graphs > 1)


def scaled(x, y):
    """Train through a write."""
    x.mul_(y)
    return x.sum()


def saved_then_written(x, y):
    """Save an input and then write it: eager's backward raises."""
    out = x.sin() * y
    x.mul_(2)
    return out


BACKWARD_RAISES = "the backward raises RuntimeError: one of the variables needed for gradient computation"


def saved_after_the_write(x, y):
    """Save the value after the write."""
    x.add_(y)
    return x.sin()


def saved_clone(x, y):
    """Save a copy made before the write."""
    z = x.clone()
    x.mul_(y)
    return z.exp() * y, x.cos()


def written_twice(x, y):
    """Save a value between two writes."""
    x.mul_(y)
    z = x.clone().exp()
    x.add_(z)
    return z


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("f", [scaled, saved_then_written, saved_after_the_write, saved_clone, written_twice])
def test_a_mutated_input_that_is_saved(f, partitioner):
    """Gradients use the saved value. If eager's backward raises, ours raises the same error."""
    eagerly = BACKWARD_RAISES if f is saved_then_written else None
    behind_dynamo(f, nonleaf(2, 3), leaf(2, 3, seed=1), partitioner=PARTITIONERS[partitioner], eagerly=eagerly)


def hidden_by_detach(x, y):
    """Write through `detach()`."""
    x.detach().mul_(2)
    return x * y


def hidden_by_no_grad(x, y):
    """Write under `no_grad`."""
    with torch.no_grad():
        x.mul_(2)
    return x * y


def hidden_after_the_save(x, y):
    """Write a value that was saved before."""
    out = x * y
    with torch.no_grad():
        x.zero_()
    return out


@pytest.mark.parametrize("make", [leaf, nonleaf])
@pytest.mark.parametrize("f", [hidden_by_detach, hidden_by_no_grad, hidden_after_the_save])
def test_hidden_writes(f, make):
    """On leaves and non-leaves; save-then-mutate raises in the backward, which is eager's."""
    behind_dynamo(f, make(2, 3), leaf(2, 3, seed=1), eagerly=BACKWARD_RAISES if f is hidden_after_the_save else None)


def unreached(x, y):
    """Return outputs where the first one depends on one input only, through an op that both outputs use."""
    shared = x.sin()
    return shared * 2, shared * y


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("backward", ["first", "all"])
def test_unreached_inputs_get_no_gradient(backward, partitioner):
    """None rather than zeros for an input that no used output reaches."""
    behind_dynamo(unreached, leaf(3), leaf(3, seed=1), backward=backward, partitioner=PARTITIONERS[partitioner])


@pytest.mark.parametrize("kind", ["leaf", "nonleaf", "plain"])
def test_overlapping_slices_of_a_buffer(kind):
    """Two windows of one buffer, one of them written, with and without a history."""

    def f(a, b):
        a.mul_(2)
        return a.sum() + (b * b).sum()

    buffer = {"leaf": torch.arange(6.0), "nonleaf": nonleaf(6), "plain": torch.arange(6.0)}[kind]
    if kind == "leaf":
        a, b = buffer[:4].detach(), buffer[2:].detach().requires_grad_()
    else:
        a, b = buffer[:4], buffer[2:]
    behind_dynamo(f, a, b)


def test_a_view_that_is_returned_takes_the_callers_write():
    """In-place work on an output that is a view of an input reaches the input, as in eager."""

    def f(x):
        x.add_(1)
        return x[1:], x.t()

    results = []
    for function in (f, aotlab.compile(f, backend="eager", frontend="dynamo")):
        x = leaf(3, 3)
        y = x * 1
        tail, turned = function(y)
        tail.mul_(3)
        turned.sum().backward()
        results.append((y.detach(), turned.detach(), x.grad, tail._base is y, turned._base is y))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected == found


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("window", [slice(None), slice(1, None)])
def test_a_view_of_a_view_made_under_no_grad(frontend, window):
    """Its gradient ends at the latter, also where the input is a view itself: compiled, or left to eager."""

    def f(x):
        with torch.no_grad():
            y = x.flatten()
        return y.view(2, -1)

    source = leaf(4, 2)
    x = (source * 1)[window][-2:] if window.start else source * 1
    with aotlab.config.patch(fallback="eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = aotlab.compile(f, backend="eager", frontend=frontend)(x)
        assert out.requires_grad == f(x).requires_grad
        (gradient,) = torch.autograd.grad(out.sum(), source, allow_unused=True)
    assert gradient is None
