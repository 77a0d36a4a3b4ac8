"""Gradients with respect to some inputs only: as in eager, a problem on the path to other inputs is no error."""

from __future__ import annotations

import pytest
import torch

from aotlab.frontends.dynamo_frontend import backend
from tests.engine_helpers import compiled


def behind_dynamo(function):
    """Compile as users of torch.compile do."""
    torch.compiler.reset()
    return torch.compile(function, backend=backend, options={"compiler": "eager"})


def branches(a, c):
    """Add two branches that save their tensors. The addition saves nothing."""
    return a.exp() + c.sin()


def product(a, c):
    """Multiply last: the product's node saves both of its operands."""
    return a.exp() * c.sin()


def written(a, c):
    """Add the written ``a``, which also has its own history."""
    first = a * c
    a.zero_()
    return first + a


def doubled(a, c):
    """Do the same without a write to a saved tensor."""
    first = a * 2
    a.zero_()
    return first + a + c * 0


def write_between(y, a, c):
    """Write a tensor that a node on the path to ``c`` saved, then compute the gradient of ``a``."""
    c.detach().add_(1)
    return torch.autograd.grad(y.sum(), a, retain_graph=True)


def write_on_the_way(y, a, c):
    """Write a tensor that a node on the path to ``c`` saved, then compute the gradient of ``c``."""
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
    """Apply ``use`` to a call's result; return the gradients or the error."""
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
    """Only the nodes on the path to the requested inputs matter; other nodes' saved values may have been freed."""
    assert outcome(function, use) == outcome(make(function), use)


def test_a_write_beside_the_way():
    """A write to any saved tensor raises autograd's error, even if eager would not use the tensor for this gradient."""
    assert isinstance(outcome(branches, write_between), list)
    assert outcome(compiled(branches), write_between).startswith("one of the variables needed for gradient computation")


@pytest.mark.parametrize("make", [compiled, behind_dynamo], ids=["direct", "dynamo"])
def test_several_results(make):
    """A gradient frees only the nodes on its own path, as an actor-critic training needs."""

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
