"""Inputs that require grad and are views of tensors that do not: views made of them without autograd require no grad.

    x = torch.arange(4.0).view(2, 2).requires_grad_()

For autograd, a view of ``x`` is a view of the base of ``x``. If the view has no autograd history, it requires grad only
if this base does.
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import aotlab
from aotlab.maintenance.fuzz.compare import differences
from tests.engine_helpers import behind, compiled, leaf


def plain():
    """Make a leaf that is no view, and another one."""
    return (torch.tensor([[0.5, 1.0], [2.0, 3.0]], requires_grad=True), torch.arange(3.0).requires_grad_()), {}


def view():
    """Return two leaves; the first is a view."""
    return (torch.arange(8.0)[2:6].view(2, 2).requires_grad_(), torch.arange(3.0).requires_grad_()), {}


def turned():
    """Make a leaf that is a view with other strides."""
    return (torch.arange(4.0).view(2, 2).t().requires_grad_(), torch.arange(3.0)), {}


def unseen_view():
    """Make a leaf that is a view made without autograd."""
    with torch.no_grad():
        x = torch.arange(4.0).view(2, 2)
    return (x.requires_grad_(), torch.arange(3.0)), {}


def one_of_several():
    """Make a leaf that is one of several views made together."""
    return (torch.arange(8.0).view(2, 2, 2).unbind(0)[0].requires_grad_(), torch.arange(3.0)), {}


def view_of_view():
    """Make a view with a history of a leaf that is a view."""
    return (torch.arange(4.0).view(2, 2).requires_grad_().view(2, 2), torch.arange(3.0)), {}


def together():
    """Make two leaves that are views of one tensor and share memory."""
    base = torch.arange(7.0)
    return (base[:4].view(2, 2).requires_grad_(), base[3:6].requires_grad_()), {}


MAKERS = (plain, view, turned, unseen_view, one_of_several, view_of_view, together)


class Asks(torch.autograd.Function):
    """Computes something else if its input needs a gradient."""

    @staticmethod
    def forward(ctx, x):
        """Multiply."""
        return x * (2 if ctx.needs_input_grad[0] else 5)

    @staticmethod
    def backward(ctx, gradient):
        """Multiply by something else."""
        return gradient * 7


def read(x, y):
    """Read a view under no_grad."""
    with torch.no_grad():
        scale = x.view(-1).sum()
    return x * scale


def step(x, y):
    """Write a view under no_grad, as an optimizer does with a parameter."""
    result = (x * 2).sum()
    with torch.no_grad():
        x.view(-1).sub_(0.5)
    return result


def steps(x, y):
    """Write it twice, and the leaf itself, and use it afterwards."""
    with torch.no_grad():
        x.mul_(2)
        part = x.view(-1)
        part.sub_(0.5)
        part[1:].mul_(y.sum())
        x.add_(1)
    return x * y.sum()


def use(x, y):
    """Use a view with grad mode on."""
    with torch.no_grad():
        part = x.view(-1)
    return part * 2, part[1:] * y, x.view(-1) * part


def ask(x, y):
    """Read `requires_grad` of a view, directly and in a custom Function."""
    with torch.no_grad():
        part = x.view(-1)
    return part.requires_grad, part[1:].requires_grad, part.is_leaf, Asks.apply(part.detach()), Asks.apply(x)


def write_in_grad_mode(x, y):
    """Write a view with grad mode on, which a leaf that is no view does not allow."""
    with torch.no_grad():
        part = x.view(-1)
    if not part.requires_grad:
        part.mul_(2)
    return x * 3


ORDERS = ["view", "view first", "plain first"]
COMPILED = [read, step, steps, use, ask, write_in_grad_mode]


@pytest.mark.parametrize("order", [(view,), (view, plain, view), (plain, view, plain)], ids=ORDERS)
@pytest.mark.parametrize("program", COMPILED)
def test_views_made_without_autograd(program, order):
    """Views of it made without autograd run eagerly; other leaves are compiled."""
    function = compiled(program)
    for grad_modes in (None, [False] * len(order)):
        assert differences(program, function, order, grad_modes=grad_modes) == []
    assert behind(function).calls.eager == 2 * order.count(view)
    assert len(behind(function).entries) == 2 * (plain in order)


def returned(x, y):
    """Return a view that requires no grad."""
    with torch.no_grad():
        return x.view(-1)


def hooked(x, y):
    """Put a hook on a view."""
    with torch.no_grad():
        scale = x.view(-1).sum()
    part = x.view(-1)
    part.register_hook(lambda gradient: gradient * 2)
    return part * scale


def base(x, y):
    """Use the leaf's base."""
    with torch.no_grad():
        scale = x.view(-1).sum()
    return scale if x._base is None else x._base * scale


