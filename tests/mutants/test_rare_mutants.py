"""Each rare mistake is caught by a program that was written for it, and the engine without it passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch

import aotlab
from tests.engine_helpers import compiled
from tests.guards.two_calls import ROOTS, described, var
from tests.mutants import MUTANTS, RARE, Mutant
from tests.trace.test_none_gradients import Two

pytestmark = pytest.mark.tier("quick")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function and the maker of the arguments of each call.

    ``look`` returns further facts about a call's results.
    """

    function: Callable[..., Any]
    calls: Sequence[Callable[[], tuple[torch.Tensor, ...]]]
    look: Callable[[Any], Any] = lambda out: None
    partitioner: Callable[..., Any] = aotlab.default_partition


def seen(program: Program, function: Callable[..., Any], number: int) -> Any:
    """Make a call. Return its observables, also if it raises, because the arguments may have changed by that time."""
    ROOTS.clear()
    arguments = program.calls[number]()
    try:
        out = function(*arguments)
        more = program.look(out)
        tensors = [each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, torch.Tensor)]
        differentiable = [each for each in tensors if each.requires_grad]
        if differentiable:
            torch.autograd.backward([each.sum() for each in differentiable])
        result = described(out), more
    except RuntimeError as error:
        result = str(error)
    return result, [described(each) for each in arguments], gradients()


def gradients() -> list[Any]:
    """Return the gradients of all leaves of the call."""
    return [None if root.grad is None else described(root.grad) for root in ROOTS]


def differs(program: Program) -> bool:
    """Return whether one of the calls differs from eager's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = compiled(program.function, partitioner=program.partitioner)
        return any(
            seen(program, program.function, number) != seen(program, f, number) for number in range(len(program.calls))
        )


# --- the programs ------------------------------------------------------------------------------------------------


def asks_for_leaf(x):
    """Write in a way that is allowed for both, and say which it is."""
    with torch.no_grad():
        x.mul_(2)
    return x * 3, x.is_leaf


def two_dtypes(x):
    """Call one op on two tensors that differ only in their dtype, and return the dtypes of the results."""
    a, b = (x * 1).exp(), (x.double() * 1).exp()
    return a, b, str(a.dtype), str(b.dtype)


def are_none(found):
    """Return for each gradient whether it is None."""
    return [each is None for each in found]


def write_one(x, y):
    """Write an argument, and compute with the other."""
    x.mul_(2)
    return y * 3


def windows_at(offset):
    """Make two windows of one buffer; the second begins at ``offset``."""

    def make():
        buffer = torch.arange(1.0, 7.0)
        return buffer[:3], buffer[offset : offset + 3]

    return make


SCALES: list[Fraction] = []


def by_object(x):
    """Read an object's value, which depends on no attribute that the code mentions."""
    return x * float(SCALES[0])


def with_scale(value):
    """Replace the object by another one, at the same address if no other object is there."""

    def make():
        gone = id(SCALES.pop()) if SCALES else None
        made = [Fraction(value)]
        while id(made[-1]) != gone and len(made) < 1000:
            made.append(Fraction(value))
        SCALES.append(made[-1])
        return (torch.ones(1),)

    return make


def view_and_more(x):
    """Return a view and a value computed from it."""
    v = x.view(-1)
    return v, v * v


def before_and_after(x):
    """Compute something from an argument that is written then."""
    before = x * 5
    x.mul_(2)
    return before, x * 3


def two_orders(x):
    """Call an op on a matrix and on its transpose, and return the strides of the results."""
    a, b = x * 2, x.t() * 2
    return a, b, a.stride(), b.stride()


def ones(grad):
    """Make a leaf, or a tensor computed from a leaf."""
    return lambda: (var([[1.0, 2.0], [3.0, 4.0]], grad=True, nonleaf=not grad),)


def clone_of_the_input(x, y):
    """Compute with a clone of an argument that is written then; a partitioner may keep the argument in its place."""
    clone = x.detach().clone()
    x.mul_(y)
    return (clone * y).sum() + x.sum()


def two_histories():
    """Make a leaf, and a tensor computed from a leaf."""
    return var([1.0, 2.0], grad=True, nonleaf=True), var([3.0, 4.0], grad=True)


PROGRAMS = {
    "stale window guard": Program(function=write_one, calls=(windows_at(1), windows_at(2))),
    "mutated input saved": Program(
        function=clone_of_the_input,
        calls=(two_histories,),
        partitioner=aotlab.min_cut_rematerialization_partition,
    ),
    "stale leaf guard": Program(function=asks_for_leaf, calls=(ones(grad=False), ones(grad=True))),
    "undefined tangents as zeros": Program(
        function=lambda x, y: Two.apply(x, y),
        calls=(two_histories,),
        look=lambda out: [
            each is None for each in torch.autograd.grad(out[0].sum(), ROOTS, retain_graph=True, allow_unused=True)
        ],
    ),
    "dtype not in the key": Program(function=two_dtypes, calls=(ones(grad=False),)),
    "objects known by address": Program(function=by_object, calls=[with_scale(n) for n in range(1, 20)]),
    "views unseen": Program(
        function=view_and_more,
        calls=(ones(grad=True),),
        look=lambda out: described(torch.autograd.grad(out[1].sum(), out[0], retain_graph=True)),
    ),
    "history after the write": Program(function=before_and_after, calls=(ones(grad=False),)),
    "strides not in the key": Program(function=two_orders, calls=(ones(grad=False),)),
}


def test_each_has_its_program():
    """And a name that no other mutant has."""
    assert {mutant.name for mutant in RARE} == set(PROGRAMS)
    assert len({mutant.name for mutant in MUTANTS + RARE}) == len(MUTANTS) + len(RARE)
    assert all(mutant.breaks.endswith(".") for mutant in RARE)


@pytest.mark.parametrize("mutant", RARE, ids=lambda mutant: mutant.name)
def test_the_program_catches_the_mutant(mutant: Mutant):
    """It differs from eager with the mutant, and neither before nor after."""
    program = PROGRAMS[mutant.name]
    assert not differs(program)
    with mutant.installed():
        assert differs(program), mutant.breaks
    assert not differs(program)
