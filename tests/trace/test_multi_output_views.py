"""Views that a function makes several of at once, returned after a write: eager protects them from writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aotlab
from tests.engine_helpers import compiled, nonleaf, same


def split(x: Tensor) -> Tensor:
    """Return a part."""
    x.mul_(2)
    return x.split(1)[0]


def transposed(x: Tensor) -> Tensor:
    """Return a view of a part."""
    x.mul_(2)
    return x.split([1, 2])[1].t()


def unbound(x: Tensor) -> Tensor:
    """Return a part of an intermediate."""
    y = x * 2
    y.mul_(2)
    return y.unbind(0)[1]


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("function", [split, transposed, unbound], ids=lambda function: function.__name__)
def test_the_caller_may_not_write_it(function: Callable[[Tensor], Tensor], frontend: str) -> None:
    """A write to the output raises eager's error and writes nothing."""
    torch.compiler.reset()
    candidate = aotlab.compile(function, backend="eager", frontend=frontend)
    found = []
    for each in (function, candidate):
        x = nonleaf(3, 2)
        with pytest.raises(RuntimeError, match="returns multiple views") as caught:
            each(x).mul_(3)
        found.append((str(caught.value), x.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("function", [split, transposed, unbound], ids=lambda function: function.__name__)
def test_it_is_eagers_in_all_else(function: Callable[[Tensor], Tensor]) -> None:
    """Values, gradients and memory are eager's, in training (on torch 2.15 by eager itself) and in inference."""
    same(function, nonleaf(3, 2), eagerly=torch.__version__.startswith("2.15"))
    same(function, torch.ones(3, 2), make=compiled)


def test_one_of_several_that_is_written_twice_is_compiled():
    """Autograd would not say where its gradient goes after the writes; nobody has to ask."""

    def f(x):
        one, _ = x.unbind(0)
        with torch.no_grad():
            one.zero_()
            one.add_(1)
        return x * 2

    same(f, nonleaf(2, 2))
    same(f, nonleaf(3, 2)[1:])
