"""Kernels that raise at run time: earlier writes have happened, and the error is eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotlab
from aotlab.errors import UsageError
from tests.engine_helpers import behind, compiled, leaf, nonleaf

GOOD, BAD = torch.tensor([1]), torch.tensor([9])


def outcome(function: Callable[..., Any], *args: Any) -> tuple[Any, list[Tensor]]:
    """Call with copies of the tensors; return the result or error, and the copies."""
    copies = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    given = [c * 1 if isinstance(c, Tensor) and c.requires_grad else c for c in copies]
    try:
        result = function(*given)
    except Exception as error:  # noqa: BLE001  # whatever it raises is compared
        result = (type(error), str(error))
    return result, [g.detach() for g in given if isinstance(g, Tensor)]


def raises_alike(
    function: Callable[..., Any], good: tuple[Any, ...], bad: tuple[Any, ...], make: Any = compiled
) -> Any:
    """Assert that a compiled function raises as eager does, and that its entry served the call before."""
    candidate = make(function)
    outcome(candidate, *good)
    (expected, written), (found, ours) = outcome(function, *bad), outcome(candidate, *bad)
    assert isinstance(expected, tuple)
    assert issubclass(expected[0], Exception)
    assert expected == found
    for theirs, mine in zip(written, ours, strict=True):
        assert torch.equal(theirs, mine)
    return candidate


def gather(x: Tensor, i: Tensor) -> Tensor:
    """Write, and look up."""
    x.add_(1)
    return x[i]


def scatter(x: Tensor, i: Tensor) -> Tensor:
    """Write before and after the kernel that may raise."""
    x.add_(1)
    y = x.scatter(0, i, 5.0)
    x.mul_(2)
    return y


def put(x: Tensor, i: Tensor) -> Tensor:
    """Write, and then some elements."""
    x.add_(1)
    x[i] = 5.0
    return x * 2


def look_up(x: Tensor, i: Tensor) -> Tensor:
    """Write a table, and look up."""
    x.add_(1)
    return nn.functional.embedding(i, x.view(4, 1))


def divide(x: Tensor, i: Tensor) -> Tensor:
    """Write, and divide by zero."""
    x.add_(1)
    return x + 12 // (i - 9)


def factor(x: Tensor, i: Tensor) -> Tensor:
    """Write, and factorize a matrix that may have no factorization."""
    x.add_(1)
    return torch.linalg.cholesky(x.sum() * (5 - i).view(1, 1))


def several(x: Tensor, i: Tensor) -> Tensor:
    """Write two inputs before the kernel that may raise."""
    x.add_(1)
    i.sub_(1)
    y = x.mul(2)
    y.add_(1)
    x.mul_(3)
    z = y.gather(0, i)
    x.zero_()
    return z


PROGRAMS = (gather, scatter, put, look_up, divide, factor, several)
INPUTS = {"inference": lambda: torch.arange(4.0), "training": lambda: leaf(4, seed=1)}


@pytest.mark.parametrize("mode", INPUTS)
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_what_was_written_before_an_error_is_written(function: Callable[..., Any], mode: str) -> None:
    """Inputs that are written before the kernel that raises keep the write; later writes do not happen."""
    x = INPUTS[mode]()
    candidate = raises_alike(function, (x, GOOD), (x, BAD))
    assert (len(behind(candidate).entries), behind(candidate).calls.eager) == (1, 1)


@pytest.mark.parametrize("mode", INPUTS)
@pytest.mark.parametrize("function", [gather, several], ids=lambda function: function.__name__)
def test_behind_dynamo(function: Callable[..., Any], mode: str) -> None:
    """Behind Dynamo, the error and the writes are eager's too."""
    torch.compiler.reset()
    x = INPUTS[mode]()
    make = lambda f: aotlab.compile(f, backend="eager", frontend="dynamo")  # noqa: E731
    raises_alike(function, (x, GOOD), (x, BAD), make)


@pytest.mark.parametrize("keep", [False, True])
def test_functions_of_upstreams_form(keep: bool) -> None:
    """In `aot_function`, the error and the writes are eager's too, even if its graphs may write their inputs."""
    make = lambda f: aotlab.aot_function(f, aotlab.nop, keep_inference_input_mutations=keep)  # noqa: E731
    raises_alike(gather, (torch.arange(4.0), GOOD), (torch.arange(4.0), BAD), make)


