"""The fast check of the values that a function reads.

Values that are reached by the same form of path share a loop. Each other value has one line.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aotlab.guards.reach import reach
from aotlab.guards.reached import fast_check
from tests.engine_helpers import behind, compiled


class Part(nn.Module):
    """A module of the user's with everything that one can have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_parameter("later", None)
        self.scale = 2.0

    def forward(self, x):
        """Use all of it."""
        return self.linear(x) * self.scale


def model(parts):
    """Make a model whose places are read by loops, if ``parts`` are many."""
    torch.manual_seed(0)
    return nn.Sequential(*[Part() for _ in range(parts)])


CHANGES = {
    "a flag": (lambda part: part.eval(), lambda part: part.train()),
    "a flag that is no bool": (lambda part: setattr(part, "training", 1), lambda part: setattr(part, "training", True)),
    "a submodule": (
        lambda part: part.__dict__.update(was=part.linear) or setattr(part, "linear", nn.Linear(2, 2)),
        lambda part: setattr(part, "linear", part.__dict__.pop("was")),
    ),
    "a submodule that is gone": (
        lambda part: part.__dict__.update(was=part._modules.pop("linear")),
        lambda part: setattr(part, "linear", part.__dict__.pop("was")),
    ),
    "a submodule more": (lambda part: part.add_module("more", nn.ReLU()), lambda part: delattr(part, "more")),
    "a hook": (
        lambda part: setattr(part, "handle", part.register_forward_hook(lambda *_: None)),
        lambda part: part.__dict__.pop("handle").remove(),
    ),
    "a forward of its own": (
        lambda part: setattr(part, "forward", lambda x: x),
        lambda part: delattr(part, "forward"),
    ),
    "a parameter that comes": (
        lambda part: setattr(part, "later", nn.Parameter(torch.ones(1))),
        lambda part: setattr(part, "later", None),
    ),
    "an attribute": (lambda part: setattr(part, "scale", 3.0), lambda part: setattr(part, "scale", 2.0)),
}


@pytest.mark.parametrize("parts", [2, 20])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_in_one_of_many_modules(kind, parts):
    """The check fails as long as one thing in one module is otherwise, and holds before and after."""
    change, undo = CHANGES[kind]
    module = model(parts)
    check = fast_check(reach(module).state)
    for part in (module[0], module[parts - 1]):
        assert check()
        change(part)
        assert not check()
        undo(part)
        assert check()


def test_the_value_follows():
    """The compiled model is eager's after such a change."""
    module = model(20)
    f, x = compiled(module), torch.ones(1, 2)
    assert torch.equal(module(x), f(x))
    module[13].linear = nn.Linear(2, 2)
    module[17].scale = 5.0
    assert torch.equal(module(x), f(x))
    assert len(behind(f).recompiles) == 1


def test_many_places_make_few_lines(monkeypatch):
    """The text that is compiled does not grow with the model, as long as its modules are torch's own."""
    sizes = []
    monkeypatch.setattr(
        "aotlab.guards.reached.compile",
        lambda text, *rest: sizes.append(len(text)) or compile(text, *rest),
        raising=False,
    )
    for count in (20, 200):
        fast_check(reach(nn.Sequential(*[nn.Linear(2, 2) for _ in range(count)])).state)
    assert sizes[1] == sizes[0]
