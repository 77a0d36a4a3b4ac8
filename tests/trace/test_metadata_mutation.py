"""Changes of an input's sizes, strides, offset and place in autograd's graph, made in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab.errors import RefusedError
from aotlab.events import CompileFailed, GraphBreak, StageFinished
from aotlab.ir.metadata import MutationType
from aotlab.verification import compare
from tests.engine_helpers import compiled, heard_events, leaf, metadata, nonleaf, record, refusing, same

STEPS: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda x: x.t_(),
    "squeeze_ a dim": lambda x: x.squeeze_(0),
    "squeeze_ dims": lambda x: x.squeeze_(dim=(0,)),
    "two steps": lambda x: x.unsqueeze_(0).transpose_(dim0=1, dim1=-1),
}
steps = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())


@steps
@pytest.mark.parametrize("make_input", [lambda: torch.randn(1, 3), lambda: torch.randn(4, 3)[2:3]])
def test_a_step_on_an_input(step, make_input):
    """The caller's tensor has the new sizes, also where it is written, saved, passed twice or returned."""

    def used(x, w):
        before = x + w
        step(x)
        return before, x * w

    def written(x, w):
        x.mul_(2)
        step(x)
        x.add_(1)
        return (x * w.sum()).sum()

    def returned(x, y):
        step(x)
        return x, y + 1

    same(used, make_input(), leaf(1))
    same(written, make_input(), leaf(1))
    same(returned, x := make_input(), x)
    with torch.no_grad():
        same(used, make_input(), leaf(1))


@steps
def test_a_step_on_an_input_with_more_to_it(step):
    """With a history or with returned views it is compiled. If another input shares memory, eager runs it."""

    def f(x):
        step(x)
        return x * 2

    def viewed(x):
        step(x)
        return x[0], x * 2

    same(f, nonleaf(1, 3))
    same(viewed, torch.randn(1, 3))
    x = torch.randn(1, 3)
    same(lambda x, y: (step(x), y + 1)[1], x, x.view(3), eagerly=True)


def test_metadata_of_a_step():
    """The records say that the sizes changed, by which steps, and that the epilogue does it."""

    def f(x):
        x.t_()
        x.unsqueeze_(dim=0)
        return x * 2

    g = compiled(f)
    g(torch.randn(2, 3))
    info = metadata(g).input_info[0]
    assert (info.mutates_metadata, info.mutates_data) == (True, False)
    assert info.mutation_type is MutationType.MUTATED_OUT_GRAPH
    assert info.metadata_steps == ("t_()", "unsqueeze_(dim=0)")
    source = record(g, "runtime").source
    assert "x.t_()\n" in source
    assert "copy_" not in source


@steps
def test_a_step_on_an_intermediate(step):
    """An intermediate whose metadata changed is returned together with values that were computed before the change."""

    def f(x):
        y = x * 2
        before = y + 1
        step(y)
        y.add_(1)
        return y, y[0] * 1, before

    same(f, torch.randn(1, 3))
    same(f, leaf(1, 3))


def behind_dynamo(function: Callable[..., Any], *args: Any, calls: int = 2, breaks: bool = False) -> None:
    """Assert that the function is eager's equal behind Dynamo, and that our engine compiles all that it is given.

    Unless ``breaks``, that shall be all of it in one graph.
    """
    torch._dynamo.reset()
    with heard_events() as heard:
        result = compare(
            function,
            args,
            candidate=lambda f: aotlab.compile(f, backend="eager", frontend="dynamo"),
            backward="all",
            calls=calls,
        )
    assert result.first is None, result.first
    assert [e for e in heard if isinstance(e, CompileFailed)] == []
    if not breaks:
        assert [e for e in heard if isinstance(e, GraphBreak)] == []
        assert len([e for e in heard if isinstance(e, StageFinished) and e.stage == "runtime"]) == 1


