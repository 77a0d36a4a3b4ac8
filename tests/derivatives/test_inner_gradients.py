"""`torch.autograd.grad` inside a compiled function whose input has hooks, a history or a base."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd import grad

from tests.engine_helpers import compiled


def plain(x):
    """Differentiate with respect to an input."""
    return grad(x.sum() * 2, x)[0]


def hooked(x):
    """Put a hook on the input before."""
    x.register_hook(lambda gradient: gradient * 2)
    return grad(x.sum() * 2, x)[0]


def hooked_on_the_way(x):
    """Register a hook on an intermediate."""
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return grad(y.sum() * 2, x)[0] * y


def retained(x):
    """Retain the gradient of the input."""
    x.retain_grad()
    return grad(x.sum() * 2, x)[0]


def moved(x):
    """Give the input other sizes before."""
    with torch.no_grad():
        x.unsqueeze_(0)
    return grad(x.sum() * 2, x)[0]


def asked(x):
    """Read the input's autograd state."""
    return x * 1, x.is_leaf, x[0].grad_fn is None


def based(x):
    """Read whether the input has a base."""
    return x * 1, x._base is None


def leaf():
    """Make a leaf."""
    return torch.ones(2, 2, requires_grad=True)


def nonleaf():
    """Make a tensor with a history."""
    return leaf() * 2


def view():
    """Make a view with a history."""
    return (torch.ones(4, requires_grad=True) * 2).view(2, 2)


def leaf_with_hook():
    """Make a leaf with a hook that the caller registered."""
    x = leaf()
    x.register_hook(lambda gradient: gradient * 5)
    return x


def nonleaf_with_hook():
    """Make such a tensor with a history."""
    x = nonleaf()
    x.register_hook(lambda gradient: gradient * 5)
    return x


def no_grad_view():
    """Make a view under no_grad of a leaf: it requires grad because its base does."""
    owner = torch.arange(4.0).requires_grad_()
    with torch.no_grad():
        return owner.view(2, 2)


def plain_view():
    """Make a view without a history."""
    return torch.arange(4.0).view(2, 2)


MAKERS = (leaf, nonleaf, view, leaf_with_hook, nonleaf_with_hook, no_grad_view, plain_view)


def outcome(function, make):
    """Call, and describe the results and gradients."""
    x = make()
    try:
        result = function(x)
    except RuntimeError as error:
        return str(error)
    several = result if isinstance(result, tuple) else (result,)
    kept = x.grad if x.is_leaf or x.retains_grad else None
    told = [(t.tolist(), t.requires_grad, t.is_leaf) if isinstance(t, torch.Tensor) else t for t in several]
    return told, None if kept is None else kept.tolist()


@pytest.mark.parametrize("function", [plain, hooked, hooked_on_the_way, retained, moved, asked, based])
def test_an_input_is_what_it_is_in_eager(function):
    """Hooks run and gradients are retained on every kind of input, and each kind has its own entry.

    A hook is registered when the compiled function runs. The trace once missed such hooks, and gradients were wrong.
    """
    for first in MAKERS:
        g = compiled(function)
        for make in (first, *MAKERS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert outcome(function, make) == outcome(g, make), (first.__name__, make.__name__)


def test_what_is_plain_is_compiled():
    """Gradients inside the function are compiled if no hook is involved. So is a function that reads `is_leaf`."""
    for function in (plain, asked):
        for make in (leaf, nonleaf, view):
            g = compiled(function)
            assert outcome(function, make) == outcome(g, make)
            assert g.calls.compiled == 1
