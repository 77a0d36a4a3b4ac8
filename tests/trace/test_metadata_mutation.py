"""Changes of an input's sizes, strides, offset and place in autograd's graph, made in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab.errors import OutputError
from aotlab.ir.metadata import MutationType
from aotlab.observe import CompileFailed, GraphBreak, StageFinished
from aotlab.verification import compare
from tests.engine_helpers import behind, compiled, events, leaf, metadata, nonleaf, record, refusing, same

STEPS: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "transpose_ by keyword": lambda x: x.transpose_(dim0=0, dim1=-1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "swapdims_": lambda x: x.swapdims_(1, 0),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ a dim": lambda x: x.squeeze_(0),
    "squeeze_ dims": lambda x: x.squeeze_(dim=(0,)),
    "squeeze_ nothing": lambda x: x.squeeze_(1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "two steps": lambda x: x.unsqueeze_(0).transpose_(1, 2),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(1, 3),
    "view": lambda: torch.randn(4, 3)[2:3],
    "nonleaf": lambda: nonleaf(1, 3),
}
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
_FEW = ("t_", "squeeze_ a dim", "two steps")
steps = pytest.mark.parametrize("step", [STEPS[name] for name in _FEW], ids=_FEW)


inputs = pytest.mark.parametrize("make_input", INPUTS.values(), ids=INPUTS.keys())


# --- steps that move


@every_step
@inputs
def test_a_step_on_an_input(step, make_input):
    """The caller's tensor has the new sizes; what is computed before and after is right, and so are gradients."""

    def f(x):
        before = x * 2
        step(x)
        return before, x * 3

    same(f, make_input())


@steps
@inputs
def test_a_step_on_an_input_that_is_returned(step, make_input):
    """The output is the caller's tensor itself."""

    def f(x):
        step(x)
        return x

    same(f, make_input())


@steps
@inputs
def test_a_step_with_nothing_else(step, make_input):
    """A function that computes nothing still changes the sizes."""

    def f(x):
        step(x)
        return 1

    same(f, make_input())


@steps
@inputs
def test_a_step_between_writes(step, make_input):
    """The new value has the final sizes; gradients flow through all of it."""

    def f(x, w):
        x.mul_(w)
        step(x)
        x.add_(1)
        return (x * x).sum()

    same(f, make_input(), leaf(1))


def test_a_step_under_no_grad_on_what_begins_to_be_a_view():
    """The entry for a tensor that is no view does not serve a view, whose history autograd makes again."""

    def f(x):
        with torch.no_grad():
            x.t_()
        return x * 2

    g = compiled(f)
    g(nonleaf(3, 3))
    w = leaf(3, 3)
    g((w * 1)[:])[0].sum().backward()
    assert torch.equal(torch.tensor([[2.0, 0, 0]] * 3), w.grad)


@steps
@inputs
def test_a_step_in_a_call_under_no_grad(step, make_input):
    """The same with the whole call under no_grad."""

    def f(x):
        with torch.no_grad():
            step(x)
            return x * 2

    same(f, make_input(), eagerly=make_input().requires_grad)
    x = make_input().detach()
    expected = x.clone()
    with torch.no_grad():
        step(expected)
        compiled(lambda x: step(x) * 2)(x)
    assert (expected.shape, expected.stride()) == (x.shape, x.stride())


@steps
@inputs
def test_a_step_and_a_hidden_write(step, make_input):
    """A write that autograd does not see, beside a step that it sees."""

    def f(x):
        step(x)
        x.detach().mul_(2)
        return x * 2

    same(f, make_input())


@steps
@inputs
def test_a_step_and_views_made_after_it(step, make_input):
    """Views of the changed input are views of the caller's tensor."""

    def f(x):
        step(x)
        return x[0], x.view(-1) if x.is_contiguous() else x.t()

    same(f, make_input())


@steps
def test_a_step_on_a_leaf_that_requires_grad(step):
    """In grad mode that is eager's error, and nothing has been changed."""

    def f(y, x):
        y.add_(1)
        step(x)
        return y

    same(f, torch.ones(2), leaf(1, 3), eagerly=True)


def test_a_step_on_an_input_passed_twice():
    """One tensor, changed once, in both places."""

    def f(x, y):
        x.t_()
        return y + 1, x, y

    x, z = torch.randn(2, 3), nonleaf(2, 3)
    same(f, x, x)
    same(f, z, z)


@steps
def test_a_step_on_an_intermediate(step):
    """It is returned with views of it, from before and after."""

    def f(x):
        y = x * 2
        before = y + 1
        step(y)
        y.add_(1)
        return y, y[0], before

    same(f, torch.randn(1, 3))
    same(f, leaf(1, 3))


def behind_dynamo(function: Callable[..., Any], *args: Any, calls: int = 2, breaks: bool = False) -> None:
    """Assert that the function is eager's equal behind Dynamo, and that our engine compiles all that it is given.

    Unless ``breaks``, that shall be all of it in one graph.
    """
    torch._dynamo.reset()
    with events() as heard:
        result = compare(
            function,
            args,
            candidate=lambda f: aotlab.compile(f, backend="eager", frontend="dynamo"),
            backward="all",
            calls=calls,
        )
    assert result.first is None, result.first
    assert [e for e in heard if isinstance(e, CompileFailed)] == []
    if not breaks:
        assert [e for e in heard if isinstance(e, GraphBreak)] == []
        assert len([e for e in heard if isinstance(e, StageFinished) and e.stage == "runtime"]) == 1


