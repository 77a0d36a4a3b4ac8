"""Forward-mode differentiation and batched gradients of compiled calls keep every tangent and every sample."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, functional, grad

import aotlab
from aotlab.errors import TransformError
from tests.engine_helpers import compiled, refusing
from tests.func_helpers import MAKES, assert_same, behind_dynamo, numbers, outcome

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


def body(x):
    """Compute something of the same shape."""
    return x.sin() * x + 1


def scalar(x):
    """Compute a number."""
    return (x.sin() * x).sum()


def parts(dual):
    """Unpack a dual tensor into copies that are valid outside its level."""
    primal, tangent = forward_ad.unpack_dual(dual)
    return primal.clone(), None if tangent is None else tangent.clone()


def dual(value):
    """Make a dual tensor."""
    return forward_ad.make_dual(value, value.cos())


# --- forward-mode differentiation around -------------------------------------------------------------------------


def calls_in_a_level(make):
    """Call with dual and plain tensors, before, within and after a level."""
    f = make(body)
    before = f(numbers(4))
    with forward_ad.dual_level():
        results = [parts(f(dual(numbers(4)))), parts(f(numbers(4)))]
    return before, *results, f(numbers(4))


def writes_in_a_level(make):
    """Give a plain tensor a tangent by a write."""
    f = make(lambda x, y: x.mul_(y))
    with forward_ad.dual_level():
        x = numbers(4) * 1
        out = f(x, dual(numbers(4)))
        return parts(x), parts(out), out is x


def dual_parameters(make):
    """Give the parameters of a module tangents."""
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    f = make(module)
    f(numbers(3, 4))
    with forward_ad.dual_level():
        for name, parameter in list(module.named_parameters()):
            delattr(module, name)
            setattr(module, name, dual(parameter))
        return parts(f(numbers(3, 4)))


def gradients_of_tangents(make):
    """Differentiate a tangent backwards."""
    f, x = make(body), numbers(4).requires_grad_()
    with forward_ad.dual_level():
        return grad(forward_ad.unpack_dual(f(forward_ad.make_dual(x, numbers(4)))).tangent.sum(), x)


def jacobians_forwards(make):
    """Let torch take Jacobians and Hessians forwards."""
    return (
        functional.jacobian(make(body), numbers(4), vectorize=True, strategy="forward-mode"),
        functional.hessian(make(scalar), numbers(4), vectorize=True, outer_jacobian_strategy="forward-mode"),
    )


def gradients_forwards(make):
    """Let torch check forward gradients."""
    given = (numbers(4).double().requires_grad_(),)
    return torch.autograd.gradcheck(make(body), given, check_forward_ad=True, check_batched_forward_grad=True)


AROUND = (
    calls_in_a_level, writes_in_a_level, dual_parameters, gradients_of_tangents, jacobians_forwards, gradients_forwards,
)  # fmt: skip


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("program", AROUND)
def test_forward_mode_around(program, make):
    """Tangents are eager's; a compiled function runs eagerly under forward mode, with one notice."""
    made = []

    def making(function):
        made.append(function)
        return make(function)

    expected, _, state = outcome(program, lambda f: f)
    found, notices, state_after = outcome(program, making)
    assert_same(expected, found)
    assert state_after == state
    if make is compiled:
        assert len(notices) == len(made)
        assert all("under forward-mode differentiation and runs eagerly" in notice for notice in notices)


# --- forward-mode differentiation inside -------------------------------------------------------------------------


def tangent_inside(x):
    """Open a level."""
    with forward_ad.dual_level():
        return parts(body(dual(x)))


def write_inside(x):
    """Give a tensor a tangent by a write."""
    with forward_ad.dual_level():
        y = x * 1
        y.mul_(dual(x.sin()))
        return parts(y)


def tangent_of_one_of_two(x):
    """Use a tensor with a tangent and a tensor without one."""
    with forward_ad.dual_level():
        return parts(dual(x).sin()), parts(x.cos())


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("program", [tangent_inside, write_inside, tangent_of_one_of_two])
def test_forward_mode_inside(program, make):
    """Tangents inside a function, and their gradients, are eager's, and no level stays open."""

    def use(make):
        f, found = make(program), []
        for _ in range(2):
            x = numbers(4).requires_grad_()
            results = [r for r in torch.utils._pytree.tree_leaves(f(x)) if r is not None]
            found += [*results, *grad(sum(r.square().sum() for r in results), x)]
        return found

    expected, _, state = outcome(use, lambda f: f)
    found, notices, state_after = outcome(use, make)
    assert_same(expected, found)
    assert state_after == state
    assert len(notices) <= 1


def test_the_notice_names_forward_mode():
    """The notice names the op that a trace cannot represent."""
    with pytest.warns(RuntimeWarning, match="forward-mode differentiation uses zeros without memory"):
        compiled(tangent_inside)(numbers(4))


