"""Training with wrappers: gradients of wrappers and of plain tensors equal eager's bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from aotlab.errors import RefusedError, SubclassError
from tests.subclasses.kinds import Quantized, Tagged, beside_eager, leaf, parts, plain, same, tensors, two
from tests.subclasses.test_calls import PROGRAMS

_LEAVES_IN_EAGER = {  # wrappers of tensors that require grad are separate leaves in eager
    "made inside", "made inside, of the arguments", "made inside, returned in part", "quantized inside",
}  # fmt: skip
_CONSTRUCTED = {"by name", "nested, with a wrapper of tensors"}


def requiring(make):
    """Return a function whose wrapper arguments all require grad; plain tensors do not."""

    def made():
        arguments = make()
        for each in tensors(arguments):
            if hasattr(each, "__tensor_flatten__"):
                each.requires_grad_()
        return arguments

    return made


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - _LEAVES_IN_EAGER - _CONSTRUCTED))
def test_with_gradients(name):
    """Programs in which all wrappers require grad agree with eager."""
    function, make = PROGRAMS[name]
    beside_eager(function, requiring(make))


MIXED = {
    "a wrapper's gradient of a tensor": (lambda t, x: (t * x).sin(), lambda: (two(), leaf(plain(7)))),
    "both": (lambda t, x: (t * x).sin(), lambda: (leaf(two()), leaf(plain(7)))),
    "a tensor's of a quantized wrapper": (
        lambda x, w: functional.linear(x, w).relu(),
        lambda: (leaf(plain()), leaf(Quantized.of(plain(1, (5, 4))))),
    ),
    "a tensor's of a wrapper of floats": (
        lambda x, w: functional.linear(x, w).relu(),
        lambda: (leaf(plain()), leaf(Tagged(plain(1, (5, 4)), "w"))),
    ),
    "two kinds": (lambda t, w: t @ w.t(), lambda: (leaf(two()), leaf(Tagged(plain(1, (5, 4)), "w")))),
    "a tensor twice": (lambda t, x: (t * x).sin() + x, lambda: (two(), leaf(plain(7)))),
    "several results": (
        lambda t, u, x: (t.sin(), (t * u).exp(), u * u, x * t),
        lambda: (leaf(two()), leaf(two(1)), leaf(plain(7))),
    ),
    "no leaf": (lambda t: (t * t).sin(), lambda: (leaf(two()) * 1,)),
    "a wrapper without": (lambda t, u: t * u, lambda: (leaf(two()), two(1))),
    "an intermediate that requires grad": (lambda t: (t.exp() * t).sum(), lambda: (leaf(two()),)),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed(name):
    """Each gradient of a wrapper or a tensor has eager's type."""
    beside_eager(*MIXED[name])


def trained(net, call, make, steps):
    """Train by SGD, and return all losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = call(make(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class Net(torch.nn.Module):
    """Two layers whose weights are wrappers."""

    def __init__(self, wrap, bias):
        super().__init__()
        self.one, self.other = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        for n, layer in enumerate((self.one, self.other)):
            layer.weight = torch.nn.Parameter(wrap(plain(n, tuple(layer.weight.shape))))
            layer.bias = torch.nn.Parameter(bias(plain(n + 2, tuple(layer.bias.shape))))

    def forward(self, x):
        """Compute."""
        return self.other(torch.relu(self.one(x)))


NETS = {
    "TwoTensor": (lambda w: TwoTensor(w, w + 1), lambda b: TwoTensor(b, b - 1)),
    "TwoTensor, with a bias": (lambda w: TwoTensor(w, w + 1), lambda b: b),
    "Quantized": (Quantized.of, lambda b: b),
    "Tagged": (lambda w: Tagged(w, "w"), lambda b: b),
}


@pytest.mark.parametrize("kind", NETS)
def test_ten_steps(kind):
    """Ten steps of SGD with momentum agree with eager."""
    if kind == "Tagged":  # it cannot be written: only its gradients count
        beside_eager(lambda x, w: functional.linear(x, w).relu(), MIXED["a tensor's of a wrapper of floats"][1])
        return
    mine, wanted = Net(*NETS[kind]), Net(*NETS[kind])
    compiled = aotlab.compile(mine, backend="eager")
    ours = trained(mine, compiled, plain, 10)
    assert same(ours, trained(wanted, wanted, plain, 10))
    assert same(list(mine.parameters()), list(wanted.parameters()))
    assert same([p.grad for p in mine.parameters()], [p.grad for p in wanted.parameters()])
    assert len(compiled.compiled.entries) == compiled.compiled.calls.compiled / 10 == 1


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", ["TwoTensor", "Quantized"])
def test_ten_steps_by_inductor(kind):
    """Ten training steps with Inductor agree with eager."""
    mine, wanted = Net(*NETS[kind]), Net(*NETS[kind])
    compiled = aotlab.compile(mine, backend="inductor")
    ours, theirs = trained(mine, compiled, plain, 10), trained(wanted, wanted, plain, 10)
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        torch.testing.assert_close(*(t.a if kind == "TwoTensor" else t for t in (a, b)), rtol=1e-3, atol=1e-4)
    assert compiled.compiled.calls.compiled == 10


def test_some_results_alone():
    """A backward of some results gives None to an input that they do not depend on."""
    function = lambda t, u: (t.sin(), (t * u).exp(), u * u)  # noqa: E731
    compiled = aotlab.compile(function, backend="eager")
    for n in range(3):
        ours, theirs = ((leaf(two()), leaf(two(1))) for _ in range(2))
        compiled(*ours)[n].sum().backward()
        function(*theirs)[n].sum().backward()
        assert [t.grad is None for t in ours] == [t.grad is None for t in theirs]
        assert same([t.grad for t in ours], [t.grad for t in theirs])
    assert compiled.calls.compiled == 3


def test_gradients_of_a_result_given():
    """The gradient of a result may be a wrapper of the result's type, or a plain tensor."""
    compiled = aotlab.compile(lambda t: (t * t).sin(), backend="eager")
    for gradient in (two(4), plain(4)):
        ours, theirs = leaf(two()), leaf(two())
        compiled(ours).backward(gradient)
        (theirs * theirs).sin().backward(gradient)
        assert same(ours.grad, theirs.grad)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))])
