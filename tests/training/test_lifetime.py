"""How long things live: as long as in eager, without the garbage collector's help."""

from __future__ import annotations

import gc
import linecache
import warnings
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from aotlab.bench.memory import measure_memory
from aotlab.errors import DoubleBackwardError
from tests.engine_helpers import behind, compiled, entry_of, leaf
from tests.training.steps import WAYS, behind_dynamo, both
from tests.training.test_ten_steps import Net, loss_of, sgd

OLD = torch.__version__.startswith("2.11")


@contextmanager
def without_collector():
    """Leave everything to reference counts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


FUNCTIONS = {
    "saves inputs": lambda x, w: (x * w).sin(),
    "saves its output": lambda x, w: (x * w).exp(),
    "writes": lambda x, w: x.mul_(w).sin(),
    "returns a view": lambda x, w: (x * w).view(-1),
    "returns a view of an input": lambda x, w: (x.view(-1), x * w),
    "in two parts": lambda x, w: ((x * w).sin(), (x + w).cos()),
    "draws": lambda x, w: nn.functional.dropout(x * w, 0.3),
    "has a hook": lambda x, w: hooked(x * w).sin(),
    "checkpoints": lambda x, w: checkpoint(torch.sin, x * w, use_reentrant=False),
}


def hooked(x):
    """Hang a hook on a tensor."""
    x.register_hook(lambda gradient: gradient * 2)
    return x


@both
@pytest.mark.parametrize("backwards", ["none", "one", "kept", "created"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_die_with_their_last_reference(name, backwards, way):
    """Inputs, outputs and gradients of a call are part of no cycle, whether there was a backward or not."""
    with WAYS[way]() as (compile_, _), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's, of hooks
        function = compile_(FUNCTIONS[name])

        def call():
            x, w = leaf(4, 3) * 1, leaf(4, 3, seed=1)
            out = function(x, w)
            outs = list(out) if isinstance(out, tuple) else [out]
            found = [x, w, *outs]
            if backwards == "created" and name == "has a hook" and way == "dynamo" and OLD:
                with pytest.raises(DoubleBackwardError, match="Dynamo captured"):  # it captures hooks as functions
                    torch.autograd.grad(outs[-1].sum(), (w,), create_graph=True)
            elif backwards == "created" and name != "checkpoints":
                found += torch.autograd.grad(outs[-1].sum(), (w,), create_graph=True)
            elif backwards != "none":
                torch.autograd.backward([each.sum() for each in outs], retain_graph=backwards == "kept")
                found += [w.grad]
            return [weakref.ref(each) for each in found]

        call()
        with without_collector():
            alive = call()
            assert [each() is not None for each in alive] == [False] * len(alive)


class Reader(nn.Module):
    """A module that reads a plain attribute."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.scales = nn.Linear(3, 3), nn.BatchNorm1d(3), [2]

    def forward(self, x):
        """Use all of it."""
        return self.norm(self.layer(x)).tanh() * self.scales[0]


MODULES = {
    "linear": lambda: nn.Linear(3, 3),
    "sequential": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)),
    "LSTM": lambda: nn.LSTM(3, 3),
    "reader": Reader,
}


@both
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_let_go(name, training, way):
    """When a compiled module is dropped, its parameters are freed at once, not when the garbage collector comes."""
    with WAYS[way]() as (compile_, functions), without_collector():
        module = MODULES[name]()
        function = compile_(module)
        with torch.set_grad_enabled(training):
            out = function(torch.randn(4, 3))
        out = out[0] if isinstance(out, tuple) else out
        if training:
            out.sum().backward()
        alive = [weakref.ref(each) for each in (module, *module.parameters(), *module.buffers())]
        functions.clear()
        del module, function, out
        if way == "dynamo":
            torch.compiler.reset()
        assert [each() is not None for each in alive] == [False] * len(alive)


class Thing:
    """Something that a function reads."""

    factor = 2


@both
def test_what_a_function_reads_is_let_go(way):
    """So are closures and defaults of a function that was compiled."""

    def make(thing):
        return lambda x: (x * thing.factor).sin()

    with WAYS[way]() as (compile_, functions), without_collector():
        thing = Thing()
        original = make(thing)
        function = compile_(original)
        function(leaf(3)).sum().backward()
        alive = [weakref.ref(each) for each in (thing, original, function)]
        functions.clear()
        del thing, original, function
        if way == "dynamo":
            torch.compiler.reset()
        assert [each() is not None for each in alive] == [False] * 3


def test_graphs_for_dynamo_are_let_go(fresh_dynamo):
    """Graphs that Dynamo compiled for one of torch's modules are freed when the module's code is freed."""
    alive = []
    for _ in range(3):
        with behind_dynamo() as (compile_, functions):
            module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
            compile_(module)(torch.ones(2, 3)).sum().backward()
            alive += [weakref.ref(each) for each in functions]
    del module, functions, compile_
    gc.collect()
    assert len(alive) == 3
    assert [each() is not None for each in alive] == [False] * 3


