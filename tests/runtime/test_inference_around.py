"""Calls under ``inference_mode``: their writes to ordinary tensors move the version counters.

A later backward checks these counters.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from aotlab.verification import compare
from tests.engine_helpers import compiled


def adds(x, y):
    """Write the argument itself."""
    x.add_(1)
    return x * 2


def scales_a_part(x, y):
    """Write it through a view."""
    x[0].mul_(2)
    return x.sum()


def copies(x, y):
    """Write one argument with the other."""
    y.copy_(x)
    return y[:1]


def through_detach(x, y):
    """Write it through an alias that counts with it."""
    x.detach().add_(1)
    return x * 1


def through_data(x, y):
    """Write it through an alias that does not."""
    x.data.add_(1)
    return x * 1


def through_a_view_of_data(x, y):
    """Write a part of such an alias, which was made from a view."""
    torch.add(x.view(-1).data[1:], 1, out=x.data.view(-1)[:3])
    return x * 1


def through_both(x, y):
    """Write it in either way."""
    data = x.data.view(-1)
    data.add_(1)
    torch.mul(data, 2, out=x.view(-1))
    return x * 1


def by_out(x, y):
    """Write it as `out`."""
    return torch.add(x, 1, out=y)


def transposes(x, y):
    """Change sizes and no data."""
    x.t_()
    return x * 1


def reads(x, y):
    """Write nothing."""
    return x * y


def apart():
    """Make two plain tensors."""
    return torch.arange(4.0).view(2, 2), torch.ones(2, 2)


def overlapping():
    """Make two that share some bytes."""
    base = torch.arange(6.0)
    return base[:4].view(2, 2), base[2:].view(2, 2)


def one():
    """Make one that is given twice."""
    x, _ = apart()
    return x, x


def with_a_history():
    """Make one that is computed from a leaf."""
    return torch.arange(4.0).view(2, 2).requires_grad_() * 1, torch.ones(2, 2)


def inside():
    """Make inference tensors, which count nothing."""
    with torch.inference_mode():
        return torch.ones(2, 2), torch.ones(2, 2)


@pytest.mark.parametrize("make", [apart, overlapping, one, with_a_history, inside])
@pytest.mark.parametrize(
    "f",
    [
        adds,
        scales_a_part,
        copies,
        through_detach,
        through_data,
        through_a_view_of_data,
        through_both,
        by_out,
        transposes,
        reads,
    ],
)
def test_what_is_written_is_counted(f, make):
    """The version counter of an ordinary tensor moves if it moves in eager, at the first and the second call."""

    def use(call):
        tensors = make()
        before = [None if t.is_inference() else t._version for t in tensors]
        try:
            with torch.inference_mode():
                out = [call(*tensors), call(*tensors)][1]
        except RuntimeError as error:  # eager copies no tensor into one that it shares a part with
            return str(error)
        moved = [None if v is None else t._version > v for t, v in zip(tensors, before, strict=True)]
        return out.tolist(), out.is_inference(), moved, [(t.tolist(), t.shape, t.requires_grad) for t in tensors]

    assert use(f) == use(compiled(f))


def test_a_backward_sees_it():
    """A backward raises if the call wrote a tensor that it saved. It once used the new values silently."""

    def use(call):
        x, w = torch.ones(3), torch.ones(3, requires_grad=True)
        y = (w * x).sum()
        with torch.inference_mode():
            call(x, None)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
        return w.grad

    assert use(adds) is None
    assert use(compiled(adds)) is None


@pytest.mark.parametrize("make", [compiled, partial(compiled, frontend="dynamo")], ids=["direct", "dynamo"])
def test_a_backward_that_does_not_see_it_in_eager(make):
    """A write through ``.data`` moves no version counter, and the backward uses the new values as in eager."""

    def use(call):
        x, w = torch.ones(3), torch.ones(3, requires_grad=True)
        y = (w * x).sum()
        with torch.inference_mode():
            call(x, None)
        y.backward()
        return w.grad.tolist(), x._version

    assert use(through_data) == use(make(through_data)) == ([2.0, 2.0, 2.0], 0)


def test_a_comparison_sees_it():
    """`verify` under inference_mode compares the version counters of ordinary tensors, with ordinary copies."""
    x, y = apart()

    def uncounted(f):
        def call(x, y):
            x.data.add_(1)
            return x * 2

        return call

    with torch.inference_mode():
        assert compare(adds, (x, y), candidate=compiled).first is None
        found = compare(adds, (x, y), candidate=uncounted).first
    assert "version counter of `x` is unmoved" in str(found)
    assert compare(reads, inside(), candidate=compiled).first is None
