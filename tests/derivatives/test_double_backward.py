"""Second and third derivatives of small programs, called directly and behind Dynamo.

All results are compared with eager bit for bit, except sums of three or more terms at third order.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.errors import TransformError
from tests.engine_helpers import behind_dynamo, compiled, refusing

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


def stock(function):
    """Compile by torch's own AOTAutograd."""
    return torch.compile(function, backend="aot_eager")


BOTH = pytest.mark.parametrize("make", [compiled, behind_dynamo])


class Saves(torch.autograd.Function):
    """Saves its input, whose history autograd knows, and an intermediate, whose history it does not know."""

    @staticmethod
    def forward(ctx, x):
        """Save both."""
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx, gradient):
        """Use both."""
        x, y = ctx.saved_tensors
        return gradient * (y + x * y)


class KeepsAttributes(torch.autograd.Function):
    """Keeps its inputs as attributes."""

    @staticmethod
    def forward(ctx, x, w):
        """Keep both."""
        ctx.x, ctx.w = x, w
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        """Use both."""
        return gradient * ctx.w, gradient * ctx.x


class Once(torch.autograd.Function):
    """Has a backward that must not be differentiated."""

    @staticmethod
    def forward(ctx, x):
        """Save it."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        """Use it."""
        return gradient * 2 * ctx.saved_tensors[0]


def around_no_grad(x, w):
    """Compute a factor under no_grad."""
    with torch.no_grad():
        factor = (x * w).sin()
    return (x * factor).exp() * w


def detached(x, w):
    """Detach a factor."""
    return (x * w).sin() * x.detach().exp()


def inner_gradient(x, w):
    """Differentiate inside."""
    (g,) = grad((x * w).sin().sum(), x, create_graph=True)
    return (g * x).tanh()


def checkpointed(x, w):
    """Compute a part again."""
    return checkpoint(lambda a: (a @ w).tanh().exp(), x, use_reentrant=False).sin()


def checkpointed_dropout(x, w):
    """Compute a part again that draws."""
    body = lambda a: functional.dropout((a @ w).tanh(), 0.5).exp()  # noqa: E731
    return checkpoint(body, x, use_reentrant=False).sin()


def dropout(x, w):
    """Draw a mask."""
    return functional.dropout((x @ w).tanh(), 0.5) * x


def saves(x, w):
    """Save by a custom Function."""
    return Saves.apply(x * w) + x


def keeps_attributes(x, w):
    """Keep by a custom Function."""
    return KeepsAttributes.apply(x.sin(), w).exp()


def once(x, w):
    """Have no second derivative."""
    return Once.apply(x * w).sin()


def written(x, w):
    """Write intermediates."""
    y = x * 1
    y.mul_(w)
    y[0].sin_()
    return y.exp()


def written_input(x, w):
    """Write an input, if it may be written."""
    x = x if x.grad_fn is not None else x * 1
    x.mul_(w)
    return x.sin()


def apart(x, w):
    """Return outputs that share an intermediate."""
    y = (x @ w).sin()
    return y.exp(), y.cos().sum()


def views(x, w):
    """Return views of one intermediate."""
    y = (x * w).exp()
    return y.t(), y[0] * 2


def hooked(x, w):
    """Put a hook in the midst."""
    y = x * w
    y.register_hook(lambda gradient: gradient * 2)
    return y.exp() * y


def linear_in_x(x, w):
    """Have a gradient that is a constant."""
    return x * 3 + w


def result_kept(x, w):
    """Return a result that its own node saves."""
    return (x @ w).exp()


def recurrent(x, w):
    """Use a weight several times."""
    h = x
    for _ in range(3):
        h = (h @ w).tanh() * x
    return h


def normed(x, w):
    """Have kernels that are differentiated otherwise under create_graph."""
    y = functional.layer_norm(x @ w, (3,))
    return functional.cross_entropy(y, torch.tensor([0, 1, 2])), functional.gelu(y)


def convolved(x, w):
    """Return a convolution, whose backward is itself differentiable."""
    return functional.conv1d(x[None], w[:, :, None]).sigmoid()


def shapes(x, w):
    """Sort, gather, cumulate."""
    return (x @ w).cumsum(0).sort(1)[0].gather(1, torch.zeros(3, 1, dtype=torch.long)).exp(), (x * w).amax().sin()


PROGRAMS = [
    around_no_grad, detached, inner_gradient, checkpointed, checkpointed_dropout, dropout, saves, keeps_attributes,
    once, written, written_input, apart, views, hooked, linear_in_x, result_kept, recurrent, normed, convolved, shapes,
]  # fmt: skip


#: Those with a custom Function.
CUSTOM = [saves, keeps_attributes, once]


def defined(gradients):
    """Leave out None."""
    return [gradient for gradient in gradients if gradient is not None]


def second(outputs, x, w):
    """Differentiate a function of the gradients."""
    first = grad([y.sum() for y in outputs], [x, w], create_graph=True, allow_unused=True)
    return [*first, *grad(sum(g.square().sum() for g in defined(first)), [x, w], allow_unused=True)]


def mixed(outputs, x, w):
    """Differentiate a function of the gradients and the outputs; the tangents depend on the latter."""
    first = grad([y.square().sum() for y in outputs], [x, w], create_graph=True, allow_unused=True)
    loss = sum(g.square().sum() for g in defined(first)) + sum(y.sum() for y in outputs)
    return [*first, *grad(loss, [x, w], allow_unused=True)]


def partial(outputs, x, w):
    """Differentiate one output for one input, then all."""
    first = grad(outputs[0].sum(), [x], create_graph=True, allow_unused=True)
    loss = sum(g.pow(3).sum() for g in defined(first)) + outputs[-1].sum()
    return [*first, *grad(loss, [x, w], allow_unused=True)]


def by_backward(outputs, x, w):
    """Differentiate for tangents too, by backward()."""
    tangents = [torch.ones_like(y, requires_grad=True) for y in outputs]
    first = grad(outputs, [x, w], tangents, create_graph=True, allow_unused=True)
    loss = sum(g.square().sum() for g in defined(first))
    loss.backward(inputs=[t for t in (*tangents, x, w) if t.is_leaf])
    return [*first, *(t.grad for t in (*tangents, x, w) if t.is_leaf)]


def third(outputs, x, w):
    """Differentiate three times."""
    first = grad([y.sum() for y in outputs], [x, w], create_graph=True, allow_unused=True)
    loss = sum(g.square().sum() for g in defined(first))
    again = grad(loss, [x, w], create_graph=True, allow_unused=True)
    return [*first, *again, *grad(sum(g.square().sum() for g in defined(again)), [x, w], allow_unused=True)]


def outcome(function, use, program, *, leaves):
    """Call and differentiate; return the resulting tensors, or the error."""
    torch.manual_seed(0)
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    given = (x, w) if leaves else (x * 1.5, w + 0.25)
    seen = (given[0] * 1, given[1]) if program is written_input and not leaves else given
    torch.manual_seed(1)
    try:
        found = function(*seen)
        outputs = list(found) if isinstance(found, tuple) else [found]
        gradients = use(outputs, *given)
    except Exception as error:  # noqa: BLE001  # whatever autograd raises
        return type(error), str(error).splitlines()[0]
    return [*outputs, *gradients, torch.rand(2)]


def same(expected, actual, *, to_rounding=False):
    """Assert that two outcomes are alike."""
    if isinstance(expected, tuple) or isinstance(actual, tuple):
        assert actual == expected
        return
    assert [t is None for t in expected] == [t is None for t in actual]
    for a, b in zip(defined(expected), defined(actual), strict=True):
        assert (a.requires_grad, a.shape, a.stride(), a.dtype) == (b.requires_grad, b.shape, b.stride(), b.dtype)
        if to_rounding:
            torch.testing.assert_close(b, a, equal_nan=True)
        else:
            assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
            assert torch.equal(a.isnan(), b.isnan())


def is_rounded(program, use):
    """Return whether the test sums three or more terms that come from several autograd nodes of a compiled call."""
    third_order = {written, written_input, saves}  # from nodes of several orders
    return (use is third and program in third_order) or (use in (mixed, partial) and program in (apart, hooked))


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "nonleaves"])
@pytest.mark.parametrize("use", [second, mixed, partial, by_backward, third])
@pytest.mark.parametrize("program", PROGRAMS)
def test_directly(program, use, leaves):
    """Gradients of gradients are eager's, or eager's error is raised."""
    function = compiled(program)
    expected = outcome(program, use, program, leaves=leaves)
    same(
        expected,
        outcome(function, use, program, leaves=leaves),
        to_rounding=is_rounded(program, use),
    )
    assert function.calls.compiled == 1


@pytest.mark.parametrize("use", [mixed, by_backward])
@pytest.mark.parametrize("program", [p for p in PROGRAMS if p not in (hooked, inner_gradient, *CUSTOM)])
def test_behind_dynamo(program, use):
    """Behind Dynamo, the derivatives are eager's too."""
    expected = outcome(program, use, program, leaves=True)
    found = outcome(behind_dynamo(program), use, program, leaves=True)
    same(expected, found, to_rounding=is_rounded(program, use))


