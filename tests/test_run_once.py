"""The function's body runs and prints once per compilation, however the call is served."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab.errors import RefusedError
from aotlab.frontends.direct import FunctionTarget

OUTSIDE = torch.ones(3)


def compiles(x: Tensor) -> Tensor:
    """Mutate an argument."""
    print("here")
    return x.mul_(2).sin()


def asks_for_a_value(x: Tensor) -> Tensor:
    """Look at a number."""
    print("here")
    return x * 2 if x.sum().item() > 0 else x


def reads_the_clock(x: Tensor) -> Tensor:
    """Read the clock."""
    print("here")
    return x + time.perf_counter() * 0


def uses_what_is_no_argument(x: Tensor) -> Tensor:
    """Use a tensor from the module."""
    print("here")
    return x + OUTSIDE


def copies_values(x: Tensor) -> Tensor:
    """Make a tensor of tensors."""
    print("here")
    return torch.tensor([x[0], x[1]])


def raises(x: Tensor) -> Tensor:
    """End with an error of the user's."""
    print("here")
    raise ValueError(x.shape)


@pytest.mark.parametrize(
    "function", [compiles, asks_for_a_value, reads_the_clock, uses_what_is_no_argument, copies_values, raises]
)
@pytest.mark.parametrize("fallback", ["eager", "error"])
def test_traced_once_and_printed_once(
    function: Callable[..., Any], fallback: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the call is compiled, refused, left to eager, or ends with an error of the function's own."""
    traces = 0
    run = FunctionTarget.run

    def counted(*args: Any) -> Any:
        nonlocal traces
        traces += 1
        return run(*args)

    monkeypatch.setattr(FunctionTarget, "run", counted)
    compiled = aotlab.compile(function, backend="eager", frontend="direct")
    with aotlab.config.patch(fallback=fallback), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(RefusedError, ValueError):
            compiled(torch.ones(3))
    assert traces == (2 if function is asks_for_a_value else 1)  # the second trace has symbols for values
    assert capsys.readouterr().out == "here\n"


def test_a_trace_in_vain_is_not_heard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs that share memory as no base can express are traced once, and then run eagerly."""
    traces = 0
    run = FunctionTarget.run

    def counted(*args: Any) -> Any:
        nonlocal traces
        traces += 1
        return run(*args)

    def function(x: Tensor, y: Tensor) -> Tensor:
        print("here")
        return x.as_strided((2,), (1,), 1) * y.sum()

    def outcome(call: Callable[..., Tensor]) -> tuple[list[float], str]:
        memory = torch.arange(4.0)
        result = call(memory[:3], memory)
        return result.tolist(), capsys.readouterr().out

    monkeypatch.setattr(FunctionTarget, "run", counted)
    compiled = aotlab.compile(function, backend="eager", frontend="direct")
    assert outcome(compiled) == outcome(function)
    assert (traces, compiled.calls.compiled) == (1, 0)
