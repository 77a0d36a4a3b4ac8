"""Backwards that draw random numbers: each backward draws new numbers, and only in the nodes that it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import aotlab
from aotlab.errors import DoubleBackwardError
from tests.both_ways import Case, both_ways
from tests.engine_helpers import behind, compiled


class Noisy(torch.autograd.Function):
    """Add noise to the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + torch.rand_like(gradient)


class DropsGradient(torch.autograd.Function):
    """Drop parts of the gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return functional.dropout(gradient * ctx.saved_tensors[0].cos(), 0.5)


class RoundsAtRandom(torch.autograd.Function):
    """Round the values and the gradient up or down at random."""

    @staticmethod
    def forward(ctx, x):
        return (x * 8 + torch.rand_like(x)).floor() / 8

    @staticmethod
    def backward(ctx, gradient):
        return (gradient * 8 + torch.empty_like(gradient).uniform_()).floor() / 8


class Permutes(torch.autograd.Function):
    """Draw a permutation that depends on no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient[torch.randperm(gradient.shape[0])] * torch.randn(gradient.shape[1])


class DrawsForEach(torch.autograd.Function):
    """Draw other numbers for the gradient of each of two inputs."""

    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient), gradient + torch.randn_like(gradient)


class ScalesInPlace(torch.autograd.Function):
    """Draw in place into a transposed tensor."""

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, gradient):
        noise = torch.zeros_like(gradient).t()
        noise.normal_()
        return gradient * noise.t()


class DrawsInVain(torch.autograd.Function):
    """Draw numbers that no gradient depends on."""

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, gradient):
        torch.rand(3)
        return gradient * 2


def in_layers(x: Tensor, w: Tensor) -> Tensor:
    """Run two layers, with dropout in the forward."""
    y = DropsGradient.apply(x @ w)
    return functional.dropout(Noisy.apply(y.relu()), 0.3) @ w


def _matrices(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2] + 0, x[2:] + 0


CASES = {
    "noise": Case(program=lambda x: Noisy.apply(x).sin()),
    "dropout": Case(program=lambda x: DropsGradient.apply(x) + 1),
    "rounding at random": Case(program=lambda x: RoundsAtRandom.apply(x * 3)),
    "no tangent is needed for the numbers": Case(program=lambda x: Permutes.apply(x), size=(4, 3)),
    "in place": Case(program=lambda x: ScalesInPlace.apply(x).sin(), size=(5, 4)),
    "two after each other": Case(program=lambda x: Noisy.apply(DropsGradient.apply(x))),
    "two outputs": Case(program=lambda x: (Noisy.apply(x), DropsGradient.apply(x)), backward="each"),
    "twice": Case(program=lambda x: (Noisy.apply(x), DropsGradient.apply(x)), backward="twice"),
    "two outputs, one backward": Case(program=lambda x: (Noisy.apply(x), DropsGradient.apply(x)), backward="first"),
    "for each of two inputs": Case(program=lambda x, y: DrawsForEach.apply(x, y), arguments=_matrices, size=(4, 3)),
    "in layers": Case(program=in_layers, arguments=_matrices, size=(4, 2)),
    "the input is written": Case(program=lambda x: (x.mul_(2), Noisy.apply(x))[1]),
    "drawn in vain": Case(program=lambda x: DrawsInVain.apply(x), eager=("training",), breaks=("training",)),
}

test_called_directly, test_behind_dynamo = both_ways(CASES)


def assert_same_gradients(reference, candidate, use, *, seed=3):
    """Assert that ``use`` gets the same tensors from two functions, and leaves the generator in the same state."""
    found = []
    for call in (reference, candidate):
        torch.manual_seed(seed)
        found.append([*use(call), torch.get_rng_state()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize(
    "partitioner", [aotlab.default_partition, aotlab.min_cut_rematerialization_partition], ids=["default", "min cut"]
)
def test_each_backward_draws_new_numbers(partitioner):
    """The graph is kept, and backwards run from both outputs, from one, and for one of the inputs."""

    def program(x, y):
        z = DrawsForEach.apply(x, y)
        return z.sin(), Noisy.apply(z)

    def use(call):
        x, y = (torch.arange(12.0).reshape(3, 4).requires_grad_() for _ in range(2))
        a, b = call(x, y)
        total = a.sum() + b.sum()
        first = torch.autograd.grad(total, (x, y), retain_graph=True)
        second = torch.autograd.grad(total, (x, y), retain_graph=True)
        assert not torch.equal(first[0], second[0])
        return [*first, *second, *torch.autograd.grad(b.sum(), (x, y), retain_graph=True)]

    candidate = compiled(program, partitioner=partitioner)
    assert_same_gradients(program, candidate, use)
    assert (behind(candidate).calls.compiled, behind(candidate).calls.eager) == (1, 0)


def test_only_the_nodes_that_run_draw():
    """A backward for one input does not draw the numbers of another node."""

    def program(x, y):
        return Noisy.apply(x) * DropsGradient.apply(y)

    def use(call):
        x, y = (torch.arange(12.0).reshape(3, 4).requires_grad_() for _ in range(2))
        out = call(x, y).sum()
        one = torch.autograd.grad(out, x, retain_graph=True)
        other = torch.autograd.grad(out, y, retain_graph=True)
        return [*one, *other, *torch.autograd.grad(out, (x, y))]

    candidate = compiled(program)
    assert_same_gradients(program, candidate, use)
    assert behind(candidate).calls.compiled == 1


def test_varying_sizes():
    """One entry serves all sizes."""
    candidate = compiled(CASES["two after each other"].program, dynamic=True)
    for size in ((2, 3), (5, 7), (9, 4)):

        def use(call, size=size):
            x = torch.ones(size, requires_grad=True)
            return torch.autograd.grad(call(x).sum(), x)

        assert_same_gradients(CASES["two after each other"].program, candidate, use)
    assert len(behind(candidate).entries) == 1


def test_a_second_derivative_is_refused():
    """It would have to repeat the numbers of the first."""
    x = torch.ones(3, requires_grad=True)
    out = compiled(lambda x: Noisy.apply(x).sin())(x)
    with pytest.raises(DoubleBackwardError, match="it draws random numbers"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_inductor_draws_the_numbers_of_torch_compile(frontend):
    """In the forward and in the backward."""

    def use(call):
        x, w = torch.ones(4, 4, requires_grad=True), torch.full((4, 4), 0.1, requires_grad=True)
        return torch.autograd.grad(call(x, w).sum(), (x, w))

    torch.compiler.reset()
    candidate = compiled(in_layers, backend="inductor", frontend=frontend)
    assert_same_gradients(torch.compile(in_layers), candidate, use)
    if frontend == "direct":
        assert (behind(candidate).calls.compiled, behind(candidate).calls.eager) == (1, 0)
