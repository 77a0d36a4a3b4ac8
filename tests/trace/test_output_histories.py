"""The autograd history of outputs: their input, whether they were made before or after a write, and their view kind.

Each program is called on both sides with inputs of the kinds that differ only to autograd: separate tensors, views of
others, equal windows of one storage. The compiled function keeps its entries between the calls.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from aotlab.maintenance.fuzz.compare import differences
from tests.engine_helpers import compiled
from tests.functions import Viewed


def behind_dynamo(function):
    """Let torch.compile capture the graphs."""
    return compiled(function, frontend="dynamo")


FRONTENDS = pytest.mark.parametrize("make", [compiled, behind_dynamo], ids=["direct", "dynamo"])
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def agree(program, *inputs, make=compiled, **settings):
    """Assert that the compiled program is eager's equal, call by call."""
    assert differences(program, make(program), list(inputs), **settings) == []


def data(*shape):
    """Make some numbers."""
    count = torch.Size(shape).numel()
    return (torch.arange(float(count)) * 1.5 - 2).reshape(shape)


# --- windows that lie at one place at the first call


def windows(first, second, requires_grad=False):
    """Make inputs that are windows of one tensor, at these places."""

    def inputs():
        w = data(10).requires_grad_(requires_grad)
        below = w * 1 if requires_grad else w
        a, b = below[first : first + 4].view(2, 2), below[second : second + 4].view(2, 2)
        return (a, b), {"w": w}

    return inputs


WAYS = {
    "view": lambda t: t.view(-1),
    "detach": lambda t: t.detach(),
    "item": lambda t: t[0],
    "transpose": lambda t: t.t(),
    "unbind": lambda t: t.unbind(0)[1],
    "window": lambda t: t.t()[1:].squeeze(),
    "itself": lambda t: t,
}


@FRONTENDS
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_windows_at_one_place_are_told_apart(way, requires_grad, make):
    """An output belongs to the argument that the function made it from, even if another argument is the same window."""

    def program(a, b):
        return way(b), way(a), b * 2

    places = [windows(i, j, requires_grad) for i, j in ((1, 1), (0, 1), (1, 0), (2, 2))]
    agree(program, *places, make=make)


