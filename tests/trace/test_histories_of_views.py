"""Outputs that are views of inputs with another history than views: of custom Functions, or made under no_grad."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from aotlab.maintenance.fuzz.compare import differences
from tests.engine_helpers import compiled, leaf, nonleaf, refusing, same, traced
from tests.functions import Viewed

MAKERS = (lambda: torch.ones(2, 2), lambda: leaf(2, 2), lambda: nonleaf(2, 2), lambda: nonleaf(3, 2)[1:])


class Part(torch.autograd.Function):
    """Gives back a view of a part of it."""

    @staticmethod
    def forward(ctx, x):
        return x[1:].t()

    @staticmethod
    def backward(ctx, gradient):
        result = torch.zeros(2, 2)
        result[1:] = gradient.t()
        return result


def _written(a, b):
    a.mul_(b)
    return Viewed.apply(a), a.sum()


def _used(a, b):
    v = Viewed.apply(a)
    return v, v * b, a * b


def _hidden(a, b):
    v = Viewed.apply(a)
    a.data.mul_(2)
    return v, b * v


def _views(a, b):
    v = Part.apply(a)
    return v[0], v, v.t(), v, a, v * b


@pytest.mark.parametrize("backward", ["all", "each", "twice"])
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: Viewed.apply(a),
        lambda a, b: (Viewed.apply(a[0]), a[0]),
        lambda a, b: (Viewed.apply(a), Viewed.apply(a), Part.apply(a)),
        lambda a, b: Viewed.apply(Viewed.apply(a)),
        _used,
        _hidden,
        _views,
    ],
)
def test_views_that_custom_functions_make(function, backward):
    """Views that custom functions make have their own autograd history over the caller's memory.

    Such calls run eagerly.
    """
    for make in MAKERS:
        for b in (torch.ones(2, 2), leaf(2, 2)):
            same(function, make(), b, backward=backward, eagerly=make().requires_grad)


def test_a_view_that_a_custom_function_makes_without_grad():
    """It has no gradient function, as other views under `no_grad`, and another protection from writes."""

    def f(a):
        with torch.no_grad():
            return Viewed.apply(a), a * 2

    for make in MAKERS:
        same(f, make(), eagerly=make().requires_grad)


def test_a_view_of_a_written_input():
    """A view that is made after a write to an input has the written input's history."""
    same(_written, nonleaf(2, 2), leaf(2, 2), eagerly=True)


def _no_grad_views(a):
    with torch.no_grad():
        v = a.t()
    w = v[0]
    return v, w, w.view(2, 1), w.sum(), a


def _enable_inside(a):
    torch.set_grad_enabled(False)
    v = a[None].mT
    with torch.enable_grad():
        return v.unbind(0)[0]


@pytest.mark.parametrize("function", [_no_grad_views, _enable_inside])
def test_views_of_views_made_under_no_grad(function):
    """Their gradients end at the view that was made under ``no_grad``: they run eagerly."""
    for make in MAKERS[:3]:
        same(function, make(), eagerly=make().requires_grad)
    same(function, nonleaf(3, 2)[1:], eagerly=True)


