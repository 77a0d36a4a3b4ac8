"""Ten steps of a training, by eager and by us, compared bit for bit after each step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotlab
from aotlab.cache import CompiledFunction
from tests.engine_helpers import behind, keeping_functions

STEPS = 10

#: A function that takes a function or module and returns its compiled replacement.
Compile = Callable[[Any], Any]

#: Does the training step with the given number, and returns the results that are compared.
Step = Callable[[int], Any]

#: Sets up a training. Returns the step function, and a function that returns the state to compare after each step.
Build = Callable[[Compile], tuple[Step, Callable[[], Any]]]


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a training left behind after each step, and the functions that were compiled for it."""

    after: list[Any]
    functions: list[CompiledFunction] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def compiled(self) -> int:
        """How many calls compiled graphs served."""
        return sum(each.calls.compiled for each in self.functions)

    @property
    def eager(self) -> int:
        """How many calls ran eagerly."""
        return sum(each.calls.eager for each in self.functions)

    @property
    def entries(self) -> int:
        """How many graphs were compiled."""
        return sum(len(each.entries) for each in self.functions)

    @property
    def recompiles(self) -> list[str]:
        """Why some were compiled again."""
        return [reason for each in self.functions for reason in each.recompiles]


def snapshot(value: Any) -> Any:
    """Copy everything that can be compared: of tensors the bits and all that shows."""
    if isinstance(value, Tensor):
        bits = value.detach().clone(memory_format=torch.preserve_format)
        return (bits, value.stride(), value.requires_grad, value.is_leaf, type(value) is nn.Parameter, _gradient(value))
    if isinstance(value, Mapping):
        return {key: snapshot(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [snapshot(each) for each in value]
    return value


def _gradient(value: Tensor) -> Any:
    return snapshot(value.grad) if value.is_leaf else None


def differences(expected: Any, found: Any, where: str = "") -> Iterator[str]:
    """Say where two snapshots differ."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        same = expected.shape == found.shape and expected.dtype == found.dtype
        if not (same and torch.equal(expected.nan_to_num(), found.nan_to_num())) or not torch.equal(
            expected.isnan(), found.isnan()
        ):
            yield f"{where}: {expected} in eager, {found} here"
    elif isinstance(expected, dict) and isinstance(found, dict):
        if list(expected) != list(found):
            yield f"{where}: keys {list(expected)} in eager, {list(found)} here"
        for key in expected.keys() & found.keys():
            yield from differences(expected[key], found[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(expected) == len(found):
        for n, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{where}[{n}]")
    elif isinstance(expected, Tensor) or isinstance(found, Tensor) or expected != found:
        yield f"{where}: {expected} in eager, {found} here"


def everything(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], Any]:
    """Return what looks at parameters, gradients, buffers and the optimizer's state."""

    def look() -> Any:
        state = {} if optimizer is None else optimizer.state_dict()
        return {"parameters": dict(module.named_parameters()), "buffers": dict(module.named_buffers()), **state}

    return look


def run(build: Build, compile_: Compile, steps: int = STEPS) -> Ran:
    """Take some steps."""
    torch.manual_seed(0)
    ran = Ran(after=[])
    step, look = build(compile_)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in range(steps):
            result = step(n)
            ran.after.append(snapshot({"result": result, "state": look(), "random": torch.get_rng_state()}))
    ran.said = [str(each.message) for each in said]
    return ran


def eagerly(function: Any) -> Any:
    """Leave a function as it is."""
    return function


@contextmanager
def direct() -> Iterator[tuple[Compile, list[CompiledFunction]]]:
    """Compile by the direct frontend."""
    functions: list[CompiledFunction] = []

    def compile_(function: Any) -> Any:
        made = aotlab.compile(function, backend="eager", frontend="direct")
        functions.append(behind(made))
        return made

    yield compile_, functions


@contextmanager
def behind_dynamo() -> Iterator[tuple[Compile, list[CompiledFunction]]]:
    """Compile behind Dynamo."""
    functions: list[CompiledFunction] = []

    torch.compiler.reset()
    yield lambda function: torch.compile(function, backend=keeping_functions(functions)), functions
    torch.compiler.reset()


WAYS = {"direct": direct, "dynamo": behind_dynamo}

both = pytest.mark.parametrize("way", WAYS)


def check(build: Build, way: str, *, steps: int = STEPS, eager: bool = False) -> Ran:
    """Assert that ten steps are eager's, bit for bit; and that all calls were compiled, or some ran eagerly."""
    expected = run(build, eagerly, steps)
    with WAYS[way]() as (compile_, functions):
        found = run(build, compile_, steps)
    found.functions = functions
    old = way == "dynamo" and torch.__version__.startswith("2.11")
    if old and any(True for _ in differences(expected.after, found.after)):
        # its Dynamo rounds some sums of optimizers otherwise whatever comes behind it; then that is what we have to do
        torch.compiler.reset()
        alone = run(build, lambda function: torch.compile(function, backend="eager"), steps)
        for one, other in zip(expected.after, alone.after, strict=True):
            torch.testing.assert_close(other["state"]["parameters"], one["state"]["parameters"])
        expected = alone
    for n, (one, other) in enumerate(zip(expected.after, found.after, strict=True)):
        different = list(differences(one, other, f"after step {n}: "))
        assert different == [], different
    assert found.compiled > 0
    assert bool(found.eager) == eager, found.said
    return found
