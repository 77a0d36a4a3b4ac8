"""If eager saves a value in the memory of a written input, the compiled function does too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.maintenance.fuzz.compare import differences
from tests.engine_helpers import compiled, entry_of, leaf, nonleaf, same


def written(name: str) -> Callable[[Tensor], Tensor]:
    """Make a function that writes its argument by a method, and computes with it."""

    def function(x: Tensor) -> Tensor:
        getattr(x, name)()
        return x * 1

    return function


def returned(x: Tensor) -> Tensor:
    """Write the argument, and return it."""
    return x.tanh_()


def twice(x: Tensor) -> Tensor:
    """Write the argument by an op that saves it, and by an op that does not."""
    return x.exp_().add_(1)


def with_a_view(x: Tensor) -> Tensor:
    """Make a view with autograd before the argument is written."""
    before = x.view(3)
    x.tanh_()
    return before * 2 + x


def gradient(function: Callable[[Tensor], Tensor], change: str) -> Any:
    """Change the input or output through `.data`, and return the gradient."""
    a = torch.full((3,), 0.5, requires_grad=True)
    x = a * 1
    y = function(x)
    {"input": x, "output": y}[change].data.mul_(2)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    assert a.grad is not None
    return a.grad.tolist()


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("change", ["input", "output"])
@pytest.mark.parametrize(
    "function",
    [written("tanh_"), written("sigmoid_"), written("sqrt_"), returned, twice, with_a_view],
    ids=lambda f: f.__qualname__,
)
def test_changes_past_autograd(function: Callable[[Tensor], Tensor], change: str, frontend: str) -> None:
    """A later change through ``.data`` changes the gradient if it does in eager."""
    torch.compiler.reset()
    candidate = aotlab.compile(function, backend="eager", frontend=frontend)
    assert gradient(function, change) == gradient(candidate, change)


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("function", [written("tanh_"), returned, twice], ids=lambda f: f.__qualname__)
def test_changes_past_autograd_with_inductor(function: Callable[[Tensor], Tensor], frontend: str) -> None:
    """The gradient also sees such changes if Inductor has added values to the graphs."""
    torch.compiler.reset()
    candidate = aotlab.compile(function, backend="inductor", frontend=frontend)
    assert gradient(function, "input") == pytest.approx(gradient(candidate, "input"))


def test_what_was_computed_elsewhere_is_kept_there() -> None:
    """A saved value that was copied into an input keeps its own memory."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y.tanh())
        return x * 1

    def use(f: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
        a, x = leaf(3), nonleaf(3)
        out = f(x, a)
        x.data.mul_(2)
        out.sum().backward()
        assert a.grad is not None
        return a.grad.tolist()  # type: ignore[no-any-return]  # untyped in torch

    assert use(function) == use(compiled(function))


def test_all_else_is_eagers() -> None:
    """Writes that autograd sees raise as before, and nothing else changes."""
    function = written("tanh_")
    candidate = compiled(function)
    for each in (function, candidate):
        x = nonleaf(3)
        y = each(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="is at version 2; expected version 1"):
            y.sum().backward()
    assert "saved.keep(0, x)" in entry_of(candidate).source
    same(function, nonleaf(3))
    same(function, nonleaf(4, 3).t())


def by_data(a):
    """Write in the one way that eager does not count."""
    a.data.mul_(2)


def by_a_part_of_data(a):
    """Write so to a part."""
    a.data[0].mul_(2)


def without_grad(a):
    """Write without a history, and counted."""
    with torch.no_grad():
        a.mul_(2)


USES = {
    "sin": torch.sin,
    "square": lambda a: a * a,
    "checkpoint": lambda a: checkpoint(lambda value: value * value, a, use_reentrant=False),
    "parts": lambda a: a[0] * a[1],
    "mm": lambda a: a @ a,
}


@pytest.mark.parametrize("write", [by_data, by_a_part_of_data, without_grad])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_what_the_caller_writes_uncounted_before_the_backward(write, use, is_leaf, when):
    """A write that no version counter counts changes the gradient, as in eager, or raises eager's error."""

    def program(a):
        results = [USES[use](a)] if when != "before" else []
        write(a)
        return results + ([USES[use](a)] if when != "after" else [])

    def inputs():
        leaf = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]], requires_grad=True)
        return (leaf if is_leaf else leaf * 1,), {"leaf": leaf}

    def before(out, a):
        return [lambda: a.data.mul_(3)]

    assert differences(program, compiled(program), [inputs, inputs], backward="all", before=before) == []