def test_parts_of_several_results_are_refused():
    """Autograd has other rules for several views of one Function."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x[:1], x[1:]

        @staticmethod
        def backward(ctx, a, b):
            return torch.cat([a, b])

    with refusing(match="autograd does not treat it as a view"):
        traced(lambda a: Both.apply(a)[0], leaf(2))


def _written_itself(b):
    v = b.view(-1)
    v.mul_(2)
    return v[1:]


def _written_above(b):
    v = b.view(-1)
    b.mul_(2)
    return v[1:], v.exp()


def _computed_from(b):
    v = b.view(-1)
    v.mul_(2)
    return v[1:].exp()


def _view_of_a_view(b):
    v = b.view(-1)
    v.mul_(2)
    w = v[1:]
    return w[:2], w[1:], b[0]


def _written_twice(b):
    v = b.view(-1)
    v.mul_(2)
    w = v[1:]
    b.add_(1)
    return w[1:], v.view(2, 2), b[0]


def _written_unseen(b):
    v = b.view(-1)
    b.detach().mul_(2)
    return v[1:], v * 2


CALLERS = {
    "gradients": lambda out, b, base: [lambda: torch.autograd.grad(out[0].sum(), [b, base], allow_unused=True)],
    "hook": lambda out, b, base: [lambda: b.register_hook(lambda gradient: SEEN.append(("b", gradient)))],
    "hook on what it is a view of": lambda out, b, base: [
        lambda: base.register_hook(lambda gradient: SEEN.append(("base", gradient)))
    ],
    "write": lambda out, b, base: [lambda: b.mul_(3), lambda: torch.autograd.grad(out[0].sum(), b, allow_unused=True)],
}
SEEN = []


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("make", [compiled, partial(compiled, frontend="dynamo")], ids=["direct", "dynamo"])
@pytest.mark.parametrize("retains", [False, True], ids=["", "retains"])
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(
    "program", [_written_itself, _written_above, _computed_from, _view_of_a_view, _written_twice, _written_unseen]
)
def test_views_from_before_a_write_that_are_used_after_it(program, caller, retains, make):
    """Their gradients go past the argument, which is a view as they are, to what both are views of."""

    def inputs():
        leaf = torch.arange(6.0).reshape(3, 2).requires_grad_()
        base = leaf * 1
        if retains:
            base.retain_grad()
        return (base[1:],), {"base": base, "leaf": leaf}

    function = make(program)
    assert differences(program, function, [inputs, inputs], before=CALLERS[caller], seen=SEEN) == []
    if make is compiled:
        assert function.calls.eager == (0 if program in (_computed_from, _view_of_a_view, _written_itself) else 2)


def _view_of_an_earlier_view(b):
    v = b.view(-1)
    v.mul_(2)
    return v.view(-1)


def _part_of_an_earlier_view(b):
    v = b.view(-1)
    with torch.no_grad():
        b.mul_(2)
    return v.view(-1)[1:]


def _view_of_a_view_of_an_earlier_view(b):
    v = b.view(-1)
    b.mul_(2)
    return v.view(-1).view(2, 2)


def _both(b):
    v = b.view(-1)
    v.mul_(2)
    return v.view(-1), v


def _view_of_a_later_view(b):
    b.mul_(2)
    return b.view(-1).view(-1)


@pytest.mark.parametrize(
    "function",
    [
        _view_of_an_earlier_view,
        _both,
        _view_of_a_later_view,
    ],
)
def test_a_view_of_a_view_from_before_a_write(function):
    """After the write, the earlier view's gradient flows to the input's base, not through the input."""

    def reaches(called, is_view):
        base = torch.arange(6.0).view(3, 2).requires_grad_() * 1
        b = base[1:] if is_view else base[1:].clone()
        made = called(b)
        found = []
        for out in made if isinstance(made, tuple) else (made,):
            (gradient,) = torch.autograd.grad(out.sum(), b, allow_unused=True, retain_graph=True)
            found.append(None if gradient is None else gradient.tolist())
        return found

    for is_view in (True, False):
        for made in (compiled(function), compiled(function, frontend="dynamo")):
            assert reaches(function, is_view) == reaches(made, is_view)
        made = compiled(function)
        reaches(made, is_view)
        assert made.calls.eager == 0


def _leaf_view_used_late(b):
    v = b.view(-1)
    b.detach().mul_(2)
    return v.view(-1), b * 2


def _leaf_view_computed_from_late(b):
    v = b.view(-1)
    with torch.no_grad():
        b.mul_(2)
    return v * 2


def _leaf_view_from_after(b):
    b.detach().mul_(2)
    return b.view(-1), b * 2


@pytest.mark.parametrize("program", [_leaf_view_used_late, _leaf_view_computed_from_late, _leaf_view_from_after])
@pytest.mark.parametrize("is_view", [True, False])
def test_views_of_a_leaf_that_is_a_view(program, is_view):
    """A write regenerates their histories from the leaf's base.

    The base does not require grad, so no gradient reaches the leaf.
    """

    def inputs():
        base = torch.arange(5.0)
        part = base[1:] if is_view else base[1:].detach()
        return (part.requires_grad_(),), {"base": base}

    function = compiled(program)
    assert differences(program, function, [inputs, inputs], backward="each") == []
    if program is _leaf_view_from_after and not is_view:
        assert function.calls.compiled == 2


def _given_a_history(b, w):
    v = b.view(-1)
    b.mul_(w)
    return v[1:], b * 2


@pytest.mark.parametrize("is_view", [True, False])
def test_views_of_a_view_that_is_given_a_history(is_view):
    """They get theirs from what both are views of; no gradient passes the written view itself."""

    def inputs():
        base = torch.arange(5.0)
        part = base[1:] if is_view else torch.arange(4.0)
        return (part, torch.ones(4, requires_grad=True)), {"base": base}

    def before(out, b):
        return [lambda: torch.autograd.grad(out[0].sum(), b, allow_unused=True, retain_graph=True)]

    assert differences(_given_a_history, compiled(_given_a_history), [inputs, inputs], before=before) == []


@pytest.mark.parametrize("base", [lambda b: torch.zeros(3, 2), lambda b: b.detach(), lambda b: b.detach().exp()])
def test_a_view_that_eager_takes_for_a_leaf(base):
    """Eager sees the history that its base got only once something has looked at it."""

    def program(b, *, looks):
        v = base(b)
        row = v[0]
        v.mul_(b.sum())
        if looks:
            row.grad_fn  # noqa: B018
        row.add_(1)
        return v * b.sum()

    for function in (program, compiled(program)):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            function(nonleaf(3, 2), looks=False)
    same(program, nonleaf(3, 2), kwargs={"looks": True}, eagerly=True)


def test_what_is_kept_by_way_of_data():
    """Eager does not notice that it is written before the backward; README says so."""

    def program(a, b):
        return a.data * a.sum() + b.detach()

    def writes(a, b):
        torch.no_grad()(b.mul_)(2)
        return a.data * a.sum()

    def gradient(function, change):
        base = leaf(3, 2)
        x = base * 1
        out = function(x, x.detach()[:1])
        change(x)
        out.sum().backward()
        return base.grad

    by_detach, by_data = (lambda x: x.detach().mul_(2)), (lambda x: x.data.mul_(2))
    before = gradient(program, lambda x: None)
    assert not torch.equal(gradient(program, by_detach), before)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(compiled(program), by_detach)
    before = gradient(writes, lambda x: None)
    assert not torch.equal(gradient(writes, by_data), before)
    assert torch.equal(gradient(compiled(writes), by_data), before)
