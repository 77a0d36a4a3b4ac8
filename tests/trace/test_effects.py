"""Ops with effects besides their results: each runs once in a call, in the program's order, whoever uses its result."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import aotlab
from aotlab._torch import has_effects
from tests.engine_helpers import behind, compiled, leaf, metadata, record, targets

FULL = pytest.param("inductor", marks=pytest.mark.tier("full"))
said: list[tuple[object, ...]] = []


@torch.library.custom_op("effects_test::say", mutates_args=())
def say(x: torch.Tensor, tag: int) -> None:
    """Note a sum, and return nothing."""
    said.append((tag, x.sum().item()))


@torch.library.custom_op("effects_test::note", mutates_args=())
def note(x: torch.Tensor, tag: int) -> torch.Tensor:
    """Note a sum, and return a copy."""
    said.append((tag, x.sum().item()))
    return x.clone()


@torch.library.custom_op("effects_test::both", mutates_args=())
def both(x: torch.Tensor, tag: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Note a sum, and return two results."""
    said.append((tag, x.sum().item()))
    return x + 1, x * 2


@torch.library.custom_op("effects_test::own", mutates_args=())
def own(x: torch.Tensor, tag: int) -> torch.Tensor:
    """Do as `note`, and do not say so to torch."""
    said.append((tag, x.sum().item()))
    return x.clone()


for made in (note, own):
    made.register_fake(lambda x, tag: torch.empty_like(x))
say.register_fake(lambda x, tag: None)
both.register_fake(lambda x, tag: (torch.empty_like(x), torch.empty_like(x)))


def _registered() -> None:
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    for name in ("say", "note", "both"):
        _register_effectful_op(f"effects_test::{name}", _EffectType.ORDERED)


_registered()
note.register_autograd(lambda ctx, g: (g * 2, None), setup_context=lambda ctx, inputs, output: None)


@pytest.fixture(autouse=True)
def _nothing_said() -> Iterator[None]:
    said.clear()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def inference(x):
    """Use few results."""
    say(x, 1)
    y = x.sin()
    note(y, 2)
    first, _ = both(y, 3)
    note(y, 4)
    note(y, 4)
    x.add_(first)
    say(x, 5)
    say(x.exp(), 6)
    return y * 2


def training(x):
    """Use a result for the gradient alone."""
    y = x * 1
    say(y, 1)
    z = note(y.sin(), 2)
    note(y.exp(), 3)
    say(z, 4)
    return (z * y).sum()


def unsaid(x):
    """Call an op that is not registered."""
    y = x * 1
    own(y, 1)
    z = own(y.sin(), 2)
    return z.sum() + y.sum() * 0


def outcome(function, program):
    """Call the function twice; return the recorded effects and the results."""
    found = []
    for scale in (1, 2):
        x = leaf(3).detach() * scale
        if program is training:
            x.requires_grad_()
        result = function(x)
        said.append((0, 0.0))  # it was called
        if program is training:
            result.backward()
        found.append((result, x.grad, x.detach()))
    return list(said), found


