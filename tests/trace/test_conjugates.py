"""Lazy conjugates and negatives: as arguments, as tensors that the function makes or writes, and as gradients."""

from __future__ import annotations

import pytest
import torch

from aotlab.verification import compare
from tests.engine_helpers import behind, compiled, leaf, same

FULL = pytest.param("inductor", marks=pytest.mark.tier("full"))


def numbers(*shape, seed=0):
    """Make complex numbers."""
    return torch.randn(*shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))


def writes_through_a_conjugate(x):
    """Write an intermediate through its conjugate."""
    y = x * 1
    y.conj().mul_(2 + 1j)
    return y


def writes_through_real_parts(x):
    """Write parts of an intermediate by three ways to them."""
    y = x * 1
    torch.view_as_real(y)[..., 0].add_(1)
    y.imag.mul_(2)
    y.conj().imag.add_(1)
    y.mH[0].mul_(3j)
    return y, y.mH @ y


def writes(x):
    """Write the argument."""
    x.mul_(2j)
    return x + 1


def writes_its_conjugate(x):
    """Write the argument through its conjugate."""
    x.conj()[0].mul_(2 + 1j)
    return x * 1, x[1]


PROGRAMS = {
    "mH": lambda x: x.mH @ x,
    "H": lambda x: x.H @ x,
    "adjoint": torch.adjoint,
    "conjugate": lambda x: (x.conj() * 2, x.conj()),
    "as real": lambda x: torch.view_as_real(x.resolve_conj()).sin(),
    "resolved": lambda x: (x.resolve_conj() * 2, x.conj().resolve_conj() * 2),
    "itself or a copy": lambda x: (x.resolve_conj(), x.conj().resolve_conj()),
    "negative": lambda x: x.conj().imag.resolve_neg() * 1,
    "parts": lambda x: (x.real * 2, x.imag.sin(), x.conj().imag * 3),
    "asked": lambda x: (x.is_conj(), x.conj().is_conj(), x.imag.is_neg(), x * 1),
    "a view": lambda x: (x[0], x.t()),
    "physical": lambda x: (x.conj_physical(), (x * 1).conj_physical_()),
    "writes a conjugate": writes_through_a_conjugate,
    "writes parts": writes_through_real_parts,
    "writes": writes,
    "writes its conjugate": writes_its_conjugate,
}
ARGUMENTS = {
    "plain": lambda: numbers(3, 3),
    "plain leaf": lambda: numbers(3, 3).requires_grad_(),
    "conjugate": lambda: numbers(3, 3).conj(),
    "conjugate of a leaf": lambda: numbers(3, 3).requires_grad_().conj(),
    "mH of a part": lambda: numbers(4, 4)[1:, 1:].mH,
}
LEAVES = ("plain leaf", "conjugate of a leaf")
#: Programs that run eagerly: a write that eager refuses, and several lazy views of an argument.
EAGERLY = {
    *(
        (program, f"{kind} leaf")
        for program in ("writes", "writes its conjugate")
        for kind in ("plain", "conjugate of a")
    ),
    *(("adjoint", argument) for argument in ARGUMENTS),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "varying"])
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_conjugates(program, argument, dynamic):
    """Values, gradients and flags are eager's, and the program is compiled."""
    made = []

    def make(function):
        made.append(compiled(function, dynamic=dynamic))
        return made[-1]

    found = compare(PROGRAMS[program], (ARGUMENTS[argument](),), candidate=make, backward="all", calls=2)
    assert found.first is None, found.first
    calls = behind(made[0]).calls
    assert (calls.eager if (program, argument) in EAGERLY else calls.compiled) == 2, calls


@pytest.mark.parametrize("by", ["eager", FULL])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_conjugates_by_each_way(by, frontend):
    """Inductor's kernels and Dynamo's graphs accept conjugates."""

    def program(x, w):
        y = x + w * 2
        return (y @ w.mH).abs().sum(), torch.cat([x, y]).real, x[:1].imag * 2

    def outcome(function):
        x, w = numbers(3, 3).requires_grad_().conj(), numbers(3, 3, seed=1).mH
        loss, *others = function(x, w)
        w.mul_(2)
        return [loss, *others, *torch.autograd.grad(others[0].sum() + others[1].sum(), x)]

    torch.compiler.reset()
    torch.testing.assert_close(
        outcome(compiled(program, backend=by, frontend=frontend)),
        outcome(program),
        rtol=0 if by == "eager" else 1e-5,
        atol=0 if by == "eager" else 1e-5,
    )


def test_an_entry_is_for_conjugates_or_for_others():
    """The conjugate bit is guarded, and the report says so."""
    f = compiled(lambda x: (x.is_conj(), x * 2))
    x = numbers(3)
    for each in (x, x.conj(), x, x.conj()):
        is_conj, doubled = f(each)
        assert is_conj == each.is_conj()
        assert torch.equal(doubled, each * 2)
    assert len(f.entries) == 2
    assert f.recompiles == ("`x` has is_conj()=True where the compiled entry expects False",)


