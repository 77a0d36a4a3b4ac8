"""Gradients that are asked for alone: what stands in the way of others is no error, as in eager."""

from __future__ import annotations

import pytest
import torch

from aotlab.frontends.dynamo import backend
from tests.engine_helpers import compiled


def behind_dynamo(function):
    """Compile as users of torch.compile do."""
    torch.compiler.reset()
    return torch.compile(function, backend=backend, options={"compiler": "eager"})


def branches(a, c):
    """Two branches that keep tensors of their own, added by a node that keeps none."""
    return a.exp() + c.sin()


def product(a, c):
    """Multiply last: that node keeps both of its operands."""
    return a.exp() * c.sin()


def written(a, c):
    """Let the sum hang on the new ``a`` too, which has a history of its own."""
    first = a * c
    a.zero_()
    return first + a


def doubled(a, c):
    """Do the same where nothing that a node keeps is written."""
    first = a * 2
    a.zero_()
    return first + a + c * 0


def write_between(y, a, c):
    """Write what a node on the way to ``a`` keeps, then ask for either."""
    c.detach().add_(1)
    return torch.autograd.grad(y.sum(), a, retain_graph=True)


def write_on_the_way(y, a, c):
    """Write what a node on the way to ``c`` keeps, then ask for it."""
    c.detach().add_(1)
    return torch.autograd.grad(y.sum(), c, retain_graph=True)


def free_and_ask(y, a, c):
    """Ask for the new ``a`` when the graph has been freed."""
    y.sum().backward()
    return torch.autograd.grad(y.sum(), a)


def free_and_ask_all(y, a, c):
    """Ask for everything when the graph has been freed."""
    y.sum().backward()
    return torch.autograd.grad(y.sum(), (a, c))


def outcome(function, use):
    """Return the gradients, or the error, of what is done with a call's result."""
    a, c = (torch.linspace(0.5, 2, 3, dtype=torch.float64).requires_grad_() for _ in range(2))
    a, c = a * 1, c * 1
    y = function(a, c)
    try:
        return [gradient.tolist() for gradient in use(y, a, c)]
    except RuntimeError as error:
        return str(error)[:60]


@pytest.mark.parametrize("make", [compiled, behind_dynamo], ids=["direct", "dynamo"])
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("use", [write_on_the_way, free_and_ask, free_and_ask_all])
@pytest.mark.parametrize("function", [branches, product, written, doubled])
def test_only_the_nodes_on_the_way_matter(function, use, make):
    """Other nodes' values may have been let go: autograd does not come there."""
    assert outcome(function, use) == outcome(make(function), use)


def test_a_write_beside_the_way():
    """One rule for all that is saved: the error is autograd's, where eager may not look at what was written."""
    assert isinstance(outcome(branches, write_between), list)
    assert outcome(compiled(branches), write_between).startswith("one of the variables needed for gradient computation")


@pytest.mark.parametrize("make", [compiled, behind_dynamo], ids=["direct", "dynamo"])
def test_several_results(make):
    """What is asked for lets go of what lies on the way to it alone, as with an actor and a critic."""

    def two(a, c):
        return (a.exp() + c.sin()).sum(), c.cos().sum()

    def gradients(call):
        a, c = (torch.linspace(0.5, 2, 3).requires_grad_() for _ in range(2))
        first, second = call(a, c)
        found = [torch.autograd.grad(y, x)[0].tolist() for y, x in ((first, a), (first, c), (second, c))]
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(first, a)
        return found

    assert gradients(two) == gradients(make(two))
