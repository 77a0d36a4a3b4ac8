"""Ops that change sizes or strides in place, on arguments that require grad, are views, or share memory with others."""

from __future__ import annotations

import pytest
import torch

import aotlab
from tests.both_ways import Case, both_ways, check_gradients_of_arguments, check_with_inductor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- one argument


def _then_use(a):
    a.t_()
    return a * 2


def _then_write(a):
    a.t_()
    a[0].mul_(2)
    return a.view(a.shape)


def _between_uses(a):
    y = a * 3
    a.transpose_(0, 1)
    return y, a.sin(), a[0]


def _unsqueezed(a):
    a.unsqueeze_(0)
    a.mul_(2)
    return a.squeeze(0)


def _after_a_write(a):
    a.mul_(2)
    a.t_()
    return a + 1


def _then_a_hidden_write(a):
    a.swapaxes_(0, 1)
    with torch.no_grad():
        a.mul_(2)
    return a * 2


def _then_a_written_row(a):
    a.t_()
    v = a[0]
    v.mul_(2)
    return v


def _returned(a):
    a.t_()
    return a


def _unused(a):
    y = a * 2
    a.t_()
    return y


def _restrided(a):
    a.as_strided_((3, 2), (2, 1))
    return a * 2


def _several(a):
    a.unsqueeze_(1)
    a.transpose_(0, 2)
    a.squeeze_(1)
    return a.exp()


def _views(a):
    a.t_()
    return a.unsqueeze(0), a.detach()


ONE = (
    _then_use, _then_write, _between_uses, _unsqueezed, _after_a_write, _then_a_hidden_write, _then_a_written_row,
    _returned, _unused, _restrided, _several, _views,
)  # fmt: skip
KINDS = {
    "a non-leaf": lambda leaf: (leaf.add(1),),
    "a view": lambda leaf: (leaf.add(1).view(2, 3),),
    "a plain tensor": lambda leaf: (torch.arange(6.0).reshape(2, 3).clone(),),
}


# --- arguments that share memory


def _view_of_another(a, c, d):
    a.t_()
    return c.view(c.shape), a.unsqueeze(0)


def _write_another(a, c, d):
    a.transpose_(1, 0)
    c.add_(1)
    return d + 1, a.diagonal(), c.sum() + a


def _write_through(a, c, d):
    a.t_()
    a[0].mul_(2)
    return a * 1, c + 1


def _after_writing_another(a, c, d):
    c.mul_(2)
    a.t_()
    return a.view(a.shape), c.sin()


def _two(a, c, d):
    a.t_()
    c.unsqueeze_(0)
    d.mul_(3)
    return a.sum() + c


def _use_on_both_sides(a, c, d):
    y = a * 2
    a.t_()
    return y, a * c.sum()


def _restride_another(a, c, d):
    c.as_strided_((3, 2), (2, 1))
    c.mul_(2)
    return c, a.exp()


SEVERAL = (
    _view_of_another, _write_another, _write_through, _after_writing_another, _two, _use_on_both_sides,
    _restride_another,
)  # fmt: skip
SHARED = {
    "views of a non-leaf": lambda leaf: (lambda b: (b[0:2], b.view(6), b[1]))(leaf.add(1)),
    "views of a plain base": lambda leaf: (lambda b: (b[0:2], b.view(6), leaf * 1))(torch.arange(6.0).view(2, 3) + 0),
}

CASES = {
    f"{program.__name__}, {name}": Case(
        program=program,
        arguments=arguments,
        eager=("training",) if program is _restrided and name == "a non-leaf" else (),
        breaks=("inference", "training") if program in (_returned, _restrided) else (),
        exact=program is not _after_writing_another,  # it sums three gradients of the base
    )
    for programs, kinds in ((ONE, KINDS), (SEVERAL, SHARED))
    for n, program in enumerate(programs)
    for name, arguments in kinds.items()
    if name != ("a non-leaf", "a plain tensor")[n % 2]
}

test_called_directly, test_behind_dynamo = both_ways(CASES)


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].eager])
def test_gradients_of_arguments(name):
    """The gradients of outputs and arguments equal eager's, with respect to the arguments before and after the call."""
    check_gradients_of_arguments(CASES[name])


@pytest.mark.tier("full")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize(
    "name",
    [
        "_then_use, a view",
        "_then_write, a non-leaf",
        "_unsqueezed, a view",
        "_write_through, views of a non-leaf",
        "_two, views of a plain base",
    ],
)
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_by_inductor(name, frontend):
    """Inductor's code for a sample of the programs gives eager's results."""
    check_with_inductor(CASES[name], frontend)


@pytest.mark.tier("full")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_varying_sizes_by_inductor(frontend):
    """The argument may have any size."""
    check_with_inductor(CASES["_then_write, a non-leaf"], frontend, sizes=[(2, 2), (3, 5), (4, 3)])


def test_the_wrapper_repeats_the_step():
    """The generated function calls ``t_`` on the caller's view, and copies the new value into its base."""
    compiled = aotlab.compile(_then_write, backend="eager")
    compiled(torch.ones(2, 3, requires_grad=True).add(1).view(2, 3))
    (entry,) = compiled.entries
    source = entry.records.runtime.source
    assert source.index("a.t_()") < source.index("base_of_a.copy_(")
