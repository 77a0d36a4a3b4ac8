"""Changes in place other than of values: moves of dimensions are compiled, others run eagerly."""

from __future__ import annotations

import pytest
import torch

from tests.engine_helpers import behind, compiled, leaf, nonleaf, same

MOVES = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "swapdims_": lambda x: x.swapdims_(1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "op": lambda x: torch.ops.aten.transpose_.default(x, 0, 1),
    "detach_": lambda x: x.detach_(),
}
INPUTS = {
    "plain": lambda: torch.arange(6.0).view(2, 3).clone(),
    "view": lambda: torch.arange(12.0)[3:9].view(2, 3),
    "history": lambda: nonleaf(2, 3),
}


def before_a_write(x, w, move):
    """Move, write, and use."""
    move(x)
    x.mul_(2)
    return x * w.sum(), x[0]


def after_a_write(x, w, move):
    """Write with a history, move, and return the input."""
    x.mul_(w)
    move(x)
    return x


def between_uses(x, w, move):
    """Use the input before and after."""
    before = x * 3
    move(x)
    return before, x.sum(0)


def of_an_intermediate(x, w, move):
    """Change the metadata of an intermediate."""
    y = x * w
    move(y)
    return y, y * 2


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("program", [before_a_write, after_a_write, between_uses, of_an_intermediate])
def test_moves_are_compiled(program, kind, move):
    """Moves of arguments and intermediates are compiled. `detach_` of an argument runs eagerly."""
    eagerly = move == "op" or (program is not of_an_intermediate and move == "detach_")
    same(program, INPUTS[kind](), leaf(2, 3), MOVES[move], eagerly=eagerly)


def _no_grad(step):
    def f(x, y):
        with torch.no_grad():
            step(x)
        return x * 2

    return f


def _step_after_a_view(x, y):
    v = x[0]
    x.t_()
    return v, x


#: The function, and whether its argument has an autograd history (None: it is a leaf).
EAGER = {
    "resize_ to fewer": (lambda x, y: x.resize_(2), False),
    "resize_ to more": (lambda x, y: x.resize_(20).fill_(1), False),
    "resize_ of an intermediate": (lambda x, y: (x * 2).resize_(2), False),
    "as_strided_": (lambda x, y: x.as_strided_((2,), (1,)), False),
    "set_ to itself": (lambda x, y: x.set_(x).mul_(2), True),
    "out": (lambda x, y: torch.add(y, 1, out=x), False),
    "a view of an input": (lambda x, y: x[0].unsqueeze_(0) * 2, False),
    "a view of an intermediate": (lambda x, y: (x * 2)[0].unsqueeze_(0), True),
    "a tensor with a view": (_step_after_a_view, False),
    "under no_grad": (_no_grad(lambda x: x.t_()), True),
    "a leaf": (_no_grad(lambda x: x.t_()), None),
}


@pytest.mark.parametrize(("function", "history"), EAGER.values(), ids=EAGER.keys())
def test_others_run_eagerly(function, history):
    """With eager's results."""
    x = leaf(2, 3) if history is None else nonleaf(2, 3) if history else torch.arange(6.0).view(2, 3).clone()
    same(function, x, torch.ones(4), eagerly=True)


@pytest.mark.parametrize("write", [lambda v: v.mul_(2), lambda v: v.unsqueeze_(0), lambda v: v.detach().mul_(2)])
def test_changes_of_views_with_a_history(write):
    """They change the history of the view's base, which becomes an input. An entry for others does not serve them."""

    def f(v):
        write(v)
        return v * 2

    same(f, nonleaf(3, 2)[1])
    same(f, torch.arange(6.0).view(3, 2)[1])
    same(f, nonleaf(2))
    g = compiled(f)
    for x in (nonleaf(2), nonleaf(3, 2)[1], nonleaf(2)):
        g(x)
    assert (behind(g).calls.compiled, behind(g).calls.eager) == (3, 0)


def test_steps_on_inputs_that_share_memory():
    """Metadata changes of views of one base are compiled; without a common base they run eagerly."""
    buffer = torch.arange(6.0)
    same(lambda a, b: (a.unsqueeze_(0), b.mul_(2))[1], buffer[:4], buffer[2:])
    same(lambda a, b: (a.unsqueeze_(0), b.mul_(2))[1], buffer[:4].detach(), buffer[2:].detach(), eagerly=True)


def test_leaves_that_are_views_of_others():
    """A view made under no_grad depends on the leaf's base and runs eagerly; other uses of such a leaf are compiled."""

    def seen(x):
        with torch.no_grad():
            scale = x.view(-1).sum()
        return x * scale

    same(seen, torch.arange(8.0)[2:6].requires_grad_(), eagerly=True)
    same(lambda x: (x * 2).sum(), torch.arange(8.0)[2:6].requires_grad_())
    same(seen, leaf(4))
