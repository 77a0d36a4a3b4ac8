"""Views of a tensor with a history that are changed, also in ways in which no window of a base can be."""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import behind, compiled, nonleaf, same
from tests.stages.test_metadata_mutation import behind_dynamo
from tests.stages.test_synthetic_bases import gradient, lone, of_a_history, steps_of


def step_and_write(a):
    """Change the sizes, then the values, and view and use what comes of it."""
    a.t_()
    a.mul_(2)
    return a * 1, a[0], a


def uses_on_both_sides(a):
    """Use the input before and after."""
    before = a * 3
    a.unsqueeze_(0)
    a.mul_(2)
    return before, a * 5


def step_and_hidden_write(a):
    """Let autograd see the step, but not the write."""
    before = a * 3
    a.unsqueeze_(0)
    a.detach().mul_(2)
    return before, a, a[0]


def history_and_write(a):
    """Note in the history that the input is given its own memory."""
    a.set_(a)
    a.add_(1)
    first, second = a.unbind(0)
    return first, second * 2


def step_on_a_view(a):
    """Change the sizes of a view, which moves the version of the input too."""
    before = a * 2
    a.view(-1).unsqueeze_(0)
    return before, a, a[0]


def step_on_a_view_before_a_use(a):
    """Use the input after its version has moved."""
    a.view(-1).unsqueeze_(0)
    return a * 2, a


def stepped_view_returned(a):
    """Return the very view whose sizes changed."""
    v = a.view(-1)
    v.unsqueeze_(0)
    return v, a


COMPILED = [
    step_and_write,
    uses_on_both_sides,
    step_and_hidden_write,
    history_and_write,
    step_on_a_view,
    step_on_a_view_before_a_use,
]


def gradients(out, a, base):
    """Differentiate each output by the view and by what it is a view of."""
    return [gradient(o, t) for o in out for t in (a, base)]


@pytest.mark.parametrize("program", COMPILED)
def test_views_that_stand_for_their_owners(program):
    """They are compiled, and gradients go where eager's go, also those of what they are views of."""
    eager, ours = steps_of(program, lone, gradients)
    assert eager == ours
    eager, ours = steps_of(program, lone, lambda _out, a, base: [gradient(base * 2, t) for t in (base, a)])
    assert eager == ours
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            same(program, of_a_history(), backward="all" if grad_mode else None)
    same(program, torch.ones(2, 2))
    same(program, of_a_history(), backward="each")


@pytest.mark.parametrize("program", COMPILED)
def test_they_do_so_behind_dynamo(program):
    """Values and gradients are those of the graph run eagerly."""
    behind_dynamo(program, of_a_history(), breaks=True)


def used_late(a):
    """Use a view from before the write after it."""
    v = a[0]
    a.set_(a)
    a.mul_(2)
    return v * 3, a


def returned_late(a):
    """Return a view from before the write."""
    v = a[0]
    a.set_(a)
    a.mul_(2)
    return v, a * 1


def moved_between(a):
    """Use the input between a write that autograd sees and one that it does not see."""
    a.set_(a)
    a.mul_(2)
    between = a * 3
    a.detach().add_(1)
    return between, a * 1


@pytest.mark.parametrize("program", [used_late, returned_late, moved_between, stepped_view_returned])
def test_views_that_do_not(program):
    """Autograd makes the view's history anew in between, so what hangs on it has no way to what the caller sees."""
    same(program, of_a_history(), eagerly=True)


def test_hooks_in_the_function():
    """A hook on the view is called for what used it before the write, which a trace without a base cannot tell."""

    def program(a):
        a.register_hook(lambda gradient: gradient * 10)
        a.set_(a)
        a.mul_(2)
        return a * 1

    same(program, of_a_history(), eagerly=True)


def test_a_view_of_a_view():
    """Its gradient goes past the view in between once it was written, and with it past that one's hooks."""

    def run(function):
        base = nonleaf(3, 2)
        middle = base[1:]
        seen = []
        middle.register_hook(lambda gradient: seen.append(gradient.tolist()))
        a = middle[...]
        out = function(a)
        return seen, gradient(out[0], base)

    for calls_before in (0, 1):
        function = compiled(history_and_write)
        for _ in range(calls_before):
            function(of_a_history())
        expected, got = run(history_and_write), run(function)
        assert expected[0] == got[0] == []
        assert behind(function).calls.eager == 1


def test_views_that_share_a_history():
    """The step on a view of one of them moves all versions; that is compiled for calls that share in the same way."""

    def program(a, b, c):
        before = a * 3
        a.view(-1).unsqueeze_(0)
        return before, b[0], a

    def make(together):
        w = nonleaf(6, 2)
        a, b = w[0:2], w[2:4]
        return (a, b if together else b.clone(), w if together else nonleaf(6, 2)), w

    both = []
    for function in (program, compiled(program)):
        found = []
        for together in (True, False, True):
            args, w = make(together)
            out = function(*args)
            found += [None if (g := gradient(o, t)) is None else g.tolist() for o in out for t in (*args, w)]
            found += [t.grad_fn.name() for t in args[:2]]
        both.append(found)
    assert both[0] == both[1]
    assert behind(function).calls.eager == 0
    assert len(behind(function).entries) == 2


def test_an_input_whose_view_is_changed():
    """Were it a view together with another input, autograd would make the other's history anew as well."""

    def program(a, b):
        result = b * 2
        a.view(-1).unsqueeze_(0)
        return result

    def together():
        base = nonleaf(2, 2, 2)
        return base[0], base[1]

    both = []
    for function in (program, compiled(program)):
        found = []
        for a, b in ((nonleaf(2, 2), nonleaf(2, 2)), together()):
            out, node = function(a, b), b.grad_fn
            found += [node.name(), b.grad_fn is node, None if (g := gradient(out, b)) is None else g.tolist()]
        both.append(found)
    assert both[0] == both[1]
    assert both[0][3] == "AsStridedBackward0"
    assert len(behind(function).entries) == 2
