"""Backwards that raise: the error, and everything that happened before it, are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.engine_helpers import compiled, record, same
from tests.functions import PartedAndSaved


def behind_dynamo(function: Callable[..., Any]) -> Any:
    """Compile behind Dynamo."""
    return compiled(function, frontend="dynamo")


makers = pytest.mark.parametrize("make", [compiled, behind_dynamo])


def grown(x: Tensor) -> Tensor:
    """Save a view of a tensor that then gets another dimension."""
    y = x * 1
    z = y.permute(1, 0)
    result = z * z
    y.unsqueeze_(0)
    return result


def grown_input(x: Tensor) -> Tensor:
    """Keep a view of an input that does."""
    z = x.t()
    result = z * z
    x.unsqueeze_(0)
    return result


def grown_for_checkpoint(x: Tensor) -> Tensor:
    """Let a checkpoint keep the view, as its argument."""
    y = x * 1
    result = checkpoint(lambda z: z * z, y.t(), use_reentrant=False)
    y.unsqueeze_(0)
    return result


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("function", [grown, grown_input, grown_for_checkpoint])
def test_what_is_kept_is_a_view_of_what_changes_its_sizes(function):
    """A write to a tensor whose saved view cannot be made again runs eagerly and raises eager's version error."""
    same(function, torch.ones(2, 3, dtype=torch.float64).requires_grad_() * 1, eagerly=True)


@makers
@pytest.mark.usefixtures("fresh_dynamo")
def test_what_only_the_backward_uses_is_computed_in_the_forward(make):
    """A tensor that a custom Function saves keeps its value, whatever the caller writes to the input."""

    def function(x):
        return PartedAndSaved.apply(x)[1]

    def gradients(called):
        found = []
        for write in (lambda x: x.add_(1), lambda x: x.data.add_(1)):
            leaf = torch.tensor([1.0, 2.0], requires_grad=True)
            x = leaf * 1
            out = called(x)
            write(x)
            out.sum().backward()
            found.append(leaf.grad.tolist())
        return found

    assert gradients(function) == gradients(make(function))


def test_it_is_saved_itself():
    """The forward graph computes the saved value; the backward graph does not."""
    made = compiled(lambda x: PartedAndSaved.apply(x)[1])
    made(torch.ones(2, requires_grad=True) * 1)
    saved = record(made, "partition").saved
    assert saved[0].name == "mul"
    assert len(saved) == 1


@makers
@pytest.mark.usefixtures("fresh_dynamo")
def test_an_output_that_reaches_no_input_leaves_the_graphs_behind_inputs_alone(make):
    """A backward from an output that reaches no input calls none of the caller's autograd nodes.

    A second call of these nodes would need `retain_graph=True`.
    """

    def function(x):
        x.mul_(2)
        with torch.no_grad():
            x.mul_(2)
            view, _ = x.unbind(0)
        return view.clone()

    def backwards(called):
        leaf = torch.ones(2, 2, requires_grad=True)
        x = leaf * 1
        out = called(x)
        for _ in range(2):
            out.backward(torch.ones(2))
        none = leaf.grad
        x.sum().backward()
        return out.requires_grad, none, leaf.grad.tolist()

    assert backwards(function) == backwards(make(function))


class Doubled(torch.autograd.Function):
    """A function whose node has its own name."""

    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


#: How the caller makes a tensor with a history.
MAKES: list[Callable[[Tensor], Tensor]] = [
    lambda leaf: leaf * 1,
    Doubled.apply,
    lambda leaf: (leaf * 1)[:],
    lambda leaf: leaf.max(0).values,
    lambda leaf: torch.unbind(torch.stack([leaf, leaf]).clone())[1].exp(),
]


def says(function: Callable[..., Any], make: Callable[[Tensor], Tensor], write: Any = None) -> str:
    """Return the text of the error that the backward raises."""
    x = make(torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True))
    out = function(x)
    if write is not None:
        write(x)
    with pytest.raises(RuntimeError) as raised:
        out.sum().backward()
    return str(raised.value).split("Hint")[0]


def written_unseen(x: Tensor) -> Tensor:
    """Write a saved tensor under no_grad."""
    y = x * x
    with torch.no_grad():
        x.add_(1)
    return y


def written_seen(x: Tensor) -> Tensor:
    """Write a saved tensor."""
    y = x * x
    x.add_(1)
    return y


def viewed_and_written(x: Tensor) -> Tensor:
    """Save a view, and write its base."""
    y = x[0] * x[0]
    x.add_(1)
    return y


def viewed_twice_and_written(x: Tensor) -> Tensor:
    """Keep a view of an intermediate's view, and write that."""
    z = (x * 2).view(-1)
    v = z[1:]
    y = v * v
    z.add_(1)
    return y


@makers
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("make_input", MAKES)
@pytest.mark.parametrize("function", [written_unseen, written_seen, viewed_and_written, viewed_twice_and_written])
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_error_names_the_nodes_that_eager_names(function, make_input, make):
    """The error names eager's node: the caller's, or the node that autograd made for a written view."""
    assert says(function, make_input) == says(make(function), make_input)


@makers
@pytest.mark.parametrize("make_input", MAKES)
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_error_after_a_write_of_the_callers_names_its_node(make_input, make):
    """After the caller's write, the error names the input's current node."""

    def unseen(x):
        with torch.no_grad():
            x.add_(1)

    def square(x):
        return x * x

    made = make(square)
    for write in (unseen, lambda x: x.add_(1), lambda x: x[0].add_(1)):
        assert says(square, make_input, write) == says(made, make_input, write)
