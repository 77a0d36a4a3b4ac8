"""Ops that users define by `torch.library.custom_op`: functional ops with a gradient, and ops that mutate arguments."""

from __future__ import annotations

import pytest
import torch

import aotlab
from tests.engine_helpers import leaf


@torch.library.custom_op("aotlab_tests::double_sine", mutates_args=())
def double_sine(x: torch.Tensor) -> torch.Tensor:
    """Return a new tensor."""
    return torch.sin(x) * 2


@double_sine.register_fake
def _(x):
    return torch.empty_like(x)


double_sine.register_autograd(
    lambda ctx, gradient: gradient * 2 * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("aotlab_tests::running", mutates_args={"total", "count"})
def running(x: torch.Tensor, total: torch.Tensor, count: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
    """Add to a running total and to a counter; return the added value."""
    added = x * by
    total.add_(added)
    count.add_(1)
    return added


@running.register_fake
def _(x, total, count, *, by=1.0):
    return torch.empty_like(x)


@torch.library.custom_op("aotlab_tests::fill_range", mutates_args={"out"})
def fill_range(out: torch.Tensor, start: int = 0) -> None:
    """Write numbers in a row."""
    out.copy_(torch.arange(start, start + out.numel(), dtype=out.dtype).view_as(out))


@fill_range.register_fake
def _(out, start=0):
    return None


def trains(x, total, count):
    """Train through the functional one."""
    return (torch.ops.aotlab_tests.double_sine(x) * x).sum()


def writes_inputs(x, total, count):
    """Write two arguments of the caller's, and read one afterwards."""
    added = running(x.detach(), total, count, by=0.5)
    return added + total * count


def writes_a_view(x, total, count):
    """Write a row of an argument."""
    fill_range(total[1], 3)
    return total.sum() + x.detach()


def writes_a_local(x, total, count):
    """Write a tensor of the function's own."""
    out = torch.empty_like(total)
    fill_range(out=out)
    return x * out


def by_overload(x, total, count):
    """Call the overload itself, with default arguments."""
    torch.ops.aotlab_tests.fill_range.default(total)
    return x + total


PROGRAMS = (trains, writes_inputs, writes_a_view, writes_a_local, by_overload)


def outcome(function, sizes):
    """Call it for several sizes; return results, arguments and gradients."""
    found = []
    for size in sizes:
        x, total, count = leaf(2, size, seed=size), torch.ones(2, size), torch.zeros(())
        result = function(x, total, count)
        if result.requires_grad:
            result.sum().backward()
        found += [result.detach(), total, count, x.grad if x.grad is not None else torch.zeros(0)]
    return found


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("error:.*runs eagerly")
def test_as_eager(program, backend, frontend, dynamic):
    """It is compiled, with eager's results, writes and gradients."""
    compiled = aotlab.compile(program, backend=backend, frontend=frontend, dynamic=dynamic)
    for mine, wanted in zip(outcome(compiled, (3, 4, 5)), outcome(program, (3, 4, 5)), strict=True):
        torch.testing.assert_close(mine, wanted, **({"rtol": 0, "atol": 0} if backend == "eager" else {}))
    if frontend == "direct":
        assert (compiled.calls.eager, len(compiled.entries)) == (0, 1 if dynamic else 3)


def test_versions_and_graph():
    """A write is counted once, as in eager, and the graph holds the functional form."""
    count, total = torch.zeros(()), torch.zeros(2)
    compiled = aotlab.compile(writes_inputs, backend="eager")
    compiled(torch.ones(2), total, count)
    assert (total._version, count._version) == (1, 1)
    code = compiled.entries[0].records.trace.module.code
    assert "aotlab_tests_running_default" in code


def test_where_a_gradient_is_wanted():
    """A mutating custom op on tensors with gradients runs eagerly, because its functional form has no gradient."""
    x = leaf(2)
    compiled = aotlab.compile(lambda x: running(x * 1, x * 2, torch.zeros(())), backend="eager")
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        result = compiled(x)
    assert torch.equal(result, x)
