"""A function that calls ``requires_grad_()`` on an argument: the compiled call does the same to the caller's tensor."""

from __future__ import annotations

import pytest
import torch

import aotlab
from tests.both_ways import Case, both_ways, check_gradients_of_arguments, check_with_inductor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _arguments(leaf):
    return torch.arange(1.0, 5.0).reshape(2, 2).clone(), torch.ones(2, 2), leaf * 1


def _first(a, b, w):
    a.requires_grad_(True)
    return a * 3, b * 4


def _after_a_write(a, b, w):
    a.mul_(2)
    a.requires_grad_()
    return (a * w).sum()


def _two(a, b, w):
    a.requires_grad_()
    b.requires_grad_()
    return a * b + w


def _between_uses(a, b, w):
    y = a * w
    a.requires_grad_()
    return y + a.sin()


def _then_a_hidden_write(a, b, w):
    a.requires_grad_()
    with torch.no_grad():
        a.mul_(3)
    return a * w


def _returned(a, b, w):
    a.requires_grad_()
    return a, a * b


def _attribute(a, b, w):
    a.requires_grad = True
    return a.exp() * w


def _already(a, b, w):
    w.requires_grad_()
    return a * w


def _viewed_afterwards(a, b, w):
    a.requires_grad_()
    return a[0] * w


def _inner_gradient(a, b, w):
    a.requires_grad_()
    (g,) = torch.autograd.grad((a * a).sum(), a, create_graph=True)
    return g * b


PROGRAMS = (
    _first, _after_a_write, _two, _between_uses, _then_a_hidden_write, _returned, _attribute, _already,
    _viewed_afterwards, _inner_gradient,
)  # fmt: skip
CASES = {
    **{program.__name__: Case(program=program, arguments=_arguments, size=(2, 2)) for program in PROGRAMS},
    "one tensor twice": Case(
        program=lambda a, b: (a.requires_grad_(), a * b)[1], arguments=lambda leaf: (torch.ones(2),) * 2
    ),
    "a view of a plain tensor": Case(
        program=_first, arguments=lambda leaf: (torch.arange(4.0).view(2, 2), torch.ones(2), leaf), size=(2, 2)
    ),
    "a written view of a plain tensor": Case(
        program=_after_a_write,
        arguments=lambda leaf: (torch.arange(4.0).view(2, 2), torch.ones(2), leaf * 1),
        size=(2, 2),
        eager=("inference", "training"),
        breaks=("inference", "training"),
    ),
    "a view that is returned": Case(
        program=lambda a: (lambda v: (a.requires_grad_(), v)[1])(a[0]),
        arguments=lambda leaf: (torch.ones(2, 2),),
        eager=("inference", "training"),
        breaks=("inference", "training"),
    ),
}

test_called_directly, test_behind_dynamo = both_ways(CASES)


@pytest.mark.parametrize("name", [program.__name__ for program in PROGRAMS])
def test_gradients_of_arguments(name):
    """The gradients of outputs and arguments equal eager's."""
    check_gradients_of_arguments(CASES[name])


@pytest.mark.tier("full")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", ["_first", "_after_a_write", "_two", "_then_a_hidden_write", "_viewed_afterwards"])
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_by_inductor(name, frontend):
    """Inductor's code for a sample of the programs gives eager's results."""
    check_with_inductor(CASES[name], frontend)


@pytest.mark.tier("full")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_varying_sizes_by_inductor(frontend):
    """The arguments may have any size."""
    check_with_inductor(
        Case(program=_two, arguments=lambda leaf: (leaf.detach() * 1, leaf.detach() + 1, leaf * 1)),
        frontend,
        sizes=[(2, 2), (3, 5), (4, 3)],
    )


def test_the_caller_differentiates_twice():
    """After the call, the caller's tensor is a leaf that accumulates gradients, and the next call is another entry."""
    compiled = aotlab.compile(lambda a: (a.requires_grad_(), (a * a).sum())[1], backend="eager")
    a = torch.arange(3.0)
    compiled(a).backward()
    assert a.is_leaf
    assert torch.equal(a.grad, 2 * a.detach())
    compiled(a).backward()
    assert torch.equal(a.grad, 4 * a.detach())
    assert (compiled.calls.compiled, compiled.calls.eager) == (2, 0)
