"""The state of a compiled module is saved, loaded, copied, pickled and switched like the original module's state."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import aotlab
from tests.engine_helpers import behind, compiled
from tests.training.steps import both, check, everything
from tests.training.test_ten_steps import Net, loss_of, sgd

FRONTENDS = ("direct", "dynamo")
frontends = pytest.mark.parametrize("frontend", FRONTENDS)


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo):
    """Let no test find what another one compiled."""


class Special(nn.Sequential):
    """A module whose class does several things in its own way."""

    def __init__(self):
        super().__init__(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.temperature = 1.0
        self.loaded = 0
        self.register_load_state_dict_post_hook(_count_load)
        self._register_state_dict_hook(_add_version)

    def forward(self, x):
        """Scale by an attribute."""
        return super().forward(x) * self.temperature

    def train(self, mode=True):
        """Leave batch norm alone."""
        self.training = mode
        self[0].train(mode)
        return self

    def get_extra_state(self):
        """Keep the temperature, too."""
        return {"temperature": self.temperature}

    def set_extra_state(self, state):
        """Take it back."""
        self.temperature = state["temperature"]


def _count_load(module, keys):
    module.loaded += 1


def _add_version(module, state, prefix, metadata):
    state[prefix + "version"] = torch.tensor(2)


def warm(module, frontend="direct"):
    """Compile a module, and call it once."""
    made = compiled(module, frontend=frontend)
    made(torch.ones(4, 3)).sum().backward()
    return made


@frontends
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), Special], ids=["plain", "special"])
def test_state_has_the_keys_of_the_module(make, frontend):
    """State keys have no prefix. The compiled module, the original and a module around them load each other's state."""
    module, other = make(), make()
    made = warm(module, frontend)
    assert list(made.state_dict()) == list(module.state_dict())
    assert list(nn.Sequential(made).state_dict()) == list(nn.Sequential(module).state_dict())
    state = {key: value for key, value in made.state_dict().items() if key != "version"}
    other.load_state_dict(state)
    warm(make(), frontend).load_state_dict(state)
    nn.Sequential(made).load_state_dict({f"0.{key}": value for key, value in state.items()})
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="Missing key"):
        made.load_state_dict({})


@frontends
def test_a_module_that_does_things_in_its_own_way(frontend):
    """Methods, attributes and flags are the original's, whichever of the two one has at hand."""
    module = Special()
    made = warm(module, frontend)
    assert len(made) == 2
    assert made[0] is module[0]
    assert [type(each) for each in made] == [nn.Linear, nn.BatchNorm1d]
    assert made.eval() is made
    assert (module.training, made.training, module[0].training, module[1].training) == (False, False, False, True)
    module.train()
    assert made.training
    made.temperature = 3.0
    module[1].eval()
    x = torch.randn(4, 3)
    assert torch.equal(made(x), module(x))
    assert torch.equal(made(x), nn.Sequential.forward(module, x) * 3.0)
    state = {key: value for key, value in made.state_dict().items() if key != "version"}
    made.temperature = 1.0
    made.load_state_dict(state)
    assert (module.temperature, module.loaded) == (3.0, 1)
    del made.loaded
    assert not hasattr(module, "loaded")
    seen = []
    assert made.apply(seen.append) is made
    assert seen[-1] is module


@frontends
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(how, frontend):
    """A copy has its own parameters and hooks, and compiles separately."""
    module = Special()
    made = warm(module, frontend)
    made.register_forward_hook(_double)
    state = made.state_dict()
    other = {"deepcopy": copy.deepcopy, "pickle": _pickled, "save": _saved}[how](made)
    assert type(other) is type(made)
    assert other.orig_module is not module
    assert other[0].weight is other.orig_module[0].weight
    assert list(other.state_dict()) == list(state)
    assert other.compiled is not made.compiled
    x = torch.randn(4, 3)
    made[1].eval()
    other[1].eval()
    assert torch.equal(other(x), made(x))
    assert torch.equal(other(x), module(x) * 2)
    with torch.no_grad():
        other[0].weight.zero_()
    assert not torch.equal(other(x), made(x))
    if frontend == "direct":
        assert behind(other).calls.compiled == 3
        assert behind(other).number != behind(made).number


def _double(module, args, out):
    return out * 2


def _pickled(value):
    return pickle.loads(pickle.dumps(value))


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@aotlab.compile(backend="eager")
def decorated(x):
    """Double a tensor, under the name by which a pickle finds it."""
    return x * 2


def plain(x):
    """Double a tensor."""
    return x * 2


class Owner:
    """Has a method."""

    factor = 2

    def method(self, x):
        """Multiply."""
        return x * self.factor


def test_copies_of_functions():
    """A function's copy is the function itself.

    A function is pickled by its name, a method together with its object.
    """
    x = torch.ones(2)
    assert copy.deepcopy(decorated) is decorated
    assert _pickled(decorated) is decorated
    function = compiled(plain)
    function(x)
    assert copy.deepcopy(function) is function
    again = _pickled(function)
    assert again is not function
    assert torch.equal(again(x), function(x))
    assert again.calls.compiled == 1
    owner = Owner()
    method = compiled(owner.method)
    other = copy.deepcopy(method)
    owner.factor = 3
    assert (method(x).tolist(), other(x).tolist()) == ([3.0, 3.0], [2.0, 2.0])


def test_what_cannot_be_pickled_says_so():
    """A lambda has no name by which it could be found: that is pickle's own error."""
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(compiled(lambda x: x))


def resumed(way_of):
    """Make a training that is saved and goes on in a new module and optimizer halfway."""

    def build(compile_):
        model = Net(nn.BatchNorm1d(8), nn.Dropout(0.2))
        now = {"model": model, "run": compile_(model), "optimizer": sgd(model)}

        def step(n):
            if n == 5:
                way_of(now, compile_)
            optimizer = now["optimizer"]
            optimizer.zero_grad()
            loss = loss_of(now["run"](torch.randn(3, 4)))
            loss.backward()
            optimizer.step()
            return loss, everything(now["model"], optimizer)()

        return step, dict

    return build


def by_state(now, compile_):
    """Load the states of model and optimizer into new ones, by way of a file."""
    file = io.BytesIO()
    torch.save({"model": now["run"].state_dict(), "optimizer": now["optimizer"].state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    state = {key.removeprefix("_orig_mod."): value for key, value in saved["model"].items()}  # torch.compile's own
    now["model"] = Net(nn.BatchNorm1d(8), nn.Dropout(0.2))
    now["run"], now["optimizer"] = compile_(now["model"]), sgd(now["model"])
    now["model"].load_state_dict(state)
    now["optimizer"].load_state_dict(saved["optimizer"])


def into_the_same(now, compile_):
    """Load other numbers into the module that is compiled: nothing is compiled again."""
    now["model"].load_state_dict({key: value * 1.5 for key, value in now["model"].state_dict().items()})


def by_assignment(now, compile_):
    """Load parameters in the place of those that are there."""
    state = {key: value.clone() for key, value in now["model"].state_dict().items()}
    now["model"].load_state_dict(state, assign=True)
    now["optimizer"] = sgd(now["model"])


@both
@pytest.mark.parametrize("way_of", [by_state, into_the_same, by_assignment])
def test_training_goes_on(way_of, way):
    """After loading, the steps are eager's."""
    found = check(resumed(way_of), way)
    if way == "direct":
        assert found.entries == len(found.functions)
