"""Autograd behaviour of a call and of its caller's later operations, in inference and training, by both frontends.

Each program tests one promise: parts of a backward, writes to outputs, hooks, containers, errors.
"""

from __future__ import annotations

import collections

import pytest
import torch

from tests.both_ways import BOTH, Case, both_ways

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Pair = collections.namedtuple("Pair", "a b")  # nothing to annotate


def _pair(x):
    return x + 0, (x + 3).neg()


def _two_leaves(x):
    return x, x.detach().clone().requires_grad_(x.requires_grad)


# --- the outputs that are differentiated, their order and number


def _shared(x, w):
    t = (x * w).exp()
    return t * 2, t * t


def _apart(x, w):
    return x.exp(), w.exp()


def _trained(x, w):
    x.mul_(w)
    return x.sum()


def _one_hangs_on_the_other(x, w):
    x.mul_(w)
    y = x.sin()
    return y, y * x


def _no_grad_view(x, w):
    y = x * w
    with torch.no_grad():
        v = y[0]
    return v, y


def _unused(x, w):
    y = x.sin()
    return y * 2, y * w


def _twice(out):
    return [lambda: out[0].sum().backward(), lambda: out[1].sum().backward()]


def _kept(out):
    return [
        lambda: out[0].sum().backward(retain_graph=True),
        lambda: out[1].sum().backward(retain_graph=True),
        lambda: out[0].sum().backward(),
        lambda: out[0].sum().backward(),
    ]


def _between(out, x):
    return [
        lambda: torch.autograd.grad(out[1].sum(), out[0], retain_graph=True),
        lambda: torch.autograd.grad(out[1].sum(), x, allow_unused=True),
    ]


STRUCTURE = {
    "x.mul_(y); x.sum()": Case(program=_trained, arguments=_pair),
    "None where nothing reaches": Case(program=_unused, arguments=_two_leaves, backward="first"),
    "an output at a time": Case(program=_unused, arguments=_pair, backward="each"),
    "shared, one after the other": Case(program=_shared, arguments=_pair, before=_twice, backward=None),
    "shared, kept": Case(program=_shared, arguments=_pair, before=_kept, backward=None),
    "apart, one after the other": Case(
        program=_apart,
        arguments=lambda x: (x, x.detach().requires_grad_(x.requires_grad)),
        before=_twice,
        backward=None,
    ),
    "between outputs": Case(program=_one_hangs_on_the_other, arguments=_pair, before=_between, backward=None),
    "a view made under no_grad": Case(program=_no_grad_view, arguments=_pair),
    "that view, written": Case(program=_no_grad_view, arguments=_pair, before=lambda out: [lambda: out[0].mul_(2)]),
}


# --- writes by the caller


def _views(x):
    x.add_(1)
    return x[1:], x.t(), x.exp()


def _of_an_intermediate(x):
    y = x.sin()
    return y[0], y, y.cos()


def _lone_view(x):
    return x.sin()[1:]


def _parts(x):
    y = x.sin()
    return (*y.unbind(0), x.split(1)[0])


def _first(out):
    return [lambda: out[0].mul_(2)]


def _second(out):
    return [lambda: out[1].mul_(2), lambda: out[0].add_(1)]


def _last(out):
    return [lambda: out[2].mul_(2)]


def _input_too(out, x):
    return [lambda: x.mul_(2), lambda: out[1].mul_(3)]


def _turned(out):
    return [lambda: out[1].t_(), lambda: out[0].mul_(3)]


def _unseen(out):
    return [lambda: out[0].detach().zero_(), lambda: out[2].data.zero_()]


WRITES = {
    f"{name}: {write.__name__[1:]}": Case(program=program, before=write)
    for name, program, writes in (
        ("views of an input", _views, (_first, _second, _last, _input_too, _unseen)),
        ("views of an intermediate", _of_an_intermediate, (_first, _second, _last, _turned, _unseen)),
        ("a lone view", _lone_view, (_first,)),
        ("parts of several", _parts, (_first, _last)),
    )
    for write in writes
}