@BOTH
def test_stock_refuses(make):
    """Torch's own AOTAutograd refuses these derivatives."""

    def use(outputs, x, w):
        (first,) = grad(outputs[0].sum(), x, create_graph=True)
        first.sum().backward()
        return [first, x.grad, w.grad]

    expected = outcome(result_kept, use, result_kept, leaves=True)
    same(expected, outcome(make(result_kept), use, result_kept, leaves=True))
    torch.compiler.reset()
    kind, text = outcome(stock(result_kept), use, result_kept, leaves=True)
    assert kind is RuntimeError
    assert re.search(r"double backward|does not require grad", text)  # the latter on torch 2.11


@pytest.mark.parametrize("program", CUSTOM)
def test_custom_functions_behind_dynamo(program):
    """A second derivative of a custom Function that Dynamo captured raises, and is never zero.

    Dynamo captures the backward as if grad mode were off.
    """
    kind, text = outcome(behind_dynamo(program), second, program, leaves=True)
    assert kind is aotlab.errors.DoubleBackwardError
    assert "that Dynamo captured" in text


@pytest.mark.parametrize("retain", [None, True, False])
@pytest.mark.parametrize("program", [result_kept, around_no_grad, linear_in_x, apart])
def test_what_is_kept(program, retain):
    """Repeated backwards succeed or raise as in eager, with and without `retain_graph`."""

    def use(outputs, x, w):
        found = grad(outputs[0].sum(), [x, w], create_graph=True, retain_graph=retain)
        loss = sum(g.square().sum() for g in found if g.requires_grad) + x.sum() * 0 + w.sum() * 0
        found += grad(loss, [x, w], retain_graph=bool(retain))
        found += grad(outputs[0].sum(), x)
        return [*found, *grad(loss, [x, w])]

    for leaves in (True, False):
        expected = outcome(program, use, program, leaves=leaves)
        same(expected, outcome(compiled(program), use, program, leaves=leaves))


