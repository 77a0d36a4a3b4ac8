"""What the user adds to torch's classes and modules, and the compiled functions of a notebook, are read by traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine_helpers import behind, compiled

scale = 2.0


class Doubled:
    """An activation with a state."""

    factor = 2.0

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        """Multiply by the factor."""
        return t * self.factor


def _scaled(t: torch.Tensor) -> torch.Tensor:
    return t * scale


def test_the_activation_of_a_torch_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a module of torch holds is read with its globals, and another function is noticed."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, activation=_scaled, batch_first=True, dropout=0.0)
    x, f = torch.randn(1, 3, 4), compiled(layer)
    assert torch.equal(f(x), layer(x))
    monkeypatch.setitem(globals(), "scale", 5.0)
    assert torch.equal(f(x), layer(x))
    layer.activation = torch.sin
    assert torch.equal(f(x), layer(x))
    layer.activation = torch.cos
    assert torch.equal(f(x), layer(x))
    assert behind(f).calls.eager == 0


def test_an_object_that_a_torch_module_calls() -> None:
    """The state of the object is guarded."""
    torch.manual_seed(0)
    act = Doubled()
    layer = nn.TransformerDecoderLayer(4, 2, 8, activation=act, batch_first=True, dropout=0.0)
    x, f = torch.randn(1, 3, 4), compiled(layer)
    assert torch.equal(f(x, x), layer(x, x))
    act.factor = 3.0
    assert torch.equal(f(x, x), layer(x, x))
    assert behind(f).calls.eager == 0


ADDED: dict[str, tuple[type, str, Any, Any, Any]] = {
    "a method of tensors": (torch.Tensor, "twice", lambda t: t * 2, lambda t: t * 3, lambda x, _: x.twice()),
    "a property of tensors": (
        torch.Tensor, "halved", property(lambda t: t / 2), property(lambda t: t / 3), lambda x, _: x.halved),
    "a constant of tensors": (torch.Tensor, "unit", 5.0, 6.0, lambda x, _: x * x.unit),
    "a method of linear layers": (
        nn.Linear, "again", lambda self, v: self(v) * 2, lambda self, v: self(v) * 3, lambda x, m: m.again(x)),
    "a constant of linear layers": (nn.Linear, "gain", 2.0, 3.0, lambda x, m: m(x) * m.gain),
    "a constant that is read by name": (nn.Linear, "gain", 2.0, 3.0, lambda x, m: m(x) * getattr(m, "gain")),  # noqa: B009
    "a method of all modules": (
        nn.Module, "scaled", lambda self, v: self(v) * 2, lambda self, v: self(v) * 3, lambda x, m: m.scaled(x)),
    "a property of all modules": (
        nn.Module, "level", property(lambda self: 2.0), property(lambda self: 3.0), lambda x, m: m(x) * m.level),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDED)
def test_an_attribute_that_the_user_adds_to_a_class_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled function follows a change of the attribute, as eager does."""
    owner, attribute, before, after, function = ADDED[name]
    model, x = nn.Linear(3, 3), torch.randn(2, 3)

    def call(x: torch.Tensor) -> torch.Tensor:
        return function(x, model)

    monkeypatch.setattr(owner, attribute, before, raising=False)
    f = compiled(call)
    assert torch.equal(f(x), call(x))
    monkeypatch.setattr(owner, attribute, after)
    assert torch.equal(f(x), call(x))
    assert behind(f).calls.eager == 0