def late(x, y):
    """Use a view from before a write after the write, when autograd regenerates its history from the other tensor."""
    part = x.view(-1)
    with torch.no_grad():
        x.mul_(2)
    return part * 3


def late_by_a_view(x, y):
    """Do so where the write is one to a view made without autograd."""
    part = x.view(-1)
    with torch.no_grad():
        x.view(-1).mul_(2)
    return part * 3


@pytest.mark.parametrize("order", [(view, plain), (plain, view)], ids=["view first", "plain first"])
@pytest.mark.parametrize("program", [returned, hooked])
def test_they_are_left_to_eager(program, order):
    """Programs that return or hook views of such leaves run eagerly; calls with other leaves are compiled."""
    function = compiled(program)
    assert differences(program, function, [*order, *order]) == []
    assert behind(function).calls.eager == 2
    assert behind(function).calls.compiled == 2


@pytest.mark.parametrize("program", [late, late_by_a_view])
def test_views_from_before_a_write_are_left_to_eager(program):
    """Whatever the leaf is a view of."""
    function = compiled(program)
    assert differences(program, function, [view, plain, view, plain]) == []
    assert (behind(function).calls.eager, behind(function).calls.compiled) == (4, 0)


def test_whose_view_an_input_is_stays_eagers_to_say():
    """A trace's wrappers are views of other tensors than the caller's are, or of none."""
    function = compiled(base)
    assert differences(base, function, [view, plain, view, plain]) == []
    assert (behind(function).calls.eager, behind(function).calls.compiled) == (4, 0)


@pytest.mark.parametrize("make", [unseen_view, one_of_several, view_of_view, together], ids=lambda make: make.__name__)
@pytest.mark.parametrize("program", COMPILED)
def test_others_are_left_to_eager(program, make):
    """Views of other kinds, those with a history, and those that share memory if it is written."""
    function = compiled(program)
    assert differences(program, function, [make, plain, make, plain]) == []
    assert make is together or (behind(function).calls.eager, behind(function).calls.compiled) == (2, 2)


def test_behind_dynamo():
    """The graph that Dynamo captures is compiled, with eager's values and gradients."""
    for program in (read, step, steps, use):
        function = aotlab.compile(program, backend="eager", frontend="dynamo")
        assert differences(program, function, [view, plain, view]) == []


VIEWS = ("{0}.view(-1)", "{0}[0]", "{0}.t()", "{0}.unsqueeze(0)", "{0}.detach()", "{0}[...]", "{0}.unbind(0)[0]")
WRITES = ("{0}.mul_(2)", "{0}.zero_()", "{0}.copy_({1}.sum())", "{0}.mul_({1}.sum())")
VALUES = ("{0} * 2", "{0} + {1}.sum()", "{0}.exp() * {1}.mean()", "Asks.apply({0})", "{0}.clone()")
QUESTIONS = ("{0}.requires_grad", "{0}.is_leaf", "{0}.grad_fn is None")
MODES = ("no_grad", "no_grad", "no_grad", "enable_grad", "inference_mode")


def drawn(draw):
    """Write a small program of views, writes and uses in several grad modes."""
    lines, tensors, results = ["def program(x, y):"], ["x"], []
    for block in range(draw.randint(2, 4)):
        lines.append(f"    with torch.{draw.choice(MODES)}():" if draw.random() < 0.6 else "    if True:")
        for n in range(draw.randint(1, 3)):
            tensor, other, name = draw.choice(tensors), draw.choice(["y", *tensors]), f"v{block}{n}"
            kind = draw.choices([VIEWS, WRITES, VALUES, QUESTIONS], [40, 20, 30, 10])[0]
            text = draw.choice(kind).format(tensor, other)
            lines.append(f"        {text}" if kind is WRITES else f"        {name} = {text}")
            if kind is VIEWS:
                tensors.append(name)
            elif kind is not WRITES:
                results.append(name)
    return "\n".join([*lines, f"    return [{', '.join(results)}]"])


@pytest.mark.parametrize("seed", range(3))
def test_drawn_programs(seed):
    """Small random programs on leaves of all kinds, one after the other."""
    draw = random.Random(seed)
    served = 0
    for _ in range(20):
        text = drawn(draw)
        names = {"torch": torch, "Asks": Asks}
        exec(text, names)
        order = [view, *draw.choices(MAKERS, k=2)]
        draw.shuffle(order)
        modes = [draw.random() < 0.9 for _ in order]
        function = compiled(names["program"])
        assert differences(names["program"], function, order, grad_modes=modes) == [], text
        served += behind(function).calls.compiled
    assert served > 4


