"""Functions of higher-order ops that draw random numbers: the compiled calls draw the same numbers as eager's calls.

In the backward, `torch.cond` and `map` run their functions again and draw again, as in eager. `scan` saves its numbers.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.config
from torch._higher_order_ops import map as map_over
from torch._higher_order_ops import scan, while_loop
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.backends import InductorBackend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
NOT_211 = pytest.mark.skipif(
    torch.__version__.startswith("2.11"),
    reason="this torch's scan draws one step more, and its while_loop is not trained",
)


def dropped(x):
    """Drop values in a branch, and draw in both branches and behind them."""
    y = torch.cond(x.sum() > 0, functional.dropout, lambda a: a * torch.randn_like(a), (x,))
    return torch.cond(y.sum() > 1e9, torch.cos, lambda a: a * torch.rand_like(a), (y,)) + torch.rand(3)


def filled(x):
    """Draw by ops that write."""
    return torch.cond(x.sum() > 0, lambda a: a * torch.empty_like(a).bernoulli_(0.4).normal_(), torch.cos, (x,))


def in_vain(x):
    """Draw numbers that no gradient needs, and numbers that nobody needs."""
    y = torch.cond(x.sum() > 0, lambda a: (torch.rand(2), a.sin() + torch.rand_like(a))[1], torch.cos, (x,))
    torch.cond(x.sum() > 0, torch.rand_like, torch.cos, (x,))
    return y * torch.rand(3)


def nested(x):
    """Draw in a branch of a branch."""
    return torch.cond(
        x.sum() > 0,
        lambda a: torch.cond(a.sum() > 1, functional.dropout, torch.cos, (a,)) * torch.rand(()),
        torch.cos,
        (x,),
    )


def over_rows(x):
    """Draw for each row."""
    return map_over(lambda row, w: (functional.dropout(row @ w), row * torch.rand(3)), x, x.t() @ x)


def recurrence(x):
    """Draw in each step; the numbers of `bernoulli` depend on the carried value."""

    def step(state, row):
        mask = torch.bernoulli(state.detach().sigmoid())
        return (state + 1) * mask + row * torch.randn(3), functional.dropout(state.sin())

    return scan(step, x[0].clone(), x)


def until(x):
    """Draw in the condition of a loop, and its steps."""
    steps = torch.zeros((), dtype=torch.int64)
    return while_loop(
        lambda i, a: (i < 3) & (torch.rand(()) < 0.9),
        lambda i, a: (i + 1, functional.dropout(a.sin(), 0.2)),
        (steps, x),
    )


def outcome(function, *, grad, size=4):
    """Return the results, the gradient and the generator's state of two calls."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        x = (torch.arange(size * 3.0).reshape(size, 3) / 7 + 1).requires_grad_(grad)
        results = pytree.tree_leaves(function(x))
        found += [*(each.detach() for each in results), torch.get_rng_state()]
        if grad:
            total = sum((each**2).sum() for each in results if each.requires_grad)
            found += [*torch.autograd.grad(total, x), torch.get_rng_state()]
    return found


