"""Gradients through views from before a write to what they are views of: laid out as eager lays them out."""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import behind, compiled, leaf, same


def summed(x, c, d):
    """Use a view of an intermediate."""
    y = x * d
    v = y.view(-1)
    y.add_(c)
    return v.sum(), y.sum()


def returned(x, c, d):
    """Return one."""
    y = (x * d).t()
    v, w = y.view(2, 2), y[0]
    y.add_(c)
    return v, w, w * 1


def of_the_input(x, c, d):
    """View the input."""
    v = x.t()
    x.add_(c)
    return v.sum(), v


def before_the_history(x, c, d):
    """View what has no history yet."""
    y = x.detach() * 2
    v = y.view(-1)
    y.add_(c)
    return v, v.sum(), (y * d).sum()


def written_twice(x, c, d):
    """Let the history be made anew twice, with a use between."""
    y = x + d
    v = y.unsqueeze(0)
    y.add_(c)
    first = v.sum()
    y.add_(d)
    return first, v.sum(), v


def unseen(x, c, d):
    """Write where autograd does not see it."""
    y = x + d
    v = y.view(-1)
    with torch.no_grad():
        y.add_(c)
    return v.sum(), v


def of_several(x, c, d):
    """Write several tensors at once."""
    y, z = x + d, x + c
    v, w = y.view(-1), z.t()
    torch._foreach_add_([y, z], [c, d])
    return v.sum(), w.sum()


def expanded(x, c, d):
    """Let elements be seen several times."""
    y = x + d
    v = y.expand(3, 2, 2)
    y.add_(c)
    return (v * torch.arange(12.0).view(3, 2, 2)).sum(), v


def by_their_ops(x, c, d):
    """View in ways that ``as_strided`` cannot say."""
    y = x + d
    v = torch.view_as_complex(y)
    y.add_(c)
    return torch.view_as_real(v).sum(), v.real


def window(x, c, d):
    """Write a view, beside another."""
    y = x + d
    v, w = y.view(-1), y[0]
    w.add_(c[0])
    return v.sum(), v


PROGRAMS = (
    summed, returned, of_the_input, before_the_history, written_twice, unseen, of_several, expanded, by_their_ops,
    window,
)  # fmt: skip


def quarters(*shape):
    """Make a leaf of numbers whose sums are exact in any order, as of gradients from outside and inside."""
    return ((torch.arange(1.0, 1 + torch.Size(shape).numel()) - 3) / 4).view(shape).requires_grad_()


INPUTS = {
    "non-leaf": lambda: quarters(2, 2) * 1,
    "view": lambda: (quarters(4, 2) * 1)[1:3],
    "plain": lambda: torch.ones(2, 2),
}


def gradients(function, make, *, order):
    """Return what each output sends to the tensors: sizes, strides, values, and whether it is what was sent."""
    found = []
    for which in range(len(function(make(), quarters(2, 2), quarters(2, 2)))):
        x, c, d = make(), quarters(2, 2), quarters(2, 2)
        given = [each for each in (x, c, d) if each.requires_grad]
        out = function(x * 1, c, d)[which]
        sent = torch.ones(()).expand(out.shape) if out.dim() else torch.ones(())
        for _ in range(order):
            got = torch.autograd.grad(out, given, sent.to(out.dtype), create_graph=order > 1, allow_unused=True)
            for each in got:
                same_memory = each is not None and each.untyped_storage() is sent.untyped_storage()
                found.append(None if each is None else (each.shape, each.stride(), each.tolist(), same_memory))
            out = sum(each.square().sum() for each in got if each is not None and each.requires_grad)
            sent = torch.ones(())
            if not isinstance(out, torch.Tensor):
                break
    return found


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("made", INPUTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_laid_out_as_in_eager(program, made, frontend):
    """Gradients of the first and second order have eager's strides, and are what was sent where eager's are."""
    torch._dynamo.reset()
    function = compiled(program, frontend=frontend)
    for order in (1, 2):
        expected = gradients(program, INPUTS[made], order=order)
        assert gradients(function, INPUTS[made], order=order) == expected
    if frontend == "direct":
        assert behind(function).entries


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_else_can_be_seen(program):
    """Values, aliases, versions and errors are eager's, too."""
    for make in INPUTS.values():
        same(program, make(), quarters(2, 2), quarters(2, 2))


def test_gradients_that_are_taken_inside():
    """They leave the function as they are."""

    def inside(x, c, d):
        y = x * d
        v = y.view(-1)
        y.add_(c)
        return torch.autograd.grad(v.sum(), (c, d))

    same(inside, torch.ones(2, 2), quarters(2, 2), quarters(2, 2))
    eager, ours = (f(torch.ones(2, 2), quarters(2, 2), quarters(2, 2)) for f in (inside, compiled(inside)))
    assert [g.stride() for g in ours] == [g.stride() for g in eager] == [(2, 1)] * 2


def test_second_derivatives_hang_on_the_copy():
    """A gradient that was copied into eager's strides can be differentiated again."""

    def program(x, c):
        y = x * c
        v = y.view(-1)
        y.add_(c)
        return (v.square() * v).sum()

    found = []
    for function in (program, compiled(program)):
        c = quarters(2, 2)
        (first,) = torch.autograd.grad(function(torch.full((2, 2), 2.0), c), c, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), c)[0].tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("returns_base", [True, False])
def test_what_is_computed_from_one_hangs_on_it(returns_base, frontend):
    """The gradient of one output with respect to another that is such a view is eager's."""

    def program(x):
        y = x * 2
        v = y.view(-1)
        y.mul_(3)
        w = v * 2
        return (w, v, y, w.sin()) if returns_base else (w, v, w.sin())

    def found(call):
        out = call(torch.arange(4.0).view(2, 2).requires_grad_())
        return [torch.autograd.grad(out[i].sum(), out[1], retain_graph=True)[0].tolist() for i in (0, -1)]

    torch.compiler.reset()
    assert found(compiled(program, frontend=frontend)) == found(program)


def test_views_of_one_made_after_the_write_are_eagers():
    """Their gradients pass that view, which is made by sizes and strides."""

    def program(x):
        y = x * 2
        v = y.view(-1)
        y.mul_(3)
        return v.view(2, 2), v

    same(program, leaf(2, 2), eagerly=True)
