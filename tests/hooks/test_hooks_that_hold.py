"""Hooks that hold tensors of the call: each compiled call gives them its own, as eager's closures have."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch

from aotlab.errors import HooksError
from tests.engine_helpers import alike, compiled, leaf, refusing


def an_input(x, y):
    """Hold another input."""
    z = x * 3
    z.register_hook(lambda g: g * y)
    return z.exp()


def the_input(x, y):
    """Hold the input on which the hook hangs."""
    x.register_hook(lambda g: g * x)
    return x.exp() * y


def an_intermediate(x, y):
    """Hold an intermediate that is returned nowhere."""
    z = x.sin()
    x.register_hook(lambda g: g * z)
    return (x * z * y).sum()


def an_output(x, y):
    """Hold the output on which the hook hangs."""
    z = x.sin()
    z.register_hook(lambda g: g * z)
    return z


def a_view(x, y):
    """Hold views of an input and of an intermediate."""
    z = x.sin()
    v, w = z[0], x[1]
    x.register_hook(lambda g: g * v + w)
    return z.exp()


def assigned_later(x, y):
    """Hold a variable that is assigned again after the registration: eager's hook finds the last value."""
    z = x.sin()
    x.register_hook(lambda g: g * z)
    z = x.cos() * y
    return x.exp()


def written_later(x, y):
    """Hold a tensor that is written after the registration."""
    z = x.sin().detach()
    x.register_hook(lambda g: g * z)
    z.mul_(3)
    return x.exp()


def defaults(x, y):
    """Hold tensors as defaults."""
    z = x.sin()

    def scale(g, z=z, *, y=y):
        return g * z + y

    x.register_hook(scale)
    return x.exp()


def a_partial(x, y):
    """Hold a tensor in a partial, and in a method of it."""
    z = x.sin()
    x.register_hook(functools.partial(torch.mul, z))
    x.register_hook(y.add)
    return x.exp()


def nested(x, y):
    """Hold a function that holds a tensor, which calls itself."""
    z = x.sin()

    def scale(g, times):
        return g if times == 0 else scale(g * z, times - 1)

    x.register_hook(lambda g: scale(g, 2))
    return x.exp()


def containers(x, y):
    """Hold tensors in a list, a dict and a tuple."""
    both = [x.sin(), {"b": (x.cos(), 2)}]
    x.register_hook(lambda g: g * both[0] + both[1]["b"][0])
    return x.exp()


def on_a_view(x, y):
    """Hold a tensor in the hook of a view that an output is made through."""
    n = x.cos()
    v = x.view(-1)
    v.register_hook(lambda g: g * n.view(-1))
    return v[0:3]


def norm(x, y):
    """Hold what was computed under no_grad."""
    with torch.no_grad():
        n = x.norm()
    x.register_hook(lambda g: g / n)
    return x.exp()


def two_hooks(x, y):
    """Hang hooks on two tensors, one of which holds what the other hangs on."""
    z = x.sin()
    x.register_hook(lambda g: g * z)
    z.register_hook(lambda g: g + x.detach())
    return z * y


def an_input_that_is_written(x, y):
    """Hold an input that is written."""
    y.register_hook(lambda g: g * x) if y.requires_grad else None
    x.register_hook(lambda g: g * y)
    y.mul_(2)
    return x * y


PROGRAMS = [
    an_input, the_input, an_intermediate, an_output, a_view, assigned_later, written_later, defaults, a_partial, nested,
    containers, on_a_view, norm, two_hooks, an_input_that_is_written,
]  # fmt: skip