@steps
@pytest.mark.parametrize("make_input", [INPUTS["plain"], INPUTS["nonleaf"]], ids=["plain", "nonleaf"])
def test_a_step_behind_dynamo(step, make_input):
    """Dynamo itself does not let such steps on an input into a graph; those on an intermediate it does."""

    def f(x):
        y = x * 2
        step(x)
        return y, x + 1

    def g(x):
        y = x * 2
        step(y)
        y.mul_(3)
        return y, x + 1

    behind_dynamo(f, make_input(), breaks=True)
    behind_dynamo(g, make_input())


def test_the_next_call_sees_the_new_sizes():
    """The same tensor comes in transposed at the second call, which compiles again and says why."""

    def f(x):
        x.t_()
        return x.sum(0)

    g = compiled(f)
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.tensor([3.0, 12.0]), g(x))
    assert torch.equal(torch.tensor([3.0, 5.0, 7.0]), g(x))
    assert torch.equal(torch.tensor([3.0, 12.0]), g(x))
    assert len(g.entries) == 2
    assert "stride" in str(g.recompiles[-1]) or "shape" in str(g.recompiles[-1])


def test_metadata_of_a_step():
    """The records say that the sizes changed, by which steps, and that the epilogue does it."""

    def f(x):
        x.t_()
        x.unsqueeze_(dim=0)
        return x * 2

    g = compiled(f)
    g(torch.randn(2, 3))
    info = metadata(g).input_info[0]
    assert (info.mutates_metadata, info.mutates_data) == (True, False)
    assert info.mutation_type is MutationType.MUTATED_OUT_GRAPH
    assert [str(step) for step in info.metadata_steps] == ["t_()", "unsqueeze_(dim=0)"]
    source = record(g, "runtime").source
    assert "x.t_()\n" in source
    assert "copy_" not in source


def test_metadata_of_a_hidden_write_beside_a_step():
    """The step gives the input another autograd node; the write is hidden all the same."""

    def f(x):
        x.t_()
        x.detach().mul_(2)
        return x * 1

    g = compiled(f)
    g(nonleaf(2, 3))
    assert metadata(g).input_info[0].mutations_hidden_from_autograd


def test_a_view_that_autograd_protects():
    """A multi-output view may not be changed in grad mode: eager's error, before anything else has changed."""

    def f(y, x):
        y.add_(1)
        x.t_()
        return y

    for first in (nonleaf(2, 3), nonleaf(4, 3).chunk(2)[0]):
        g = compiled(f)
        with suppress(RuntimeError):
            g(torch.ones(2), first)
        y, x = torch.ones(2), nonleaf(4, 3).chunk(2)[0]
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            g(y, x)
        assert torch.Size([2, 3]) == x.shape


# --- detach_ and requires_grad_


@pytest.mark.parametrize("make_input", [lambda: torch.randn(3), lambda: leaf(3), lambda: nonleaf(3)])
def test_detach_in_place(make_input):
    """The caller's tensor leaves autograd's graph; what was computed before keeps its gradient."""

    def f(x):
        before = x * 2
        x.detach_()
        return before, x * 3

    same(f, make_input())


@pytest.mark.parametrize("make_input", [lambda: torch.randn(3), lambda: leaf(3), lambda: nonleaf(3)])
def test_detach_in_place_and_write(make_input):
    """A write after it is no write that gradients flow through."""

    def f(x):
        before = x * 2
        x.detach_()
        x.mul_(2)
        return before, x

    same(f, make_input())


def test_write_and_detach_in_place():
    """The write is done and forgotten by autograd."""

    def f(x, w):
        x.mul_(w)
        y = x * 2
        x.detach_()
        return y, x

    same(f, nonleaf(3), leaf(3))


def test_detach_in_place_and_gradients_anew():
    """Written with something that requires grad, it gets another history."""

    def f(x, w):
        x.detach_()
        x.mul_(w)
        return x * 2

    same(f, nonleaf(3), leaf(3))


def test_detach_in_place_of_a_view_is_eagers_error():
    """Views refuse it; also when the entry was made for a tensor that is none."""

    def f(y, x):
        y.add_(1)
        x.detach_()
        return y

    same(f, torch.ones(2), nonleaf(4, 3)[1], eagerly=True)
    g = compiled(f)
    g(torch.ones(2), torch.randn(3))
    y = torch.ones(2)
    with pytest.raises(RuntimeError, match="Can't detach views in-place"):
        g(y, torch.randn(4, 3)[1])


@pytest.mark.parametrize("assign", [True, False])
def test_requires_grad_set_on_an_input(assign):
    """From there on gradients flow to the caller's tensor."""

    def f(x):
        before = x * 2
        if assign:
            x.requires_grad = True
        else:
            x.requires_grad_()
        return before, x * 3, x

    same(f, torch.randn(3))