def test_sources_are_shown_for_as_long_as_they_serve():
    """The text of a generated function is forgotten with it; the backward of what it returned works without."""

    def shown():
        gc.collect()
        return {name for name in linecache.cache if name.startswith("<aotlab")}

    before = shown()
    function = compiled(lambda x: (x * x).sin())
    out = function(leaf(3))
    own = entry_of(function).records.runtime.name
    assert own in shown()
    del function
    assert own not in shown()  # nothing of it is needed for the backward
    out.sum().backward()
    del out
    assert shown() <= before


# --- as early as eager -------------------------------------------------------------------------------------------


def chain(x, w):
    """Make eight tensors one after the other, of which each is needed by the next and some by the backward."""
    for _ in range(4):
        x = (x * w).sin()
    return x.sum()


def unsaved(x, w):
    """Make eight tensors that no backward needs."""
    for _ in range(4):
        x = (x + w) * 2
    return x.sum()


def fan(x, w):
    """Make tensors of which the backward uses up one after the other."""
    return torch.stack([(x * w * k).exp().sum() for k in range(6)]).sum()


@both
@pytest.mark.parametrize("program", [chain, unsaved, fan])
@pytest.mark.parametrize("what", ["forward", "inference", "backward", "both"])
def test_memory_is_freed_as_early_as_in_eager(program, what, way):
    """The most that is in use at a time, in forward and in backward, is no more than in eager."""
    size = 64 * 1024

    def peak(function):
        x, w = (torch.full((size,), 0.5, requires_grad=what != "inference") for _ in range(2))
        x = x * 1 if what != "inference" else x
        if what == "both":  # the backward releases the tensors that the forward saved, one after the other
            return measure_memory(lambda: torch.autograd.grad(function(x, w), (x, w))).peak_bytes
        if what != "backward":
            return measure_memory(lambda: function(x, w)).peak_bytes
        outs = [function(x, w) for _ in range(2)]
        return measure_memory(lambda: torch.autograd.grad(outs.pop(), (x, w))).peak_bytes

    expected = peak(program)
    with WAYS[way]() as (compile_, _):
        found = peak(compile_(program))
    assert found <= expected + 1024, (found / (4 * size), expected / (4 * size))


# --- no growth ---------------------------------------------------------------------------------------------------


MANY = 1000


def in_use():
    """Count the objects that the garbage collector knows, by type, and the resident memory in MiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096 / 2**20
    return Counter(type(each).__name__ for each in gc.get_objects()), resident


@both
@pytest.mark.parametrize("sizes", [(4,), tuple(range(2, 14))], ids=["one size", "more sizes than are compiled for"])
def test_a_thousand_steps_leave_nothing(sizes, way):
    """After the first steps, a thousand more leave no objects and no memory behind."""
    model = Net(nn.BatchNorm1d(8), nn.Dropout(0.2))
    with WAYS[way]() as (compile_, _), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the limit of recompiles is reached
        run, optimizer = compile_(model), sgd(model)

        def steps(count):
            for n in range(count):
                optimizer.zero_grad()
                loss_of(run(torch.randn(sizes[n % len(sizes)], 4))).backward()
                optimizer.step()

        steps(40)
        before, growth, grown = in_use(), [], []
        for _ in range(3):
            steps(MANY // 3)
            after = in_use()
            growth.append(after[1] - before[1])
            grown.append({name: count - before[0][name] for name, count in after[0].items() if count > before[0][name]})
            before = after
    # A leak grows in every round. Memory that the allocator reserves, or that others cache or free meanwhile, grows
    # once.
    assert min(sum(each.values()) for each in grown) < 50, grown
    assert min(growth) < 2.5, growth


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_gradients_leave_nothing(create_graph):
    """Nor do backwards under ``create_graph``, and partial ones."""
    function = compiled(lambda x, w: ((x * w).sin(), (x + w).cos() * w))

    def step():
        x, w = leaf(3), leaf(3, seed=1)
        one, two = function(x, w)
        (g,) = torch.autograd.grad(one.sum(), x, create_graph=create_graph, retain_graph=True)
        if create_graph:
            torch.autograd.grad(g.square().sum() + two.sum(), (x, w))

    def grown():
        objects, _ = in_use()
        for _ in range(300):
            step()
        later, _ = in_use()
        return {name: later[name] - objects[name] for name in later if later[name] > objects[name]}

    grown()  # caches of `isinstance` may fill, whatever filled them before
    found = grown()
    assert sum(found.values()) < 100, found
    assert len(behind(function).entries) == 1
