"""Numbers in the caller's objects: counters, schedules and metrics. They do not make each call compile again."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.frontends import dynamo_frontend
from tests.engine_helpers import behind, keeping_functions

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
CALLS = 6


class Model(nn.Module):
    """A module with numbers in its state; ``body`` computes its result."""

    def __init__(self, body, **numbers):
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 0.5))
        self.body = body
        for name, value in numbers.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.body(self, x)


def _counter(m, x):
    m.steps += 1
    return x * m.w * m.steps


def _unused_counter(m, x):
    m.steps += 1
    return x * m.w


def _warm_up(m, x):
    m.steps += 1
    return x * m.w * min(1.0, m.steps / 4)


def _every_second(m, x):
    m.steps += 1
    return x * m.w if m.steps % 2 == 0 else x + m.w


def _in_a_dictionary_of_self(m, x):
    m.stats["steps"] += 1
    return x * m.w / m.stats["steps"]


def _two_counters(m, x):
    m.steps += 1
    m.seen += x.shape[0]
    return x * m.w * (m.seen / m.steps)


def _history(m, x):
    loss = (x * m.w).sum()
    m.history.append(loss.item())
    return loss


def _total(m, x):
    loss = (x * m.w).sum()
    m.total += loss.item()
    m.steps += 1
    return loss


def _closure_dictionary():
    state = {"step": 0}

    def adam(x):
        state["step"] += 1
        return x / (1 - 0.9 ** state["step"])

    return adam, state, None


def _closure_variable():
    count = 0

    def f(x):
        nonlocal count
        count += 1
        return x * count

    return f, SimpleNamespace(count=lambda: count), None


def _object():
    class Step:
        def __init__(self):
            self.n = 0

        def __call__(self, x):
            self.n += 1
            return x * self.n

    step = Step()
    return (lambda x: step(x)), step, None


def _rate():
    @dataclass
    class Config:
        rate: float = 0.1
        decay: float = 0.01

    config = Config()

    def change(i):
        config.rate = 0.1 / (i + 1)

    return (lambda x: x - config.rate * x * config.decay), config, change


def _optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)

    def change(i):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)

    return (lambda x: x * optimizer.param_groups[0]["lr"]), None, change


def _schedule():
    m = Model(lambda m, x: x * m.w * m.scale, scale=1.5)

    def change(i):
        m.scale = 1.5 + i

    return m, m, change


def _losses():
    losses = []

    def f(x):
        loss = (x * x).sum()
        losses.append(loss.item())
        return loss * 2

    return f, losses, None


_count = 0


def _global():
    global _count
    _count = 0

    def f(x):
        global _count
        _count += 1
        return x * _count

    return f, SimpleNamespace(count=lambda: _count), None


def _model(body, **numbers):
    def make():
        m = Model(body, **{name: type(value)(value) for name, value in numbers.items()})
        return m, m, None

    return make


#: Each makes a function, its state, and None or a function that changes the state before call number ``i``.
PROGRAMS = {
    "counter on self": _model(_counter, steps=0),
    "counter on self that nothing reads": _model(_unused_counter, steps=0),
    "warm-up": _model(_warm_up, steps=0),
    "every second step": _model(_every_second, steps=0),
    "counter in a dictionary on self": _model(_in_a_dictionary_of_self, stats={"steps": 0}),
    "two counters": _model(_two_counters, steps=0, seen=0),
    "counter in a dictionary": _closure_dictionary,
    "counter in a closure": _closure_variable,
    "counter of an object": _object,
    "counter in a global": _global,
    "learning rate of an object": _rate,
    "learning rate of an optimizer": _optimizer,
    "schedule by the caller": _schedule,
}
#: The function reads a value of a tensor in Python, so Dynamo captures the parts before and after this line.
METRICS = {
    "list on self": _model(_history, history=[]),
    "running total": _model(_total, total=0.0, steps=0),
    "list in a closure": _losses,
}


def _contents(state):
    if isinstance(state, SimpleNamespace):
        return state.count()
    return str({k: v for k, v in getattr(state, "__dict__", {"": state}).items() if k[:1] != "_" and k != "body"})


def _observed(function, call, state, change, calls=CALLS):
    seen = []
    for i in range(calls):
        if change is not None:
            change(i)
        x = (torch.arange(3.0) + i).requires_grad_()
        out = call(x)
        out.sum().backward()
        seen += [out.tolist(), x.grad.tolist(), _contents(state)]
    return seen


def _kept_by_dynamo(function):
    """Compile behind Dynamo. Return the callable, and the list of the compiled functions of its graphs."""
    made = []
    dynamo_frontend.prepare_dynamo()
    backend = keeping_functions(made)
    backend.is_aotlabs = True
    return torch.compile(function, backend=backend), made


@pytest.mark.parametrize("name", PROGRAMS)
def test_called_directly(name):
    """All calls are compiled without Dynamo, by at most three compilations, and equal eager's."""
    function, state, change = PROGRAMS[name]()
    expected = _observed(function, function, state, change)
    function, state, change = PROGRAMS[name]()
    call = aotlab.compile(function, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert expected == _observed(function, call, state, change)
    log = behind(call).calls
    assert (log.eager, log.by_dynamo) == (0, 0)
    assert len(behind(call).entries) <= 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_behind_dynamo(name):
    """Dynamo captures the function at most three times."""
    function, state, change = PROGRAMS[name]()
    expected = _observed(function, function, state, change)
    function, state, change = PROGRAMS[name]()
    call, made = _kept_by_dynamo(function)
    assert expected == _observed(function, call, state, change)
    assert sum(each.calls.compiled for each in made) == CALLS
    assert len(made) <= 3


@pytest.mark.parametrize("calls", [6, 9])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", METRICS)
def test_metrics(name, frontend, calls):
    """The number of compilations does not depend on the number of calls, and no call runs eagerly."""
    function, state, change = METRICS[name]()
    expected = _observed(function, function, state, change, calls)
    function, state, change = METRICS[name]()
    call, made = _kept_by_dynamo(function)
    call = aotlab.compile(function, backend="eager") if frontend == "direct" else call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert expected == _observed(function, call, state, change, calls)
    if frontend == "direct":
        assert behind(call).calls.eager == 0
    else:
        assert len(made) <= 4
        assert sum(each.calls.compiled for each in made) >= calls


def test_on_inductor():
    """The same on Inductor."""
    function, state, change = PROGRAMS["two counters"]()
    expected = _observed(function, function, state, change, 3)
    function, state, change = PROGRAMS["two counters"]()
    call = aotlab.compile(function, backend="inductor")
    actual = _observed(function, call, state, change, 3)
    torch.testing.assert_close(torch.tensor(actual[::3]), torch.tensor(expected[::3]))
    assert (actual[2::3], behind(call).calls.eager) == (expected[2::3], 0)


def test_varying_sizes():
    """A counter and the size of a batch vary at the same time."""
    m = Model(_two_counters, steps=0, seen=0)
    call = aotlab.compile(m, backend="eager")
    seen = [call(torch.ones(size, 3)).detach() for size in (2, 3, 4, 5)]
    m.steps = m.seen = 0
    assert [each.tolist() for each in seen] == [m(torch.ones(size, 3)).tolist() for size in (2, 3, 4, 5)]
    assert (behind(call).calls.eager, len(behind(call).entries)) == (0, 2)


def test_other_types_are_other_entries():
    """A counter that becomes a float, a bool or a tensor is compiled again."""
    m, _, _ = PROGRAMS["counter on self"]()
    call = aotlab.compile(m, backend="eager")
    x = torch.ones(3)
    for value in (0, 2.5, True, torch.tensor(4.0), 7):
        m.steps = copy.deepcopy(value)
        expected = m(x), m.steps
        m.steps = copy.deepcopy(value)
        result = call(x)
        assert torch.equal(expected[0], result)
        assert (type(expected[1]), float(expected[1])) == (type(m.steps), float(m.steps))


def test_an_error_counts_once():
    """If the compiled call raises, eager runs the call, and the counter has counted once."""

    def body(m, x):
        m.steps += 1
        return m.w[x] * m.steps

    m = Model(body, steps=0)
    call = aotlab.compile(m, backend="eager")
    call(torch.tensor([0, 1]))
    with pytest.raises(IndexError):
        call(torch.tensor([0, 9]))
    assert m.steps == 2


def test_another_container():
    """An entry reads the number from its dictionary, so another dictionary in its place is another entry."""
    state = {"n": 0}

    def f(x):
        state["n"] += 1
        return x * state["n"]

    call = aotlab.compile(f, backend="eager")
    assert [call(torch.ones(1)).item() for _ in range(2)] == [1.0, 2.0]
    before, state = state, {"n": 10}
    assert call(torch.ones(1)).item() == 11.0
    assert (before["n"], state["n"]) == (2, 11)


class _Scaled(torch.autograd.Function):
    """Reads a number of the module when its backward runs."""

    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * m.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.m.scale, None


class _Counted(_Scaled):
    """Counts its backwards."""

    @staticmethod
    def backward(ctx, gradient):
        ctx.m.scale += 1
        return gradient * ctx.m.scale, None


def _checkpointed(m, x):
    m.scale += 1
    return checkpoint(lambda v: v * m.w * m.scale, x, use_reentrant=False)


def _counts_in_checkpoint(m, x):
    def inner(v):
        m.scale += 1
        return (v * m.w * 2).sin()

    return checkpoint(inner, x, use_reentrant=False)


def _counts_beside_custom(m, x):
    m.scale += 1
    return _Scaled.apply(x * m.w, m)


@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: _Scaled.apply(x * m.w, m),
        lambda m, x: _Counted.apply(x * m.w, m),
        _checkpointed,
        _counts_in_checkpoint,
        _counts_beside_custom,
    ],
    ids=["read by a backward", "changed by a backward", "checkpoint", "changed in a checkpoint", "both"],
)
def test_numbers_in_backwards(body, changes):
    """Code that runs in the backward sees and changes the numbers as in eager, compiled or not."""

    def make():
        m = Model(body, scale=2)
        return m, m, (lambda i: setattr(m, "scale", 2 * i)) if changes else None

    function, state, change = make()
    expected = _observed(function, function, state, change)
    function, state, change = make()
    call = aotlab.compile(function, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert expected == _observed(function, call, state, change)


def test_static_numbers():
    """With ``dynamic=False``, Dynamo captures a function that counts, as before."""
    m, _, _ = PROGRAMS["counter on self"]()
    call = aotlab.compile(m, backend="eager", dynamic=False)
    with pytest.warns(RuntimeWarning, match="captured by Dynamo"):
        call(torch.ones(3))
    assert m.steps == 1


def test_modules_of_one_class_stay_apart():
    """Dynamo fixes an int of a module that does not change, even if another module of the class has another int."""
    shapes = []

    def body(m, x):
        return x.view(m.heads, -1) * 2

    for heads in (2, 3):
        call, made = _kept_by_dynamo(Model(body, heads=heads))
        call(torch.ones(6))
        shapes += [len(graph.entries[0].records.capture.arguments) for graph in made]
    assert shapes == [1, 1]
