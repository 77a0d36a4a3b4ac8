"""Numbers that change: after the second value one compilation serves all, beside eager, bit for bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

import aotlab
from aotlab import events
from tests.engine_helpers import compiled

FLOATS = tuple(0.1 * k + 0.03 for k in range(12))
INTS = tuple(range(2, 14))

#: A function of a tensor and a number, the numbers, and how many compilations serve all of them.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "a factor": (lambda x, s: (x * s).sin() * s, FLOATS, 2),
    "several steps, in the order of the program": (lambda x, s: x * (s * 0.1 * 0.2) + (1 - s) / 3, FLOATS, 2),
    "on the right of others": (
        lambda x, s: (x * (0.1 * s * 0.2), 0.1 * s + 0.9 * (1 - s), 0.1 * s * 0.2),
        FLOATS,
        2,
    ),
    "returned": (lambda x, s: (x * s, s, s * 0.1 * 0.2, -s), FLOATS, 2),
    "alpha": (lambda x, s: torch.add(x, x * 2, alpha=s), FLOATS, 2),
    "a written input": (lambda x, s: x.mul_(s), FLOATS, 2),
    "a fill": (lambda x, s: torch.full((5,), s) * x, FLOATS, 2),
    "bounds": (lambda x, s: x.clamp(max=s) + torch.where(x > s, x, s), FLOATS, 2),
    "of an integer tensor": (lambda x, s: torch.arange(5) * s + x, FLOATS, 2),
    "of a tensor without dimensions": (lambda x, s: x.sum() * s, FLOATS, 2),
    "a branch": (lambda x, s: x * s if s > 0.5 else x + s, FLOATS, 3),
    "a comparison that is no branch": (lambda x, s: (x * (s > 0.5) + (s >= 0.3 and s != 0.33), s < 0.7), FLOATS, 6),
    "rounded down": (lambda x, s: x * math.floor(s * 10) + math.floor(9 * s), FLOATS, 2),
    "asked for its type": (lambda x, s: x * s if isinstance(s, float) else x + 100, FLOATS, 2),
    "an int": (lambda x, n: x * n + n // 2, INTS, 2),
    "an int that is asked for its type": (lambda x, n: x * n if isinstance(n, int) else x + 100, INTS, 2),
    "a size to upsample to": (lambda x, n: functional.interpolate(x[None, None], size=n, mode="linear"), INTS, 2),
    "repetitions": (lambda x, n: x.repeat(n), INTS, 3),
    "the end of a slice": (lambda x, n: x[:n] * 2, INTS, 3),
}
#: Those whose number has to be known to trace them: each value is compiled for.
FIXED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "written as text": (lambda x, s: (x * 2, f"{s:.2f} {s}"), FLOATS[:4]),
    "a comparison as text": (lambda x, s: (x * 2, f"{s > 0.5}"), FLOATS[:8]),
    "its very type": (lambda x, s: x * s if type(s) is float else x + 100, FLOATS[:4]),
    "a root": (lambda x, s: x * math.sqrt(s), FLOATS[:4]),
    "rounded": (lambda x, s: x * round(s * 10), FLOATS[:4]),
    "a range": (lambda x, n: sum(x * k for k in range(n)), INTS[:4]),
    "zeros, and what is no number": (lambda x, s: x * s, (0.5, 0.0, -0.0, math.inf, -math.inf)),
    "of other types": (lambda x, s: x * s, (2, 2.0, True, 3, 3.0, False)),
    "a probability": (functional.dropout, FLOATS[:4]),
}


def seen(function: Callable[..., Any], x: Tensor, number: Any) -> list[str]:
    """Call a function and run a backward. Return the observables."""
    torch.manual_seed(1)
    result = function(x, number)
    leaves = pytree.tree_leaves(result)
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if roots:
        sum(root.square().sum() for root in roots).backward()
    shown = [leaf.detach().tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [repr(each) for each in (*shown, x.tolist(), None if x.grad is None else x.grad.tolist())]


def operand(name: str) -> Tensor:
    """Make the tensor that a program is called with."""
    return torch.linspace(-1, 2, 5).requires_grad_(name != "a written input")


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compilation_serves_all_numbers(name: str) -> None:
    """The first value is compiled for, the second brings the entry for all."""
    function, numbers, most = PROGRAMS[name]
    made = compiled(function)
    for number in numbers:
        assert seen(made, operand(name), number) == seen(function, operand(name), number)
    assert len(made.entries) <= most
    assert made.calls.eager == 0


@pytest.mark.parametrize("name", FIXED)
def test_numbers_that_have_to_be_known(name: str) -> None:
    """A function that reads the number itself is compiled for each number, or guards the condition that it read."""
    function, numbers = FIXED[name]
    made = compiled(function)
    for number in numbers:
        assert seen(made, operand(name), number) == seen(function, operand(name), number)
    assert made.calls.eager == 0


def counted(compilations: list[events.Event], event: events.Event) -> None:
    """Keep the compilations."""
    if isinstance(event, events.CompileFinished):
        compilations.append(event)


@pytest.mark.parametrize("name", PROGRAMS)
def test_behind_dynamo(name: str, fresh_dynamo: None) -> None:
    """Dynamo hands a float over as a tensor, and takes it out again: it stays a number."""
    function, numbers, most = PROGRAMS[name]
    made = torch.compile(function, backend="aotlab", options={"compiler": "eager"})
    compilations: list[events.Event] = []
    with events.listen(partial(counted, compilations)), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for number in numbers:
            assert seen(made, operand(name), number) == seen(function, operand(name), number)
    assert len(compilations) <= most + 1


def test_a_logged_number_behind_dynamo(fresh_dynamo: None) -> None:
    """A computation with a logged `.item()` is compiled, although the number differs at each call."""

    def step(x: Tensor, _: int) -> Tensor:
        loss = x.sin().sum().item()
        return x * loss

    made = torch.compile(step, backend="aotlab", options={"compiler": "eager"})
    compilations: list[events.Event] = []
    with events.listen(partial(counted, compilations)), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for k in range(1, 7):
            ours, theirs = (torch.linspace(0, k, 5) for _ in range(2))
            assert seen(made, ours, 0) == seen(step, theirs, 0)
    assert len(compilations) <= 3


def learned(rates: tuple[float, ...], make: Callable[..., Any], backend: Any) -> tuple[list[float], int]:
    """Make steps with different learning rates.

    Return where a parameter was after each step, and the number of compilations.
    """
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = make([parameter], lr=0.1)

    def step() -> None:
        optimizer.step()

    if backend == "aotlab":
        step = torch.compile(step, backend=backend, options={"compiler": "eager"})
    elif backend is not None:
        step = torch.compile(step, backend=backend)
    compilations: list[events.Event] = []
    found = []
    with events.listen(partial(counted, compilations)):
        for k, rate in enumerate(rates):
            parameter.grad = torch.full((3,), k - 3.0)
            optimizer.param_groups[0]["lr"] = rate
            step()
            found.append(parameter[0].item())
    return found, len(compilations)


@pytest.mark.parametrize(
    ("make", "beside"),
    [
        (torch.optim.SGD, None),
        # Dynamo's own form of these rounds otherwise than eager, of the first on torch 2.11
        (partial(torch.optim.SGD, momentum=0.9), "eager"),
        (torch.optim.Adam, "eager"),
        (partial(torch.optim.AdamW, foreach=False), "eager"),
    ],
    ids=["SGD", "momentum", "Adam", "AdamW"],
)
def test_learning_rates(make: Callable[..., Any], beside: str | None, fresh_dynamo: None) -> None:
    """Twelve learning rates in a compiled step need two compilations."""
    expected, _ = learned(FLOATS, make, beside)
    torch.compiler.reset()
    found, compilations = learned(FLOATS, make, "aotlab")
    assert found == expected
    assert compilations <= 2


def test_what_is_guarded_is_said() -> None:
    """The recompile reason names the number, and the guards state the assumptions about it."""
    made = compiled(lambda x, s: x * s if s > 0.5 else x + s)
    with aotlab.Report.record() as report:
        for number in (0.1, 0.2, 0.9):
            made(torch.ones(2), number)
    assert made.recompiles == (
        "`s` is 0.2 where the compiled entry expects 0.1",
        "the compiled entry expects `s <= 0.5`, which does not hold for this call",
    )
    sentences = report.guards.sentence.tolist()
    assert "`s` is of type float" in sentences
    assert "`s > 0.5`" in sentences


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("a branch", "repetitions")])
def test_by_inductor(name: str) -> None:
    """Inductor's kernels receive numbers as tensors without dimensions."""
    function, numbers, most = PROGRAMS[name]
    made = aotlab.compile(function)
    for number in numbers[:5]:
        x, y = operand(name), operand(name)
        ours, theirs = made(x, number), function(y, number)
        torch.testing.assert_close(ours, theirs)
        for result in (ours, theirs):
            first = pytree.tree_leaves(result)[0]
            if first.requires_grad:
                first.square().sum().backward()
        torch.testing.assert_close((x.detach(), x.grad), (y.detach(), y.grad))
    assert len(made.entries) <= (len(numbers[:5]) if name == "rounded down" else most)