def test_a_wrapper_into_a_function_of_tensors(backend):
    """A wrapper as the gradient of a plain result gives eager's gradient, and no kernel receives the wrapper."""
    ours, theirs = leaf(plain()), leaf(plain())
    compiled = aotlab.compile(lambda x: (x * x).sin(), backend=backend)
    (compiled(ours) * two()).sum().backward()
    ((theirs * theirs).sin() * two()).sum().backward()
    assert same(ours.grad, theirs.grad, versions=False)
    assert compiled.calls.compiled == 1


def test_a_wrapper_for_a_tensor_beside_wrappers():
    """A wrapper as the gradient of a plain output is refused with a reason if other outputs are wrappers."""
    weight, x = leaf(Quantized.of(plain(1, (5, 4)))), leaf(plain(7, (3, 5)))
    result = aotlab.compile(lambda w, x: x @ w, backend="eager")(weight, x)
    with pytest.raises(SubclassError, match="the gradient of a plain output is a `TwoTensor`"):
        (result * two(0, (3, 4))).sum().backward()


def test_independent_results():
    """A backward of one result does not call hooks on another result's argument."""
    seen = []
    for call in (independent := lambda t, x: (t * t, x + 1), aotlab.compile(independent, backend="eager")):
        t, x = leaf(two()), leaf(plain(7)) * 1
        x.register_hook(lambda gradient: seen.append(gradient))
        results = call(t, x)
        results[0].sum().backward()
        assert seen == []
        results[1].sum().backward()
        assert torch.equal(seen.pop(), torch.ones_like(x))


def test_other_strides_of_a_gradient():
    """A gradient with untraced strides is copied to the traced strides if no backward can be compiled for it."""
    found = []
    for call in (row := lambda t: t.reshape(4, 3).t()[0], aotlab.compile(row, backend="eager")):
        t = leaf(TwoTensor(plain(0, (4, 3)).t(), plain(1, (4, 3)).t()))
        call(t).sum().backward()
        found.append(t.grad)
    assert same(*found, versions=False)


def test_complex_parts():
    """Training with complex parts is refused: parts may be lazy conjugates, which graphs of parts do not represent."""
    t = leaf(TwoTensor(*(torch.complex(plain(n), plain(n + 1)) for n in (0, 2))))
    with pytest.raises(
        RefusedError, match="gradients flow through `out`, a `TwoTensor`, and not all of its parts are real"
    ):
        aotlab.compile(lambda t: t.square(), backend="eager")(t)


def test_gradients_of_two_kinds():
    """A plain argument with a wrapper gradient from one result and a tensor gradient from another is refused."""
    function = lambda t, x: ((t * x).sin(), x * 2)  # noqa: E731
    with pytest.raises(
        RefusedError, match="a plain argument gets a plain gradient from one result, and a tensor subclass"
    ):
        aotlab.compile(function, backend="eager")(leaf(two()), leaf(plain(7)))


def test_a_wrong_gradient():
    """A gradient of another type is refused with a reason."""
    t = leaf(two())
    result = aotlab.compile(lambda t: (t * t).sin(), backend="eager")(t)
    with pytest.raises(SubclassError, match="was compiled for a `TwoTensor"):
        result.backward(Tagged(plain(4), "g"))


