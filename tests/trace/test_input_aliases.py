"""Outputs that are inputs or views of inputs."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab.ir.metadata import OutputType
from tests.engine_helpers import compiled, leaf, metadata, nonleaf, same


def test_output_is_an_input():
    """The caller gets the very object back, mutated or not."""
    same(lambda x: x, leaf(3))
    same(lambda x: x.mul_(2), nonleaf(3))
    same(lambda x, y: (y, x, y), torch.randn(3), leaf(3))
    x = torch.randn(2)
    f = compiled(lambda x: (x, x))
    assert f(x)[0] is x
    assert f(x)[1] is x
    assert [o.output_type for o in metadata(f).output_info] == [OutputType.IS_INPUT] * 2


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.view(3, 2),
        lambda x: x[1:],
        lambda x: x[:, 1],
        lambda x: x[0, 1],
        lambda x: x.unsqueeze(1).expand(2, 4, 3),
        lambda x: x.permute(1, 0).unsqueeze(-1).squeeze(),
        lambda x: x.diagonal(),
        lambda x: x.as_strided((2, 2), (3, 1), 1),
        lambda x: x.unfold(1, 2, 1),
        lambda x: x.reshape(-1),
        lambda x: x.flatten().narrow(0, 1, 4).view(2, 2),
        lambda x: x.view_as(x),
        lambda x: x.movedim(0, 1),
        lambda x: x.alias() if hasattr(x, "alias") else torch.ops.aten.alias(x),
        lambda x: torch.atleast_3d(x),
    ],
)
def test_views_of_inputs(view):
    """A view of an input comes back as a view of the caller's tensor: storage, offset, strides and gradients."""
    same(lambda x: view(x), torch.randn(2, 3))
    same(lambda x: view(x), leaf(2, 3))
    same(lambda x: (view(x), x * 2), nonleaf(2, 3))


def test_views_of_mutated_inputs():
    """A view of a written input shares its memory, and differentiates through the write."""

    def f(x):
        before = x.t()
        x.mul_(3)
        return before, x[0], x * x

    same(f, nonleaf(2, 3), eagerly=True)
    same(lambda x: f(x)[1:], nonleaf(2, 3))
    same(f, torch.randn(2, 3))


def test_detached_views_of_inputs():
    """A detached alias shares memory and has no gradient."""

    def f(x):
        return x.detach(), x.detach().t(), x.t().detach(), x * 2

    same(f, leaf(2, 3))
    same(f, nonleaf(2, 3))
    same(f, torch.randn(2, 3))


def test_detached_views_may_be_written():
    """A detached view is no view made under no_grad: it may be written afterwards."""

    def f(x):
        y = x * 2
        return x.t().detach(), x.detach()[0], y.detach()[1], y

    def g(x):
        view = x.t().detach()
        x.mul_(2)
        return view, x.detach()[0]

    for function in (f, compiled(f), g, compiled(g)):
        x = nonleaf(2, 3)
        for view in function(x):
            if not view.requires_grad:
                view.mul_(2)
        factor = 4 if function in (f,) or getattr(function, "__wrapped__", None) is f else 8
        assert torch.equal(x.detach()[0, 0], leaf(2, 3).detach()[0, 0] * factor)


def test_views_of_inputs_under_no_grad():
    """A view that was made under no_grad is as eager has it."""

    def f(x):
        with torch.no_grad():
            quiet = x.t()
        return quiet, x * 2

    same(f, leaf(2, 3))
    same(f, nonleaf(2, 3))


def test_views_under_enable_grad_in_a_no_grad_call():
    """Grad mode that the function switches on for a view is on for the view that the caller gets."""

    def f(x):
        with torch.enable_grad():
            loud = x.t()
        return loud, x * 2

    with torch.no_grad():
        same(f, leaf(2, 3))
        same(f, nonleaf(2, 3))


@pytest.mark.parametrize(
    "split", [lambda x: x.unbind(0), lambda x: x.split(1), lambda x: x.chunk(2), lambda x: x.split([1, 1])]
)
def test_multi_output_views_of_inputs(split):
    """unbind, split and chunk give views of the caller's tensor."""
    same(lambda x: split(x), torch.randn(2, 3))
    same(lambda x: split(x), nonleaf(2, 3))
    same(lambda x: (split(x)[1], x * 2), leaf(2, 3))


def test_multi_output_view_may_not_be_written():
    """Writing one of several views is eager's error, also after the call."""
    x = nonleaf(2, 3)
    out = compiled(lambda x: x.unbind(0))(x)
    with pytest.raises(RuntimeError, match="output of a function that returns multiple views"):
        out[0].mul_(2)


def test_dtype_views_of_inputs():
    """A view as another dtype shares the bytes."""
    same(lambda x: x.view(torch.int32), torch.randn(2, 4))
    same(lambda x: x.view(torch.int32)[1:], torch.randn(2, 4))
    same(lambda x: (x.view(torch.int16), x), torch.randn(2, 4))


def test_real_and_complex_views_of_inputs():
    """view_as_real and view_as_complex of an input, gradients included."""
    same(lambda x: torch.view_as_real(x), torch.randn(2, 3, dtype=torch.complex64))
    same(lambda x: torch.view_as_complex(x), leaf(3, 2))
    same(lambda x: torch.view_as_complex(x * 2), leaf(3, 2))
    same(lambda x: x.real, torch.randn(3, dtype=torch.complex64))


def test_lazy_conjugates_are_not_wrong():
    """An output with the conjugate bit is eager's, or refused."""
    x = torch.randn(3, dtype=torch.complex64)
    try:
        out = compiled(lambda x: x.conj())(x)
    except aotlab.errors.RefusedError:
        return
    assert out.is_conj()
    assert torch.equal(out, x.conj())


def test_offset_of_an_input_is_respected():
    """An input that begins inside a storage gives views at the right place, for as_strided too."""
    whole = torch.arange(24.0).reshape(4, 6)
    same(lambda x: (x.t(), x[1:], x.as_strided((2,), (1,), x.storage_offset())), whole[1:3])


def test_output_aliases_two_calls():
    """Every call's view is of that call's input."""
    f = compiled(lambda x: x[1:])
    for _ in range(3):
        x = torch.randn(4)
        assert f(x).data_ptr() == x.data_ptr() + x.element_size()
