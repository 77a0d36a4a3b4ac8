"""Ops that write several tensors: they are compiled, unless the written tensors share memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine_helpers import leaf, same


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
def test_lists_with_shared_memory_run_eagerly(function, make):
    """Eager writes the members in turn. Functionalization would compute all of them before any write."""
    if function is _step_twice and make().requires_grad:
        pytest.skip("eager has no gradient for it")
    said = "runs eagerly: .* writes one of several arguments that share memory, at .*test_several_writes_of_one_op"
    with pytest.warns(RuntimeWarning, match=said):
        same(function, make(), eagerly=True)


def test_lists_without_shared_memory_are_compiled():
    """In-place list ops are compiled if their written members are adjacent windows, or if a member is read twice."""

    def f(x, y):
        steps = [x * 2, y * 3]
        torch._foreach_add_([x[:2], x[2:], y], [steps[1][:2], x[2:] * 2, steps[0]], alpha=2)
        torch._foreach_addcmul_([x, y], steps, steps, 0.5)
        return x + y

    same(f, torch.arange(4.0), torch.ones(4))


def test_foreach_writes_move_version_counters():
    """An in-place op on a list of tensors moves each tensor's version counter, as in eager."""

    def f(a, b, factor):
        torch._foreach_mul_([a, b], factor)
        torch._foreach_add_([a], 1)

    assert same(f, torch.ones(3), torch.ones(2), torch.tensor(0.5))


def test_statistics_of_batch_norm_that_share_memory():
    """Eager writes the mean and then the variance to the shared memory. A graph would keep only one of them."""
    x, one = torch.randn(4, 3), torch.ones(4)
    same(lambda x, m: nn.functional.batch_norm(x, m[:3], m[:3], training=True), x, one, eagerly=True)
    two = torch.ones(2, 3)
    same(lambda x, m: nn.functional.batch_norm(x, m[0], m[1], training=True), x, two)
    x.requires_grad_()
    same(lambda x, m: nn.functional.batch_norm(x, m[:3], m[:3], training=True), x, one, eagerly=True)
    same(lambda x, m: nn.functional.instance_norm(x[None], m[:4], m[:4]), x, one, eagerly=True)
