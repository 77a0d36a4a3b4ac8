"""Leaves that a function makes with ``requires_grad_()`` and returns: the caller reads their gradients."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab.errors import OutputError
from tests.engine_helpers import behind, compiled, leaf, nonleaf, record, refusing, same


def _alone(x):
    y = x.detach() * 2
    y.requires_grad_()
    return y, x * 3


def _used(x):
    y = (x.detach() * 2).requires_grad_()
    return y, y * 3


def _used_with_an_input(x):
    y = (x.detach() * 2).requires_grad_()
    return y, (y * x).sum()


def _with_views(x):
    y = (x.detach() * 2).requires_grad_()
    return y[1], y, y[0] * 2


def _in_the_memory_of_an_input(x):
    y = x.t().detach().requires_grad_()
    return y, y * x


def _twice(x):
    y = (x.detach() * 2).requires_grad_()
    return y, y


def _written_afterwards(x):
    y = (x.detach() * 2).requires_grad_()
    with torch.no_grad():
        y.add_(1)
    return y, y.sin()


def _made_by_a_factory(x):
    w = torch.zeros(2, requires_grad=True)
    return w, (w + x).cos()


def _two(x):
    y, z = x.detach().sin().requires_grad_(), x.detach().cos().requires_grad_()
    return z, y, (y * z).exp()


def _hooked(x):
    y = (x.detach() * 2).requires_grad_()
    y.register_hook(lambda gradient: gradient * 2)
    return y, y * 3


def _differentiated_inside(x):
    y = (x.detach() * 2).requires_grad_()
    (gradient,) = torch.autograd.grad((y * y).sum(), y)
    return gradient, y, y * gradient


PROGRAMS = [
    _alone,
    _used,
    _used_with_an_input,
    _with_views,
    _in_the_memory_of_an_input,
    _twice,
    _written_afterwards,
    _made_by_a_factory,
    _two,
    _hooked,
    _differentiated_inside,
]


@pytest.mark.parametrize("make", [lambda: torch.randn(2, 2), lambda: leaf(2, 2), lambda: nonleaf(2, 2)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_equals_eager(program, make):
    """The call and its backward are compiled, and the leaf gets eager's gradient."""
    same(program, make())


@pytest.mark.parametrize("program", PROGRAMS)
def test_behind_dynamo(program, fresh_dynamo):
    """Dynamo may break the graph at ``requires_grad_()``. The results are eager's."""
    for x in (torch.randn(2, 2), leaf(2, 2)):
        assert aotlab.verify(program, x, frontend="dynamo", backward="all").first is None


@pytest.mark.parametrize("program", [_used_with_an_input, _with_views, _in_the_memory_of_an_input])
def test_inductor(program):
    """The leaf is a result of a kernel, or shares memory with an argument."""
    assert aotlab.verify(program, leaf(2, 2), backend="inductor", backward="all").first is None


def test_modes_and_sizes():
    """One entry serves all sizes. Under `torch.no_grad` the leaf requires grad, too."""
    f = compiled(_used, dynamic=True)
    for n in (3, 4, 5):
        y, z = f(torch.ones(n, 2))
        z.sum().backward()
        assert torch.equal(y.grad, torch.full((n, 2), 3.0))
    assert len(behind(f).entries) == 1
    with torch.no_grad():
        same(_used, leaf(2, 2))


def test_second_derivatives():
    """The gradient of the leaf can be differentiated."""

    def cubes(x):
        y = (x.detach() * 2).requires_grad_()
        return y, (y**3 * x).sum()

    def second(f):
        x = leaf(2, 2)
        y, z = f(x)
        first = torch.autograd.grad(z, (y, x), create_graph=True)
        return torch.autograd.grad(sum(each.sum() for each in first), (y, x))

    f = compiled(cubes)
    assert all(map(torch.equal, second(f), second(cubes)))
    assert f.calls.compiled == 1


def test_the_wrapper_and_the_report():
    """The wrapper makes the leaf before the node that needs it. The report says that the output requires grad."""
    f = compiled(_with_views)
    with aotlab.Report.record() as report:
        f(torch.ones(2, 2))
    source = record(f, "runtime").source
    assert source.count(".requires_grad_(True)") == 1
    assert source.index(".requires_grad_(True)") < source.index("Compiled.apply")
    assert report.outputs.requires_grad.tolist() == [True] * 3
    assert report.outputs.base.tolist()[0] == "out[1]"


def test_what_is_not_compiled():
    """Eager runs a function that returns only a view of the leaf. An export with a leaf is refused."""
    same(lambda x: (x.detach() * 2).requires_grad_()[0], torch.randn(2, 2), eagerly=True)
    with refusing(OutputError, match="leaf that the function made to require grad"):
        aotlab.aot_export_joint_simple(_used, (leaf(2, 2),), trace_joint=True)