# --- hooks and retained gradients


def _hook_inside(x):
    y = x.sin()
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 3)
    return y * y, y.cos()


def _hook_on_the_input(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 3)
    x.mul_(2)
    return x * x


def _hook_and_write(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 3)
    y[0].mul_(2)
    return y * y


def _hook_and_step(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 3)
    y.unsqueeze_(0)
    return y * 2, y


def _hook_on_what_moved(out):
    return [lambda: out[1].register_hook(lambda gradient: gradient.clamp(max=1))]


def _moved_by_a_view(x):
    x[:1].t_()
    return x.sin() * x


def _other_memory(out, x):
    def act():
        x.data = x.detach() * 2

    return [act]


def _retained(x):
    y = x.sin()
    if y.requires_grad:
        y.retain_grad()
    return y, y.unbind(0)[0] * 2


def _hooks(out):
    return [lambda: out[1].register_hook(lambda gradient: gradient * 5), lambda: out[0].retain_grad()]


def _hook_on_the_argument(out, x):
    return [lambda: x.register_hook(lambda gradient: gradient * 7), lambda: x.retain_grad()]


HOOKS = {
    "in the function": Case(program=_hook_inside),
    "on the input": Case(program=_hook_on_the_input),
    "before a write": Case(program=_hook_and_write, breaks=("training",)),
    "before a step that moves it": Case(
        program=_hook_and_step, before=_hook_on_what_moved, eager=("training",), breaks=("training",)
    ),
    "retained": Case(program=_retained, eager=("training",), breaks=("training",)),
    "of the caller": Case(program=_of_an_intermediate, before=_hooks, exact=False),
    "of the caller, on an argument": Case(program=_views, before=_hook_on_the_argument),
}


# --- returned structures and exceptions


def _nested(x):
    x.mul_(2)
    y = x.sin()
    return {"k": [y, y, None, 3], "p": Pair(x.t(), y[0])}, (True, 1.5)


def _itself(x):
    x.mul_(2)
    return x, x.sin(), x


def _raises(x):
    x.mul_(2)
    return x @ x


def _may_not(x):
    a, b = x.unbind(0)
    a.mul_(2)
    return b


def _written_after_the_save(x):
    y = x.exp() * x
    x.mul_(2)
    return y


#: In torch 2.15, one of several views does not show which call made it. A function that returns such a view from before
#: a write runs eagerly.
MAY_NOT = BOTH if torch.__version__.startswith("2.15") else ("training",)

RESULTS = {
    "containers": Case(program=_nested, backward="each"),
    "the input itself": Case(program=_itself),
    "an error after a write": Case(program=_raises, eager=BOTH, breaks=BOTH),
    "saved, then written": Case(program=_written_after_the_save, eager=("training",), breaks=("training",)),
}
# --- modes


def _autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
        y.mul_(2)
        x[:, :2].add_(y)
    return y, x


def _nested_grad_modes(x):
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x.sin()
            b.mul_(2)
        a.add_(1)
    return a, b, a * b


def _inference_mode(x):
    with torch.inference_mode():
        y = (x * 2).sum()
    return y + 1, x.sin()


def _set_on_the_way(x):
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y, x * 3


MODES_INSIDE = {
    "autocast, written": Case(program=_autocast, breaks=BOTH),
    "grad modes, nested": Case(program=_nested_grad_modes),
    "inference mode": Case(program=_inference_mode, eager=BOTH, breaks=BOTH),
    "grad mode, set and set back": Case(program=_set_on_the_way),
}
GROUPS = {"mode": MODES_INSIDE, "structure": STRUCTURE, "write": WRITES, "hook": HOOKS, "result": RESULTS}
CASES = {f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()}

test_called_directly, test_behind_dynamo = both_ways(CASES)
