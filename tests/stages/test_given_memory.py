"""Tensors that are given other memory, or their own again: ``x.data = …``, ``x.set_(…)``, and numpy's way to it."""

from __future__ import annotations

import pytest
import torch

from aotlab.errors import EscapeError, StorageMutationError
from tests.engine_helpers import compiled, leaf, nonleaf, refusing, same

MAKERS = {
    "plain": lambda: torch.ones(2, 2),
    "leaf": lambda: leaf(2, 2),
    "non-leaf": lambda: nonleaf(2, 2),
    "view": lambda: nonleaf(3, 2)[1:],
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def _assign(a, b):
    a.data = b.detach().clone()
    return a * b


def _assign_own(a, b):
    a.data = a.detach().clone()
    return a


def _assign_and_write(a, b):
    y = a * b
    a.data = torch.zeros(2, 2)
    a.data.mul_(3)
    return y, a[0]


def _assign_an_intermediate(a, b):
    y = (a * b).sin()
    z = y.cos()
    y.data = b.detach().clone()
    return z, y * y


def _assign_what_was_saved(a, b):
    y = a * a
    a.data = b.detach().clone()
    return y, a * a


@makers
@pytest.mark.parametrize(
    "function", [_assign, _assign_own, _assign_and_write, _assign_an_intermediate, _assign_what_was_saved]
)
def test_data_is_assigned(function, make):
    """The caller's tensor gets the memory of a result; its version and its history stay."""
    for b in (torch.full((2, 2), 3.0), leaf(2, 2)):
        same(function, make(), b, entries=None)


def test_set_to_an_intermediate():
    """``set_`` is the same, and counts as a write."""
    same(lambda a, b: a.set_(b.detach() * 2).t(), torch.ones(2, 2), leaf(3, 2), entries=None)


def _old_view(a, b):
    v = a[0]
    a.data = b.detach().clone()
    return v


def _two_owners(a, b):
    t = b.detach() * 2
    a.data = t
    return t


def _written_before(a, b):
    a.mul_(2)
    a.data = b.detach().clone()
    return b * 1


def _of_a_view(a, b):
    v = (a * 2)[0]
    v.data = b.detach().clone()
    return v


@pytest.mark.parametrize("function", [_old_view, _two_owners, _written_before, _of_a_view])
def test_what_eager_has_to_do(function):
    """Old memory that is returned, memory with two owners, writes before, views."""
    same(function, torch.ones(2, 2), torch.full((2, 2), 3.0), eagerly=True)


def test_the_memory_of_an_input_is_refused():
    """It would be shared from then on."""
    with refusing(EscapeError):
        compiled(lambda a, b: (setattr(a, "data", b), a * 1)[1])(torch.ones(2), torch.ones(2))
    with refusing(StorageMutationError):
        compiled(lambda a, b: a.set_(b))(torch.ones(2), torch.ones(2))


def _set_first(a, b):
    a.set_(a)
    a.mul_(b)
    return a, a[0]


def _set_last(a, b):
    a.t_()
    a.mul_(2)
    a.set_(a)
    return a[0] * b


def _set_intermediate(a, b):
    v = a * b
    v.set_(v)
    return v, b * 2


@pytest.mark.parametrize("make", [MAKERS["plain"], MAKERS["non-leaf"]])
@pytest.mark.parametrize("function", [_set_first, _set_last, _set_intermediate])
def test_set_to_itself(function, make):
    """It moves the version, and autograd cannot differentiate it."""
    for b in (torch.full((2, 2), 3.0), leaf(2, 2)):
        same(function, make(), b)


def test_resize_to_the_first_elements_of_a_view():
    """It is another view of the same memory."""

    def f(a):
        v = a[1:].detach()
        v.resize_(2)
        v.mul_(3)
        return v, a

    same(f, torch.ones(3, 3))
    same(f, nonleaf(3, 3))
    same(f, torch.ones(3, 6)[:, ::2])
    same(f, nonleaf(3, 6)[:, ::2], eagerly=True)


@makers
def test_an_array_is_written(make):
    """Numpy's writes are eager's."""

    def f(a):
        a.detach().numpy()[...] = 2
        torch.from_numpy(a.detach()[1:].numpy()).mul_(2)
        return a * 2

    same(f, make(), eagerly=True)


@pytest.mark.parametrize("make", [lambda: torch.ones(2, 3), lambda: torch.arange(9.0).view(3, 3)[1:]])
def test_the_offset_of_a_written_input(make):
    """It is the caller's, not that of the new values; windows that count from it are left to eager."""

    def f(a):
        a.mul_(2)
        return a.storage_offset(), a[1:].storage_offset(), a.as_strided((2,), (1,)) * 1

    same(f, make())


def _again(x):
    """Copy a tensor with all of its memory."""
    whole = torch.empty(0).set_(x.untyped_storage().clone())
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def test_windows_that_new_values_would_not_have():
    """Counted from the beginning of the memory."""

    def counted(a):
        b = a.as_strided((2,), (1,), 3)
        a.mul_(2)
        return b * 1

    x = torch.arange(9.0).view(3, 3)[1:]
    assert counted(_again(x)).tolist() == compiled(counted)(_again(x)).tolist()


def test_out_that_is_resized_and_requires_grad():
    """Under ``no_grad`` eager lets ``out=`` resize it, ``resize_`` would not."""

    def f(b, c):
        with torch.no_grad():
            torch.mul(b, 3, out=c)
        return b * 2

    with pytest.warns(UserWarning, match="resized"):
        same(f, torch.ones(4, 3), leaf(2, 3), eagerly=True)
