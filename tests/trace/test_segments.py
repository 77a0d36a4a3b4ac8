"""One autograd node per call, or several if outputs depend on each other."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.engine_helpers import compiled, entry_of, leaf, nonleaf, same


def both(function, *make):
    """Run something with eager's function and with the compiled one, and return both results."""
    return [make[0](candidate) for candidate in (function, compiled(function))]


def test_one_node_where_that_is_enough():
    """Outputs that do not depend on each other share one autograd node."""
    f = compiled(lambda x: (x.sin(), x.cos()))
    f(leaf(3))
    assert entry_of(f).source.count("Compiled.apply(") == 1


def test_gradients_between_outputs():
    """``autograd.grad`` from one output to another, through several, and to the inputs besides."""

    def f(x, w):
        hidden = x * w
        logits = hidden.sin()
        return hidden, logits, (logits * hidden).sum()

    def use(g):
        x, w = leaf(3), leaf(3, seed=1)
        hidden, logits, loss = g(x, w)
        first = torch.autograd.grad(loss, (hidden, logits, x), retain_graph=True)
        second = torch.autograd.grad(logits, hidden, torch.ones(3), retain_graph=True)
        loss.backward()
        return [t.tolist() for t in (*first, *second, x.grad, w.grad)]

    expected, actual = both(f, use)
    assert expected == actual
    same(f, leaf(3), leaf(3, seed=1))


def test_hooks_and_retained_gradients_of_outputs():
    """A hook on an output sees the gradients that arrive through other outputs.

    No hook runs that eager would not run.
    """

    def f(x):
        y = x * 2
        z = y * y
        return y, z, x.cos()

    def use(g):
        x, seen = leaf(3), []
        y, z, other = g(x)
        for name, output in (("y", y), ("z", z), ("other", other)):
            output.register_hook(lambda gradient, name=name: seen.append((name, gradient.tolist())))
            output.retain_grad()
        z.sum().backward()
        return seen, y.grad.tolist(), z.grad.tolist(), other.grad, x.grad.tolist()

    expected, actual = both(f, use)
    assert expected == actual


def test_views_and_writes_between():
    """Outputs that are views of others, and an input that is written in between, are on the way too."""

    def f(x, w):
        before = x + w
        x.mul_(2)
        view = x.view(-1)[1:]
        return before, view, view * before[1:], (x * before).sum()

    def use(g):
        x = leaf(4)
        w = leaf(4, seed=1)
        hidden = x * 1
        before, view, product, total = g(hidden, w)
        found = torch.autograd.grad(total, (before, hidden), retain_graph=True)
        more = torch.autograd.grad(product, (view, before, w), torch.ones(3), retain_graph=True)
        (total + product.sum()).backward()
        return [t.tolist() for t in (*found, *more, x.grad, w.grad)]

    expected, actual = both(f, use)
    assert expected == actual
    same(f, nonleaf(4), leaf(4, seed=1))
    same(f, nonleaf(4), leaf(4, seed=1), backward="each")


