"""In-place results of another dtype than their destination: eager casts some and refuses others."""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import same

ATEN = torch.ops.aten


def of_detached_part(op):
    """Let ``op`` write an alias of a part, which knows no base."""

    def f(x):
        op(x[1:].detach())
        return x + 1

    return f


def of_intermediate(op):
    """Return a function that applies ``op`` to a transposed intermediate."""

    def f(x):
        y = x + 1
        y.t_()
        op(y)
        return y

    return f


WHERE = pytest.mark.parametrize("where", [of_detached_part, of_intermediate])


@WHERE
@pytest.mark.parametrize(
    "op",
    [
        lambda y: torch.mul(y, 0.5, out=y),
        lambda y: torch.sin(y, out=y),
        lambda y: torch._foreach_mul_([y], 0.5),
        lambda y: ATEN.mul_.Scalar(y, 0.5),
    ],
    ids=["out", "sin", "foreach", "overload"],
)
def test_what_eager_refuses_to_cast(op, where):
    """An in-place cast that eager refuses raises eager's error, also for detached tensors and intermediates."""
    same(where(op), torch.tensor([[-1, 1], [-1, 0]]), eagerly=True)


@WHERE
@pytest.mark.parametrize(
    "op",
    [lambda y: y.mul_(2), lambda y: y.masked_fill_(y > 0, 2), lambda y: y.copy_(y * 1.5)],
    ids=["mul", "masked_fill", "copy"],
)
def test_what_eager_casts_or_need_not(op, where):
    """An in-place cast that eager allows is compiled."""
    same(where(op), torch.tensor([[-1, 1], [-1, 0]]))


def test_an_input_that_was_passed_several_times():
    """A tensor that is passed twice becomes a view of a synthetic base, and the refused cast runs eagerly."""

    def f(a, b):
        a.unsqueeze_(0)
        a.mul_(2)
        torch.mul(a, 0.5, out=a)
        return b

    x = torch.tensor([[-1, 1], [-1, 0]])
    same(f, x, x, eagerly=True)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: ATEN.t_.default(x),
        lambda x: ATEN.unsqueeze_(x, 1),
        lambda x: ATEN.squeeze_.dims(x, [0]),
        lambda x: ATEN.detach_.default(x),
    ],
    ids=["t", "unsqueeze", "squeeze", "detach"],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_steps_by_their_overloads(step, requires_grad):
    """In-place ops that are called by their ATen overload run eagerly, like the methods of the same name."""

    def f(x):
        y = x * 2
        step(y)
        ATEN.mul_.Tensor(y, y + 1)
        return y

    same(f, torch.randn(2, 2, requires_grad=requires_grad), eagerly=True)


@pytest.mark.parametrize(
    "op", [lambda y: ATEN.addmm_.default(y, y, y), lambda y: ATEN.copy_.default(y[0], y[:, 1])], ids=["addmm", "copy"]
)
def test_overloads_that_read_what_they_write(op):
    """An overload that reads the memory that it writes runs eagerly and gives eager's value or error."""

    def f(x):
        op(x)
        return x + 1

    same(f, torch.arange(1.0, 5.0).reshape(2, 2), eagerly=True)
