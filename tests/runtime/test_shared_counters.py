"""Inputs that share a version counter but no bytes, such as slices of one buffer: eager's errors, and guards."""

from __future__ import annotations

import pytest
import torch

import aotlab
from tests.engine_helpers import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FRONTENDS = ["direct", "dynamo"]


def slices(count=2):
    """Make neighbours on one buffer, cut off from its history; the first one requires grad."""
    buffer = torch.arange(1.0, 1 + 3 * count)
    parts = [buffer[3 * i : 3 * i + 3].detach() for i in range(count)]
    return (parts[0].requires_grad_(), *parts[1:])


def apart(count=2):
    """Return the same tensors, each with its own memory."""
    return tuple(part.detach().clone().requires_grad_(part.requires_grad) for part in slices(count))


def save_then_write(a, b):
    """Save `a` for backward, then write `b`, which shares its version counter."""
    out = a.sin()
    b.mul_(2)
    return out


def write_then_save(a, b):
    """Do it in the other order, which spoils nothing."""
    b.mul_(2)
    return a.sin()


def by(frontend, function):
    """Compile on torch's own kernels."""
    return aotlab.compile(function, backend="eager", frontend=frontend)


def backward_error(function, args):
    """Call and differentiate; return the error's text or None, and the gradient."""
    out = function(*args)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error).partition("; expected")[0], args[0].grad
    return None, args[0].grad


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", [save_then_write, write_then_save])
@pytest.mark.parametrize("make", [slices, apart])
def test_a_write_to_a_neighbour_counts(frontend, function, make):
    """The backward raises eager's error after a write to a tensor that shares the counter.

    Otherwise gradients are equal.
    """
    expected, gradient = backward_error(function, make())
    assert (expected is not None) == (function is save_then_write and make is slices)
    f = by(frontend, function)
    for _ in range(2):
        args = make()
        error, found = backward_error(f, args)
        assert expected == error
        assert gradient is None if found is None else torch.equal(gradient, found)
        assert args[1].tolist() == [8.0, 10.0, 12.0]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("first", [slices, apart])
def test_the_sharing_of_counters_is_guarded(frontend, first):
    """If inputs start or stop sharing a version counter, the call gets another entry, in both directions."""
    f = by(frontend, save_then_write)
    second = apart if first is slices else slices
    errors = [backward_error(f, make())[0] is not None for make in (first, second, first)]
    assert errors == [make is slices for make in (first, second, first)]


def test_a_write_in_training_runs_eagerly():
    """A write in training that must also move another input's version runs eagerly.

    Tensors that share no counter have another entry.
    """
    f = compiled(save_then_write)
    f(*apart())
    f(*slices())
    assert (f.calls.compiled, f.calls.eager) == (1, 1)


def test_without_gradients_a_write_stays_compiled():
    """Without gradients a write stays compiled, and moves the shared counter once."""
    args = slices()
    before = args[0]._version
    f = compiled(save_then_write)
    with torch.no_grad():
        f(*args)
    assert args[0]._version == before + 1
    (entry,) = f.entries
    infos = entry.records.trace.metadata.input_info
    assert [(info.mutates_data, info.moves_version) for info in infos] == [(False, False), (True, True)]


def test_a_view_of_a_neighbour_is_returned_by_eager():
    """A view of a tensor that shares the counter is returned eagerly, because it may be from before the write."""
    f = compiled(lambda a, b: (a[1:], b.mul_(2)))
    with torch.no_grad():
        f(*slices())
    assert (f.calls.compiled, f.calls.eager) == (0, 1)


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_overlapping_neighbours_of_a_third(frontend):
    """With three windows of one storage, a write to a window raises for a saved neighbour that it does not overlap."""

    def f(a, b, c):
        out = a.sin()
        c.mul_(2)
        return out, b + 1

    def make():
        buffer = torch.arange(1.0, 9.0)
        return buffer[:3].detach().requires_grad_(), buffer[3:6].detach(), buffer[4:8].detach()

    g = by(frontend, f)
    for function in (f, g, g):
        args = make()
        out, other = function(*args)
        assert other.tolist() == [5.0, 11.0, 13.0]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("first", ["together", "apart"])
def test_a_step_that_changes_no_values_counts_too(frontend, first):
    """Shared counters are guarded even if an op changes only sizes or strides in place."""

    def f(a, b):
        a.swapaxes(0, 1).t_()
        return b * 2

    def moved(g, *, shared):
        a = torch.ones(2, 2)
        b = a.detach() if shared else a.detach().clone()
        g(a, b)
        return a._version, b._version

    g = by(frontend, f)
    for shared in (first == "together", first == "apart", first == "together"):
        assert moved(f, shared=shared) == moved(g, shared=shared)
