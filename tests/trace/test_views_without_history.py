"""Outputs that are views of intermediates are views for the caller too where autograd has no history of them.

Autograd then refuses to detach them in place, and to write those that were made under ``no_grad``.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.engine_helpers import behind, compiled

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


def view(x):
    """Return a view whose base nobody sees."""
    return (x > 0).t()


def squeezed(x):
    """Return one through several ops."""
    return torch.cat([x, x]).detach().unsqueeze(0).squeeze(0)


def made_quietly(x):
    """Make all under no_grad."""
    with torch.no_grad():
        return (x * 2).t()


def base_made_quietly(x):
    """Make the base under no_grad."""
    with torch.no_grad():
        y = x * 2
    return y.t()


def base_returned(x):
    """Return base and view, made under no_grad."""
    with torch.no_grad():
        y = x * 2
        return y, y.t()


def several(x):
    """Return several at once."""
    return (x > 0).double().chunk(3)[1:]


def through_a_dtype(x):
    """Return views of an input as a dtype that has no gradients."""
    ints = x.view(torch.int32)
    return ints, ints.t(), ints.as_strided((1,), (1,))


def detached(x):
    """Return an input detached, which is no view."""
    return x.detach(), x.t().detach()


PROGRAMS = [view, squeezed, made_quietly, base_made_quietly, base_returned, several, through_a_dtype, detached]
ROW = torch.ones(3, requires_grad=True)


def _quietly_written(tensor):
    with torch.no_grad():
        tensor.mul_(2)


ACTIONS = {
    "nothing": lambda tensor: None,
    "detach_": torch.Tensor.detach_,
    "written with a history": lambda tensor: tensor.mul_(ROW),
    "required": lambda tensor: tensor.requires_grad_().mul_(2),
    "written under no_grad": _quietly_written,
}


def outcome(call, action, *, requires_grad):
    """Call and act on each output; return what can be seen of them."""
    outputs = call(torch.arange(9.0).view(3, 3).clone().requires_grad_(requires_grad))
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    seen = []
    for output in outputs:
        try:
            ACTIONS[action](output)
        except RuntimeError as error:
            seen.append(str(error)[:70])
        base, node = output._base, None
        try:
            node = str(output.grad_fn)[:15]
        except RuntimeError as error:  # its base was written
            seen.append(str(error)[:70])
        seen.append((output._is_view(), None if base is None else base.shape, node, output.tolist()))
    return seen


@pytest.mark.parametrize(
    "make",
    [
        compiled,
        functools.partial(compiled, frontend="dynamo"),
        functools.partial(compiled, backend="inductor"),
    ],
    ids=["direct", "dynamo", "inductor"],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_they_are_views(program, make):
    """The caller may do the same with these views as in eager, with the same results."""
    for requires_grad in (False, True):
        for grad_mode in (True, False):
            for action in ACTIONS:
                torch.compiler.reset()
                function = make(program)
                with torch.set_grad_enabled(grad_mode):
                    expected = outcome(program, action, requires_grad=requires_grad)
                    actual = outcome(function, action, requires_grad=requires_grad)
                assert expected == actual, (requires_grad, grad_mode, action)
                assert not hasattr(function, "calls") or behind(function).calls.eager == 0


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("function", [lambda x: x[1:], lambda x: x.t(), lambda x: x[1:].detach(), lambda x: x.detach()])
def test_views_of_inputs_in_inference_mode(function, requires_grad):
    """Views made in inference mode require grad if their base does.

    A write outside raises unless they were detached.
    """

    def seen(call):
        x = torch.ones(3, 3, requires_grad=requires_grad)
        with torch.inference_mode():
            y = call(x)
        try:
            y.mul_(2)
        except RuntimeError as error:
            return y.requires_grad, y._is_view(), str(error)
        return y.requires_grad, y._is_view()

    assert seen(function) == seen(compiled(function))