def gradients(function):
    """Return values and gradients of two calls with other values, the first backwarded after the second."""
    pairs = []
    for seed in range(2):
        x, y = leaf(4, 2, seed=seed), leaf(4, 2, seed=seed + 7).detach()
        pairs.append((x, function(x, y)))
    for _, out in pairs:
        (out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum().backward()
    return [(out.tolist(), x.grad.tolist()) for x, out in pairs]


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("fresh_dynamo")
def test_they_hold_the_calls_own(function, frontend):
    """Gradients are eager's; those of the first call are made with the first call's tensors."""
    if frontend == "dynamo" and not alike(gradients, function):
        pytest.skip("Dynamo itself is wrong here")
    g = compiled(function, frontend=frontend)
    assert gradients(function) == gradients(g)
    if frontend == "direct":
        assert g.calls.compiled == 2


def test_the_very_tensor():
    """The hook holds the caller's own tensors, and what the caller writes after the call it sees."""
    held = []

    def f(x, y):
        z = x.sin()
        z.register_hook(lambda g: held.append((y, z, z.requires_grad)))
        return z

    x, y = leaf(3), torch.ones(3)
    z = compiled(f)(x, y)
    z.sum().backward()
    assert held[0][0] is y
    assert held[0][1] is z
    assert held[0][2] is True


def test_after_accumulation():
    """A hook on the accumulation into a leaf may hold tensors too."""

    def f(x):
        z = x.sin()

        def scale(p):
            p.grad.mul_(z.detach())

        x.register_post_accumulate_grad_hook(scale)
        return x.exp()

    found = []
    for g in (f, compiled(f)):
        x = leaf(3)
        g(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_what_they_hold_is_let_go():
    """With the last of the call's tensors goes what its hooks hold."""

    def f(x, y):
        x.register_hook(lambda g: g * y)
        return x * 2

    g = compiled(f)
    for _ in range(2):
        y = torch.ones(3)
        reference = weakref.ref(y)
        out = g(leaf(3) * 1, y)
        del y
        assert reference() is not None
        del out
        gc.collect()
        assert reference() is None


class Owner:
    """An object that may hold a tensor, or count."""

    def __init__(self):
        self.tensor = None
        self.count = 0

    def scale(self, gradient):
        """Count, and scale."""
        self.count += 1
        return gradient * self.count


shared = Owner()


def attribute(x):
    """Hold a tensor in an attribute."""
    owner = Owner()
    owner.tensor = x * 2
    x.register_hook(lambda g: g * owner.tensor)  # refused
    return x * 3


def counter(x):
    """Count in a variable of the call, which eager makes anew in each."""
    n = 0

    def scale(g):
        nonlocal n
        n += 1
        return g * n

    x.register_hook(scale)  # refused
    return x * 2


def own_list(x):
    """Append to a list of the call."""
    grads = []
    x.register_hook(lambda g: grads.append(g))  # refused
    return x * 2


def own_method(x):
    """Append to it by its method."""
    grads = []
    x.register_hook(grads.append)  # refused
    return x * 2


def own_default(x):
    """Append to a list that is a default."""

    def keep(g, grads=[]):  # noqa: B006  # the point of this program
        grads.append(g)

    x.register_hook(keep)  # refused
    return x * 2


def own_object(x):
    """Count in an object of the call."""
    x.register_hook(Owner().scale)  # refused
    return x * 2


@pytest.mark.parametrize(
    "function", [attribute, counter, own_list, own_method, own_default, own_object], ids=lambda f: f.__name__
)
def test_what_is_refused(function):
    """State that each call of eager has for itself, and tensors where they cannot be exchanged; the line is named."""
    with refusing(HooksError, match=r"# refused") as error:
        compiled(function)(leaf(3))
    assert __file__ in str(error.value)


def test_a_list_that_is_an_argument():
    """The trace has a copy of it: refused."""

    def f(x, log):
        x.register_hook(lambda g: log.append(g))
        return x * 2

    with refusing(HooksError, match="holds `log`, a `list` of the call"):
        compiled(f)(leaf(3), [])


def test_state_outside_of_the_call():
    """What is made outside is shared by all calls, in eager as here: lists, variables, objects."""

    def make():
        log, n = [], 0

        def f(x):
            def scale(g):
                nonlocal n
                n += 1
                return g * n

            x.register_hook(scale)
            x.register_hook(lambda g: log.append(g.tolist()))
            x.register_hook(shared.scale)
            return x * 2

        return f, log

    found = []
    for make_it in (lambda f: f, compiled):
        shared.count = 0
        f, log = make()
        g = make_it(f)
        grads = []
        for _ in range(3):
            x = leaf(3)
            g(x).sum().backward()
            grads.append(x.grad.tolist())
        found.append((grads, log, shared.count))
    assert found[0] == found[1]


def test_a_modules_parameter():
    """A hook that holds the module finds the module's own parameters and lists."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(1.0, 4.0))
            self.log = []

        def forward(self, x):
            y = x * self.w
            y.register_hook(lambda g: g * self.w.detach())
            y.register_hook(lambda g: self.log.append(g.tolist()))
            return y.sin()

    found = []
    for make_it in (lambda m: m, compiled):
        module = Module()
        g = make_it(module)
        grads = []
        for _ in range(2):
            x = leaf(3)
            g(x).sum().backward()
            with torch.no_grad():
                module.w.mul_(2)
            grads.append((x.grad.tolist(), module.w.grad.tolist()))
        found.append((grads, module.log))
    assert found[0] == found[1]
