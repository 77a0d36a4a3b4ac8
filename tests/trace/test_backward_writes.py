"""Custom functions whose backward writes in place agree with eager, whatever they write."""

import pytest
import torch

from tests.engine_helpers import compiled, same


class Counts(torch.autograd.Function):
    """Counts its backwards in a tensor of the caller's."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.save_for_backward(count)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (count,) = ctx.saved_tensors
        count.add_(1)
        return gradient * 2, None


class Attribute(torch.autograd.Function):
    """The same, without `save_for_backward`."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.count.view(-1)[0] += 1
        return gradient * 2, None


class Scales(torch.autograd.Function):
    """A function whose backward writes its incoming gradient in place."""

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(3)


class OwnWork(torch.autograd.Function):
    """Writes only a tensor that its backward made."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient * x).mul_(2)


@pytest.mark.parametrize("function", [Counts, Attribute])
@pytest.mark.parametrize("inside", [False, True], ids=["input", "intermediate"])
def test_a_tensor_that_was_kept_is_written(function, inside):
    """A backward that writes an input is compiled, and one that writes an intermediate runs eagerly.

    The caller sees the new count in an input. For an intermediate, the next backward reads the new count.
    """

    def f(x, count):
        return function.apply(x, count * 1 if inside else count).sum()

    results = []
    for call in (f, made := compiled(f)):
        x, count = torch.ones(3, requires_grad=True), torch.zeros(2)
        out = call(x, count)
        out.backward(retain_graph=True)
        results.append((x.grad.tolist(), count.tolist()))
    assert results[0] == results[1]
    assert made.calls.eager == inside


def test_the_gradient_that_comes_in_is_written():
    """A backward that writes its incoming gradient writes the caller's tensor, as in eager."""
    results = []
    for call in (Scales.apply, compiled(lambda x: Scales.apply(x))):
        x, gradient = torch.ones(3, requires_grad=True), torch.ones(3)
        call(x).backward(gradient)
        results.append((x.grad.tolist(), gradient.tolist()))
    assert results == [([3.0] * 3, [3.0] * 3)] * 2


def test_what_the_backward_made_may_be_written():
    """A backward that writes only a tensor that it made is compiled, because the write is not visible."""
    same(lambda x: OwnWork.apply(x), torch.ones(3, requires_grad=True))
