"""Functions that a trace refuses: nothing was changed, and the error names the argument and the line."""

from __future__ import annotations

import inspect
import itertools
import random

import torch
from torch import nn

from aotlab import _torch as internals
from aotlab.errors import (
    CapturedTensorError,
    EscapeError,
    HooksError,
    LeakedTensorError,
    MetadataMutationError,
    OutputError,
    RandomOpError,
    UntraceableError,
)
from tests.engine_helpers import compiled, global_torch_state, leaf, refusing, same


def line_in(function, text):
    """Return the number of the line of ``function`` that has ``text``."""
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if text in line)


def refused(function, *args, kind, match=None, line=None, argument=None):
    """Assert that the call is refused, that nothing was changed, and that the error says where."""
    state = global_torch_state()
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    before = [(t.detach().clone(), t._version, t.shape, t.stride(), t.grad) for t in tensors]
    f = compiled(function)
    for _ in range(2):
        with refusing(kind, match) as caught:
            f(*args)
    assert type(caught.value) is kind
    for tensor, (value, version, shape, stride, grad) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor.detach(), value)
        assert (tensor.shape, tensor.stride(), tensor.grad) == (shape, stride, grad)
    if line is not None:
        assert caught.value.line is not None, str(caught.value)
        assert caught.value.line.line == line_in(function, line), caught.value.line
        assert caught.value.line.file == __file__
        assert str(caught.value.line) in str(caught.value)
    assert caught.value.argument == argument
    assert global_torch_state() == state
    assert f.entries == ()
    return caught.value


def test_metadata_mutation_by_ops_is_refused():
    """t_ and friends on an input where no function mode gets to see them."""

    def f(y, x):
        y.add_(1)
        with internals.disable_torch_function():
            x.t_()
        return y

    refused(f, torch.ones(2, 3), torch.ones(2, 3), kind=MetadataMutationError, match="`x`", argument="x")


def test_metadata_mutation_by_overloads():
    """Eager takes them."""

    def f(y, x):
        y.add_(1)
        torch.ops.aten.t_.default(x)
        torch.ops.aten.unsqueeze_(x, 0)
        return y

    same(f, torch.ones(2, 3), torch.ones(2, 3), eagerly=True)


def test_metadata_mutation_of_intermediates_is_fine():
    """On an intermediate they are only views."""

    def f(x):
        y = x * 2
        y.t_()
        y.unsqueeze_(0)
        return y, y.squeeze_(0)

    same(f, torch.randn(2, 3))


def test_storage_resize_is_refused():
    """untyped_storage().resize_ of an input."""

    def f(x):
        y = x * 2
        x.untyped_storage().resize_(0)
        return y

    x = torch.ones(3)
    refused(f, x, kind=EscapeError, line="resize_(0)", argument="x")
    assert x.untyped_storage().nbytes() == 12


def test_backward_inside_is_refused():
    """backward() inside would leave gradients on traced tensors."""

    def f(x):
        (x * x).sum().backward()
        return x * 2

    x = leaf(3)
    refused(f, x, kind=EscapeError, line="backward()")
    assert x.grad is None

    def g(x):
        torch.autograd.backward((x * x).sum())
        return x * 2

    refused(g, x, kind=EscapeError, argument="x")
    assert x.grad is None


CAPTURED = (torch.ones(3),)


def test_captured_tensors_are_refused():
    """A captured tensor in a tuple is refused.

    The trace cannot replace it, and would freeze its value into the graph.
    """

    def f(x):
        return x * CAPTURED[0]

    refused(f, torch.ones(3), kind=CapturedTensorError, match="not an argument", line="x * CAPTURED[0]")


def test_mutated_captured_tensors_are_refused():
    """Nor is it written while tracing."""
    total = (torch.zeros(3),)
    (only,) = total

    def f(x):
        total[0].add_(x)
        return x * 2

    def g(x):
        total[0].zero_()
        return x * 2

    def h(x):
        total[0][0] = 1.0
        return x * 2

    def through_a_view(x):
        total[0][1:].mul_(x[1:])
        return x * 2

    def into(x):
        torch.mul(x, 2, out=total[0])
        return x

    only.fill_(5)
    version = only._version
    for each in (f, g, h, through_a_view, into):
        refused(each, torch.ones(3), kind=CapturedTensorError)
        assert (only.tolist(), only._version) == ([5.0, 5.0, 5.0], version)


def test_captured_tensor_as_output():
    """A captured tensor that is returned untouched is that very tensor, as in eager."""
    f = compiled(lambda x: (x * 2, CAPTURED[0]))
    for _ in range(2):
        assert f(torch.ones(3))[1] is CAPTURED[0]


def test_captured_leaf_would_miss_its_gradient():
    """It is refused rather than left without a gradient."""
    weights = (leaf(3),)
    refused(lambda x: (x * weights[0]).sum(), torch.ones(3), kind=CapturedTensorError)


def test_attributes_of_arguments():
    """An attribute that the function sets on its argument is refused; an attribute that existed before can be read."""

    def hangs(x):
        x.note = x * 2
        return x * 3

    x = torch.ones(2)
    refused(hangs, x, kind=LeakedTensorError, match="`note`", argument="x")
    assert not hasattr(x, "note")

    x.factor = 5.0
    assert compiled(lambda x: x * x.factor)(x).tolist() == [5.0, 5.0]


def test_seeding_inside_is_refused():
    """manual_seed inside the function would happen while tracing only; the generator is as it was."""

    def f(x):
        torch.manual_seed(3)
        return x * 2

    state = torch.get_rng_state()
    refused(f, torch.ones(2), kind=RandomOpError, match="seed")
    assert torch.equal(torch.get_rng_state(), state)


def test_mutable_custom_ops_are_refused():
    """A custom op that writes its argument is refused, and does not write."""
    with torch.library._scoped_library("aotlab_tests", "FRAGMENT") as library:
        library.define("write(Tensor(a!) x, Tensor y) -> ()")
        library.impl("write", lambda x, y: (x.copy_(y), None)[1], "CPU")
        library.impl("write", lambda x, y: None, "Meta")

        def f(x, y):
            torch.ops.aotlab_tests.write(x, y)
            return x * 2

        x = torch.ones(2)
        with refusing(UntraceableError):
            compiled(f)(x, torch.zeros(2))
        assert torch.equal(x, torch.ones(2))


def test_backward_hooks_are_refused():
    """Hooks that a compiled backward would not run: of modules, and on autograd nodes."""
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        module = nn.Sequential(nn.Linear(2, 2))
        calls = itertools.count()
        getattr(module[0], register)(lambda *args, c=calls: next(c) and None)
        with refusing(HooksError):
            compiled(module)(leaf(1, 2))
        assert next(calls) == 0


def test_python_random_is_refused():
    """Python's own random numbers would be frozen into the graph; their generator is left as it was."""
    random.seed(0)
    state = random.getstate()
    refused(lambda x: x * random.random(), torch.ones(2), kind=RandomOpError)
    assert random.getstate() == state


def test_parameters_are_parameters_inside():
    """`isinstance(x, nn.Parameter)` and attributes of arguments are as outside; new attributes are refused."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.flag = True
    assert compiled(lambda x: isinstance(x, nn.Parameter) and x.flag)(parameter) is True

    def tags(x):
        y = x * 2
        y.tag = 5
        return y

    with refusing(OutputError, match="tag"):
        compiled(tags)(torch.ones(1))