def test_requires_grad_set_on_an_input_that_nothing_uses():
    """The flag alone."""

    def f(x, y):
        x.requires_grad_()
        return y * 2

    same(f, torch.randn(3), leaf(3))
    same(f, torch.randn(3), torch.randn(3))


def test_requires_grad_set_on_an_input_that_is_written():
    """Written before, it is a leaf afterwards."""

    def f(x):
        x.mul_(2)
        x.requires_grad_()
        return x * x

    same(f, torch.randn(3))


def test_requires_grad_taken_from_a_leaf():
    """What was computed before keeps its graph, which does not accumulate any more."""

    def f(x, w):
        before = x * w
        x.requires_grad_(False)
        return before, x * w, x

    same(f, leaf(3), leaf(3))


def test_requires_grad_taken_and_given_back():
    """In the end nothing has changed; what was computed in between has no gradient to the input."""

    def f(x):
        before = x * 2
        x.requires_grad_(False)
        between = x * 3
        x.requires_grad_(True)
        return before, between, x * 4

    same(f, leaf(3))


def test_requires_grad_taken_from_a_leaf_that_is_then_written():
    """No leaf that requires grad any more, it may be written."""

    def f(x):
        x.requires_grad_(False)
        x.mul_(2)
        return x * 3

    same(f, leaf(3))


def test_requires_grad_after_a_step():
    """Transposed first, then made a leaf that requires grad."""

    def f(x):
        x.t_()
        x.requires_grad_()
        return 1

    same(f, torch.randn(2, 3), eagerly=True)


def test_requires_grad_of_a_nonleaf_is_eagers_error():
    """Only leaves can give it up."""

    def f(y, x):
        y.add_(1)
        x.requires_grad_(False)
        return y

    same(f, torch.ones(2), nonleaf(3), eagerly=True)


def test_requires_grad_set_on_an_output():
    """A leaf made inside: gradients accumulate into the output."""

    def f(x):
        y = x.detach() * 2
        y.requires_grad_()
        return y, x * 3

    same(f, torch.randn(3))
    same(f, leaf(3))
    out, _ = compiled(f)(leaf(3))
    (out * 5).sum().backward()
    assert torch.equal(torch.full((3,), 5.0), out.grad)


def test_an_output_that_is_a_leaf_and_used_inside_is_refused():
    """The graph of the other output would have to reach the caller's leaf."""

    def f(x):
        y = (x.detach() * 2).requires_grad_()
        return y, y * 3

    with refusing(OutputError, match="leaf that the function made to require grad"):
        compiled(f)(torch.randn(3))


def test_requires_grad_on_a_part_of_an_intermediate():
    """A leaf that is a window of something larger."""

    def f(x):
        return (x * 2)[1:].detach().requires_grad_()

    same(f, torch.randn(3))


def test_steps_of_buffers():
    """A module's buffer is changed where it is."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.randn(2, 3))

        def forward(self, x):
            self.b.t_()
            return x @ self.b

    module = Module()
    made = compiled(module)
    before = module.b.clone()
    out = made(torch.ones(3))
    assert torch.equal(torch.ones(3) @ before.t(), out)
    assert torch.Size([3, 2]) == module.b.shape
    assert len(behind(made).entries) == 1


def test_a_step_and_a_write_where_the_gradient_is_retained():
    """Torch does not let a write follow a step there; eager wrote first."""

    def f(x):
        x.mul_(2)
        x.t_()
        return x * 3

    def retaining():
        x = torch.ones(2, 3, requires_grad=True) * 1
        x.retain_grad()
        return x

    same(f, torch.ones(2, 3, requires_grad=True) * 1)
    made = compiled(f)
    made(torch.ones(2, 3, requires_grad=True) * 1)
    gradients = []
    for call in (f, made):
        x = retaining()
        call(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert made.calls.eager == 1


def test_what_eager_leaks_is_not_leaked():
    """A leaf's node that eager keeps for good is seen when the caller gives the leaf another shape; README says so."""

    def f(x):
        v = x * 2
        v.mul_(v)
        return x.detach() + 1

    made = compiled(f)
    for call in (f, made):
        x = torch.ones(1, 2, requires_grad=True)
        call(x)
        with torch.no_grad():
            x.t_()
        with pytest.raises(RuntimeError, match="invalid gradient") if call is f else nullcontext():
            x.sum().backward()
    assert made.calls.compiled == 1


@pytest.mark.parametrize("step", [lambda x: x.t_(), lambda x: x.swapdims_(0, 1)])
def test_an_input_is_saved_with_the_sizes_that_it_had(step):
    """The backward reads it, after the epilogue has changed the caller's tensor."""

    def f(x):
        step(x)
        return x @ x

    def g(x, w):
        y = x @ w
        step(x)
        return y

    same(f, nonleaf(2, 2))
    same(g, nonleaf(2, 2), leaf(2, 2), eagerly=True)
    behind_dynamo(g, nonleaf(2, 2), leaf(2, 2), breaks=True)
