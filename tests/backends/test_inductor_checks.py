"""The default backend raises where eager does, even where Inductor alone would compute a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, fx
from torch.nn import functional

import aotlab
from aotlab.backends.inductor_backend import drop_unused, keep_unused, with_checks
from aotlab.ir.fx_graphs import STAYS

INDEX = torch.tensor([1])


def outcome(function: Callable[..., Any], x: Tensor, *others: Any, grad: bool) -> Any:
    """Call with a copy of ``x``, a non-leaf if ``grad``. Return the result or the error, and the copy."""
    given = x.clone().requires_grad_() * 1 if grad else x.clone()
    torch.manual_seed(0)
    try:
        result = function(given, *others).tolist()
    except Exception as error:  # noqa: BLE001  # whatever it raises is compared
        result = (type(error), str(error))
    return result, given.tolist(), torch.rand(1).item()


def write_and_index(x: Tensor, i: Tensor) -> Tensor:
    """Write, and index some elements."""
    x.add_(1)
    return x[i] * 2


def unused_index(x: Tensor, i: Tensor) -> Tensor:
    """Index some elements and do not use them."""
    x.add_(1)
    x.gather(0, i)
    return x * 2


def negative(x: Tensor, i: Tensor) -> Tensor:
    """Index with an op that does not accept negative indices."""
    return x.index_select(0, i - 2)


def asserts(x: Tensor, i: Tensor) -> Tensor:
    """Assert without a message."""
    x.add_(1)
    torch._assert_async((i < 4).all())
    return x * 2


def loss(x: Tensor, i: Tensor) -> Tensor:
    """Compute a loss that requires values between 0 and 1."""
    return functional.binary_cross_entropy(x / 9 * i, torch.ones(4))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("function", "bad"),
    [(write_and_index, 9), (unused_index, 9), (negative, 0), (asserts, 9), (loss, -1)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_are_eagers(function: Callable[..., Any], bad: int, grad: bool) -> None:
    """The error, the writes before it, and the later random numbers equal eager's."""
    candidate = aotlab.compile(function, backend="inductor")
    x, good = torch.arange(4.0) + 1, INDEX + 1
    with torch.set_grad_enabled(grad):
        assert isinstance(outcome(candidate, x, good, grad=grad)[0], list | float)
        expected = outcome(function, x, torch.tensor([bad]), grad=grad)
        assert expected == outcome(candidate, x, torch.tensor([bad]), grad=grad)
    assert isinstance(expected[0], tuple)


def test_ops_that_inductor_has_no_code_for() -> None:
    """Ops that Inductor's own decomposition would draw or compute differently are run by eager's kernel."""

    def function(x: Tensor, i: Tensor) -> Tensor:
        torch.rand(3)  # drawn, though nobody uses it
        loss = functional.multilabel_margin_loss(x.view(1, 4), torch.tensor([[1, 2, -1, 0]]))
        return torch.bernoulli(x / 9) + loss

    candidate = aotlab.compile(function, backend="inductor")
    x = torch.arange(4.0)
    with torch._inductor.config.patch(fallback_random=True):
        assert outcome(function, x, INDEX, grad=False) == outcome(candidate, x, INDEX, grad=False)


def test_results_that_nobody_uses() -> None:
    """Unused results, also of ops with several results, are outputs during the compilation only."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    single = graph.call_function(torch.ops.aten.sort.default, (x,))
    double = graph.call_function(torch.ops.aten.neg.default, (x,))
    for node, value in ((single, (torch.ones(1), torch.ones(1))), (double, torch.ones(1))):
        node.meta.update(val=value)
        node.meta[STAYS] = True
    graph.output((x,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    count = keep_unused(module)
    output = next(iter(reversed(module.graph.nodes)))
    assert (count, len(output.args[0])) == (1, 3)
    drop_unused(module, count)
    assert (x,) == output.args[0]


def test_checks_are_for_kernels_that_can_say_so() -> None:
    """The checks are made only on the CPU."""
    asked: list[str] = []
    op = torch.ops.aten.index_select.default
    table = with_checks({op: lambda *args: asked.append("decomposed")})
    table[op](torch.ones(2, device="meta"), 0, torch.zeros(1, dtype=torch.int64, device="meta"))
    assert asked == ["decomposed"]
