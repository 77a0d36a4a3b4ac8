"""Hooks on views: the gradient of a view of a hooked view passes the hook, as in eager."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.engine_helpers import alike, behind, compiled, leaf

seen: list = []


def hook(name, factor=1):
    """Make a hook that notes its gradient and changes it; with factor None it returns nothing."""

    def call(gradient):
        seen.append((name, None if gradient is None else gradient.tolist()))
        return None if factor is None or gradient is None else gradient * factor

    return call


def part_of_a_view(x):
    """Return a part of a view of an input that has a hook."""
    v = x.view(-1)
    v.register_hook(hook("v", 2))
    return v.select(0, 3)


def equal_views(x):
    """Return an equal view without the hook, a view of the hooked one, and the input."""
    v = x.view(-1)
    v.register_hook(hook("v", 2))
    return x.view(-1), v.select(0, 3), x


def a_chain(x):
    """Hang hooks on a view and on a view of it."""
    v = x.view(-1)
    v.register_hook(hook("v", 2))
    w = v.view(2, 4)
    w.register_hook(hook("w", 3))
    return w.t(), v[2]


def viewed_and_used(x):
    """View it again, and compute with it."""
    v = x.view(-1)
    v.register_hook(hook("v", 2))
    return v[1:3], v.sin()


def of_an_intermediate(x):
    """Hang a hook on a view of an intermediate that is returned too."""
    y = x * 2
    v = y.view(-1)
    v.register_hook(hook("v", 2))
    return v.select(0, 1), y


def two_of_an_intermediate(x):
    """Hang hooks on two equal views of an intermediate that is not returned."""
    y = x * 2
    v, w = y.view(-1), y.view(-1)
    v.register_hook(hook("v", 2))
    w.register_hook(hook("w", 5))
    return v.select(0, 1), w.select(0, 2), w


def alone(x):
    """Return only a view of a hooked view of an intermediate."""
    v = (x * 2).view(-1)
    v.register_hook(hook("v", 2))
    return v.view(2, 4)


def several_hooks(x):
    """Register several hooks on one view, some of which return nothing, and remove one again."""
    v = x.t()
    v.register_hook(hook("first", None))
    v.register_hook(hook("second", -1))
    v.register_hook(hook("removed", 7)).remove()
    v.register_hook(hook("last", 3))
    return v[0], v


def one_of_many(x):
    """Hang a hook on one of the views that one op gives."""
    a, b = x.unbind(1)
    b.register_hook(hook("b", 2))
    return b.view(2, 2), a, b[1:]


def without_grad(x):
    """Hang hooks on under no_grad, where a view is made too."""
    v = x.view(-1)
    with torch.no_grad():
        v.register_hook(hook("v", 2))
        x.register_hook(hook("x", 3))
        w = v[0:2]
    return w, v[2:3], x * 2


def hidden_write(x):
    """Write the input where autograd does not see it."""
    v = x.unfold(1, 2, 1)
    v.register_hook(hook("v", -1))
    x.data.mul_(2)
    return (v[...],)


def restrided(x):
    """Register a hook on an as_strided view, and on an expanded view."""
    v = x.as_strided((2, 2), (2, 1))
    v.register_hook(hook("v", 2))
    w = x.unsqueeze(0).expand(3, 4, 2)
    w.register_hook(hook("w", 3))
    return v[0], v, w[1]


def written_input(x):
    """Hang hooks on a non-leaf and its views before and after it is written."""
    if x.is_leaf:
        x = x * 1
    x.register_hook(hook("before", 2))
    x.mul_(3)
    v = x.t()
    v.register_hook(hook("v", 7))
    x.register_hook(hook("after", 5))
    return v[0], x


PROGRAMS = [
    part_of_a_view, equal_views, a_chain, viewed_and_used, of_an_intermediate, two_of_an_intermediate, alone,
    several_hooks, one_of_many, without_grad, hidden_write, restrided, written_input,
]  # fmt: skip


def used(function, *, nonleaf, pick):
    """Call twice, each time with other values; backward from one output or all; return all that can be seen."""
    seen.clear()
    found = []
    for seed in range(2):
        x = leaf(4, 2, seed=seed)
        outputs = function(x * 1 if nonleaf else x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found.append([(o.tolist(), o.requires_grad) for o in outputs])
        chosen = [o for o in outputs if o.grad_fn is not None]
        chosen = chosen if pick is None else [chosen[pick % len(chosen)]]
        sum((o * torch.arange(1.0, o.numel() + 1).view(o.shape)).sum() for o in chosen).backward()
        found.append(x.grad.tolist())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the gradient of a tensor that is no leaf
            found.append([o.grad.tolist() if o.retains_grad and o.grad is not None else None for o in outputs])
    return found, list(seen)


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("fresh_dynamo")
def test_gradients_pass_the_hooks(function, frontend):
    """Hooks are called with eager's gradients, in eager's order, whichever outputs the backward starts from."""
    for nonleaf in (False, True):
        for pick in (None, 0, 1):
            torch.compiler.reset()
            g = compiled(function, frontend=frontend)
            expected = used(function, nonleaf=nonleaf, pick=pick)
            if frontend == "dynamo" and not alike(lambda f, n=nonleaf, p=pick: used(f, nonleaf=n, pick=p), function):
                continue  # Dynamo itself mixes up hooks and writes
            assert expected == used(g, nonleaf=nonleaf, pick=pick)
            if frontend == "direct":
                assert g.calls.eager == 2
            else:
                break  # the direct frontend's test covers the start of the backward


def test_without_grad_mode():
    """A view in a call without grad mode has no history, so the call runs eagerly.

    A call with gradients is compiled.
    """

    def f(x):
        v = x.view(-1)
        if v.requires_grad:
            v.register_hook(hook("v", 2))
        return v[0].exp(), v.sin()

    g = compiled(f)
    found = []
    for kind in (f, g):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")  # it is known, and not a trace that failed
            warnings.filterwarnings(
                "ignore", ".* runs eagerly: a hook is registered on a view that was made under no_grad", RuntimeWarning
            )
            a, b = kind(leaf(4, 2))
        found.append((a.item(), b.tolist(), a.requires_grad, b.requires_grad))
    assert found[0] == found[1]
    assert used(f, nonleaf=False, pick=None) == used(g, nonleaf=False, pick=None)
    assert (g.calls.eager, g.calls.compiled) == (1, 2)


def test_equal_inputs_of_which_one_has_a_hook():
    """If two inputs are the same view, each output is made from the input that the function used."""

    def f(v, w):
        return v.select(0, 1), w.select(0, 2), w.view(2, 4)

    def use(g):
        seen.clear()
        x = leaf(4, 2)
        y = x * 1
        v, w = y.view(-1), y.view(-1)
        v.register_hook(hook("v", 2))
        w.register_hook(hook("w", 5))
        a, b, c = g(v, w)
        (a + b + c.sum()).backward()
        return x.grad.tolist(), list(seen)

    g = compiled(f)
    assert use(f) == use(g)
    assert g.calls.compiled == 1


def test_another_hook_at_the_second_call():
    """A hook that is an argument gets another entry if it changes; each entry registers its own hook."""

    def f(x, h):
        v = x.view(-1)
        v.register_hook(h)
        return v[0:2].exp(), v.cos()

    g = compiled(f)
    for h in (torch.neg, torch.exp, torch.neg):
        found = []
        for kind in (f, g):
            x = leaf(4, 2)
            a, b = kind(x, h)
            (a.sum() + b.sum()).backward()
            found.append(x.grad.tolist())
        assert found[0] == found[1]
    assert len(g.entries) == 2


def test_a_removed_handle():
    """A handle that is removed before the function returns has no effect; the other hooks stay."""

    def f(x):
        v = x.view(-1)
        handle = v.register_hook(hook("gone", 11))
        w = v[0:2]
        handle.remove()
        return w, v

    expected = used(f, nonleaf=False, pick=0)
    assert expected[1] == []
    assert expected == used(compiled(f), nonleaf=False, pick=0)


@pytest.mark.parametrize("leaf_first", [False, True])
def test_hooks_of_the_caller_on_a_view_that_is_written(leaf_first):
    """In eager the gradient of a written view bypasses the caller's hooks on it. Only calls with hooks run eagerly."""

    def f(b):
        c = b * 3
        b.sin_()
        return c

    def use(g, *, hooked):
        seen.clear()
        x = leaf(3, 2)
        base = x * 1
        b = base[1:]
        if hooked:
            b.register_hook(hook("b", 5))
        c = g(b)
        (base.sum() + c.sum()).backward()
        return x.grad.tolist(), list(seen)

    g = compiled(f)
    order = [True, False, True] if leaf_first else [False, True, False]
    for with_hook in order:
        assert use(f, hooked=with_hook) == use(g, hooked=with_hook)
    assert (g.calls.compiled, g.calls.eager) == (order.count(False), order.count(True))