def _leaf(over):
    values = torch.arange(1.0, 7.0).view(3, 2)
    return (values if over else values.clone()).requires_grad_()


#: What a call is given of a leaf, and of what it is a view of: tensors that count their writes together.
SHARED = {
    "two views": lambda leaf: (leaf[1:], leaf[:2]),
    "it and a view": lambda leaf: (leaf, leaf[1:]),
    "it and an alias": lambda leaf: (leaf, leaf.detach()),
    "a view and an alias": lambda leaf: (leaf[1:], leaf.detach()),
    "a view and its base": lambda leaf: (leaf[1:], leaf.detach() if leaf._base is None else leaf._base),
}


def _steps_a_view(a, b):
    a.view_as(a).squeeze_(0)
    return b.sin()


def _writes_unseen(a, b):
    with torch.no_grad():
        a.mul_(2)
    return b * 2


def _writes_an_alias(a, b):
    a.detach().mul_(2)
    return a * b.sum()


def _steps_an_alias(a, b):
    a.detach().unsqueeze_(0)
    return b * a.sum()


def _writes(a, b):
    a.mul_(2)
    return b * a.sum()


def _writes_hidden(a, b):
    b.data.mul_(2)
    return a * b.sum()


def _writes_and_returns_views(a, b):
    with torch.no_grad():
        b.add_(1)
    return a.view(-1), b.view(-1), b * a.sum()


@pytest.mark.parametrize("first", [True, False], ids=["first a view", "first none"])
@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize(
    "program",
    [
        _steps_a_view,
        _writes_unseen,
        _writes_an_alias,
        _steps_an_alias,
        _writes,
        _writes_hidden,
        _writes_and_returns_views,
    ],
)
def test_two_of_them_that_share_memory(program, shared, first):
    """A write to one leaf regenerates the other's history, which then ends at the leaf's base."""

    def inputs(over):
        leaf = _leaf(over)
        return shared(leaf), {"leaf": leaf}

    function = compiled(program)
    calls = [lambda: inputs(first), lambda: inputs(not first), lambda: inputs(first)]
    assert differences(program, function, calls) == []


EMPTY = {
    "rows": lambda whole: (whole, whole[2:]),
    "columns": lambda whole: (whole, whole[:, 2:]),
    "beside": lambda whole: (whole[:1], whole[2:]),
    "both": lambda whole: (whole[2:], whole[2:]),
}


def _used_between(a, b):
    a.mul_(2)
    v = b / 2
    a.zero_()
    return v


def _empty_written(a, b):
    b.mul_(3)
    return a / 2, b * 2


def _each_after_the_other(a, b):
    a.mul_(3)
    v, w = b / 2, a * 2
    b.mul_(2)
    return v, w


def _neither(a, b):
    return a / 2, b * 2


@pytest.mark.parametrize("program", [_used_between, _empty_written, _each_after_the_other, _neither])
@pytest.mark.parametrize("kind", EMPTY)
def test_a_view_without_elements(kind, program):
    """It shares no byte, and yet a history, which a write to the other moves (`aotlab fuzz --seed 1160000`)."""

    def gradients(call):
        leaf = torch.tensor([[-1.25, 1.25], [2.0, 3.0]], requires_grad=True)
        a, b = EMPTY[kind](leaf * 1)
        outputs = call(a, b)
        found = []
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            for tensor in (a, b, leaf):
                way = torch.autograd.grad(output.sum(), tensor, retain_graph=True, allow_unused=True)[0]
                found.append(None if way is None else way.tolist())
        return found

    call = aotlab.compile(program, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert gradients(call) == gradients(program)
    assert behind(call).calls.compiled == 1


def test_a_write_that_gives_a_history():
    """A write that gives a view a history also gives it to the base.

    So the base is an input, and an entry for a tensor that is no view does not serve the call.
    """

    def program(x, w):
        return x.mul_(w)

    function = compiled(program)
    for whole in (torch.ones(2), torch.ones(3)):
        w, other = leaf(2), leaf(2)
        x, y = whole.clone(), whole.clone()
        program(x[-2:] if len(x) > 2 else x, w)
        function(y[-2:] if len(y) > 2 else y, other)
        x.sum().backward()
        y.sum().backward()
        assert torch.equal(w.grad, other.grad)
    assert (function.calls.compiled, function.calls.eager) == (2, 0)
