"""In-place random ops and random ops with ``out=``: the compiled call draws eager's numbers, or eager runs."""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import compiled, same

_FILLS = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.5),
    "bernoulli_ by a tensor": lambda x: x.bernoulli_(torch.full((4, 3), 0.5)),
    "bernoulli_ of a part": lambda x: x[1:].bernoulli_(0.5),
}


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("fill", _FILLS.values(), ids=_FILLS)
def test_random_writes_to_non_contiguous_tensors_run_eagerly(fill, frontend):
    """A graph would draw eager's numbers in another order."""
    torch.compiler.reset()
    if frontend == "direct":
        same(fill, torch.rand(3, 4).t(), eagerly=True)
    reason = r"into a tensor that is not contiguous, and a graph would draw them in another order than eager.*"
    text = reason + r", at .*test_random_fills\.py:\d+.*; draw into a contiguous tensor"
    candidate = compiled(lambda x: fill(x), frontend=frontend)

    def use(call):
        torch.manual_seed(0)
        x = torch.ones(3, 4).t()
        return [call(x), x, torch.get_rng_state()]

    with pytest.warns(RuntimeWarning, match=text):
        found = use(candidate)
    torch.testing.assert_close(use(fill), found, rtol=0, atol=0)


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
