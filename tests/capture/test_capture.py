"""Capture: names of arguments, lifted inputs, and that nothing is run or copied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aotlab.capture import call as capture
from aotlab.capture.call import names_of_arguments
from aotlab.errors import PythonValueError
from aotlab.frontends.direct import FunctionTarget, ModuleTarget
from tests.engine_helpers import leaf, refusing


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (lambda x, y: None, (1, 2), {}, ["x", "y"]),
        (lambda x, y: None, (1,), {"y": 2}, ["x", "y"]),
        (lambda *rest: None, (1, [2]), {}, ["rest[0]", "rest[1][0]"]),
        (lambda x, *rest, k=1, **more: None, (1, 2), {"k": 3, "z": {"a": 4}}, ["x", "rest[0]", "k", "z['a']"]),
        (lambda opts: None, ({"w": [1, 2]},), {}, ["opts['w'][0]", "opts['w'][1]"]),
        (lambda x, /, y: None, (1, 2), {}, ["x", "y"]),
        (torch.add, (1, 2), {}, ["args[0]", "args[1]"]),
        (lambda: None, (), {}, []),
    ],
)
def test_names_of_arguments(function, args, kwargs, expected):
    """Each flat argument is named by the parameter that takes it."""
    assert names_of_arguments(function, args, kwargs) == expected


def test_bound_methods_do_not_count_self():
    """The first argument of a bound method is the one after self."""

    class Has:
        def method(self, x, y):
            return x

    assert names_of_arguments(Has().method, (1, 2), {}) == ["x", "y"]


def test_run_looks_and_does_nothing():
    """The function is not called, and no tensor is touched."""

    def f(x, n):
        raise AssertionError("called")

    x = leaf(2, 3)
    record, call = capture.run(FunctionTarget(f), (x, 4), {})
    assert call.values == (x, 4)
    assert call.values[0] is x
    assert (call.lifted_count, call.tensor_positions) == (0, (0,))
    assert record.training is True
    assert record.frontend == "direct"
    with torch.no_grad():
        quiet, _ = capture.run(FunctionTarget(f), (x, 4), {})
    assert (quiet.grad_mode, quiet.training) == (False, False)


def test_rebuild_nests_again():
    """Flat values go back into the caller's nesting, lifted ones apart."""
    module = nn.Linear(2, 2)
    _, call = capture.run(ModuleTarget(module), ({"a": torch.ones(1)},), {"k": [2]})
    assert call.lifted_count == 2
    lifted, args, kwargs = call.rebuild(["w", "b", "x", "two"])
    assert lifted == ["w", "b"]
    assert args == ({"a": "x"},)
    assert kwargs == {"k": ["two"]}


def test_modules_are_lifted():
    """Parameters are lifted first, then buffers, named by their path.

    A tied parameter is listed at each place with one identity.
    """
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.append(nn.Linear(2, 2))
    module[2].weight = module[0].weight
    record, call = capture.run(ModuleTarget(module), (torch.ones(3, 2),), {})
    named = {a.name: a.kind for a in record.arguments}
    assert named["0.weight"] == "parameter"
    assert named["1.running_mean"] == "buffer"
    assert list(named)[-1] == "input" or record.arguments[-1].kind == "input"
    kinds = [a.kind for a in record.arguments]
    assert kinds == sorted(kinds, key=["parameter", "buffer", "input"].index)
    places = [i for i, a in enumerate(record.arguments) if a.name in ("0.weight", "2.weight")]
    if len(places) == 2:
        assert call.state.same_as[places[1]] == places[0]


def test_refusals_name_the_argument():
    """An argument that cannot be guarded is named as the caller knows it."""
    with refusing(PythonValueError) as caught:
        capture.run(FunctionTarget(lambda x, opts: x), (torch.ones(1), {"set": {1}}), {})
    assert caught.value.argument == "opts['set']"