@steps
@pytest.mark.parametrize("make_input", [lambda: torch.randn(1, 3), lambda: nonleaf(1, 3)], ids=["plain", "nonleaf"])
def test_a_step_behind_dynamo(step, make_input):
    """Dynamo itself does not let such steps on an input into a graph; those on an intermediate it does."""

    def f(x):
        y = x * 2
        step(x)
        return y, x + 1

    def g(x):
        y = x * 2
        step(y)
        y.mul_(3)
        return y, x + 1

    behind_dynamo(f, make_input(), breaks=True)
    behind_dynamo(g, make_input())


# --- detach_ and requires_grad_


def _assigned(x, w):
    before = x * 2
    x.requires_grad = True
    return before, x * 3, x


def _written_before(x, w):
    x.mul_(2)
    x.requires_grad_()
    return x * x


def _taken(x, w):
    before = x * w
    x.requires_grad_(False)
    return before, x * w, x


def _written_after(x, w):
    x.requires_grad_(False)
    x.mul_(2)
    return x * 3


REQUIRES = {
    "assigned": _assigned,
    "nothing uses it": lambda x, w: (x.requires_grad_(), w * 2)[1],
    "written before": _written_before,
}


@pytest.mark.parametrize("program", REQUIRES.values(), ids=REQUIRES.keys())
def test_requires_grad_set_on_an_input(program):
    """A function that makes its argument require grad is compiled."""
    same(program, torch.randn(3), leaf(3))


@pytest.mark.parametrize("program", [_taken, _written_after])
def test_requires_grad_taken_from_an_input(program):
    """A function that makes its argument not require grad runs eagerly and says so."""
    same(program, leaf(3), leaf(3), eagerly=True)
    with refusing(RefusedError, match="changes whether `.*` requires grad"):
        compiled(program)(leaf(3), leaf(3))


def test_requires_grad_taken_and_given_back():
    """`requires_grad_(False)` and then `True` leaves the input unchanged.

    Values computed in between have no gradient.
    """

    def f(x):
        before = x * 2
        x.requires_grad_(False)
        between = x * 3
        x.requires_grad_(True)
        return before, between, x * 4

    same(f, leaf(3))


def test_requires_grad_of_a_nonleaf_is_eagers_error():
    """Only leaves can give it up."""

    def f(y, x):
        y.add_(1)
        x.requires_grad_(False)
        return y

    same(f, torch.ones(2), nonleaf(3), eagerly=True)


def test_what_eager_leaks_is_not_leaked():
    """A leaf's node that eager keeps for good is seen when the caller gives the leaf another shape; README says so."""

    def f(x):
        v = x * 2
        v.mul_(v)
        return x.detach() + 1

    made = compiled(f)
    for call in (f, made):
        x = torch.ones(1, 2, requires_grad=True)
        call(x)
        with torch.no_grad():
            x.t_()
        with pytest.raises(RuntimeError, match="invalid gradient") if call is f else nullcontext():
            x.sum().backward()
    assert made.calls.compiled == 1


@pytest.mark.parametrize("step", [lambda x: x.t_(), lambda x: x.swapdims_(0, 1)])
def test_an_input_is_saved_with_the_sizes_that_it_had(step):
    """The backward reads it, after the epilogue has changed the caller's tensor."""

    def f(x):
        y = x * 2
        step(y)
        return y @ y

    def g(x, w):
        y = x @ w
        step(x)
        return y

    same(f, nonleaf(2, 2))
    same(g, nonleaf(2, 2), leaf(2, 2), eagerly=True)
    behind_dynamo(g, nonleaf(2, 2), leaf(2, 2), breaks=True)


@pytest.mark.parametrize("first", [False, True])
def test_a_written_input_that_retains_its_gradient(first):
    """If the function also writes the input, the retained gradient moves with each write. Such a call runs eagerly."""

    def f(x):
        x.mul_(2)
        x.t_()
        return x * 1

    def use(g, *, retains):
        source = leaf(2, 3)
        x = source * 1
        if retains:
            x.retain_grad()
        g(x).sum().backward()
        return source.grad.tolist(), x.grad.tolist() if retains else None

    g = compiled(f)
    order = (first, not first, first)
    for retains in order:
        assert use(f, retains=retains) == use(g, retains=retains)
    assert (g.calls.compiled, g.calls.eager) == (order.count(False), order.count(True))