def compiles(function, reference, *, grad, sizes=(4,), **settings):
    """Assert that a compiled function's calls are compiled, and equal the calls of ``reference``."""
    candidate = aotlab.compile(function, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*eagerly")
        for size in sizes:
            expected, actual = outcome(reference, grad=grad, size=size), outcome(candidate, grad=grad, size=size)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    return candidate


ALL = [(each, grad) for each in (dropped, filled, in_vain, nested, over_rows, recurrence) for grad in (False, True)]


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize(("program", "grad"), [*ALL, (until, False)])
@pytest.mark.filterwarnings("ignore:.* is captured by Dynamo")
def test_numbers_are_eagers(program, grad, frontend):
    """The results, the gradients, and the state of the generator after each call and each backward."""
    compiles(program, program, grad=grad, backend="eager", frontend=frontend)


@pytest.mark.tier("full")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize(
    ("program", "grad"), [(dropped, True), (in_vain, True), (over_rows, True), (recurrence, True), (until, False)]
)
@pytest.mark.filterwarnings("ignore:.* is captured by Dynamo", "ignore:.*script_method")
def test_inductor_draws_the_numbers_of_torch_compile(program, grad, frontend):
    """The reference is `torch.compile` with a setting without which it cannot compile loops."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        reference = torch.compile(program)
        outcome(reference, grad=grad)
    compiles(program, reference, grad=grad, backend="inductor", frontend=frontend)


@pytest.mark.parametrize("program", [dropped, recurrence])
def test_sizes(program):
    """Calls with other sizes draw eager's numbers, too."""
    compiles(program, program, grad=True, sizes=(4, 6, 3), backend="eager", frontend="dynamo")


@pytest.mark.parametrize("program", [dropped, recurrence, over_rows])
@pytest.mark.filterwarnings("ignore:.* is captured by Dynamo")
def test_verified_and_reported(program):
    """`verify` finds no difference, and a report shows where the functions draw."""
    assert aotlab.verify(program, torch.ones(4, 3, requires_grad=True)).ok
    with aotlab.Report.record() as report:
        outcome(aotlab.compile(program, backend="eager", frontend="dynamo"), grad=True)
    assert "aten.rand" in "".join(code.text for stage in report.frames[0].graphs[0].stages for code in stage.codes)


def repeated(x):
    """Draw in a checkpoint, whose backward must repeat the numbers."""
    return checkpoint(
        lambda a: torch.cond(a.sum() > 0, functional.dropout, torch.cos, (a.sin(),)), x, use_reentrant=False
    )


def choice_in_steps(x):
    """Draw in a branch in each step: eager draws again in the backward, but only in the branch."""
    return scan(
        lambda s, r: (torch.cond(r.sum() > 0, lambda s: functional.dropout(s), torch.cos, (s,)), r * s), x[0] * 1, x
    )


@pytest.mark.parametrize("program", [repeated, choice_in_steps, pytest.param(until, marks=NOT_211)])
def test_left_to_eager(program):
    """These calls run eagerly with a notice, and get eager's numbers."""
    candidate = aotlab.compile(program, backend="eager", frontend="dynamo")
    with pytest.warns(RuntimeWarning, match=r"passed to `\w+` draws random numbers, .*pass them as an operand"):
        found = outcome(candidate, grad=True)
    torch.testing.assert_close(found, outcome(program, grad=True), rtol=0, atol=0)


@pytest.mark.parametrize("program", [dropped, recurrence])
@pytest.mark.filterwarnings("ignore:.* is captured by Dynamo")
def test_inductor_does_not_draw_eagers_numbers(program):
    """Cells of notebooks want eager's numbers from Inductor, which keeps no order between a graph and its functions."""
    candidate = aotlab.compile(program, backend=InductorBackend(draws="eager"), frontend="dynamo")
    with pytest.warns(RuntimeWarning, match="draws random numbers that must equal eager's|draws random numbers, at"):
        found = outcome(candidate, grad=True)
    torch.testing.assert_close(found, outcome(program, grad=True), rtol=0, atol=0)


@pytest.mark.parametrize("program", [dropped, pytest.param(recurrence, marks=NOT_211)])
def test_second_derivatives(program):
    """A backward that draws has no second derivative. The backward of `scan` draws nothing, so it has one."""

    def second(function):
        torch.manual_seed(1)
        x = torch.linspace(0.1, 1, 6).double().reshape(2, 3).requires_grad_()
        total = sum((each**3).sum() for each in pytree.tree_leaves(function(x)))
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    candidate = aotlab.compile(program, backend="eager", frontend="dynamo")
    refused = pytest.raises(aotlab.errors.DoubleBackwardError, match="it draws random numbers")
    with refused if program is dropped else nullcontext():
        found = second(candidate)
        torch.testing.assert_close(found, second(by_steps))


def by_steps(x):
    """Compute the results of `recurrence` with Python's ``for``."""
    state, rows = x[0].clone(), []
    for row in x:
        mask = torch.bernoulli(state.detach().sigmoid())
        state, before = (state + 1) * mask + row * torch.randn(3), state
        rows.append(functional.dropout(before.sin()))
    return state, torch.stack(rows)