@FRONTENDS
@pytest.mark.parametrize("write", [lambda t: t.mul_(2), lambda t: t.detach().mul_(2)], ids=["seen", "unseen"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_written_windows_at_one_place_are_told_apart(way, write, make):
    """A write to one of two arguments in one place leaves each output's gradient with the argument it was made from."""

    def program(a, b):
        write(a)
        return way(b), way(a)

    def gradients(out, a, b):
        pairs = [(o, i) for o in out if o.requires_grad for i in (a, b)]
        return [
            lambda o=o, i=i: torch.autograd.grad(o, i, torch.ones_like(o), retain_graph=True, allow_unused=True)
            for o, i in pairs
        ]

    agree(program, windows(1, 1, True), windows(0, 1, True), make=make, before=gradients, exact=False)


@FRONTENDS
@pytest.mark.parametrize("parts", [True, False], ids=["two parts", "a part and the whole"])
@pytest.mark.parametrize(("written", "used"), itertools.product((0, 1), (0, 1)))
def test_a_gradient_passes_an_argument_as_all_writes_left_it(written, used, parts, make):
    """A gradient flows to an argument as it is after the writes to all arguments that overlap it."""

    def program(a, b):
        (a, b)[written].mul_(2)
        return (a, b)[used] * 3

    def inputs():
        w = data(10).requires_grad_()
        below = w * 1
        return (below[:6], below[2:] if parts else below), {"w": w, "below": below}

    def gradients(out, a, b):
        return [
            lambda o=o, i=i: torch.autograd.grad(o, i, torch.ones_like(o), retain_graph=True, allow_unused=True)
            for o, i in itertools.product(out, (a, b))
        ]

    agree(program, inputs, make=make, before=gradients, exact=False)


@pytest.mark.parametrize("grad_mode", [True, False], ids=["grad mode", "no_grad"])
def test_separate_storages_that_were_one(grad_mode):
    """Two arguments that are aliases at the first call are separate tensors at the second."""

    def program(a, b, c):
        return c.detach(), b.view(-1), a[0]

    def one():
        a = data(2, 2)
        return (a, a.detach(), a[...]), {}

    def several():
        a = data(2, 2)
        return (a, a.detach().clone(), a[...].clone()), {}

    agree(program, one, several, one, grad_modes=[grad_mode] * 3)


def test_a_write_to_windows_at_one_place():
    """Where one of them is written, other places are another entry, and the outputs are still those of eager."""

    def program(a, b):
        a.mul_(2)
        return b.view(-1), a[0]

    agree(program, windows(1, 1), windows(0, 1), windows(1, 0), windows(1, 1))


# --- views that nobody may write


LONE = {
    "split": lambda t: t.split(2, 0)[0],
    "chunk": lambda t: t.chunk(1, 0)[0],
    "unbind": lambda t: t[None].unbind(0)[0],
    "tensor_split": lambda t: t.tensor_split(1, 0)[0],
    "split_with_sizes": lambda t: t.split([2], 0)[0],
    "part of one": lambda t: t.split(2, 0)[0].view(-1),
    "custom": Viewed.apply,
    "view of custom": lambda t: Viewed.apply(t).view(-1),
    "custom of custom": lambda t: Viewed.apply(Viewed.apply(t)),
}


def history(*shape):
    """Make an argument that was computed."""

    def inputs():
        leaf = data(*shape).requires_grad_()
        return (leaf * 1,), {"leaf": leaf}

    return inputs


CALLERS = {
    "mul_": lambda out: [lambda: out[0].mul_(2)],
    "copy_": lambda out: [lambda: out[0].copy_(out[0] * 2)],
    "no_grad": lambda out: [lambda: torch.no_grad()(out[0].mul_)(2)],
    "detached": lambda out: [lambda: out[0].detach().mul_(2)],
    "view": lambda out: [lambda: out[0][0].mul_(2)],
    "retained": lambda out: [lambda: out[0].retain_grad()],
    "hooked": lambda out: [lambda: out[0].register_hook(lambda gradient: gradient * 3)],
}


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS.keys())
@pytest.mark.parametrize("writes", [False, True], ids=["", "input written"])
@pytest.mark.parametrize("way", LONE.values(), ids=LONE.keys())
def test_a_lone_view_that_may_not_be_written(way, writes, caller):
    """A caller's write to an output that views a whole intermediate raises or succeeds as in eager."""

    def program(a):
        out = way(a * 2)
        if writes:
            a.zero_()
        return (out,)

    agree(program, history(2, 2), history(2, 2), before=caller)


@FRONTENDS
@pytest.mark.parametrize("way", [LONE["split"], LONE["custom"]], ids=["split", "custom"])
def test_lone_views_behind_both_frontends(way, make):
    """Without grad mode they are like any other, and the second call is served by the entry of the first."""

    def program(a):
        return (way(a / 2),)

    both = [history(2, 2), history(2, 2)]
    for grad_mode, caller in itertools.product((True, False), (CALLERS["mul_"], CALLERS["no_grad"])):
        agree(program, *both, make=make, before=caller, grad_modes=[grad_mode] * 2)


def test_a_custom_view_between_outputs():
    """A value that is computed from a custom view depends on the tensor object that the caller receives."""

    def program(a):
        viewed = Viewed.apply(a * 2)
        return viewed, viewed.exp()

    def after(out):
        return [lambda: torch.autograd.grad(out[1], out[0], torch.ones_like(out[1]))]

    agree(program, history(2, 2), backward="first", after=after)


# --- views of an input from before a write and from after it


def view_of_computed(*shape):
    """Make an argument that is a view of something that was computed."""

    def inputs():
        leaf = data(shape[0] + 1, *shape[1:]).requires_grad_()
        below = leaf * 1
        return (below[1:],), {"leaf": leaf, "below": below}

    return inputs


def leaf_input(*shape):
    """Make a leaf."""

    def inputs():
        return (data(*shape).requires_grad_(),), {}

    return inputs


WRITES = {
    "mul_": lambda t: t.mul_(2),
    "setitem": lambda t: t.__setitem__(0, 3.0),
    "zero_": lambda t: t.zero_(),
    "hidden": lambda t: t.detach().mul_(2),
    "data": lambda t: t.data.mul_(2),
    "no_grad": lambda t: torch.no_grad()(t.mul_)(2),
    "twice": lambda t: (t.mul_(2), t.detach().mul_(2)),
    "hidden first": lambda t: (t.detach().mul_(2), t.mul_(2)),
}
ORDERS = {
    "before": lambda a, view, write: (view(a), write(a))[0],
    "after": lambda a, view, write: (write(a), view(a))[1],
    "between": lambda a, view, write: (write(a), view(a), write(a))[1],
    "itself": lambda a, view, write: (v := view(a), write(v))[0],
}
VIEWS = {
    "item": lambda t: t[1],
    "transpose": lambda t: t.t(),
    "unbind": lambda t: t.unbind(0)[1],
    "tensor_split": lambda t: t.tensor_split(2, 0)[1],
}


def asks_for_gradients(out, a):
    """Ask for the gradients of what was returned with respect to the argument as it is now."""
    return [
        lambda: torch.autograd.grad(out[0], a, torch.ones_like(out[0]), allow_unused=True, retain_graph=True),
        lambda: torch.autograd.grad(out[0], a, torch.ones_like(out[0]), allow_unused=True),
        lambda: out[0].mul_(2),
    ]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_before_and_after_a_write(view, write, order):
    """The history of the view, whatever kind of tensor the argument is at each of the calls."""

    def program(a):
        return (order(a, view, write),)

    kinds = [history(2, 2), view_of_computed(2, 2), history(2, 2), view_of_computed(2, 2)]
    agree(program, *kinds, before=asks_for_gradients)
    agree(program, *kinds[1:], after=asks_for_gradients)


@FRONTENDS
@pytest.mark.parametrize("view", [VIEWS["item"], VIEWS["transpose"]], ids=["item", "transpose"])
def test_views_before_and_after_detach_(view, make):
    """A view that is made before `detach_` keeps the argument's earlier history."""

    def before(a):
        out = view(a)
        a.detach_()
        return (out,)

    def after(a):
        a.detach_()
        return (view(a),)

    def both(a):
        out = view(a)
        a.mul_(2)
        again = view(a)
        a.detach_()
        return out, again

    for program in (before, after):
        agree(program, leaf_input(2, 2), leaf_input(2, 2), make=make)
        agree(program, history(2, 2), history(2, 2), make=make)
    agree(both, history(2, 2), make=make)


def test_a_use_after_a_write_that_autograd_does_not_see():
    """A write that autograd does not see changes the history of a view.

    The entry for an argument that is not a view therefore does not serve a view.
    """

    def program(a):
        a.detach().mul_(2)
        return (a * 3,)

    kinds = [history(2, 2), view_of_computed(2, 2), history(2, 2)]
    g = compiled(program)
    assert differences(program, g, kinds, after=asks_for_gradients) == []
    assert (g.calls.compiled, g.calls.eager) == (3, 0)

    def other(a):
        out = a * 3
        a.detach().mul_(2)
        return (out,)

    g = compiled(other)
    assert differences(other, g, kinds, after=asks_for_gradients) == []
    assert (g.calls.compiled, g.calls.eager) == (3, 0)


# --- results that a write to a view keeps


KEEPS = ["relu_", "tanh_", "sigmoid_", "exp_", "sqrt_", "mul_", "sin_"]


def write_afterwards(out, a):
    """Write the memory of which the backward has a part, as autograd may or may not see."""
    return [lambda: out[0].mul_(2)]


def write_the_argument(out, a):
    """Write it through the argument."""
    return [lambda: a.mul_(2)]


@pytest.mark.parametrize("caller", [write_afterwards, write_the_argument])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("op", KEEPS)
def test_a_result_that_is_kept(op, twice, caller):
    """A later write to it is an error in the backward where eager has one."""

    def program(a, b):
        write = getattr(a.view(-1), op)
        write(3.0) if op == "mul_" else write()
        return (b.view(-1),) if twice else (a.view(-1), b)

    def inputs():
        leaf = data(2, 2).abs().requires_grad_()
        a = leaf * 1
        return (a, a if twice else data(2)), {"leaf": leaf}

    agree(program, inputs, inputs, before=lambda out, a: caller(out, a))


def test_an_intermediate_that_is_kept():
    """An intermediate that a node has saved raises on a later write in the same way."""

    def program(a):
        made = a * 2
        made.view(-1).relu_()
        return (made.view(-1),)

    def caller(out):
        return [lambda: out[0].mul_(2)]

    agree(program, history(2, 2), before=caller)
    agree(program, history(2, 2), after=caller)


OPERANDS = {
    "mul_": lambda view, other: view.mul_(other),
    "*=": lambda view, other: view.__imul__(other),
    "pow_": lambda view, other: view.pow_(other),
    "addcmul_": lambda view, other: view.addcmul_(other, other),
    "scatter_": lambda view, other: view.scatter_(0, (other > 0).long(), 1.0),
    "sub_": lambda view, other: view.sub_(other),
}


@pytest.mark.parametrize("caller", [write_afterwards, write_the_argument])
@pytest.mark.parametrize("kind", ["input", "view", "intermediate"])
@pytest.mark.parametrize("op", OPERANDS)
def test_an_operand_that_a_write_to_a_view_keeps(op, kind, caller):
    """A later write to it by the caller is an error in the backward where eager has one."""

    def program(a, b):
        a.relu_()
        target = b * 1 if kind == "intermediate" else b
        OPERANDS[op](target.view(-1) if kind == "view" else target.t(), a.view(-1) if kind == "view" else a)
        return a.view(-1), target

    def inputs():
        leaf = data(2, 2).abs().requires_grad_()
        base = leaf * 1
        return (data(2, 2), base.t() if kind == "input" else base), {"leaf": leaf}

    agree(program, inputs, inputs, before=lambda out, a: caller(out, a))


KEPT_BY_CHECKPOINT = {
    "argument": lambda a, b: (a.t(), checkpointed(torch.sin, a * 1 + a)),
    "written": lambda a, b: (a.mul_(2), checkpointed(lambda value: (value * 2).square(), a)),
    "without grad mode": lambda a, b: (written_quietly(a), checkpointed(lambda value: (value * 2).square(), a)),
    "unseen": lambda a, b: (checkpointed(lambda value: (value * 2).square(), a), a.data[0].add_(2), a)[::2],
    "other": lambda a, b: (b.add_(1).t(), checkpointed(torch.mul, a, b)),
    "intermediate": lambda a, b: (made := b * 2, checkpointed(lambda one, two: (one * two).exp(), a, made)),
    "nested": lambda a, b: (b.add_(1), checkpointed(lambda one, two: checkpointed(torch.mul, one.sin(), two), a, b)),
    "nothing": lambda a, b: (b.add_(1), checkpointed(torch.add, a, b)),
}


def checkpointed(function, *args):
    """Use checkpoint, which keeps the arguments of the function to compute again."""
    return checkpoint(function, *args, use_reentrant=False)


def written_quietly(tensor):
    """Write a tensor under no_grad."""
    with torch.no_grad():
        tensor.mul_(2)
    return tensor


@pytest.mark.parametrize("caller", [write_afterwards, write_the_argument, lambda out, a: [lambda: out[1].mul_(2)]])
@pytest.mark.parametrize("kind", KEPT_BY_CHECKPOINT)
def test_what_a_checkpoint_keeps(kind, caller):
    """A later write to a checkpointed function's argument raises in the backward, as in eager."""

    def inputs():
        base = data(2, 2).requires_grad_()
        return (base * 1, data(2, 2)), {"base": base}

    agree(KEPT_BY_CHECKPOINT[kind], inputs, inputs, before=lambda out, a: caller(out, a))


# --- hooks between nodes


@pytest.mark.parametrize("reached", [(0,), (1,), (0, 1), (1, 0)])
def test_a_hook_on_what_only_one_output_reaches(reached):
    """It is not called when a gradient comes from the other output only."""

    def program(a):
        hooked = a * 2
        hooked.register_hook(lambda gradient: -gradient)
        hooked.data[0].add_(2)
        return a / 2, hooked.view(-1), hooked.view(-1)[1:]

    def caller(out):
        return [lambda i=i: out[i].backward(torch.ones_like(out[i]), retain_graph=True) for i in reached]

    agree(program, history(2, 2), history(2, 2), backward=None, before=caller)
    agree(lambda a: program(a)[:2], history(2, 2), history(2, 2), backward=None, before=caller)


@pytest.mark.parametrize("change", [lambda t: t.unsqueeze_(0), lambda t: t.t_(), lambda t: t.unsqueeze_(0).t_()])
def test_other_sizes_without_grad_mode(change):
    """What was computed, and changes its sizes under no_grad, keeps the history of its old sizes."""

    def program(a):
        made = a.view(-1) + 1
        with torch.no_grad():
            change(made)
        return made

    agree(program, history(), history(2, 3))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("viewed", [False, True], ids=["", "viewed"])
def test_an_intermediate_that_is_set(viewed, requires_grad):
    """Its views stay in the memory that it leaves, and autograd has no derivative for it."""

    def program(a):
        first, second = a * 2, a * 3
        out = second.view(-1) if viewed else second
        second.data[0].add_(2)
        second.set_(first)
        first.detach().mul_(5)
        return out, second * 1

    def inputs():
        leaf = data(2, 2).requires_grad_(requires_grad)
        return (leaf * 1,), {"leaf": leaf}

    agree(program, inputs, inputs)


@pytest.mark.parametrize("where", ["nowhere", "elsewhere", "below", "on it", "everywhere"])
@pytest.mark.parametrize("view", [lambda y: y.view(-1), lambda y: y.t(), lambda y: y[:]])
def test_a_lone_view_of_an_intermediate_is_a_view(view, where):
    """A lone view of an intermediate is a view to autograd.

    A later write gives the view a history through its base. The new history skips the hooks that the view had, and the
    backward frees it. The same holds if the function registers hooks on the view or on its base.
    """

    def use(g):
        x = torch.ones(2, 2, requires_grad=True)
        out = g(x)
        called = []
        out.register_hook(lambda gradient: called.append(gradient.tolist()))
        out.mul_(2)
        out.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        return called, x.grad.tolist(), out._base is not None

    def f(x):
        below = x.sin()
        made = view(below)
        for name, tensor in {"elsewhere": x, "below": below, "on it": made}.items():
            if where in (name, "everywhere"):
                tensor.register_hook(lambda gradient: gradient * 3)
        return made

    function = compiled(f)
    assert use(f) == use(function)
    assert (function.calls.compiled, function.calls.eager) == (1, 0)