def test_conjugates_from_outside():
    """A tensor that the function reads through a closure may be a conjugate view too."""
    held = [numbers(3).conj()]
    f = compiled(lambda x: x * held[0])
    x = numbers(3, seed=1)
    for _ in range(2):
        assert torch.equal(f(x), x * held[0])
        held[0] = numbers(3, seed=2).conj()
    assert (f.calls.eager, len(f.entries)) == (0, 1)


@pytest.mark.parametrize("which", ["one", "the same", "another part"])
def test_conjugates_that_share_memory_with_what_is_written(which):
    """A conjugate that shares memory with a written input runs eagerly. A synthetic base cannot be conjugate."""

    def program(x, y):
        x.mul_(2j)
        return y + 1

    def outcome(function):
        memory = numbers(6)
        x, y = {
            "one": (memory.conj(), memory),
            "the same": (memory, memory.conj()),
            "another part": (memory[2:].conj(), memory[:4].conj()),
        }[which]
        return function(x, y).tolist(), memory.tolist()

    f = compiled(program)
    with pytest.warns(RuntimeWarning, match="inputs share memory"):
        assert outcome(f) == outcome(program)


def test_lazy_negatives_run_eagerly():
    """A call with a lazy negative among its arguments runs eagerly."""

    def outcome(function):
        x = numbers(3).conj().imag
        return function(x).tolist(), x.tolist()

    f = compiled(lambda x: x.mul_(2).sin())
    with pytest.warns(RuntimeWarning, match=r"`x` is a view with the negative bit.*resolve_neg"):
        found = outcome(f)
    assert found == outcome(lambda x: x.mul_(2).sin())


LOSSES = {
    "conjugate": lambda y: (y.conj() * (1 + 2j)).abs().sum(),
    "transposed conjugate": lambda y: (y.mH * (1 + 2j)).sum().real,
    "lazy negative": lambda y: (torch.complex(torch.ones(4, 4), y.real).conj() * (1 + 2j)).sin().abs().sum(),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("by", ["eager", FULL])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_that_come_in_as_conjugates(loss, by, create_graph):
    """The gradient of a conjugate is lazy, and a backward may take its real and imaginary parts."""
    weight = leaf(4, 4, seed=1).detach()

    def program(x):
        return torch.complex(x @ weight, x * 2)

    def outcome(function):
        x, tangents = leaf(4, 4), []
        y = function(x)
        y.register_hook(lambda tangent: tangents.append(tangent.is_conj() or tangent.is_neg()))
        (gradient,) = torch.autograd.grad(LOSSES[loss](y), x, create_graph=create_graph)
        return gradient.detach(), tangents

    expected, lazily = outcome(program)
    found, _ = outcome(compiled(program, backend=by))
    assert lazily == [loss != "lazy negative"]
    torch.testing.assert_close(found, expected, rtol=0 if by == "eager" else 1e-5, atol=0 if by == "eager" else 1e-5)


@pytest.mark.parametrize("by", ["eager", FULL])
def test_a_real_gradient_that_comes_in_as_a_lazy_negative(by):
    """A gradient that is a lazy negative is read with its sign, which its memory does not contain."""
    x = leaf(4)
    y = compiled(lambda x: x.sin(), backend=by)(x)
    (found,) = torch.autograd.grad(y, x, torch._neg_view(torch.ones(4)))
    torch.testing.assert_close(found, -x.cos())


def test_conjugates_that_are_returned_and_resolved():
    """Lazy conjugates and negatives inside the function, returned, resolved, and their parts."""

    def make(grad=False):
        return torch.randn(3, dtype=torch.complex64).requires_grad_(grad)

    same(lambda x: (x.resolve_conj(), x.conj().resolve_conj(), x.conj().resolve_conj()), make())
    same(lambda x: ((x * 2).conj(), (x * 3).conj()), make(grad=True))
    same(lambda x: (x.conj().clone(), (x * 2).conj().clone(), x.clone(), (x * 2).conj().resolve_conj()), make())
    same(lambda x: (x.conj().conj() * 1, (x * 2).conj() * 1, (x * 3).conj() * 1), make())
    same(lambda x: x.conj().mul_(2j), make())
    same(lambda x: x.imag.mul_(2), make())
    same(lambda x: (x.imag, (x * 2).imag), make())
    same(lambda x: ((x * 2).conj().imag * 1, x.conj().imag * 2), make())
    for returned in (lambda x: x.conj().imag, lambda x: (x * 3).conj().imag, lambda x: x.conj().conj()):
        assert not compare(returned, (make(),), candidate=compiled).differences