# --- backwards with tensors of a transform -----------------------------------------------------------------------


def two(x, w):
    """Compute two results."""
    return torch.tanh(x @ w), x.exp() * w


def pair():
    """Make two leaves."""
    return numbers(3, 3).requires_grad_(), (numbers(3, 3) / 3).requires_grad_()


def batched(make):
    """Take batched gradients of both, and of one after the other."""
    given = pair()
    y, z = make(two)(*given)
    several = torch.eye(9).reshape(9, 3, 3)
    settings = {"is_grads_batched": True, "retain_graph": True}
    return (
        grad((y, z), given, (several, several * 2), **settings),
        grad(y, given, several, **settings),
        grad(z, given[1], several, is_grads_batched=True),
        torch.vmap(lambda v: grad(y, given, v, retain_graph=True))(several),
        functional.jacobian(make(body), numbers(4), vectorize=True),
        functional.hessian(make(scalar), numbers(4), vectorize=True),
    )


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_batched_gradients(make):
    """Batched gradients are eager's."""
    expected, _, state = outcome(batched, lambda f: f)
    found, notices, state_after = outcome(batched, make)
    assert_same(expected, found)
    assert state_after == state
    assert notices == []


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_batched_gradients_with_histories(make):
    """Batched gradients with a history are refused under every kind of vmap, and the graph is not freed."""
    x = numbers(4).requires_grad_()
    y = make(body)(x)
    with refusing(TransformError, match="is_grads_batched"):
        grad(y, x, torch.eye(4), is_grads_batched=True, create_graph=True)
    with refusing(TransformError, match="under a transform"):
        torch.vmap(lambda v: grad(y, x, v, create_graph=True))(torch.eye(4))
    assert torch.equal(grad(y, x, numbers(4))[0], grad(body(x), x, numbers(4))[0])


def test_batched_gradients_of_other_compilers():
    """Another compiler's kernels receive no batched tensors: the graph itself runs instead."""
    seen = []

    def compiler(graph, inputs):
        def run(*args):
            seen.extend(torch._C._functorch.is_legacy_batchedtensor(a) for a in args)
            return graph.forward(*args)

        return run

    x = numbers(4).requires_grad_()
    y = aotlab.aot_function(body, compiler)(x)
    seen.clear()
    (found,) = grad(y, x, torch.eye(4), is_grads_batched=True, retain_graph=True)
    assert torch.equal(found, grad(body(x), x, torch.eye(4), is_grads_batched=True)[0])
    assert not any(seen)
    (nested,) = torch.vmap(lambda v: grad(y, x, v.expand(2, 4), is_grads_batched=True, retain_graph=True))(torch.eye(4))
    assert torch.equal(nested[:, 1], found)
    assert not any(seen)
    grad(y, x, torch.eye(4), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="second time"):
        grad(y, x, torch.ones(4))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_dual_gradients(make):
    """A dual tensor keeps its tangent in a compiled backward; under ``create_graph`` it is refused."""
    x = numbers(4).requires_grad_()
    y, expected = make(body)(x), body(x)
    with forward_ad.dual_level():
        results = [parts(grad(each, x, dual(numbers(4)), retain_graph=True)[0]) for each in (y, expected)]
        with refusing(TransformError, match="create_graph=True"):
            grad(y, x, dual(numbers(4)), create_graph=True)
        plain = grad(y, x, numbers(4), create_graph=True)[0]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(plain, grad(expected, x, numbers(4), create_graph=True)[0])
    jvp = [
        torch.func.jvp(lambda v, out=out: grad(out, x, v, retain_graph=True)[0], (numbers(4),), (numbers(4),))
        for out in (y, expected)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*jvp, strict=True))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_backward_in_another_transform(make):
    """A compiled backward with ``create_graph`` inside grad or jvp is refused if the transform applies to it."""
    x = numbers(4).requires_grad_()
    y = make(body)(x)

    def inside(v):
        return grad(y, x, v, retain_graph=True, create_graph=True)[0].sum()

    for use in (lambda: torch.func.grad(inside)(numbers(4)), lambda: torch.func.jvp(inside, *[(numbers(4),)] * 2)):
        with refusing(TransformError, match="the backward of compiled `body` was called"):
            use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad(y, x, numbers(4))


def test_a_break_in_a_level():
    """A dual level that Dynamo cannot capture in one graph stays open after a graph break.

    Dynamo itself reports that a dual tensor that a graph receives has no tangent.
    """

    def broken(x):
        with forward_ad.dual_level():
            y = dual(x).sin()
            torch._dynamo.graph_break()
            primal, tangent = forward_ad.unpack_dual(y * x)
            return primal.clone(), tangent.clone()

    expected, _, state = outcome(lambda make: make(broken)(numbers(4)), lambda f: f)
    found, _, state_after = outcome(lambda make: make(broken)(numbers(4)), behind_dynamo)
    assert_same(expected, found)
    assert state_after == state
