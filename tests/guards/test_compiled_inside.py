"""Compiled functions and modules inside others that are traced directly: the values that they read are guarded too."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

import aotlab
from aotlab.errors import LeakedTensorError
from tests.engine_helpers import compiled, refusing
from tests.func_helpers import by_us_behind_dynamo, numbers

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FACTOR = 2.0
held = types.SimpleNamespace(scale=1.0, unread=0)


def reads(x):
    """Read a global, and an attribute of another."""
    return x * FACTOR * held.scale


class Holder:
    """Has compiled methods, and is called."""

    def __init__(self):
        """Begin with one."""
        self.own = 1.0

    @aotlab.compile(backend="eager")
    def direct(self, x):
        """Also read an attribute of the object."""
        return reads(x) * self.own

    @aotlab.compile(backend="eager", frontend="dynamo")
    def behind_dynamo(self, x):
        """Call `reads` behind Dynamo."""
        return reads(x) * self.own

    def __call__(self, x):
        """Call `reads` and an attribute of the object."""
        return reads(x) * self.own


def by_torch(function):
    """Compile by torch."""
    return torch.compile(function, backend="eager")


def in_a_list(functions):
    """Return a function that calls an element of a list."""
    return lambda x: functions[0](x)


INSIDE = {
    "direct": lambda holder: compiled(reads),
    "behind Dynamo": lambda holder: by_us_behind_dynamo(reads),
    "by torch": lambda holder: by_torch(reads),
    "aot_function": lambda holder: aotlab.aot_function(reads, aotlab.nop),
    "partial": lambda holder: functools.partial(compiled(lambda y, x: reads(x) + y), 0.0),
    "in a list": lambda holder: in_a_list([compiled(reads)]),
    "of a compiled one": lambda holder: compiled(compiled(reads)),
    "wrapped": lambda holder: functools.wraps(reads)(in_a_list([compiled(reads)])),
    "under vmap": lambda holder: torch.func.vmap(compiled(reads)),
    "method": lambda holder: holder.direct,
    "method behind Dynamo": lambda holder: holder.behind_dynamo,
    "method by name": lambda holder: lambda x: holder.direct(x),
    "object": lambda holder: compiled(holder),
    "object behind Dynamo": lambda holder: by_us_behind_dynamo(holder),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_what_a_compiled_function_reads(inside, monkeypatch):
    """A change of a value that the inner function reads recompiles the outer one; another change does not."""
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    monkeypatch.setattr(held, "scale", 1.0)
    holder = Holder()
    inner = INSIDE[inside](holder)
    outer = compiled(lambda x: inner(x) + 1)
    x = numbers(3, 4)
    original = holder if "method" in inside or "object" in inside else reads
    expected = 1
    for change in (
        lambda: None,
        lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0),
        lambda: monkeypatch.setattr(held, "scale", 5.0),
        lambda: monkeypatch.setattr(held, "unread", 1),
        *([lambda: setattr(holder, "own", 7.0)] if original is holder else []),
    ):
        change()
        for _ in range(2):
            assert torch.equal(outer(x), original(x) + 1)
    expected = 4 if original is holder else 3
    assert (len(outer.entries), outer.calls.eager) == (expected, 0)
    reasons = " ".join(outer.recompiles)
    assert all(name in reasons for name in ("FACTOR", "held.scale"))
    assert "unread" not in reasons


class Network(nn.Module):
    """Reads an attribute and its flag."""

    def __init__(self):
        """Make layers."""
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = 2.0

    def forward(self, x):
        """Use all of it."""
        x = self.norm(self.layer(x)) * self.scale
        return x if self.training else -x


class Plain(nn.Module):
    """Has no parameters, so that a function can capture it."""

    def __init__(self):
        """Make a layer."""
        super().__init__()
        self.layer = nn.LeakyReLU(0.5)
        self.scale = 2.0

    def forward(self, x):
        """Use all of it."""
        x = self.layer(x - 1) * self.scale
        return x if self.training else -x


class Outer(nn.Module):
    """Calls another module."""

    def __init__(self, inner):
        """Hold it."""
        super().__init__()
        self.inner = inner

    def forward(self, x):
        """Call it."""
        return self.inner(x).sin()


MODULES = {"direct": compiled, "behind Dynamo": by_us_behind_dynamo, "by torch": by_torch}


@pytest.mark.parametrize("how", MODULES)
@pytest.mark.parametrize("held_by", ["module", "function"])
def test_what_a_compiled_module_reads(held_by, how):
    """Attributes, flags, hooks and submodules of the original are guarded, and so are hooks of the compiled module."""
    torch.manual_seed(0)
    original = Network() if held_by == "module" else Plain()
    inner = MODULES[how](original)
    outer = compiled(Outer(inner) if held_by == "module" else lambda x: inner(x).sin())
    log = outer.compiled if held_by == "module" else outer
    x, removed = numbers(3, 4), []
    for change in (
        lambda: None,
        lambda: setattr(original, "scale", 3.0),
        lambda: setattr(inner, "scale", 4.0),
        original.eval,
        inner.train,
        lambda: setattr(original, "layer", nn.Linear(4, 4) if held_by == "module" else nn.LeakyReLU(0.25)),
        lambda: removed.append(original.register_forward_hook(lambda module, args, out: out + 1)),
        lambda: removed.append(inner.register_forward_hook(lambda module, args, out: out * 3)),
        lambda: [hook.remove() for hook in removed],
    ):
        change()
        state = {name: value.clone() for name, value in original.state_dict().items()}
        expected = original(x)
        after = {name: value.clone() for name, value in original.state_dict().items()}
        original.load_state_dict(state)
        if len(inner._forward_hooks) and inner._forward_hooks is not original._forward_hooks:
            expected = expected * 3
        found = outer(x)
        assert torch.equal(found, expected.sin())
        assert all(torch.equal(value, after[name]) for name, value in original.state_dict().items())
    assert log.calls.eager == 0
    assert any("scale`, which the function reads, is 3.0 where" in reason for reason in log.recompiles)


@pytest.mark.parametrize("how", MODULES)
def test_what_a_compiled_module_keeps(how):
    """A module that counts its calls or stores a tensor is refused inside another function too, and is restored."""

    class Counts(Network):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    class Keeps(Network):
        last = None

        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    for kind, place in ((Counts, "calls"), (Keeps, "last")):
        original = kind()
        with refusing(LeakedTensorError, match=rf"`(self\.)?inner\.(orig_module\.|_orig_mod\.)?{place}`"):
            compiled(Outer(MODULES[how](original)))(numbers(3, 4))
        assert place not in vars(original)
        assert original.training
        assert all("training" in vars(module) for module in original.modules())


def test_the_code_of_a_graph():
    """Of a `torch.fx.GraphModule`, the code of the last recompilation and the attributes that it reads are guarded."""
    graph = torch.fx.symbolic_trace(Plain())
    outer, x = compiled(nn.Sequential(graph)), numbers(3, 4)
    assert torch.equal(outer(x), graph(x))
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.mul or getattr(node.target, "__name__", "") == "mul":
            node.args = (node.args[0], 7.0)
    graph.recompile()
    assert torch.equal(outer(x), graph(x))
    assert outer(x)[2, 0] == (x[2, 0] - 1) * 7
    graph.layer = nn.LeakyReLU(0.125)
    assert torch.equal(outer(x), graph(x))
    log = outer.compiled
    assert (len(log.entries), log.calls.eager) == (3, 0)
    with torch.fx._lazy_graph_module._use_lazy_graph_module(True):
        lazy = torch.fx.symbolic_trace(Plain())
    outer = compiled(nn.Sequential(lazy))
    assert torch.equal(outer(x), outer(x))
    assert len(outer.compiled.entries) == 1