def test_a_shared_part_runs_once():
    """A computation that two dependent outputs share belongs to one segment, so its backward runs once."""
    runs = threading.Semaphore(0)  # no guard looks into a lock, so that the counting function is compiled

    class Count(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            runs.release()
            return gradient * 2

    def f(x):
        trunk = Count.apply(x)
        y = trunk.sin()
        return y, y * trunk

    same(f, leaf(3))
    before = runs._value
    f_compiled = compiled(f)
    f_compiled(leaf(3))
    assert runs._value - before == 1


def test_separate_backwards():
    """Each output has its own backward. A shared part fails the second time, and works with ``retain_graph``."""

    def f(x):
        y = x.sin()
        return y + 1, y.exp(), (y + 1).sum() * 2

    def use(g):
        outcome = []
        for keep in (True, False):
            for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
                x = leaf(3)
                outputs = g(x)
                for i in order:
                    try:
                        outputs[i].sum().backward(retain_graph=keep)
                    except RuntimeError as error:
                        outcome.append(str(error)[:40])
                    else:
                        outcome.append(x.grad.tolist())
        return outcome

    expected, actual = both(f, use)
    assert expected == actual


def test_none_where_nothing_reaches():
    """An input that no used output reaches gets None, also across segments."""

    def f(x, w, v):
        y = x * 2
        return y, y * w, v.exp()

    def use(g):
        x, w, v = leaf(2), leaf(2, seed=1), leaf(2, seed=2)
        outputs = g(x, w, v)
        outputs[0].sum().backward()
        return [None if t.grad is None else t.grad.tolist() for t in (x, w, v)]

    expected, actual = both(f, use)
    assert expected == actual
    assert actual[1:] == [None, None]


def test_an_error_in_the_middle():
    """A value that one segment needs and the caller overwrote is an error for that segment only."""

    def use(g):
        x = leaf(3)
        y, z = g(x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
        return x.grad

    assert both(lambda x: ((y := x.exp()), y * y), use) == [None, None]


def test_a_backward_that_reaches_no_input_raises_as_in_eager():
    """A view of a leaf that is made under `no_grad` is a hidden leaf; outputs computed from it have a backward."""

    def f(x, overwrite):
        with torch.no_grad():
            v = x[...]
        y = v.relu()
        if overwrite:
            y.add_(2)
        return y

    same(f, leaf(2, 2), True, eagerly=True)
    same(f, leaf(2, 2), False, eagerly=True)  # what `relu` keeps is the caller's to overwrite

    def keeps_nothing(x):
        with torch.no_grad():
            v = x[...]
        return v * 2

    same(keeps_nothing, leaf(2, 2))


def test_what_is_kept_on_the_way_to_no_input_is_watched():
    """The caller writes it, and the backward raises as in eager."""

    def f(x):
        y = x * 2
        with torch.no_grad():
            v = y.view(-1)
        return y, v.sin()

    for function in (f, compiled(f)):
        y, z = function(nonleaf(2, 2))
        y.mul_(2)
        with pytest.raises(RuntimeError, match="created in no_grad mode"):
            z.sum().backward()


@pytest.mark.parametrize("others", [False, True])
def test_an_op_without_a_derivative_on_the_way_to_no_input_raises(others):
    """Eager comes to its node all the same; beside other outputs it was passed by (`fuzz --seed 920000`)."""

    def f(x):
        with torch.no_grad():
            view = x.view(-1)
        y = view * 2
        y.set_(y)
        return (y, x.sin()) if others else (y,)

    def use(g):
        with pytest.raises(RuntimeError, match="derivative for set_ is not implemented"):
            g(nonleaf(2, 2))[0].sum().backward()

    use(f)
    use(compiled(f))


@pytest.mark.parametrize("kept", ["by the first", "by both"])
def test_what_leads_nowhere_is_used_up_beside_other_nodes(kept):
    """A call whose outputs need several autograd nodes runs eagerly if one path reaches no input.

    None of the nodes would know that the path has been freed. `fuzz --seed 900000`: the second backward passed,
    although eager has freed the tensors that `/` saves.
    """

    def f(x):
        with torch.no_grad():
            x.clamp_(-1, 1)
            part = x.split(1, 0)[1]
        return part / 2, x.sin() if kept == "by both" else x * 2

    def use(g):
        x = leaf(2, 2)
        first, second = g(x * 1)
        found = []
        for output, retain in ((first, True), (first, False), (second, True), (first, False), (second, False)):
            try:
                output.sum().backward(retain_graph=retain)
                found.append(None if x.grad is None else x.grad.tolist())
            except RuntimeError as error:
                found.append(str(error))
        return found

    g = compiled(f)
    expected, actual = use(f), use(g)
    assert expected == actual
    assert "second time" in expected[3]
    assert g.calls.eager == 1


def test_hooks_on_the_way_to_no_input_are_called():
    """Eager calls them, though no gradient gets to an input."""
    calls = []

    def f(x):
        y = torch.ones(2, requires_grad=True) * x.detach()
        y.register_hook(calls.append)
        return y.sum()

    for function in (f, compiled(f)):
        function(leaf(2)).backward()
    assert len(calls) == 2


def test_the_gradient_of_something_expanded_has_memory_of_its_own():
    """It comes in with memory for each element, and need not be brought into the strides of the output."""
    same(lambda x: (x * 2).expand(3, 2), leaf(2))
    same(lambda x: ((x * 2).unbind(0)[0].expand(2, 2), x.mul_(3)), nonleaf(2, 2))
