"""Inputs that are written, alias each other and are returned, in the combinations that upstream's tests cover.

Upstream's AOTAutograd raises if it is called, so aotlab itself computes the results. The tests of single writes, views,
modes and duplicates are in ``tests/trace`` and ``tests/capture``; this module combines them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine_helpers import compiled, leaf, same
from tests.test_pipeline import HARMLESS, poison

MODES = ("inference", "training")


def alone(x):
    """Pass it alone."""
    return (x,)


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and a function that makes its arguments from a tensor of shape (4, 3) that may be written.

    ``inference`` and ``training`` are parts of the reason why the call runs eagerly in that mode, or "" if it is
    compiled.
    """

    program: Callable[..., Any]
    arguments: Callable[[torch.Tensor], tuple[Any, ...]] = alone
    inference: str = ""
    training: str = ""


def around(x):
    """Pass a tensor among a number, nothing and another tensor."""
    return None, x, 3, torch.ones(3)


def two(x):
    """Pass two tensors that have nothing in common."""
    return x, x.detach() * 2


def itself_and_view(x):
    """Pass a tensor and a view of it, with another between."""
    return x, torch.ones(4, 3), x.view(-1)


def views_alone(x):
    """Pass two views that overlap, of a base that is no argument."""
    return x[:3], x[1:]


def views_apart(x):
    """Pass two views that share a base and no memory."""
    return x[:2], x[2:]


def leaves_apart(x):
    """Pass leaves over one storage that share no memory."""
    flat = torch.arange(12.0)
    return flat[:6].requires_grad_(x.requires_grad), flat[6:].clone() if x.requires_grad else flat[6:]


def two_bases(x):
    """Pass alternating views of two bases, bases after their views, and a separate tensor."""
    other = torch.arange(12.0).view(4, 3)
    return x[0], other.view(-1), torch.ones(3), x, other[1:]


def plain_pair_and_leaf(x):
    """Pass two aliases that require no grad, and a tensor that does."""
    shared = torch.arange(3.0)
    return shared, shared.view(3, 1), x


class Doubles(torch.autograd.Function):
    """Writes its argument, says so, and returns it."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Passes(torch.autograd.Function):
    """Returns its very argument."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


# --- one input is written


def with_nothing_and_numbers(nothing, x, n, y):
    """Write an input among arguments that are no tensors."""
    x.mul_(n)
    return nothing, x * y, n


def written_and_returned(x):
    """Return a written input, a view of it, and a value computed from it."""
    x.mul_(2)
    return x, x.view(-1), x * 1


def returned_in_between(x):
    """Return a copy from before a write and the input itself after the next one."""
    x.add_(1)
    before = x.clone()
    x.mul_(3)
    return before, x


def in_three_ways(x):
    """Write for autograd, without it and around it."""
    x.mul_(2)
    with torch.no_grad():
        x.mul_(3)
    x.detach().add_(1)
    return (x * x).sum()


def hidden_twice(x):
    """Write around autograd only, before and after a use."""
    x.detach().mul_(2)
    y = x.sin()
    x.data.add_(1)
    return y


def beside_a_mean(x):
    """Pass a tensor of zeros before it."""
    return torch.zeros(4, 3), x


def average(mean, x):
    """Update a running average of the input under no_grad."""
    with torch.no_grad():
        mean.lerp_(x, 0.1)
    return (x - mean).square().sum()


def by_a_function_that_says_so(x):
    """Let a custom function write and declare it, and use its result."""
    y = Doubles.apply(x)
    return y, y * 3


def through_a_custom_view(x):
    """Write an input, and return it by way of a custom function that only passes it on."""
    x.mul_(2)
    return Passes.apply(x), x * 1


def of_some_outputs(x, y):
    """Return views, one of which requires grad, and a result that does not."""
    x.mul_(2)
    return x.t(), y.t(), (y * 2).view(-1), x.detach() * 3


def made_to_require_grad(x, y):
    """Copy a value that requires grad into a plain input, and return a view of the input."""
    y.copy_(x * 3)
    return y.view(-1), x * 1


def rows_from_others(x, y):
    """Fill rows of one input from the other, and the other from the first."""
    x[0] = y[1]
    y[2:] = x[:2] * 2
    return x.sum() + (y * y).sum()


def strided_window(x):
    """Write through a window with given strides."""
    x.as_strided((2, 2), (3, 1), 1).mul_(5)
    return x * x


# --- sizes and values of one input are written


def turned(x):
    """Turn an input around, and return a result and a view."""
    x.transpose_(0, 1)
    return x * 2, x.reshape(-1)


def turned_and_written(x):
    """Turn it around, write, turn it back and write again."""
    x.t_()
    x.mul_(2)
    x.t_()
    x[0].add_(1)
    return x.sum(), x


def turned_beside_intermediates(x, y):
    """Transpose one input in place, and return views of an intermediate."""
    x.transpose_(1, 0)
    t = y * 2
    return t.unsqueeze(0), t.transpose(1, 0), x.unsqueeze(0), t.view(-1)


# --- inputs that alias each other


def writes_first(x, between, view):
    """Write the tensor whose view is passed, too."""
    x.add_(between)
    return x + view.view(4, 3)


def writes_view(x, between, view):
    """Write the view, and return aliases of the tensor."""
    view.mul_(2)
    return between + 1, x.t(), view[1:]


