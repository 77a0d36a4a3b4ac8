"""What somebody found who used aotlab for the first time: each was a crash, silently wrong, or not understood."""

from __future__ import annotations

import warnings

import pytest
import torch

from aotlab import config
from tests.engine_helpers import compiled, leaf, same


def _apply(x):
    return x.apply_(lambda value: value + 1)


def _apply_between(x):
    return (x * 2).apply_(lambda value: value + 1) * x


def _map(x):
    return x.map_(x * 2, lambda value, other: value + other)


def _map2(x):
    return x.map2_(x * 2, x * 3, lambda value, second, third: value + second * third)


@pytest.mark.parametrize("function", [_apply, _apply_between, _map, _map2], ids=lambda f: f.__name__)
def test_what_calls_python_for_each_element_runs_eagerly(function):
    """A trace has no elements: `apply_` and the like read memory that was not there, and ended the interpreter."""
    with pytest.warns(RuntimeWarning, match=r"runs eagerly: `\w+_` calls Python with each element .*test_stranger"):
        same(function, torch.arange(3.0), eagerly=True)


def test_what_calls_python_for_each_element_of_a_gradient_runs_eagerly():
    """In the backward of a function of the user's, which no function mode sees, that is noticed too."""

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.clone().apply_(lambda value: value * 3)

    with pytest.warns(RuntimeWarning, match="`apply_` calls Python"):
        same(Tripled.apply, leaf(3), eagerly=True)


def _add_twice(x):
    torch._foreach_add_([x, x], 1.0)
    return x * 2


def _scale_overlapping(x):
    torch._foreach_mul_([x[:3], x[1:]], 2.0)
    return x * 2


def _cross(x):
    torch._foreach_mul_([x[:2], x[2:]], [x[2:], x[:2]])
    return x * 2


def _add_by_overload(x):
    torch.ops.aten._foreach_add_.Scalar([x, x], 1.0)
    return x * 2


def _swap(x):
    torch._foreach_copy_([x[:2], x[2:]], [x[2:], x[:2]])
    return x * 2


def _step_twice(x):
    torch._fused_sgd_(
        [x, x], [torch.ones(4), torch.ones(4)], [], lr=0.1, momentum=0.0, weight_decay=0.0, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip
    return x * 2


@pytest.mark.parametrize(
    "function",
    [_add_twice, _scale_overlapping, _cross, _add_by_overload, _swap, _step_twice],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("make", [lambda: torch.arange(4.0), lambda: leaf(4) * 1], ids=["inference", "training"])
def test_lists_whose_members_share_memory_are_written_one_after_the_other(function, make):
    """Functionalization computes all from the values before any write, so eager runs such a call."""
    if function is _step_twice and make().requires_grad:
        pytest.skip("eager has no gradient for it")
    with pytest.warns(RuntimeWarning, match="runs eagerly: .* share.* memory, at .*test_stranger"):
        same(function, make(), eagerly=True)


def test_lists_whose_members_lie_apart_are_compiled():
    """Windows beside each other, and a tensor that is read twice, are no reason."""

    def f(x, y):
        steps = [x * 2, y * 3]
        torch._foreach_add_([x[:2], x[2:], y], [steps[1][:2], x[2:] * 2, steps[0]], alpha=2)
        torch._foreach_addcmul_([x, y], steps, steps, 0.5)
        return x + y

    same(f, torch.arange(4.0), torch.ones(4))


def test_the_recompile_limit_is_told_once():
    """Each further shape runs eagerly without another word."""
    ours = compiled(lambda x: x * 2, dynamic=False)
    with config.patch(recompile_limit=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [ours(torch.ones(n)).tolist() for n in range(1, 7)] == [[2.0] * n for n in range(1, 7)]
    assert ["recompile_limit" in str(each.message) for each in caught] == [True]


def test_help_shows_the_docstring_of_what_was_compiled():
    """That of the class is about the engine."""

    def step(x):
        """Take a step."""
        return x

    assert compiled(step).__doc__ == "Take a step."