@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "varying"])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("by", ["eager", FULL])
@pytest.mark.parametrize("program", [inference, training])
def test_effects(program, by, frontend, dynamic):
    """The effects, their order and their number are eager's, and the program is compiled."""
    said_in_eager, expected = outcome(program, program)
    said.clear()
    f = compiled(program, backend=by, frontend=frontend, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`.*` runs eagerly")
        said_now, found = outcome(f, program)
    assert [each[0] for each in said_now] == [each[0] for each in said_in_eager]
    torch.testing.assert_close([each[1:] for each in said_now], [each[1:] for each in said_in_eager])
    torch.testing.assert_close(found, expected, rtol=0 if by == "eager" else 1e-5, atol=0 if by == "eager" else 1e-5)
    if frontend == "direct":
        assert (behind(f).calls.compiled, len(behind(f).entries)) == (2, 1)


@pytest.mark.tier("full")
def test_order_in_kernels_of_inductor():
    """The kernel that computes an op's argument waits for the next effect: torch 2.13 swaps them otherwise."""

    def program(x):
        say(x.exp(), 1)
        return (note(x, 2) + 1) * x

    compiled(program, backend="inductor")(leaf(3).detach())
    assert [each[0] for each in said] == [1, 2]


class Late(torch.autograd.Function):
    """Needs what an op with effects returns in the backward alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(note(x, 2))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


@pytest.mark.parametrize("partition", [aotlab.default_partition, aotlab.min_cut_rematerialization_partition])
@pytest.mark.parametrize("program", [training, lambda x: Late.apply(x).sum()], ids=["training", "late"])
def test_no_partitioner_moves_them(partition, program):
    """They are in the forward, all of them, and in no backward."""
    f = compiled(program, partitioner=partition)
    loss = f(leaf(3))
    before = list(said)
    loss.backward()
    parts = record(f, "partition")
    found = [each.split(".")[1] for each in targets(parts.forward) if "effects_test" in each]
    assert found == (["say", "note", "note", "say"] if program is training else ["note"])
    assert not any("effects_test" in each for each in targets(parts.backward))
    assert [each.split(".")[1] for each in metadata(f).tokens] == found
    assert (len(before), said) == (len(found), before)


@pytest.mark.parametrize("by", ["eager", FULL])
def test_an_op_of_ones_own_that_is_not_registered(by):
    """It runs once, too: torch would leave it out where nobody uses its result."""
    expected = outcome(unsaid, unsaid)
    said.clear()
    f = compiled(unsaid, backend=by)
    found = outcome(f, unsaid)
    torch.testing.assert_close(sorted(found[0]), sorted(expected[0]), rtol=0 if by == "eager" else 1e-5, atol=0)
    assert f.calls.compiled == 2


@pytest.mark.parametrize("op", [say, own])
def test_effects_in_functions_of_ops(op):
    """Eager calls them, whatever the sizes."""

    def program(x):
        def first(x):
            op(x, 1)
            return x * 2

        return torch.cond(x.sum() > 0, first, torch.sin, (x,))

    f = compiled(program, frontend="dynamo")
    with pytest.warns(RuntimeWarning, match="calls an op with side effects"):
        results = [f(torch.ones(size)).sum() for size in (3, 4, 5)]
    assert results == [6, 8, 10]
    assert said == [(1, 3), (1, 4), (1, 5)]


@pytest.mark.tier("full")
def test_inductor_would_lose_an_op_that_returns_nothing_and_is_not_registered():
    """So eager runs it."""
    settings = {"schema": "(Tensor x) -> ()", "mutates_args": ()}
    silent = torch.library.custom_op("effects_test::silent", lambda x: said.append(("s",)), **settings)
    silent.register_fake(lambda x: None)

    def program(x):
        silent(x)
        return x.sin()

    f = compiled(program, backend="inductor")
    with pytest.warns(RuntimeWarning, match=r"silent.default` returns nothing, and is not registered to have effects"):
        f(torch.ones(2))
    assert said == [("s",)]


@torch.library.custom_op("effects_test::late", mutates_args=())
def late(x: torch.Tensor) -> torch.Tensor:
    """Call another one in the backward."""
    return x.clone()


late.register_fake(lambda x: torch.empty_like(x))


def _say_late(ctx, gradient):
    say(gradient, 7)
    return gradient * 2


late.register_autograd(_say_late)


class Says(torch.autograd.Function):
    """Call ops of each kind in the backward, of what it keeps and of what comes in."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        note(x, 1)
        _, more = both(gradient, 2)
        say(x.exp(), 3)
        return note(gradient, 4) + more


def deep(x, w):
    """Call an op in the forward, and several in the backward."""
    y = Says.apply((x @ w).exp())
    say(y, 5)
    return late(y).sin().sum()


def backwards(function, size, *, asked=False):
    """Run the backward twice, or compute one set of gradients; return the recorded effects and the results."""
    x, w = leaf(size, 4), leaf(4, 4, seed=1)
    said.clear()
    result = function(x, w)
    said.append((0, 0.0))
    if asked:
        return list(said), [result, *torch.autograd.grad(result, w)]
    result.backward(retain_graph=True)
    said.append((0, 0.0))
    result.backward()
    return list(said), [result, x.grad, w.grad]


@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "varying"])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("by", ["eager", FULL])
def test_effects_in_a_backward(by, frontend, dynamic):
    """Effects in a compiled backward run once per backward and in eager's order, for any subset of gradients."""
    f = compiled(deep, backend=by, frontend=frontend, dynamic=dynamic)
    rtol = 0 if by == "eager" else 1e-5
    for size in (3, 4, 5):
        for asked in (False, True):
            told, expected = backwards(deep, size, asked=asked)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "`.*` runs eagerly")
                said_now, found = backwards(f, size, asked=asked)
            assert [each[0] for each in said_now] == [each[0] for each in told]
            torch.testing.assert_close(said_now, told, rtol=rtol, atol=0)
            torch.testing.assert_close(found, expected, rtol=rtol, atol=0)
    if frontend == "direct":
        assert behind(f).calls.compiled == 6


