"""On Inductor, a tensor that an in-place op fills is read after the op.

The ops are drawn masks, scatters and index writes.
"""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F  # noqa: N812  # as everybody writes it

import aotlab
from tests.engine_helpers import leaf, same

INDEX = torch.tensor([3, 1, 2, 0])
COLUMNS = torch.arange(7, -1, -1).expand(4, 8)


def beside_a_sum(change):
    """Fuse a loop that reads the result of ``change`` with a reduction."""

    def program(x, index, columns):
        made = change(x, index, columns) / 0.5
        return x.sum(1, keepdim=True) * x * made, made

    return program


PROGRAMS = {
    "dropout": lambda x, index, columns: F.dropout(x.sum(1, keepdim=True) * x, 0.5),
    "dropout_of_layer_norm": lambda x, index, columns: F.dropout(F.layer_norm(x, (8,)), 0.5),
    "dropout_of_softmax": lambda x, index, columns: F.dropout(x.softmax(1), 0.5) * x,
    "bernoulli": beside_a_sum(lambda x, index, columns: torch.empty_like(x).bernoulli_(0.5)),
    "scatter_reduce": beside_a_sum(
        lambda x, index, columns: torch.ones_like(x).scatter_reduce(1, columns, x.detach(), "prod")
    ),
    "scatter_add": beside_a_sum(lambda x, index, columns: torch.zeros_like(x).scatter_add(1, columns, x)),
    "index_put": beside_a_sum(lambda x, index, columns: torch.zeros_like(x).index_put((index,), x)),
    "index_add": beside_a_sum(lambda x, index, columns: torch.zeros_like(x).index_add(0, index, x)),
    "bool_index_put": beside_a_sum(
        lambda x, index, columns: torch.zeros_like(x, dtype=torch.bool).index_put((index,), x > 0)
    ),
    "put_into_itself": lambda x, index, columns: (h := x.softmax(1)).index_add(0, index, h),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_reads_come_after_writes(program, grad):
    """Results and gradients are eager's, with eager's random numbers."""

    def run(function):
        torch.manual_seed(0)
        x = leaf(4, 8, seed=1).detach().requires_grad_(grad)
        results = function(x, INDEX, COLUMNS)
        results = results if isinstance(results, tuple) else (results,)
        if grad:
            sum(result.sum() for result in results).backward()
        return [*(result.detach() for result in results), x.grad, torch.get_rng_state()]

    with torch._inductor.config.patch(fallback_random=True):
        compiled = run(aotlab.compile(program, frontend="direct"))
    torch.testing.assert_close(compiled, run(program))


DROPPED = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.ReLU(inplace=True)).eval()
BY_DECOMPOSITIONS = {
    "table": lambda function: aotlab.aot_function(function, aotlab.nop, decompositions=select_decomp_table()),
    "inductor": aotlab.compile,
}


@pytest.mark.parametrize("make", ["table", pytest.param("inductor", marks=pytest.mark.tier("full"))])
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_that_drops_nothing_returns_its_argument(grad, make):
    """A write into its result is a write into the argument, which is an input or an intermediate."""

    def program(x):
        y = x * 3
        return DROPPED(x), DROPPED(y), x * 1, y * 2

    with torch.set_grad_enabled(grad):
        same(program, leaf(3, 3).detach(), make=BY_DECOMPOSITIONS[make], backward=None)


def test_writes_by_inductors_kernels_are_counted():
    """A write by a compiled graph moves the version counter, so that a stale backward raises."""
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    y = (w * x).sum()
    aotlab.compile(lambda x: x.add_(1))(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
