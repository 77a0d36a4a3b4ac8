"""Custom Functions whose backward updates a buffer or an argument, or writes its incoming gradient in place.

The write happens when the backward runs: twice for two backwards, as in eager.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import Function

import aotlab
from aotlab.errors import DoubleBackwardError
from tests.engine_helpers import behind, keeping_functions

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class NormSum(Function):
    """Sums up the norms of its gradients."""

    @staticmethod
    def forward(ctx, x, total):
        ctx.total = total
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.total.add_(gradient.norm())
        return gradient * 2, None


class Counter(Function):
    """Counts its backwards in an integer."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.save_for_backward(x)
        ctx.count = count
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.count += 1
        return gradient * x.cos(), None


class Average(Function):
    """Divides its gradient by the running average of its size."""

    @staticmethod
    def forward(ctx, x, average):
        ctx.average = average
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.average.mul_(0.9).add_(gradient.abs().mean(), alpha=0.1)
        return gradient / (ctx.average + 1), None


class Scaled(Function):
    """Keeps the largest values of forward and backward in one buffer, as the scaling of float8 layers does."""

    @staticmethod
    def forward(ctx, x, largest):
        ctx.largest = largest
        largest[0] = x.detach().abs().max()
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.largest[1] = gradient.abs().max()
        return gradient * 1, None


class Log(Function):
    """Copies its gradient to an argument."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.copy_(gradient)
        return gradient * 2, None


class SavedLog(Function):
    """The same with `save_for_backward`: a second backward raises, because the saved tensor was written."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.save_for_backward(log)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (log,) = ctx.saved_tensors
        log.add_(gradient)
        return gradient * 2, None


class Doubles(Function):
    """Doubles its incoming gradient in place."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)


class Clips(Function):
    """Clips its incoming gradient in place."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient.clamp_(-0.5, 1.5)
        return gradient


class Rectifier(Function):
    """Sets the parts of its incoming gradient to zero where the result was zero."""

    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        gradient[y == 0] = 0
        return gradient


class Layer(nn.Module):
    """Has a parameter and two buffers, and calls ``body`` with itself."""

    def __init__(self, body, buffer=None):
        super().__init__()
        self.body, self.w = body, nn.Parameter(torch.full((3,), 0.5))
        self.register_buffer("a", torch.zeros(()) if buffer is None else buffer)
        self.register_buffer("b", torch.zeros(()))

    def forward(self, x):
        return self.body(self, x)


def _two_outputs(m, x):
    y = NormSum.apply(x * m.w, m.a)
    return y.sin(), y * x


def _beside_others(m, x):
    m.b.add_(1)
    return (Average.apply(x * m.w, m.a) * m.b).sum()


#: Makes the callable and its further arguments. A tensor among these is written.
PROGRAMS = {
    "sum of norms in a buffer": lambda: (Layer(lambda m, x: NormSum.apply(x * m.w, m.a)), ()),
    "integer counter": lambda: (Layer(lambda m, x: Counter.apply(x * m.w, m.a), torch.tensor(0)), ()),
    "running average": lambda: (Layer(lambda m, x: (Average.apply(x * m.w, m.a) * 2).sum()), ()),
    "buffer that the forward writes, too": lambda: (Layer(lambda m, x: Scaled.apply(x * m.w, m.a), torch.zeros(2)), ()),
    "two layers with one buffer": lambda: (
        Layer(lambda m, x: Average.apply(Average.apply(x * m.w, m.a).sin(), m.a) * 2),
        (),
    ),
    "two layers with two buffers": lambda: (
        Layer(lambda m, x: Average.apply(NormSum.apply(x * m.w, m.a).sin(), m.b) * 2),
        (),
    ),
    "two outputs": lambda: (Layer(_two_outputs), ()),
    "another buffer in the forward": lambda: (Layer(_beside_others), ()),
    "argument": lambda: (lambda x, log: Log.apply(x.exp(), log), (torch.zeros(3),)),
    "saved argument": lambda: (lambda x, log: SavedLog.apply(x.exp(), log), (torch.zeros(3),)),
    "incoming gradient of the call": lambda: (lambda x: Doubles.apply(x), ()),
    "incoming gradient of a view": lambda: (lambda x: (Clips.apply(x.sin()) * 3).view(3, 1), ()),
    "incoming gradient by a mask": lambda: (lambda x: Rectifier.apply(x - 2), ()),
    "incoming gradient inside": lambda: (lambda x: Doubles.apply(x.sin()).exp(), ()),
    "incoming gradient and buffer": lambda: (Layer(lambda m, x: Doubles.apply(NormSum.apply(x * m.w, m.a))), ()),
}


def _observed(function, call, others, backwards=2, size=3):
    """Call it twice, with some backwards for each call. Return everything that the caller can see."""
    written = [*others, *(function.buffers() if isinstance(function, nn.Module) else ())]
    parameters = [*function.parameters()] if isinstance(function, nn.Module) else []
    seen = []
    for shift in range(2):
        x = (torch.arange(float(size)) + shift).requires_grad_()
        results = call(x, *others)
        results = results if isinstance(results, tuple) else (results,)
        seen += [each.detach().clone() for each in (*results, *written)]
        gradients = [torch.full_like(each, 2.0) for each in results]
        for _ in range(backwards):
            versions = [each._version for each in (*written, *gradients)]
            try:
                torch.autograd.backward(results, gradients, retain_graph=True)
            except RuntimeError as error:
                seen.append(str(error).partition(":")[0])
            moved = [each._version > version for each, version in zip((*written, *gradients), versions, strict=True)]
            seen += [moved, *(each.detach().clone() for each in (x.grad, *written, *gradients))]
            seen += [each.grad.clone() for each in parameters]
    return seen


