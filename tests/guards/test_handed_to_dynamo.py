"""Calls that the direct frontend passes to Dynamo, and calls behind Dynamo, notice changes too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from tests.engine_helpers import behind, compiled

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]
FRONTENDS = pytest.mark.parametrize("frontend", ["direct", "dynamo"])
Factor = Callable[..., tuple[Tensor, ...]]


class Counting(nn.Module):
    """A model that only Dynamo can capture, because it counts its calls, around another one."""

    def __init__(self, inner: nn.Module, *, counts: bool) -> None:
        super().__init__()
        self.inner, self.counts, self.calls = inner, counts, 0
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        return self.inner(x) * self.scale


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a function's sum with respect to its input."""
    x = torch.ones(2, 3, requires_grad=True)
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


@FRONTENDS
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_on_the_backward_that_comes_later(kind: str, counts: bool, frontend: str) -> None:
    """A hook that is registered after the first call scales the gradient, and after its removal does not."""
    torch.manual_seed(0)
    model = Counting(nn.Linear(3, 3), counts=counts)
    candidate = compiled(model, frontend=frontend)
    before = gradient(candidate)
    handle = getattr(model.inner, kind)(lambda module, *gradients: (gradients[0][0] * 8,))
    assert torch.equal(8 * before, gradient(candidate))
    handle.remove()
    assert torch.equal(before, gradient(candidate))


@FRONTENDS
def test_two_objects_that_are_compared_by_identity(frontend: str) -> None:
    """A function that swaps an object finds the other one at the next call."""
    first, second = SimpleNamespace(), SimpleNamespace()
    holder = SimpleNamespace(a=first, b=second, now=first)

    def alternate(x: Tensor) -> Tensor:
        is_first = holder.now is holder.a
        holder.now = holder.b if is_first else holder.a
        return x * 2 if is_first else -x

    candidate = compiled(alternate, frontend=frontend)
    results = [candidate(torch.ones(())).item() for _ in range(6)]
    assert results == [2.0, -1.0] * 3


HIDDEN: dict[str, Any] = {
    "inner": lambda x: x * 7,
    "inner.weight": torch.full((3, 3), 5.0),
    "inner.bias": torch.full((3,), 5.0),
    "scale": torch.full((3,), 5.0),
}


@FRONTENDS
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("path", HIDDEN)
def test_an_attribute_that_hides_a_parameter_or_a_submodule(path: str, counts: bool, frontend: str) -> None:
    """An entry of a module's ``__dict__`` has priority over a parameter or submodule of the same name."""
    torch.manual_seed(0)
    model, x = Counting(nn.Linear(3, 3), counts=counts), torch.randn(2, 3)
    candidate = compiled(model, frontend=frontend)
    candidate(x)
    *owner, name = path.split(".")
    vars(model.get_submodule(".".join(owner)))[name] = HIDDEN[path]
    assert torch.equal(model(x), candidate(x))


DISTRIBUTIONS = """
import warnings, torch, aotlab
from torch.distributions import Distribution, Normal
warnings.simplefilter("ignore")
def sample(mean, deviation):
    return Normal(mean, deviation).log_prob(mean).sum()
candidate, mean, deviation = aotlab.compile(sample, backend="eager", frontend="{}"), torch.ones(3), torch.ones(3)
assert torch.equal(sample(mean, deviation), candidate(mean, deviation))
assert Distribution._validate_args
try:
    candidate(mean, -deviation)
except ValueError as error:
    print(error)
"""


@FRONTENDS
def test_distributions_go_on_checking_their_arguments(frontend: str) -> None:
    """Dynamo's first use in a process switches the checks of `torch.distributions` off; with aotlab they stay on."""
    command = [sys.executable, "-c", DISTRIBUTIONS.format(frontend)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    assert "parameter scale" in result.stdout


def test_a_hook_on_all_modules_that_comes_later() -> None:
    """A traced function guards the hooks on the backward of all modules."""
    layer = nn.Linear(3, 3)
    candidate = compiled(lambda x: layer(x))
    before = gradient(candidate)
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, gradients, _: (gradients[0] * 8,))
    try:
        assert torch.equal(8 * before, gradient(candidate))
    finally:
        handle.remove()
    assert torch.equal(before, gradient(candidate))
    assert len(behind(candidate).entries) == 1


@FRONTENDS
def test_distributions_that_check_nothing_are_compiled_whole(frontend: str) -> None:
    """A distribution without argument checks is part of one graph; the checks would read values of tensors."""

    def sample(mean: Tensor, deviation: Tensor) -> Tensor:
        return Normal(mean, deviation, validate_args=False).log_prob(mean).sum()

    mean, deviation = torch.ones(3), torch.ones(3)
    candidate = compiled(sample, frontend=frontend, fullgraph=True)
    assert torch.equal(sample(mean, deviation), candidate(mean, deviation))
