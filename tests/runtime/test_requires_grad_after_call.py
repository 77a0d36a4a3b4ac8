"""Inputs on which the caller sets `requires_grad` after the call.

Views from before a write follow the input's new state.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.engine_helpers import behind, compiled


def older(x, y):
    """Return a view from before a write."""
    v = x.view(-1)
    x.mul_(2)
    return v


def both(x, y):
    """Return one from before and one from after."""
    v = x.view(-1)
    x.mul_(2)
    return v, x[0]


def of_another(x, y):
    """View another tensor than is written; they may count their writes together."""
    v = y.view(-1)
    x.mul_(2)
    return v


def of_both(x, y):
    """Write both."""
    v, u = y.view(-1), y[1:]
    x.mul_(2)
    y.add_(x.sum())
    return v, y, u, x


def one_of_several(x, y):
    """Make several views at once."""
    first, _ = x.unbind(0)
    x.mul_(2)
    return first


def hidden(x, y):
    """Write through `.data`, which has a separate version counter."""
    v = x.view(-1)
    x.data.mul_(2)
    return v


def through_another(x, y):
    """Write through a view."""
    v, u = x.view(-1), x[0]
    u.mul_(2)
    return v, u, x


def chained(x, y):
    """View views."""
    v = x.view(-1).view(2, 2)
    u, w = v[0], v.t()
    x.mul_(2)
    return w, u


def moved(x, y):
    """Change the strides."""
    v = x.view(-1)
    x.t_()
    return v


def moved_and_written(x, y):
    """Change strides and values; views are from before both, from between and from after."""
    v = x.view(-1)
    x.t_()
    u = x[0]
    x.mul_(2)
    return v, u, x[1]


MOVING = (moved, moved_and_written)
PROGRAMS = (older, both, of_another, of_both, one_of_several, hidden, through_another, chained, *MOVING)
MAKERS = {
    "apart": lambda: (torch.ones(2, 2), torch.ones(2, 2)),
    "one buffer": lambda: (buffer := torch.ones(4, 2), (buffer[:2].detach(), buffer[2:].detach()))[1],
    "views": lambda: torch.ones(4, 2).split(2),
    "overlapping": lambda: (buffer := torch.ones(3, 2), (buffer[:2], buffer[1:]))[1],
}


def seen(function, make, which, *, grad):
    """Call the function and let an argument require grad; return the results' metadata and their gradients."""
    x, y = make()
    with nullcontext() if grad else torch.no_grad():
        out = function(x, y)
    try:
        (x, y)[which].requires_grad_()
    except RuntimeError as error:
        return str(error)
    found = [x.tolist(), y.tolist()]
    for each in out if isinstance(out, tuple) else (out,):
        try:
            found.append((each.requires_grad, each.is_leaf, each.stride(), each.grad_fn and each.grad_fn.name()))
            given = [tensor for tensor in (x, y) if tensor.requires_grad]
            got = torch.autograd.grad(each.sum(), given, allow_unused=True, retain_graph=True)
            found.append([None if g is None else (g.tolist(), g.stride()) for g in got])
        except RuntimeError as error:  # of views that must not be used any more, or without a history
            found.append(str(error))
    return found


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_older_views_have_its_history(program, made, grad):
    """`requires_grad`, gradients and errors are eager's, also at a second call."""
    function = compiled(program)
    for which in (0, 1):
        for _ in range(2):
            expected = seen(program, MAKERS[made], which, grad=grad)
            assert seen(function, MAKERS[made], which, grad=grad) == expected
    if made == "apart" and program is not one_of_several and program not in MOVING:
        assert behind(function).entries


@pytest.mark.parametrize("made", ["apart", "one buffer"])
@pytest.mark.parametrize("program", [older, of_another])
def test_behind_dynamo(program, made):
    """The same holds behind Dynamo.

    It also holds if the function itself calls `requires_grad_` after it has computed its results.
    """

    def required_inside(x, y):
        out = program(x, y)
        x.requires_grad_()
        return out

    torch._dynamo.reset()
    for original in (program, required_inside):
        function = compiled(original, frontend="dynamo")
        for which in (0, 1):
            assert seen(function, MAKERS[made], which, grad=True) == seen(original, MAKERS[made], which, grad=True)
