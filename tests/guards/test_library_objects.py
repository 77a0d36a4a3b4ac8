"""Guards on torch's objects: the attributes that the user's code names, and public ones that its calls read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import transforms
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from aotlab.errors import LeakedTensorError
from tests.engine_helpers import behind, compiled, refusing

FACTOR = 2.0
Case = tuple[Callable[[Tensor], Tensor], Callable[[], Any], str]


def _wrapping() -> Case:
    @functools.wraps(torch.relu)
    def scaled(x: Tensor) -> Tensor:
        return x * FACTOR

    return lambda x: scaled(x), lambda: globals().update(FACTOR=3.0), "FACTOR"


def _learning_rate() -> Case:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    group = optimizer.param_groups[0]
    return lambda x: x * optimizer.param_groups[0]["lr"], lambda: group.update(lr=3.0), "optimizer.param_groups"


def _schedule() -> Case:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = StepLR(optimizer, 1)
    optimizer.step()
    return lambda x: x * scheduler.get_last_lr()[0], scheduler.step, "scheduler._last_lr"


def _transform() -> Case:
    affine = transforms.AffineTransform(loc=0.0, scale=2.0)
    return lambda x: affine(x), lambda: setattr(affine, "scale", 3.0), "affine.scale"


def _list_of_modules() -> Case:
    layers = nn.ModuleList([nn.Identity()])
    layers.factor = 2.0  # type: ignore[assignment]
    return lambda x: layers[0](x) * layers.factor, lambda: setattr(layers, "factor", 3.0), "layers.factor"


def _average() -> Case:
    average = AveragedModel(nn.Identity())
    average.factor = 2.0  # type: ignore[assignment]
    return lambda x: x * average.factor, lambda: setattr(average, "factor", 3.0), "average.factor"  # type: ignore[operator]


def _data() -> Case:
    data = TensorDataset(torch.ones(3))
    data.factor = 2.0  # type: ignore[attr-defined]
    return lambda x: x * data.factor, lambda: setattr(data, "factor", 3.0), "data.factor"  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", [_wrapping, _learning_rate, _schedule, _transform, _list_of_modules, _average, _data])
def test_a_change_is_seen(case: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is a reason to compile again; without one nothing is compiled again."""
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    function, change, name = case()
    candidate, x = compiled(function), torch.ones(3)
    for _ in range(3):
        assert torch.equal(candidate(x), function(x))
    before = function(x)
    change()
    assert not torch.equal(function(x), before)
    for _ in range(3):
        assert torch.equal(candidate(x), function(x))
    log = behind(candidate)
    assert (len(log.entries), log.calls.eager) == (2, 0)
    (reason,) = log.recompiles
    assert name in reason


def test_what_the_function_changes_itself() -> None:
    """A function that steps a scheduler whose rate it reads is refused. The step would run only in the trace."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = StepLR(optimizer, 1)
    optimizer.step()

    def function(x: Tensor) -> Tensor:
        scheduler.step()
        return x * scheduler.get_last_lr()[0]

    with refusing(LeakedTensorError, match=r"the function assigns to `scheduler\.last_epoch`"):
        compiled(function)(torch.ones(3))


def test_caches_are_none_of_it() -> None:
    """Caches inside torch's objects neither refuse a call nor recompile it."""
    affine = transforms.AffineTransform(loc=0.0, scale=2.0)
    add = torch.ops.aten.add
    candidate = compiled(lambda x: add(affine.inv(affine(x)), x) * add.Tensor(x, x))
    x = torch.ones(3)
    for _ in range(3):
        assert candidate(x).tolist() == [4.0] * 3
        torch.ops.aten.add.out(x, x, out=torch.empty(3))
    log = behind(candidate)
    assert (len(log.entries), log.calls.eager) == (1, 0)
