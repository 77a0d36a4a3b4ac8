"""Ops that write memory that they also read. Eager raises or reads the new values; such calls run eagerly."""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import compiled, nonleaf, same


def of_intermediate(op):
    """Let ``op`` write a tensor that the function made."""

    def f(x):
        y = x * 1
        op(y)
        return y

    return f


def of_input(op):
    """Let ``op`` write the input."""

    def f(x):
        op(x)
        return x + 1

    return f


WHERE = pytest.mark.parametrize("where", [of_intermediate, of_input])


@WHERE
@pytest.mark.parametrize(
    "op",
    [
        lambda y: torch.take(y, torch.zeros_like(y[1:], dtype=torch.int64), out=y[1:]),
        lambda y: torch.sin(y.view(-1)[1:], out=y.view(-1)[:-1]),
        lambda y: torch.mm(y, y, out=y),
        lambda y: torch.sum(y, 0, out=y[0]),
        lambda y: torch.cat([y[1:], y[:1]], out=y),
        lambda y: torch.max(y, 0, out=(y[0], torch.zeros_like(y[0], dtype=torch.int64))),
        lambda y: y.addmm_(y, y),
        lambda y: y.masked_scatter_(y > 1, y),
        lambda y: y.index_add_(0, torch.zeros_like(y[0], dtype=torch.int64), y),
        lambda y: y.put_(torch.zeros_like(y, dtype=torch.int64), y),
    ],
    ids=["take", "sin", "mm", "sum", "cat", "max", "addmm_", "masked_scatter_", "index_add_", "put_"],
)
def test_what_reads_what_it_writes(op, where):
    """Eager's value or error, whichever it is."""
    same(where(op), torch.arange(1.0, 5.0).reshape(2, 2), eagerly=True)


@WHERE
@pytest.mark.parametrize(
    "op",
    [
        lambda y: torch.mul(y, 2, out=y),
        lambda y: torch.where(y > 1, y, y * 2, out=y),
        lambda y: y.add_(y),
        lambda y: y.__setitem__(slice(None), y),
        lambda y: y.__imul__(y),
        lambda y: y[:, 1].sub_(y[:, 0]),  # another column of the same rows
    ],
    ids=["mul", "where", "add_", "setitem", "imul", "column"],
)
def test_what_may_write_what_it_reads(op, where):
    """Element by element: these are compiled."""
    same(where(op), torch.arange(1.0, 5.0).reshape(2, 2))


OUTS = {
    "several": lambda x, out: torch.max(x, 1, out=(out, torch.zeros_like(out, dtype=torch.int64))),
    "list": lambda x, out: torch.unbind_copy(x, out=[out, torch.zeros_like(out)]),
    "resized": lambda x, out: torch.mul(x, 2, out=out),
    "cast": lambda x, out: torch.mul(x[0], 2, out=out.double()),
    "not written": lambda x, out: torch.empty(2, out=out),
    "by its overload": lambda x, out: torch.ops.aten.mul.out(x[0], x[1], out=out),
    "draws in another order": lambda x, out: torch.normal(x, 1.0, out=torch.zeros(2, 2).t()),
}


@WHERE
@pytest.mark.parametrize("kind", OUTS)
def test_out_that_runs_eagerly(kind, where):
    """An `out` runs eagerly if the op resizes it, casts to it, writes several of them or leaves it uninitialized."""
    same(where(lambda y: OUTS[kind](y, torch.zeros(2))), torch.arange(1.0, 5.0).reshape(2, 2), eagerly=True)


@pytest.mark.parametrize("out", [lambda: torch.zeros(3, 2), lambda: torch.zeros(4, 2)[1:]])
@pytest.mark.parametrize("of_view", [False, True])
def test_out_that_is_compiled(out, of_view):
    """An `out` with the result's own sizes is compiled, for an input, a view of an input and an intermediate."""

    def f(x, y, out):
        made = torch.empty_like(x)
        end = 2 if of_view else 3
        torch.add(x[:end], y[:end], out=made[:end] if of_view else made)
        with torch.no_grad():
            return torch.mul(x, 3, out=out) if not of_view else torch.mul(x[:2], 3, out=out[:2]), made[:end] * 2

    x = torch.arange(6.0).reshape(3, 2)
    same(f, x, x + 1, out())
    if not of_view:
        same(f, x, x + 1, nonleaf(3, 2))


@pytest.mark.parametrize("device", [{}, {"device": "cpu"}])
def test_a_random_op_draws_once(device):
    """A random op draws once: the trace finds the shape of its result without drawing a number."""
    f = compiled(lambda out: torch.normal(1.5, 0.3, [2, 3], **device, out=out))
    drawn = []
    for call in (f, f, lambda out: torch.normal(1.5, 0.3, [2, 3], **device, out=out)):
        torch.manual_seed(0)
        drawn.append((call(torch.zeros(2, 3)).tolist(), torch.rand(1).item()))
    assert drawn[0] == drawn[1] == drawn[2]
    assert (f.calls.compiled, f.calls.eager) == (2, 0)


class KeepsNothing(torch.autograd.Function):
    """Saves None beside a tensor."""

    @staticmethod
    def forward(ctx, x):
        """Save both."""
        ctx.save_for_backward(x, None)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        """Use the tensor."""
        x, nothing = ctx.saved_tensors
        assert nothing is None
        return grad * x.cos()


def test_a_function_that_saves_none():
    """An undefined saved tensor is not watched for writes."""
    same(KeepsNothing.apply, torch.ones(3, requires_grad=True))


@pytest.mark.parametrize(
    "write",
    [
        lambda y: torch.nn.functional.relu(y, inplace=True),
        lambda y: torch.nn.functional.elu(y, 1.0, True),
        lambda y: y.mul_(2),
    ],
)
def test_what_overlaps_itself_is_not_written(write):
    """Eager has an error for it."""
    same(lambda x: write(x.expand(2, 3)), torch.ones(3), eagerly=True)