def _same(expected, actual, tolerance=0.0):
    assert len(expected) == len(actual)
    for a, b in zip(expected, actual, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
        else:
            assert a == b


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_writes_when_the_backward_runs(name, frontend):
    """Two calls with two backwards each are compiled once, and equal eager's: values, gradients, writes, versions."""
    function, others = PROGRAMS[name]()
    expected = _observed(function, function, others)
    function, others = PROGRAMS[name]()
    made = []
    if frontend == "direct":
        call = aotlab.compile(function, backend="eager")
        made.append(behind(call))
    else:
        call = torch.compile(function, backend=keeping_functions(made))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        actual = _observed(function, call, others)
    _same(expected, actual)
    assert [(each.calls.compiled, len(each.entries)) for each in made] == [(2, 1)]


@pytest.mark.parametrize("name", ["running average", "argument", "incoming gradient by a mask"])
def test_on_inductor(name):
    """The same on Inductor."""
    function, others = PROGRAMS[name]()
    expected = _observed(function, function, others)
    function, others = PROGRAMS[name]()
    call = aotlab.compile(function, backend="inductor")
    _same(expected, _observed(function, call, others), tolerance=1e-6)
    assert behind(call).calls.eager == 0


@pytest.mark.parametrize("name", ["argument", "incoming gradient of the call", "sum of norms in a buffer"])
def test_varying_sizes(name):
    """One entry serves all sizes."""
    seen = []
    for is_compiled in (False, True):
        function, _ = PROGRAMS[name]()
        if isinstance(function, nn.Module):
            function.w = nn.Parameter(torch.ones(1))
        call = aotlab.compile(function, backend="eager", dynamic=True) if is_compiled else function
        for size in (3, 4, 5):
            others = (torch.zeros(size),) if name == "argument" else ()
            seen.append(_observed(function, call, others, size=size))
    for expected, actual in zip(seen[:3], seen[3:], strict=True):
        _same(expected, actual)
    assert (behind(call).calls.eager, len(behind(call).entries)) == (0, 1)


def test_only_the_backward_that_runs_writes():
    """With ``inputs``, autograd runs only the nodes on the path to these inputs, and only these write."""

    def f(x, y, log):
        return Log.apply(x, log) * y

    counts = []
    for call in (f, aotlab.compile(f, backend="eager")):
        x, y, log = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.zeros(3)
        out = call(x, y, log).sum()
        out.backward(inputs=[y], retain_graph=True)
        before = log.tolist()
        out.backward(inputs=[x])
        counts.append((before, log.tolist(), x.grad.tolist(), y.grad.tolist()))
    assert counts[0] == counts[1]
    assert call.calls.eager == 0


def test_reads_the_present_value():
    """A write of the caller between the forward and the backward is seen by the backward."""
    f = Layer(lambda m, x: Average.apply(x * m.w, m.a).sum())
    results = []
    for call in (f, aotlab.compile(f, backend="eager")):
        x = torch.ones(3, requires_grad=True)
        out = call(x)
        f.a.fill_(3.0)
        out.backward()
        results.append((x.grad.tolist(), f.a.item()))
    assert results[0] == results[1]


def test_an_expanded_gradient_cannot_be_written():
    """Eager raises for a write to a gradient whose elements share memory, and so does the compiled backward."""
    for call in (Doubles.apply, aotlab.compile(lambda x: Doubles.apply(x), backend="eager")):
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            call(x).sum().backward()


def test_higher_derivatives_raise():
    """A backward under ``create_graph`` raises before it writes anything."""
    f = Layer(lambda m, x: NormSum.apply(x * m.w, m.a).sum())
    out = aotlab.compile(f, backend="eager")(torch.ones(3, requires_grad=True))
    with pytest.raises(DoubleBackwardError, match="it writes an input or its incoming gradient"):
        torch.autograd.grad(out, f.w, create_graph=True)
    assert f.a.item() == 0


@pytest.mark.parametrize("order", ["written first", "read first"])
def test_arguments_that_share_memory(order):
    """Arguments that share memory with the written one: the call equals eager's, compiled or not."""

    def f(x, log, alias):
        return Log.apply(x, log) * alias

    results = []
    call = aotlab.compile(f, backend="eager")
    call(torch.ones(3, requires_grad=True), torch.zeros(3), torch.ones(3)).sum().backward()
    for function in (f, call):
        x, memory = torch.ones(3, requires_grad=True), torch.ones(3)
        pair = (memory, memory[:]) if order == "written first" else (memory[:], memory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = function(x, *pair)
        try:
            out.sum().backward()
        except RuntimeError as error:
            results.append(str(error).partition(":")[0])
        results.append((x.grad, memory.tolist()) if x.grad is None else (x.grad.tolist(), memory.tolist()))
    assert results[: len(results) // 2] == results[len(results) // 2 :]


def test_one_gradient_for_two_results():
    """If two results get the same gradient tensor, the second node reads what the first one wrote."""

    def f(x, y):
        return Doubles.apply(x), Doubles.apply(y)

    seen = []
    for call in (f, aotlab.compile(f, backend="eager")):
        x, y, gradient = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(3)
        torch.autograd.backward(call(x, y), [gradient, gradient])
        seen.append((x.grad.tolist(), y.grad.tolist(), gradient.tolist()))
    assert seen[0] == seen[1]


def test_the_written_gradient_is_returned():
    """A Function that returns the gradient that it has written returns the caller's own tensor."""
    for call in (Doubles.apply, aotlab.compile(lambda x: Doubles.apply(x), backend="eager")):
        x, gradient = torch.ones(3, requires_grad=True), torch.ones(3)
        assert torch.autograd.grad(call(x), x, gradient)[0] is gradient
        assert gradient.tolist() == [2.0] * 3