def test_modules() -> None:
    """Buffers are written as in eager, also in the flat calling convention for modules."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.table = nn.Embedding(4, 2)

        def forward(self, i: Tensor) -> tuple[Tensor]:
            self.seen.add_(1)
            return (self.table(i),)

    for make in (
        lambda module: aotlab.aot_module(module, aotlab.nop),
        lambda module: aotlab.aot_module_simplified(module, [GOOD], aotlab.nop),
    ):
        module = Counts()
        call = make(module)
        call(GOOD)
        with pytest.raises(IndexError, match="index out of range in self"):
            call(BAD)
        assert module.seen.item() == 2


def test_the_first_call_may_raise() -> None:
    """The first call, which compiles the function, may raise too."""
    candidate = compiled(gather)
    expected, found = outcome(gather, torch.arange(4.0), BAD), outcome(candidate, torch.arange(4.0), BAD)
    assert expected[0] == found[0]
    assert torch.equal(expected[1][0], found[1][0])


def test_several_autograd_nodes() -> None:
    """If a call has several autograd nodes, the error and the writes are eager's too."""

    def function(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        row = x[:2]
        x.add_(row.sum())
        return x[:2], x[i]

    candidate = raises_alike(function, (leaf(4), GOOD), (leaf(4), BAD))
    assert "# segment 1 of 2" in behind(candidate).entries[0].source


@pytest.mark.parametrize("mode", INPUTS)
def test_random_numbers_are_drawn_once(mode: str) -> None:
    """Random numbers before a kernel that raises are drawn once and written as in eager."""

    def function(x: Tensor, i: Tensor) -> Tensor:
        x.add_(torch.rand(4))
        y = x.gather(0, i)
        return y + torch.rand(1)

    candidate = compiled(function)
    outcome(candidate, INPUTS[mode](), GOOD)
    found = []
    for each in (function, candidate):
        torch.manual_seed(3)
        _, (x, _) = outcome(each, INPUTS[mode](), BAD)
        found.append((x, torch.rand(1)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_warnings_are_given_once() -> None:
    """A function that warns gives its warnings once in a call that raises."""

    def function(x: Tensor, i: Tensor) -> Tensor:
        warnings.warn("mind", UserWarning, stacklevel=1)
        return x.add_(1)[i]

    candidate = compiled(function)
    for i in (GOOD, BAD):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            outcome(function, torch.arange(4.0), i)
            expected = len(heard)
            outcome(candidate, torch.arange(4.0), GOOD) if i is GOOD and not behind(candidate).entries else None
            del heard[:]
            outcome(candidate, torch.arange(4.0), i)
        assert expected == len(heard) == 1


def test_the_error_stands_alone() -> None:
    """Eager's error has no link to the kernel's error."""
    candidate = compiled(gather)
    for _ in range(2):
        with pytest.raises(IndexError) as caught:
            candidate(torch.arange(4.0), BAD)
        assert caught.value.__context__ is None


def broken(error: BaseException) -> Callable[..., Any]:
    """Make a compiler whose callables raise."""

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            raise error

        return call

    return compiler


def test_an_error_that_eager_does_not_raise() -> None:
    """If eager does not raise, its result is returned with one warning."""
    candidate = aotlab.aot_function(lambda x: x.add_(1).sum(), broken(ValueError("no kernel")))
    x = torch.zeros(2)
    with pytest.warns(RuntimeWarning, match="its compiled form raised ValueError: no kernel"):
        result = candidate(x)
    assert (result.item(), x.tolist()) == (2.0, [1.0, 1.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        candidate(x)


def test_nothing_is_hidden_where_all_raises() -> None:
    """With ``config.fallback = "error"`` a kernel's error is raised if eager raises none, and the message says so."""
    candidate = aotlab.aot_function(lambda x: x.add_(1).sum(), broken(ValueError("no kernel")))
    with aotlab.config.patch(fallback="error"), pytest.raises(ValueError, match="no kernel") as caught:
        candidate(torch.zeros(2))
    assert caught.value.__notes__ == ["aotlab: eager did not raise this; the arguments are as eager left them"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("ours")], ids=lambda error: type(error).__name__)
def test_what_is_not_run_again(error: BaseException) -> None:
    """A call that ends with an interrupt or one of our errors is not run again."""
    candidate = aotlab.aot_function(lambda x: x.add_(1).sum(), broken(error))
    x = torch.zeros(2)
    with pytest.raises(type(error)):
        candidate(x)
    assert x.tolist() == [0.0, 0.0]


def compiled_once(function: Callable[..., Any]) -> Any:
    """Compile and call."""
    candidate = compiled(function)
    candidate(torch.arange(4.0), GOOD)
    return candidate


def test_a_graph_whose_ops_may_raise_writes_no_inputs() -> None:
    """A graph writes inputs itself only if none of its ops can raise, because a compiler may reorder kernels."""
    plain = compiled(lambda x, i: x.add_(i).sum())
    plain(torch.arange(4.0), GOOD)
    assert "x.copy_" not in behind(plain).entries[0].source
    assert "x.copy_" in behind(compiled_once(gather)).entries[0].source


def test_hooks_are_registered_once() -> None:
    """A hook that the function registers before the error is registered once, by the eager run."""
    calls = []

    def function(x: Tensor, i: Tensor) -> Tensor:
        x.register_hook(calls.append)
        return x.mul(2)[i]

    x = nonleaf(4)
    candidate = compiled(function)
    with pytest.raises(IndexError):
        candidate(x, BAD)
    x.sum().backward()
    assert len(calls) == 1