@pytest.mark.parametrize("what", ["x", "w", "tangent", "output"])
@pytest.mark.parametrize("program", [result_kept, around_no_grad, views])
def test_writes_in_between(program, what):
    """A write between the first and the second backward raises if it does in eager."""

    def use(outputs, x, w):
        tangent = torch.ones_like(outputs[0])
        found = grad(outputs[0], [x, w], tangent, create_graph=True)
        with torch.no_grad():
            {"x": x, "w": w, "tangent": tangent, "output": outputs[0]}[what].add_(1)
        return [*found, *grad(found[0].sum(), [x, w], allow_unused=True)]

    def without_node(found):
        return (found[0], found[1].partition(", which is")[0].partition(" is at ")[0]) if len(found) == 2 else found

    expected = outcome(program, use, program, leaves=False)
    same(without_node(expected), without_node(outcome(compiled(program), use, program, leaves=False)))


@BOTH
def test_outputs_that_are_written(make):
    """The caller may scale a result in place before differentiating it."""

    def program(x, w):
        return (x * w).exp().sin().sum()

    def use(outputs, x, w):
        outputs[0].mul_(3)
        return second(outputs, x, w)

    same(outcome(program, use, program, leaves=True), outcome(make(program), use, program, leaves=True))


@BOTH
def test_with_respect_to_outputs(make):
    """A tensor that an output's node saved is differentiated with respect to the output, and the output's hooks run."""

    def use(outputs, x, w):
        seen: list[Tensor] = []
        outputs[0].register_hook(lambda g: seen.append(g.clone()))
        outputs[0].retain_grad()
        (first,) = grad(outputs[0].sum(), x, create_graph=True)
        found = grad(first.sum(), [outputs[0], w], retain_graph=True)
        first.sum().backward()
        return [*found, *seen, outputs[0].grad, x.grad]

    same(outcome(result_kept, use, result_kept, leaves=True), outcome(make(result_kept), use, result_kept, leaves=True))