def writes_both(x, between, view):
    """Write both by turns and read in between."""
    x.mul_(2)
    read = view * 1
    view.add_(1)
    return read, x, view.view(4, 3) * between


def alias_of_either(a, b):
    """Write one of two views and return views of both."""
    a.add_(1)
    return b.view(-1), a[0], (a * 2).sum()


def in_turn(a, b):
    """Write overlapping views in turn, each with values of the other."""
    a.mul_(b + 1)
    b.add_(a[-1:].clone())
    return a.sum() - b.sum()


def only_one(a, b):
    """Write one of two tensors that share memory at most."""
    a.detach().mul_(2)
    return (a * 3).sum() + b.sum()


def of_bases_by_turns(row, flat, alone, x, rest):
    """Write views of two bases. One base is passed after its view."""
    row.mul_(2)
    alone.add_(row)
    flat.add_(1)
    return x.sum() + rest.sum(), alone


def everything_at_once(row, flat, alone, x, rest):
    """Return views of bases, of inputs and of intermediates, and inputs, after writes to several."""
    x.add_(1)
    rest.mul_(2)
    t = alone * row
    return t, t.view(-1), row, flat, x.t(), rest.unsqueeze(0), t.unsqueeze(-1), alone


def pair_without_grad(a, b, x):
    """Write aliases that require no grad, and use a tensor that does."""
    a.add_(1)
    b.mul_(2)
    return x * a + x.sum() * b.view(-1)


def turned_alias(x, between, view):
    """Turn a tensor around whose view is passed, too."""
    x.t_()
    return x.sum() + view.sum(), between


def of_which_input(x, between, view):
    """Return views of each of two aliases. The base of each view is the alias that made it."""
    return view[1:], x[1:], x.view(-1)[2:], view.view(3, 4), between * 2


# --- views of intermediates


def of_an_intermediate_and_itself(x):
    """Return views of a result before and after the result itself, with a write between."""
    t = x * 2
    first = t.view(-1)
    t.mul_(3)
    return t.unsqueeze(0), t, first


def turned_intermediate(x):
    """Turn a result in place and return views of it."""
    t = x.sin()
    t.t_()
    return t, t.view(-1) if t.is_contiguous() else t.t().view(-1), t[0]


def without_grad_beside(x):
    """Return views of a result, one of which was made without grad."""
    t = x * 2
    with torch.no_grad():
        quiet = t.view(-1)
    return t[0], quiet, t.detach()


def through_a_linear(x):
    """Write a result of a linear layer, as ReLU in place does, and return both names."""
    t = nn.functional.linear(x, torch.ones(3, 3))
    again = t.relu_()
    return t.sum(), again.view(-1), again


def several_times(x):
    """Return the same result, and the same view of it, in several places."""
    t = x.exp()
    v = t.view(-1)
    return t, v, t, [v, {"v": v}], t.view(-1)


#: Sizes change in place, of a base whose views are arguments too.
SIZES = "changes the sizes or the history of `x`, an argument that shares memory with another one"
CASES = (
    Case(with_nothing_and_numbers, around),
    Case(written_and_returned),
    Case(returned_in_between),
    Case(in_three_ways),
    Case(hidden_twice),
    Case(average, beside_a_mean),
    Case(by_a_function_that_says_so),
    Case(through_a_custom_view, training="autograd does not treat it as a view of"),
    Case(of_some_outputs, two),
    Case(made_to_require_grad, two),
    Case(rows_from_others, two),
    Case(strided_window, inference="viewed by `as_strided`", training="viewed by `as_strided`"),
    Case(turned),
    Case(turned_and_written),
    Case(turned_beside_intermediates, two),
    Case(turned_alias, itself_and_view, inference=SIZES, training=SIZES),
    Case(writes_first, itself_and_view),
    Case(writes_view, itself_and_view),
    Case(writes_both, itself_and_view),
    Case(of_which_input, itself_and_view),
    Case(alias_of_either, views_alone),
    Case(alias_of_either, views_apart),
    Case(in_turn, views_alone),
    Case(only_one, leaves_apart, training="a view of a tensor that requires grad or has a hook"),
    Case(only_one, views_apart),
    Case(of_bases_by_turns, two_bases),
    Case(everything_at_once, two_bases),
    Case(pair_without_grad, plain_pair_and_leaf),
    Case(of_an_intermediate_and_itself, training="a view of an intermediate that was made before a write"),
    Case(turned_intermediate),
    Case(without_grad_beside),
    Case(through_a_linear),
    Case(several_times),
)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.program.__name__}-{case.arguments.__name__}")
def test_as_eager(case, mode, dynamic, monkeypatch):
    """Results, aliases, the caller's tensors, and gradients of all and of each output are eager's, by one entry."""
    poison(monkeypatch, HARMLESS)
    arguments = case.arguments(leaf(4, 3) * 1 if mode == "training" else leaf(4, 3).detach())
    make, why = partial(compiled, dynamic=dynamic), getattr(case, mode)
    for backward in ("all", "each"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            same(case.program, *arguments, backward=backward, eagerly=bool(why), make=make)
        assert any(re.search(f"runs eagerly: .*({why})", str(each.message)) for each in said) == bool(why), said
