"""Tensors that a function reads become inputs: tensors and modules in closures, globals, objects and containers."""

from __future__ import annotations

import copy
import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import aotlab
from aotlab import config
from tests.engine_helpers import compiled, leaf

WEIGHT = torch.ones(3)


class Net(nn.Module):
    """A layer, a buffer that each call counts in, and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x, weight=1.0):
        """Use them all."""
        return self.norm(self.layer(x)) * self.scale * weight


def in_a_closure(state):
    """Write one tensor and read another, which requires grad."""
    weight, total = state["weight"], state["total"]

    def f(x):
        total.add_(x.detach().sum(0))
        return (x * weight).sum() + total.sum()

    return f


def by_lambda(state):
    """Use the loss of a model."""
    net = state["net"]
    return lambda x: net(x).square().mean()


def by_method(state):
    """Use a bound method."""
    return state["net"].forward


def by_partial(state):
    """Bind a model and a keyword to a function."""
    return functools.partial(lambda net, x, *, weight: net(x, weight).sum(), state["net"], weight=state["weight"])


def in_containers(state):
    """Read a list in a dictionary, and an object."""
    held = {"all": [state["weight"], state["total"]], "obj": SimpleNamespace(net=state["net"], w=state["weight"])}

    def f(x):
        first, second = held["all"]
        return held["obj"].net(x).sum() + (x * first + second * held["obj"].w).sum()

    return f


def by_default(state):
    """Use a dictionary as the default of a parameter."""

    def f(x, more=state):
        return x * more["weight"] + more["total"]

    return f


def given_back(state):
    """Return the tensor itself, and a view of it."""
    total = state["total"]
    return lambda x: (x * 2, total, total[1:])


FAMILY = (in_a_closure, by_lambda, by_method, by_partial, in_containers, by_default, given_back)


def outcome(make, build, rows=(4, 4, 4)):
    """Make the function of fresh tensors, call it thrice with gradients, and return all that can be seen.

    In float64, where gradients that cancel out are as good as zero on Inductor, too.
    """
    torch.manual_seed(0)
    double = torch.float64
    state = {"net": Net().to(double), "weight": leaf(3, dtype=double), "total": torch.zeros(3, dtype=double)}
    tensors = [*state["net"].parameters(), *state["net"].buffers(), state["weight"], state["total"]]
    function = build(make(state))
    found = []
    for seed, count in enumerate(rows):
        x = leaf(count, 3, seed=seed, dtype=double)
        out = function(x)
        first = out[0] if isinstance(out, tuple) else out
        first.sum().backward()
        same = [out[1] is state["total"], out[2]._base is state["total"]] if isinstance(out, tuple) else []
        found += [first.detach(), *(t.detach().clone() for t in tensors), x.grad, *same]
        found += [None if t.grad is None else t.grad.clone() for t in tensors]
    return found, function


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))])
@pytest.mark.parametrize(
    ("rows", "dynamic", "entries"), [((4, 4, 4), None, 1), ((4, 6, 5), None, 2), ((4, 6, 5), True, 1)]
)
@pytest.mark.parametrize("make", FAMILY, ids=lambda make: make.__name__)
def test_as_eager(make, rows, dynamic, entries, backend):
    """Values, gradients, writes and identities are eager's, by one entry, with one more where sizes are others."""
    expected, _ = outcome(make, lambda function: function, rows)
    found, function = outcome(make, lambda f: aotlab.compile(f, backend=backend, dynamic=dynamic), rows)
    assert (len(function.entries), function.calls.eager, function.calls.by_dynamo) == (entries, 0, 0)
    for mine, wanted in zip(found, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(mine, wanted, **({"rtol": 0, "atol": 0} if backend == "eager" else {}))
        else:
            assert mine is wanted


def test_names():
    """Inputs are called after their places."""
    net, held = Net(), {"w": leaf(3)}
    f = compiled(lambda x: net(x) * held["w"])
    f(torch.ones(4, 3))
    names = [argument.name for argument in f.entries[0].records.capture.arguments]
    assert names[:2] == ["net.layer.weight", "net.layer.bias"]
    assert {"held['w']", "net.scale", "net.norm.running_mean"} <= set(names)
    assert names[-1] == "x"


def test_rebound():
    """For a new tensor of the same kind, the entry is reused.

    Another shape, number or `requires_grad` needs a new entry.
    """
    held = {"w": torch.ones(3), "k": 2}

    def f(x):
        return x * held["w"] * held["k"]

    g = compiled(f)
    x = torch.ones(3)
    for change in ({"w": torch.full((3,), 5.0)}, {"w": torch.full((1,), 7.0)}, {"k": 3}, {"w": leaf(3)}):
        assert torch.equal(g(x), f(x))
        held.update(change)
        entries = len(g.entries)
        assert torch.equal(g(x), f(x))
        assert len(g.entries) == entries + ("k" in change or held["w"].shape == (1,) or held["w"].requires_grad)
    assert g.calls.eager == 0


def test_the_same_tensor_twice():
    """An argument may be the tensor in the closure, or a part of it, as with two arguments."""
    weight = torch.ones(4)

    def f(x):
        x.add_(1)
        return x * weight

    for given in (lambda: weight, lambda: weight[:4], lambda: torch.ones(4)):
        weight.fill_(1)
        expected = f(given())
        weight.fill_(1)
        assert torch.equal(compiled(f)(given()), expected)


def test_a_global_is_rebound():
    """A global is read again at each call."""
    f = compiled(lambda x: x * WEIGHT)
    assert f(torch.ones(3)).tolist() == [1.0] * 3
    before = WEIGHT
    try:
        globals()["WEIGHT"] = torch.full((3,), 4.0)
        assert f(torch.ones(3)).tolist() == [4.0] * 3
    finally:
        globals()["WEIGHT"] = before
    assert (len(f.entries), f.calls.eager) == (1, 0)


def test_what_is_assigned_is_refused():
    """A function that assigns another tensor to such a place is refused, and the place stays unchanged."""
    held = {"w": torch.ones(3)}

    def f(x):
        held["w"] = held["w"] * x
        return held["w"] + 1

    own = held["w"]
    with config.patch(fallback="error"), pytest.raises(aotlab.errors.LeakedTensorError, match=r"held\['w'\]"):
        compiled(f)(torch.ones(3))
    assert held["w"] is own
    with config.patch(fallback="eager"), pytest.warns(RuntimeWarning, match="runs eagerly"):
        assert compiled(f)(torch.full((3,), 2.0)).tolist() == [3.0] * 3
    assert held["w"].tolist() == [2.0] * 3


def test_a_data_set_is_no_input():
    """A long list of tensors is not made an input. A function that uses one of them is refused as before."""
    rows = [torch.full((1,), float(i)) for i in range(1000)]
    f = compiled(lambda x: x + rows[3])
    with config.patch(fallback="eager"), pytest.warns(RuntimeWarning, match=r"rows\[3\]"):
        assert f(torch.ones(1)).item() == 4.0


def test_signature():
    """A compiled module takes the arguments of the one that it was made of, and is of its class, as trainers ask."""
    net = Net()
    for made in (aotlab.compile(net, backend="eager"), copy.deepcopy(aotlab.compile(net, backend="eager"))):
        assert inspect.signature(made.forward) == inspect.signature(net.forward)
        assert isinstance(made, Net)
        assert made(torch.ones(4, 3), weight=2.0).shape == (4, 3)


@pytest.mark.parametrize(
    ("mode", "backend", "why"),
    [("reduce-overhead", "inductor", "CUDA graphs"), ("quick", "inductor", "use one of"),
     ("max-autotune-no-cudagraphs", "eager", "backend inductor")],
)  # fmt: skip
def test_modes(mode, backend, why):
    """An unknown mode is refused with the reason."""
    with pytest.raises(aotlab.errors.UsageError, match=why):
        aotlab.compile(torch.sin, backend=backend, mode=mode)


def test_another_container():
    """If another list or dictionary replaces a container of inputs, the inputs are read from the new one."""
    held = SimpleNamespace(all=[torch.ones(3)], more={"w": [torch.ones(3)]})
    f = compiled(lambda x: x * held.all[0] + held.more["w"][0])
    x = torch.ones(3)
    for change in ({"all": [torch.zeros(3)]}, {"more": {"w": [torch.zeros(3)]}}, {}):
        assert torch.equal(f(x), x * held.all[0] + held.more["w"][0])
        vars(held).update(change)
    held.more["w"] = [torch.full((3,), 5.0)]
    assert torch.equal(f(x), torch.full((3,), 5.0))


def test_a_module_is_made_anew():
    """If ``__init__`` is called again, the new dictionaries of parameters and of modules are read."""
    net = nn.Sequential(nn.Linear(3, 3))
    f, x = compiled(lambda x: net(x)), torch.ones(3)
    for again in (lambda: nn.Linear.__init__(net[0], 3, 3), lambda: net.__init__(nn.Linear(3, 3))):
        assert torch.equal(f(x), net(x))
        again()
        assert torch.equal(f(x), net(x))