HIGHER = {
    "alone": (lambda t: (t * t).sin(), lambda: [leaf(two())]),
    "two": (lambda t, u: (t * u).sin() * t, lambda: [leaf(two()), leaf(two(1))]),
    "with a tensor": (lambda t, x: (t * t * x).sin(), lambda: [leaf(two()), leaf(plain(7))]),
}


@pytest.mark.parametrize("name", HIGHER)
def test_higher_derivatives(name):
    """Second derivatives are eager's, and third derivatives are eager's except for the order of sums."""
    function, make = HIGHER[name]
    compiled = aotlab.compile(function, backend="eager")
    found = []
    for call in (compiled, function):
        arguments = make()
        first = torch.autograd.grad(call(*arguments).sum(), arguments, create_graph=True)
        second = torch.autograd.grad(sum((g * g).sum() for g in first), arguments, create_graph=True)
        third = torch.autograd.grad(sum((g * g).sum() for g in second), arguments)
        found.append([[each.detach() for each in level] for level in (first, second, third)])
    ours, theirs = found
    assert same(ours[:2], theirs[:2], versions=False)
    for mine, wanted in zip(ours[2], theirs[2], strict=True):
        assert type(mine) is type(wanted)
        assert all(torch.allclose(*pair, rtol=1e-5) for pair in zip(parts(mine)[1], parts(wanted)[1], strict=True))
    assert compiled.calls.compiled == 1


def test_accumulated_and_hooked():
    """Gradients accumulate, and hooks on wrappers see wrapper gradients."""
    seen = []
    found = []
    compiled = aotlab.compile(lambda t: (t * t).sin(), backend="eager")
    for call in (compiled, lambda t: (t * t).sin()):
        t = leaf(two())
        t.register_hook(lambda g: seen.append(g.clone()))
        for _ in range(2):
            result = call(t)
            result.register_hook(lambda g: g * 2)
            result.sum().backward()
        found.append(t.grad)
    assert same(*found)
    assert same(seen[:2], seen[2:])


PLAIN_GRADIENTS = {
    "a number": (lambda t: t * 2, lambda: (leaf(two()),)),
    "another wrapper": (lambda t, u: t * u, lambda: (leaf(two()), leaf(two(1)))),
    "a number and another wrapper": (lambda t, u: t * u + u * 2, lambda: (leaf(two()), leaf(two(1)))),
    "a tensor that is added": (lambda t, x: t + x, lambda: (leaf(two()), leaf(plain(7)))),
    "a tensor beside a wrapper without": (lambda t, x: t + x * 2, lambda: (two(), leaf(plain(7)))),
    "a view": (lambda t: (t * 2)[1:], lambda: (leaf(two()),)),
    "a write": (lambda t: (t * 1).mul_(2), lambda: (leaf(two()),)),
    "a wrapper of wrappers": (lambda t: t * 2, lambda: (leaf(TwoTensor(two(), two(1))),)),
    "two results": (lambda t: (t * 2, t * t), lambda: (leaf(two()),)),
    "a result of another": (lambda t: ((y := t * 2), y * 3), lambda: (leaf(two()),)),
}


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", sorted({*MIXED, *PLAIN_GRADIENTS}))
def test_plain_gradients(name, frontend):
    """If the caller passes a plain gradient for a wrapper, each ``.grad`` has eager's type."""
    function, make = {**MIXED, **PLAIN_GRADIENTS}[name]
    found = []
    torch.compiler.reset()
    for call in (aotlab.compile(function, backend="eager", frontend=frontend), function):
        gradients = []
        for is_plain in (True, False, True):
            arguments = make()
            results = tensors(call(*arguments))
            given = [torch.full(each.shape, 3.0) if is_plain else torch.ones_like(each) for each in results]
            torch.autograd.backward(results, given)
            gradients.append([each.grad for each in arguments])
        found.append(gradients)
    assert same(*found, versions=False)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_plain_gradient_beside_that_of_a_wrapper(is_first):
    """Of two results that are wrappers, one may get a plain gradient, or none."""

    def f(t, u):
        return t * u, t * 2

    compiled, found = aotlab.compile(f, backend="eager"), []
    for call in (compiled, f):
        t, u = leaf(two()), leaf(two(1))
        results = call(t, u)[:: 1 if is_first else -1]
        torch.autograd.backward(results, [torch.ones(3, 4), two(2)], retain_graph=True)
        torch.autograd.backward(results[:1], [torch.ones(3, 4)])
        found.append([t.grad, u.grad])
    assert same(*found, versions=False)
