"""Views that a function makes several of at once, returned after a write: eager protects them from writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab.ir.metadata import ViewStep
from aotlab.trace.views import with_several
from tests.engine_helpers import compiled, nonleaf, same

SLICE = ViewStep(target="aten.slice.Tensor", args=(1, 2, 4))


@pytest.mark.parametrize(
    ("make", "views", "expected"),
    [
        (lambda x: x.split(2, -1)[1], (SLICE,), ("aten.split.Tensor", (2, -1), 1)),
        (lambda x: x.split([1, 3], 1)[1], (SLICE,), ("aten.split_with_sizes.default", ([1, 3], 1), 1)),
        (
            lambda x: x.unbind(0)[2],
            (ViewStep(target="aten.select.int", args=(0, 2)),),
            ("aten.unbind.int", (0,), 2),
        ),
    ],
    ids=["split", "sizes", "unbind"],
)
def test_the_call_that_made_it(make: Any, views: tuple[ViewStep, ...], expected: tuple[Any, ...]) -> None:
    """A slice or select that autograd knows as one of several views becomes the call that made all of them."""
    after = (ViewStep(target="aten.unsqueeze.default", args=(0,)),)
    output = make(nonleaf(3, 4))
    target, args, item = expected
    step = ViewStep(target=target, args=args, item=item)
    assert with_several(views, output) == (step,)
    assert with_several((*views, *after), output.unsqueeze(0)) == (step, *after)


def test_what_stays() -> None:
    """Slices of one's own, and calls that are known, stay what they are."""
    x = nonleaf(3, 4)
    known = (ViewStep(target="aten.split.Tensor", args=(2, 1), item=1),)
    assert with_several((SLICE,), x[:, 2:4]) == (SLICE,)
    assert with_several((SLICE,), x.detach().split(2, 1)[1]) == (SLICE,)
    assert with_several(known, x.split(2, 1)[1]) == known
    assert with_several(None, x.split(2, 1)[1]) is None


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
    """A write to the output raises what it raises in eager, and writes nothing."""
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
    """Values, gradients and memory are eager's, in training and in inference."""
    same(function, nonleaf(3, 2))
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
    same(f, nonleaf(3, 2)[1:], eagerly=True)
