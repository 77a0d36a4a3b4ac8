"""Environment variables that a function reads are guarded; one that sets them is refused."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import EscapeError
from tests.engine_helpers import behind, compiled, refusing

NAME = "AOTLAB_TEST_FACTOR"


def by_item(x: Tensor) -> Tensor:
    """Read one."""
    return x * int(os.environ[NAME])


def by_method(x: Tensor) -> Tensor:
    """Read one that may be missing."""
    return x * int(os.environ.get(NAME, "1"))


def by_function(x: Tensor) -> Tensor:
    """Read one by the function."""
    return x * int(os.getenv(NAME) or 1)


@pytest.mark.parametrize("function", [by_item, by_method, by_function], ids=lambda function: function.__name__)
def test_a_variable_that_changes(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another value is compiled for, with the reason; an old one finds its entry."""
    candidate = compiled(function)
    found = []
    for value in ("2", "3", "2"):
        monkeypatch.setenv(NAME, value)
        found.append(candidate(torch.ones(())).item())
    assert found == [2.0, 3.0, 2.0]
    assert len(behind(candidate).entries) == 2
    assert behind(candidate).recompiles[0].startswith("os.environ is <environment of")


def test_functions_that_read_none_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that do not read the environment are not compiled again when it changes."""
    candidate = compiled(torch.sin)
    candidate(torch.ones(()))
    monkeypatch.setenv(NAME, "9")
    candidate(torch.ones(()))
    assert len(behind(candidate).entries) == 1


def test_a_function_that_sets_one() -> None:
    """A function that sets an environment variable is refused, and the environment is restored."""

    def function(x: Tensor) -> Tensor:
        os.environ[NAME] = "5"
        return x * 2

    before = dict(os.environ)
    with refusing(EscapeError, match=r"leaves a global setting changed: os\.environ"):
        compiled(function)(torch.ones(2))
    assert before == dict(os.environ)


def test_what_is_shown() -> None:
    """The repr of the environment does not show its values, and `restore` restores them."""
    now = internals.Environment()
    assert repr(now) == f"<environment of {len(now)} variables>"
    assert len(now) > 3
    os.environ[NAME] = "1"
    assert now != internals.Environment()
    now.restore()
    assert NAME not in os.environ


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"])
def test_variables_that_inductor_sets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor sets variables when it first compiles. The new entry serves its own call and the next ones."""
    monkeypatch.setenv(name, "before")  # so that it is as before after the test

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        os.environ[name] = str(int(os.environ.get(name, "0").replace("before", "0")) + 1)
        return graph.forward

    candidate = compiled(by_method, backend=compiler)
    assert [candidate(torch.ones(())).item() for _ in range(3)] == [1.0] * 3
    assert os.environ[name] == "1"
    assert behind(candidate).calls.eager == 0
    internals.Environment().restore()
    assert os.environ[name] == "1"
