"""In-place random ops and random ops with ``out=``: the compiled call draws eager's numbers."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab.quirks import random_order
from tests.both_ways import Case, both_ways
from tests.engine_helpers import behind, compiled, same


def _transposed(x: Tensor) -> tuple[Tensor]:
    return (x.t() * 1,)


#: Draws into tensors whose strides are not in order, or that have gaps in their memory.
CASES = {
    "uniform_ into a view of an input": Case(program=lambda x: (x.t().uniform_(), x.t() + 1)[1], size=(4, 5)),
    "uniform_ into columns": Case(program=lambda x: (x[:, 1:4].uniform_(1, 2), x * 2)[1], size=(6, 5)),
    "normal_ into a transposed input": Case(program=lambda x: x.normal_() * 2, arguments=_transposed, size=(4, 5)),
    "normal_ into columns": Case(program=lambda x: (x[:, :3].normal_(2, 3), x.sin())[1], size=(6, 5)),
    "normal_ into transposed columns": Case(program=lambda x: (x.t()[1:4, ::2].normal_(), x * 2)[1], size=(7, 6)),
    "bernoulli_ into transposed columns": Case(
        program=lambda x: (x.t()[1:4, ::2].bernoulli_(0.3), x * 2)[1], size=(7, 6)
    ),
    "bernoulli_ by a tensor": Case(
        program=lambda x: x.bernoulli_(torch.full((5, 4), 0.5)), arguments=_transposed, size=(4, 5)
    ),
    "exponential_ into channels last": Case(
        program=lambda x: x.exponential_() + 1,
        arguments=lambda x: (x.contiguous(memory_format=torch.channels_last) * 1,),
        size=(2, 3, 4, 5),
    ),
    "geometric_ into permuted dimensions": Case(
        program=lambda x: (x * 1).permute(2, 0, 1).geometric_(0.5) * x.permute(2, 0, 1), size=(3, 4, 5)
    ),
    "random_ between two numbers": Case(program=lambda x: (x.t().random_(3, 90), x.t() + x.t())[1], size=(4, 5)),
    "random_ below a number": Case(program=lambda x: (x[:, ::2].random_(90), x * 2)[1], size=(4, 6)),
    "an intermediate like a transposed input": Case(
        program=lambda x: torch.empty_like(x).normal_() * x, arguments=_transposed, size=(4, 5)
    ),
}
if not random_order._goes_along_memory(torch.float32):
    del CASES["bernoulli_ into transposed columns"]  # on this processor it runs eagerly

test_called_directly, test_behind_dynamo = both_ways(CASES)


@pytest.mark.parametrize("name", ["uniform_ into a view of an input", "normal_ into columns", "random_ below a number"])
def test_varying_sizes(name):
    """One entry serves all sizes."""
    case = CASES[name]
    compiled_program = compiled(case.program, dynamic=True)
    for size in ((4, 5), (6, 7), (9, 30)):
        x = torch.ones(size)
        assert_same_draws(case.program, compiled_program, x)
    assert behind(compiled_program).calls.compiled == 3
    assert len(behind(compiled_program).entries) == 1


def assert_same_draws(program, compiled_program, *inputs):
    """Assert that a compiled program draws the numbers of another program, and leaves the generator in its state."""
    found = []
    for call in (program, compiled_program):
        torch.manual_seed(0)
        arguments = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
        result = call(*arguments)
        gradients = torch.autograd.grad(result.sum(), arguments) if result.requires_grad else ()
        found.append([result, *arguments, *gradients, torch.get_rng_state()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_inductor_draws_the_numbers_of_torch_compile(frontend):
    """Draws into transposed memory, in order, by kernels of torch and by Inductor's own kernels."""

    def program(x: Tensor) -> Tensor:
        x.t().uniform_()
        y = x[:, :3].normal_() + torch.empty_like(x.t()).exponential_().t()[:, :3]
        return y * 2

    x = torch.ones(5, 4)
    torch.compiler.reset()
    upstream = torch.compile(program)
    candidate = compiled(program, backend="inductor", frontend=frontend)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a notice that the call runs eagerly
        assert_same_draws(upstream, candidate, x)


def test_inductor_draws_between_two_numbers():
    """`random_` with two bounds draws the numbers of `torch.compile`, which are eager's."""
    candidate = compiled(lambda x: x.random_(3, 90) + 1, backend="inductor", frontend="direct")
    assert_same_draws(lambda x: x.random_(3, 90) + 1, candidate, torch.zeros(4, 5))


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_normal_numbers_for_a_vector_with_gaps_are_drawn_eagerly(frontend):
    """Eager's kernel for vectors with gaps draws other numbers than its kernel for contiguous vectors."""
    torch.compiler.reset()

    def program(x):
        return x[::2].normal_()

    if frontend == "direct":
        same(program, torch.rand(40), eagerly=True)
        same(program, torch.rand(40), eagerly=True, make=partial(aotlab.aot_function, fw_compiler=aotlab.nop))
    reason = r"into a tensor that is not contiguous, and a graph would draw them in another order than eager.*"
    text = reason + r", at .*test_random_fills\.py:\d+.*; draw into a contiguous tensor"
    candidate = compiled(program, frontend=frontend)
    with pytest.warns(RuntimeWarning, match=text):
        assert_same_draws(program, candidate, torch.ones(40))


_HALVES = torch.full((4, 5), 0.5)


_DRAWS = {
    "rand": lambda out: torch.rand((4, 5), out=out),
    "randn": lambda out: torch.randn((4, 5), out=out),
    "bernoulli": lambda out, halves: torch.bernoulli(halves, out=out),
    "normal": lambda out, halves: torch.normal(halves, halves, out=out),
}


@pytest.mark.parametrize("make", [lambda: torch.zeros(5, 4).t(), lambda: torch.zeros(4, 10)[:, ::2]], ids=["t", "gaps"])
@pytest.mark.parametrize("draw", _DRAWS.values(), ids=_DRAWS)
def test_random_numbers_for_an_out_with_other_strides_are_eagers(draw, make):
    """Kernels draw in the order of the memory that they write: `verify ops` found other numbers in `randn(out=)`."""
    more = (_HALVES,) * (draw.__code__.co_argcount - 1)
    same(draw, make(), *more, eagerly=True)
    same(draw, make().contiguous(), *more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_random_numbers_between_two(dtype):
    """`random_(from, to)` is compiled: its op's name is a keyword of Python, which the graph's code cannot contain."""
    same(lambda x: (x.random_(3, 90), x * 2)[1], torch.zeros(5, 4, dtype=dtype))
    same(lambda x: (x * 2).random_(-5, 5), torch.zeros(4, dtype=dtype))


def test_random_numbers_between_two_in_training():
    """`random_` may also fill a tensor that has a history."""
    x = torch.ones(4, requires_grad=True)
    same(lambda x: (x * 2).random_(0, 5) + x, x)
    same(lambda x: x.random_(0, 5) * 2, x * 1)