def test_a_second_hook_after_a_write_to_the_base():
    """A second hook after a write to the base runs eagerly.

    Up to torch 2.14 the hook is attached to the first hook's node; from 2.15 on it is attached to the view's new node.
    """

    def f(x):
        y = x * 1
        v = y.view(-1)
        v.register_hook(hook("before", 2))
        y.mul_(3)
        v.register_hook(hook("after", 5))
        return v[0:2], y.sin()

    g = compiled(f)
    assert used(f, nonleaf=False, pick=None) == used(g, nonleaf=False, pick=None)
    assert behind(g).calls.eager == 2


@pytest.mark.parametrize("write", [lambda a: a.__setitem__(..., a), lambda a: a.mul_(2), lambda a: a[:1].zero_()])
def test_a_hook_on_a_view_that_is_written_without_grad_mode(write):
    """A hook on a view that is written without grad mode is registered before the write.

    Torch itself crashes if it is registered afterwards.
    """

    def f(a):
        a.register_hook(hook("a", 2))
        write(a)
        return a.new_zeros(2)

    for function in (f, compiled(f)):
        base = leaf(4) * 1
        a = base[1:]
        with torch.no_grad():
            function(a)
        seen.clear()
        base.sum().backward()
        assert a.grad_fn is not None
        assert seen == []


@pytest.mark.parametrize("first", [False, True])
def test_a_written_view_that_retains_its_gradient(first):
    """A call that writes a view that retains its gradient runs eagerly.

    When autograd regenerates the view's history, it also moves the retained gradient.
    """

    def f(b):
        b.select(0, 0)[...] = 3
        b.mul_(2)
        return b * 1

    def use(g, *, retained):
        x = leaf(3, 2)
        b = (x * 1)[1:]
        if retained:
            b.retain_grad()
        g(b).sum().backward()
        return x.grad.tolist(), b.grad.tolist() if retained else None

    g = compiled(f)
    order = (first, not first, first)
    for retained in order:
        assert use(f, retained=retained) == use(g, retained=retained)
    assert (g.calls.compiled, g.calls.eager) == (order.count(False), order.count(True))
