"""Inputs that require grad and get other sizes under ``no_grad``: autograd goes on with those from before."""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import leaf, nonleaf, same


def written_before(x):
    """Write in a way that autograd sees, then change the sizes in a way that it does not."""
    x.mul_(2)
    with torch.no_grad():
        x.unsqueeze_(0)
    return x * 3


def written_after(x):
    """Change the sizes first."""
    with torch.no_grad():
        x.unsqueeze_(0)
    x.mul_(2)
    return x * 3


def viewed_while_known(x):
    """View a leaf while autograd still knows it with the sizes from before."""
    kept = x * 2
    with torch.no_grad():
        x.unsqueeze_(0)
    return x.view(-1), kept.detach()


@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_a_write_before_other_sizes_is_eagers(shape):
    """The gradient of what was written has the sizes from before, though the tensor has others."""
    same(written_before, nonleaf(*shape), eagerly=True)


@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_a_write_after_other_sizes_is_compiled(shape):
    """The write tells autograd of the sizes."""
    same(written_after, nonleaf(*shape))


@pytest.mark.parametrize("shape", [(1,), (2, 3)])
def test_a_view_of_a_leaf_with_other_sizes_is_eagers(shape):
    """The sizes of its gradient hang on whether something still knows the leaf from before."""
    same(viewed_while_known, leaf(*shape), calls=1, eagerly=True)


@pytest.mark.parametrize("grad_mode", [True, False], ids=["grad mode", "no_grad"])
def test_resizing_what_requires_grad_is_an_error_whatever_the_size(grad_mode):
    """Eager raises its error, also where the size is the one that it has."""

    def program(x):
        with torch.set_grad_enabled(grad_mode):
            return x.view(-1).resize_(4)

    same(program, leaf(2, 2), eagerly=True)


@pytest.mark.parametrize("size", [4, 2])
def test_resizing_under_inference_mode_is_eagers(size):
    """There eager has no such error."""

    def program(x):
        with torch.inference_mode():
            x.resize_(size)
        return x

    same(program, leaf(2, 2), calls=1, eagerly=True)