def test_hooks_on_gradients():
    """Hooks on gradients that are differentiated again see the same gradients as in eager."""

    def use(outputs, x, w):
        seen: list[Tensor] = []
        first = grad(outputs[0].sum(), [x, w], create_graph=True)
        for gradient in first:
            gradient.register_hook(lambda g: seen.append(g.clone()))
        found = grad(first[1].square().sum(), x, create_graph=True)
        return [*found, *grad(first[0], first[0], torch.ones(3, 3)), *seen]

    same(
        outcome(result_kept, use, result_kept, leaves=True),
        outcome(compiled(result_kept), use, result_kept, leaves=True),
    )


def test_calls_behind_each_other():
    """Gradients flow from one compiled call into another whose results are no longer referenced."""

    def first(h, w):
        return (h + w).cos().sum(0)

    for make in (compiled, behind_dynamo):
        found = []
        for step in (first, make(first)):
            torch.manual_seed(0)
            x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
            y = step(step(x * 2, w) * w, w).sum()
            (g,) = grad(y, x, create_graph=True)
            found.append([g, *grad(g.square().sum() + y, [x, w])])
        same(found[0], found[1], to_rounding=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_numerically(dtype):
    """Second derivatives agree with finite differences."""
    function = compiled(lambda x, w: (x @ w).sin() * x)
    torch.manual_seed(0)
    given = [torch.randn(2, 2, dtype=dtype, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradgradcheck(function, given)


@pytest.mark.parametrize("partitioner", ["default_partition", "min_cut_rematerialization_partition"])
def test_partitioners(partitioner):
    """A value that a partitioner did not save is recomputed, or an error names it.

    The result is never a wrong value.
    """

    def deep(x, w):
        for _ in range(4):
            x = (x @ w).tanh().exp().sin()
        return x

    expected = outcome(deep, mixed, deep, leaves=True)
    function = compiled(deep, partitioner=getattr(aotlab, partitioner))
    same(expected, outcome(function, mixed, deep, leaves=True))


def test_autocast():
    """The backward of a backward runs under the autocast state of the code that calls it."""

    def run(function, where):
        torch.manual_seed(0)
        x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
        cast = [torch.autocast("cpu", torch.bfloat16, enabled=n == where) for n in range(3)]
        with cast[0]:
            y = function(x, w)
        with cast[1]:
            (g,) = grad(y.float().sum(), x, create_graph=True)
        with cast[2]:
            return [y, g, *grad(g.square().sum(), [x, w])]

    function = compiled(result_kept)
    for where in range(3):
        same(run(result_kept, where), run(function, where))


def test_checkpoint_around_and_saved_on_cpu():
    """A compiled call inside a checkpoint, or under save_on_cpu, is differentiated twice as in eager."""

    def in_checkpoint(function):
        return lambda x, w: checkpoint(lambda a: function(a, w).cos(), x, use_reentrant=False)

    def on_cpu(function):
        def call(x, w):
            with torch.autograd.graph.save_on_cpu():
                return function(x, w)

        return call

    for wrap in (in_checkpoint, on_cpu):
        expected = outcome(wrap(result_kept), second, None, leaves=True)
        same(expected, outcome(wrap(compiled(result_kept)), second, None, leaves=True))


def test_batched():
    """Batched gradients are eager's; with histories they are refused."""
    function = compiled(result_kept)
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    y, expected = function(x, w), result_kept(x, w)
    tangents = torch.eye(9).reshape(9, 3, 3)
    (a,), (b,) = (grad(each, x, tangents, is_grads_batched=True, retain_graph=True) for each in (y, expected))
    assert torch.equal(a, b)
    with refusing(TransformError, match="is_grads_batched"):
        grad(y, x, tangents, is_grads_batched=True, create_graph=True)


def test_nothing_is_left():
    """The values saved for higher-order derivatives are freed with them, without the garbage collector."""
    import gc
    import weakref

    function = compiled(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))

    def step():
        x = torch.ones(4, 3, requires_grad=True)
        y = function(x)
        (g,) = grad(y.sum(), x, create_graph=True)
        again = grad(g.square().sum(), x, create_graph=True)
        return [weakref.ref(each) for each in (x, y, g, *again)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        gc.collect()
        gc.disable()
        try:
            assert [each() for each in step()] == [None] * 4
        finally:
            gc.enable()


def test_an_argument_that_leads_nowhere():
    """An unused argument that is not a leaf does not disturb the second derivative.

    In torch 2.11 the argument's autograd node is freed early, which raised an error.
    """

    def use(function):
        torch.manual_seed(0)
        x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
        (first,) = grad(function(x, y * 1).sum(), x, create_graph=True)
        return grad(first.sum(), x)[0]

    def function(x, unused):
        return x.exp()

    assert torch.equal(use(function), use(compiled(function)))
