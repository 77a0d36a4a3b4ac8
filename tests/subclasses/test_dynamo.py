"""Wrappers behind Dynamo, which passes them to aotlab unchanged: aotlab's entries serve its graphs."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from aotlab import events
from tests.subclasses.kinds import Quantized, leaf, plain, same, tensors, two
from tests.subclasses.test_calls import PROGRAMS
from tests.subclasses.test_training import NETS, Net, trained


@pytest.fixture
def finished():
    """Reset Dynamo; list the compilations, and how each call is served."""
    torch.compiler.reset()
    heard = []
    with events.listen(heard.append):
        yield heard
    torch.compiler.reset()


_FIRST = ["alone", "several", "with a tensor", "nested", "in containers", "a view returned", "made inside", "quantized"]


@pytest.mark.parametrize("name", _FIRST)
@pytest.mark.parametrize("grad", [False, True])
def test_calls(name, grad, finished):
    """Results and gradients are eager's, and no call runs eagerly."""
    function, make = PROGRAMS[name]
    compiled = aotlab.compile(function, backend="eager", frontend="dynamo")
    for _ in range(2):
        ours, theirs = make(), make()
        for each in (*tensors(ours), *tensors(theirs)) if grad and name != "made inside" else ():
            if each.is_floating_point() and hasattr(each, "__tensor_flatten__"):
                leaf(each)
        result, expected = compiled(*ours), function(*theirs)
        assert same(result, expected)
        for found in (result, expected):
            losses = [each.sin().sum() for each in tensors(found) if each.requires_grad]
            if losses:
                sum(losses[1:], losses[0]).backward()
        for mine, wanted in zip(tensors(ours), tensors(theirs), strict=True):
            assert not wanted.is_leaf or same(mine.grad, wanted.grad, versions=False)
    calls = [event for event in finished if isinstance(event, events.Called)]
    assert len(calls) == 2
    assert None not in [call.entry for call in calls]


@pytest.mark.parametrize("kind", ["TwoTensor", "Quantized"])
def test_training(kind, finished):
    """Ten steps of SGD on a module whose parameters are wrappers agree with eager."""
    mine, wanted = Net(*NETS[kind]), Net(*NETS[kind])
    compiled = aotlab.compile(mine, backend="eager", frontend="dynamo")
    assert same(trained(mine, compiled, plain, 10), trained(wanted, wanted, plain, 10))
    assert same(list(mine.parameters()), list(wanted.parameters()))
    calls = [event for event in finished if isinstance(event, events.Called)]
    assert len(calls) == 10
    assert None not in [call.entry for call in calls]


def test_as_a_backend(finished):
    """``torch.compile(backend="aotlab")`` agrees with eager, with a graph break in between."""

    def function(t):
        y = t * 2
        torch._dynamo.graph_break()
        return y.sin()

    compiled = torch.compile(function, backend="aotlab", options={"compiler": "eager"})
    ours, theirs = leaf(two()), leaf(two())
    compiled(ours).sum().backward()
    function(theirs).sum().backward()
    assert same(ours.grad, theirs.grad, versions=False)
    assert len([event for event in finished if isinstance(event, events.CompileFinished)]) == 2


#: Arguments by a size.
VARYING = {
    "a wrapper": lambda n: (two(0, (n, 4)),),
    "nested, before a tensor": lambda n: (TwoTensor(two(0, (n, 4)), two(1, (n, 4))), plain(2, (n, 4))),
    "the tensor behind it alone": lambda n: (two(0, (3, 4)), plain(2, (n, 3, 4))),
    "a part of other sizes": lambda n: (Quantized.of(plain(0, (n, 4))),),
}


@pytest.mark.parametrize("name", VARYING)
def test_sizes(name, finished):
    """A size that Dynamo treats as dynamic is dynamic in the parts too.

    There is one graph for all sizes, or a second one after the sizes have changed.
    """
    make = VARYING[name]
    function = lambda *args: (args[0] * 2).sin() + args[-1]  # noqa: E731
    for dynamic, graphs in ((True, 1), (None, 2)):
        torch.compiler.reset()
        finished.clear()
        compiled = aotlab.compile(function, backend="eager", frontend="dynamo", dynamic=dynamic)
        for n in (5, 6, 7):
            assert same(compiled(*make(n)), function(*make(n)))
        assert len([event for event in finished if isinstance(event, events.CompileFinished)]) == graphs
