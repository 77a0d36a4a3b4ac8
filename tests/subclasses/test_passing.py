"""Wrappers that are returned together with values computed from them, as logits and their loss, agree with eager."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from aotlab import events
from aotlab.errors import RefusedError
from tests.subclasses.kinds import leaf, parts, plain, same, tensors, two
from tests.subclasses.test_calls import nested
from tests.subclasses.test_training import NETS, Net


def detached(y):
    """Compute without gradients."""
    with torch.no_grad():
        return y * 3


PROGRAMS = {
    "a loss": lambda t: (lambda y: (y, (y * y).sum()))(t * 2),
    "a loss of a loss": lambda t: (lambda y: (y, y.exp(), y.exp().sum()))(t * 2),
    "beside what has no history": lambda t: (lambda y: (detached(y), y, y.detach() + 1, y.sin()))(t * 2),
    "with views": lambda t: (lambda y: (y[0], y, y.t(), y.sin()))(t * 2),
    "of a view": lambda t: (lambda y: (y, y[0].exp()))(t * 2),
    "twice": lambda t: (lambda y: (y, y, y.exp()))(t * 2),
    "two of them": lambda t: (lambda y, z: [y, z, (y * z).sum()])(t * 2, t.sin()),
    "the loss first": lambda t: {"loss": (y := t.tanh() * 2).sum(), "logits": y},
    "a view of what is computed": lambda t: (lambda y: (y, y.exp().view(-1)))(t * 2),
    "of a part": lambda t: (lambda y: (y, y.sum(), t.a * 2))(t * 2),
}


@pytest.mark.parametrize("kind", ["two", "nested"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name, kind):
    """Hooks, ``.grad`` and ``autograd.grad`` see the gradients that flow through a returned wrapper."""
    function, make = PROGRAMS[name], {"two": two, "nested": nested}[kind]
    compiled = aotlab.compile(function, backend="eager")
    found = []
    for call in (compiled, function) * 2:
        t, seen = leaf(make()), []
        out = call(t)
        results = [each for each in tensors(out) if each.requires_grad]
        last = next(each for each in results[::-1] if each.dim() < 2 or len(results) == 1 or each is results[-1])
        for n, each in enumerate(results):
            each.register_hook(lambda g, n=n, seen=seen: seen.append((n, g)))
            each.retain_grad()
        inner = torch.autograd.grad(last.sum(), results, retain_graph=True, allow_unused=True)
        last.sum().backward()
        found.append((out, t.grad, [each.grad for each in results], inner, sorted(seen, key=lambda s: s[0])))
    for mine, wanted in (found[:2], found[2:]):
        assert same(mine, wanted, versions=False)
    assert (compiled.calls.compiled, len(compiled.entries)) == (2, 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_gradients(name):
    """Backwards of all results, and of gradients, are eager's except for the order of sums."""
    compiled = aotlab.compile(PROGRAMS[name], backend="eager")
    found = []
    for call in (compiled, PROGRAMS[name]):
        t = leaf(two())
        results = [each for each in tensors(call(t)) if each.requires_grad]
        first = torch.autograd.grad(sum(each.sin().sum() for each in results), [t, *results], create_graph=True)
        second = torch.autograd.grad(sum((each * each).sum() for each in first), t)
        found.append([part for each in (*first, *second) for part in parts(each.detach())[1]])
    for pair in zip(*found, strict=True):
        torch.testing.assert_close(*pair)
    assert compiled.calls.compiled == 1


class WithLoss(torch.nn.Module):
    """A model that returns logits and their loss."""

    def __init__(self, kind):
        super().__init__()
        self.net = Net(*NETS[kind])

    def forward(self, x):
        """Compute both."""
        logits = self.net(x)
        return logits, (logits * logits).mean()


@pytest.mark.parametrize("frontend", ["direct", pytest.param("dynamo", marks=pytest.mark.tier("full"))])
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))])
def test_ten_steps(backend, frontend):
    """Ten training steps on the loss agree with eager, with retained gradients of the logits."""
    found, served = [], []
    for compiles in (True, False):
        model = WithLoss("TwoTensor")
        call = aotlab.compile(model, backend=backend, frontend=frontend) if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for step in range(10):
            optimizer.zero_grad()
            with events.listen(served.append):
                logits, loss = call(plain(step))
            logits.retain_grad()
            loss.backward()
            optimizer.step()
            seen += [loss.detach(), logits.grad]
        found.append([*seen, *(p.detach() for p in model.parameters())])
    calls = [event.entry for event in served if isinstance(event, events.Called)]
    assert len(calls) == 10
    assert None not in calls
    if backend == "eager":
        assert same(*found, versions=False)
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(parts(mine)[1], parts(wanted)[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes(dynamic):
    """Calls with other sizes agree with eager too."""
    function = PROGRAMS["a loss"]
    compiled = aotlab.compile(function, backend="eager", dynamic=dynamic)
    for rows in (3, 5, 7):
        ours, theirs = (leaf(two(0, (rows, 4))) for _ in range(2))
        (y, loss), (wanted, other) = compiled(ours), function(theirs)
        for each in (loss, other):
            each.backward()
        assert same([y, loss, ours.grad], [wanted, other, theirs.grad], versions=False)
    assert (compiled.calls.eager, len(compiled.entries)) == (0, 1 if dynamic else 2)


def test_written_before_the_backward():
    """A write to a returned wrapper that the loss needs makes the backward raise, as in eager."""
    for call in (aotlab.compile(PROGRAMS["a loss"], backend="eager"), PROGRAMS["a loss"]):
        y, loss = call(leaf(two()))
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_wrapper_made_inside_a_function_of_tensors():
    """A function of tensors returns a wrapper that it made, and a loss computed from it."""
    u = two(5)
    function = lambda x: (lambda y: (y, (y * y).sum()))(x * u)  # noqa: E731
    ours, theirs = leaf(plain()), leaf(plain())
    compiled = aotlab.compile(function, backend="eager")
    out, wanted = compiled(ours), function(theirs)
    assert same(out, wanted)
    for each in (out[1], wanted[1]):
        each.backward()
    assert same(ours.grad, theirs.grad, versions=False)
    assert compiled.calls.compiled == 1


class Twice(torch.autograd.Function):
    """A custom Function that doubles a wrapper. No function mode sees its call."""

    @staticmethod
    def forward(ctx, x):
        """Double."""
        return TwoTensor(x.a * 2, x.b * 2)

    @staticmethod
    def backward(ctx, gradient):
        """Double."""
        return gradient * 2


BESIDE = "is a tensor subclass, and a value computed from it is also returned or written"
REFUSED = {
    "of what it is computed of, too": (lambda t: (lambda y: (y, t * y))(t.sin()), f"a result {BESIDE}"),
    "by a custom Function": (lambda t: (lambda y: (y, y.sum()))(Twice.apply(t)), BESIDE),
    "a view": (lambda t: (lambda y: (y, y.sum()))((t * 2)[0]), BESIDE),
    "written, and returned by what writes it": (
        lambda t: (lambda y: (y, y.sum()))(functional.relu(t * 2, inplace=True)), BESIDE,
    ),
    "first without history": (
        lambda t: (lambda y: (y, y.sum()))(torch.zeros_like(t).add_(t * 2)), BESIDE,
    ),
    "written after": (lambda t: (lambda y: (y.mul_(2), y.sum()))(t * 2), BESIDE),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """These programs are refused with a reason."""
    function, text = REFUSED[name]
    with pytest.raises(RefusedError, match=text):
        aotlab.compile(function, backend="eager")(leaf(two()))
