"""Hooks on one of several results of a function.

Autograd calls them with None when only another one gets a gradient.
"""

from __future__ import annotations

import pytest
import torch

from aotlab.maintenance.fuzz.compare import differences
from tests.engine_helpers import compiled
from tests.functions import Parted

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def behind_dynamo(function):
    """Let torch.compile capture the graphs."""
    return compiled(function, frontend="dynamo")


def leaf_input():
    """Make a leaf."""
    return (torch.tensor([[1.0, -2.0], [3.5, 0.5]]).requires_grad_(),), {}


SEVERAL = {
    "custom": Parted.apply,
    "var_mean": lambda a: torch.var_mean(a, 0),
    "eigh": torch.linalg.eigh,
    "unbind": lambda a: a.unbind(0),
    "split": lambda a: (a * 2).split(1),
}


def negated(gradient):
    """Raise for None."""
    return -gradient


# --- the function's own hooks


def only_other(one, two):
    """Return the other one."""
    one.register_hook(negated)
    return two


def each(one, two):
    """Return both."""
    one.register_hook(negated)
    return one, two


def other_goes_elsewhere(one, two):
    """Use both results together, and the other one alone."""
    one.register_hook(negated)
    return (one.sum() * two).sum(), two * 3


def together(one, two):
    """Use both together."""
    one.register_hook(negated)
    return (one.sum() * two).sum()


def own_goes_elsewhere(one, two):
    """Use both results together, and the hooked one alone."""
    one.register_hook(negated)
    return (one.sum() * two).sum(), one * 3


@pytest.mark.parametrize("backward", ["all", "each"])
@pytest.mark.parametrize("several", ["custom", "eigh", "unbind", "split"])
@pytest.mark.parametrize("use", [only_other, each, other_goes_elsewhere, together, own_goes_elsewhere])
def test_a_hook_in_the_function(use, several, backward):
    """A hook in the function is called with None as in eager."""

    def program(a):
        return use(*SEVERAL[several](a))

    function = compiled(program)
    assert differences(program, function, [leaf_input, leaf_input], backward=backward) == []
    assert function.calls.compiled == 0


BELOW = {
    "view": lambda made: [made.view(-1)],
    "views": lambda made: [made.view(-1), made[0]],
    "view and more": lambda made: [made.t(), made.exp()],
}


@pytest.mark.parametrize("make", [compiled, behind_dynamo], ids=["direct", "dynamo"])
@pytest.mark.parametrize("backward", ["all", "first", "each"])
@pytest.mark.parametrize("views", BELOW.values(), ids=BELOW.keys())
def test_a_hook_on_what_outputs_are_views_of(views, backward, make):
    """A hook on a base is not called if the gradient comes from an output that is no view of it.

    It is not even called with None.
    """

    def program(a):
        made = a * 2
        made.register_hook(negated)
        return a.sin(), *views(made)

    function = make(program)
    assert differences(program, function, [leaf_input, leaf_input], backward=backward) == []
    if make is compiled:
        assert function.calls.compiled == 2


@pytest.mark.parametrize("backward", ["all", "each"])
@pytest.mark.parametrize("several", ["custom", "eigh"])
@pytest.mark.parametrize("hooked", [0, 1])
def test_a_hook_in_the_function_where_one_result_is_returned_as_a_view(hooked, several, backward):
    """A hook on one of several results is called with None if the gradient comes from the other result.

    This holds if one of the results is returned as a view.
    """

    def program(a):
        results = SEVERAL[several](a)
        results[hooked].register_hook(negated)
        return results[0].view_as(results[0]), results[1]

    assert differences(program, compiled(program), [leaf_input, leaf_input], backward=backward) == []


# --- the caller's hooks


RESULTS = {
    "both": lambda one, two: (one, two),
    "mixed and one": lambda one, two: (one.exp(), two),
    "mixed, changed and one": lambda one, two: (one.exp(), two * 2, two),
    "mixed together": lambda one, two: (one, two * 2, (one.sum() * two).sum(), two),
    "mixed part and one": lambda one, two: (one[:1].exp(), two),
    "part and one": lambda one, two: (one[:1], one.exp(), two),
}
#: Of these, eager runs those of views: gradients pass one that is no output.
HIDE_ONE = ("mixed and one", "mixed, changed and one", "mixed part and one", "part and one")


@pytest.mark.parametrize("make", [compiled, behind_dynamo], ids=["direct", "dynamo"])
@pytest.mark.parametrize("backward", ["first", "each"])
@pytest.mark.parametrize("several", ["custom", "var_mean", "eigh", "unbind", "split"])
@pytest.mark.parametrize("results", RESULTS)
def test_a_hook_of_the_caller(results, several, backward, make):
    """The caller's hook is called with None as in eager, also if the gradient bypasses the output."""

    def program(a):
        return RESULTS[results](*SEVERAL[several](a))

    for at in (0, -1):
        for keep in (lambda out: out.register_hook(negated), lambda out: out.retain_grad()):
            function = make(program)

            def before(out):
                return [lambda: keep(out[at])]  # noqa: B023  # called in this round

            assert differences(program, function, [leaf_input, leaf_input], backward=backward, before=before) == []
            if make is compiled:
                one_is_hidden = several in ("unbind", "split") and results in HIDE_ONE
                assert (function.calls.compiled > 0) is not one_is_hidden


def test_results_that_have_a_node_in_common_are_the_callers_own():
    """Results that share an autograd node may be written in place as in eager, and returning them moves no version."""

    def program(a):
        return Parted.apply(a)

    one, two = compiled(program)(torch.ones(2, requires_grad=True))
    assert one.grad_fn is two.grad_fn
    assert (one._version, two._version) == (0, 0)
    one.mul_(3)
    torch.autograd.grad((one * two).sum(), two)
    assert differences(program, compiled(program), [leaf_input], before=lambda out: [lambda: out[1].mul_(2)]) == []


# --- a hook that no gradient reaches is not called


MIDDLE = {
    "result": lambda a: (made := a * 2, made.exp(), a.sin()),
    "view": lambda a: (view := a.view(-1), view.exp(), a.sin()),
    "both": lambda a: (view := (made := a * 2).view(-1), view.exp(), a.sin(), made.cos()),
    "two": lambda a: (made := a * 2, other := made + 1, other.exp(), made.sin(), a.cos()),
    "slices": lambda a: (a[:1].exp(), a[1:] * 2, a[1:]),
}


@pytest.mark.parametrize("make", [compiled, behind_dynamo], ids=["direct", "dynamo"])
@pytest.mark.parametrize("backward", ["first", "each", "all"])
@pytest.mark.parametrize("middle", MIDDLE)
def test_a_hook_in_the_middle_of_other_outputs(middle, backward, make):
    """The hook is not called if the gradient comes from an output that does not depend on the hooked one."""
    for at in (0, 1, -1):

        def before(out):
            return [lambda: out[at].register_hook(negated)]  # noqa: B023  # called in this round

        program = MIDDLE[middle]
        assert differences(program, make(program), [leaf_input], backward=backward, before=before) == []