@pytest.mark.parametrize("partition", [aotlab.default_partition, aotlab.min_cut_rematerialization_partition])
def test_no_partitioner_moves_them_out_of_the_backward(partition):
    """Partitioners keep effects in the backward, even those that depend on no tangent.

    The metadata lists them in order.
    """
    f = compiled(deep, partitioner=partition)
    said_now, _ = backwards(f, 3)
    assert said_now == backwards(deep, 3)[0]
    names = [f"effects_test.{name}.default" for name in ("say", "note", "both", "say", "note")]
    assert metadata(f).backward_tokens == tuple(names)
    assert metadata(f).tokens == ("effects_test.say.default",)


def test_a_backward_for_some_of_the_results():
    """Only those effects happen that are on its way."""

    def program(x):
        return late(x).sin(), Says.apply(x).cos()

    def use(function):
        found = []
        for which in ([0], [1], [0, 1]):
            x = leaf(3)
            results = function(x)
            said.append((0, 0.0))
            sum(results[n].sum() for n in which).backward()
            found.append(x.grad)
        return list(said), found

    told, expected = use(program)
    said.clear()
    f = compiled(program)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`.*` runs eagerly")
        said_now, found = use(f)
    assert said_now == told
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


LEFT = [
    pytest.param(lambda x, w: (late(x) @ w).sum(), id="on the way to one of two"),
    pytest.param(lambda x, w: torch.utils.checkpoint.checkpoint(deep, x, w, use_reentrant=False), id="checkpoint"),
]


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("program", LEFT)
def test_effects_in_a_backward_that_hang_on_what_is_asked_for(program, frontend):
    """Eager runs all of it."""
    expected = [backwards(program, 3, asked=asked) for asked in (False, True)]
    f = compiled(program, frontend=frontend)
    with pytest.warns(RuntimeWarning, match=r"a backward calls `effects_test..*`, which has side effects"):
        found = [backwards(f, 3, asked=asked) for asked in (False, True)]
    assert [each[0] for each in found] == [each[0] for each in expected]
    torch.testing.assert_close([each[1] for each in found], [each[1] for each in expected], rtol=0, atol=0)


def test_a_backward_with_effects_is_not_differentiated():
    """It is refused before anything is said; gradients of other strides are none of that."""
    f = compiled(lambda x: late(x.sin()))
    x = leaf(3, 4)
    result = f(x)
    with pytest.raises(aotlab.errors.DoubleBackwardError, match=r"a backward calls `effects_test.say.default`"):
        torch.autograd.grad(result.sum(), x, create_graph=True)
    assert said == []
    ones = torch.arange(12.0).view(4, 3).t()
    assert torch.equal(*(torch.autograd.grad(each, x, ones)[0] for each in (result, late(x.sin()))))
    assert said == [(7, 66.0), (7, 66.0)]


@pytest.mark.parametrize("by", ["eager", FULL])
def test_print(by, capfd):
    """The op that prints, which has no tensors; a trace does not print."""

    def program(x):
        torch.ops.aten._print("here")
        return x.sin()

    f = compiled(program, backend=by)
    for _ in range(2):
        f(torch.ones(2))
    assert capfd.readouterr().out.split() == ["here", "here"]
    assert f.calls.compiled == 2
    assert has_effects(torch.ops.aten._print.default)


def test_values_of_constants_that_come_from_an_effect():
    """They are not asked for while tracing."""

    def program(x):
        return x * note(torch.ones(2), 1).sum().item()

    f = compiled(program, frontend="direct")
    assert f(torch.ones(2)).tolist() == [2.0, 2.0]
    assert said == [(1, 2.0)]
    assert f.calls.compiled == 1


def test_a_call_that_raises_is_not_run_again():
    """A call that raises is not run again, because eager would repeat its effects."""

    def program(x, index):
        say(x, 1)
        return x[index]

    f = compiled(program)
    f(torch.ones(2), torch.tensor([1]))
    with pytest.raises(IndexError):
        f(torch.ones(2), torch.tensor([5]))
    assert said == [(1, 2.0), (1, 2.0)]
