"""Tensors that a custom function keeps as attributes: no backward frees them, as in eager."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.engine_helpers import alike, compiled, entry_of, leaf, nonleaf

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FRONTENDS = pytest.mark.parametrize("frontend", ["direct", "dynamo"])


class Kept(torch.autograd.Function):
    """Keeps a tensor as an attribute."""

    @staticmethod
    def forward(ctx, x, w):
        """Multiply."""
        ctx.w = w * 2
        return x * ctx.w

    @staticmethod
    def backward(ctx, gradient):
        """Use it."""
        return gradient * ctx.w, None


class Written(torch.autograd.Function):
    """Writes its argument, and saves the other one, which is not visible behind Dynamo."""

    @staticmethod
    def forward(ctx, x, w):
        """Multiply in place."""
        ctx.mark_dirty(x)
        ctx.save_for_backward(w)
        x.mul_(w)
        return x

    @staticmethod
    def backward(ctx, gradient):
        """Use the saved tensor."""
        return gradient * ctx.saved_tensors[0], None


def _beside_another(x, w):
    return Kept.apply(x, w), x.sin()


def _behind_another(x, w):
    return Kept.apply(x.sin(), w), x.exp()


def _before_a_write(x, w):
    y = Kept.apply(x, w)
    x.mul_(2)
    return y, x.sin()


def _in_a_write(x, w):
    row = x[0]
    y = Written.apply(x, w.detach())
    return row * 2, y[1] * 1


def _one_after_the_other(function, order):
    """Backward some outputs in this order; return the gradients, or the first words of an error."""
    found = []
    for _ in range(2):
        source = leaf(2, 3)
        outputs = function(source + 0, torch.arange(6.0).view(2, 3))
        for n in order:
            try:
                outputs[n].sum().backward()
                found.append(source.grad.tolist())
            except RuntimeError as error:
                found.append(str(error)[:40])
    return found


@FRONTENDS
@pytest.mark.parametrize("order", [(1, 0), (0, 1), (0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("function", [_beside_another, _behind_another, _before_a_write], ids=lambda f: f.__name__[1:])
def test_outputs_are_backwarded_in_any_order(function, order, frontend):
    """A kept attribute survives the other output's backward; saved tensors of other nodes do not."""
    expected = _one_after_the_other(function, order)
    assert expected == _one_after_the_other(compiled(function, frontend=frontend), order)


def _gradients(function):
    source = leaf(2, 3)
    x = source + 0
    outputs = function(x, leaf(2, 3, seed=1))
    torch.autograd.backward([each.sum() for each in (*outputs, x)])
    return source.grad.tolist()


@FRONTENDS
def test_a_write_by_a_custom_function(frontend):
    """The backward of a later op does not free the tensors that the write's backward needs."""
    if frontend == "dynamo" and not alike(_gradients, _in_a_write):
        pytest.skip("Dynamo itself is wrong here")
    assert _gradients(_in_a_write) == _gradients(compiled(_in_a_write, frontend=frontend))


def test_a_write_by_the_caller():
    """A write to a kept attribute raises like a write to a saved tensor. Eager's gradient would use the new value."""

    class Square(torch.autograd.Function):
        """Keeps its argument as an attribute."""

        @staticmethod
        def forward(ctx, x):
            """Square."""
            ctx.x = x
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            """Read it."""
            return 2 * ctx.x * gradient

    x = nonleaf(2, 3)
    y = compiled(Square.apply)(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_others_are_let_go():
    """If no custom function keeps a tensor, the backwards of all outputs free everything."""
    g = compiled(lambda x, w: (x.sin() * w, -x))
    first, _other = g(nonleaf(2, 3), leaf(2, 3))
    saved = first.grad_fn.next_functions[0][0].values  # the first node is the output's own
    kept = [weakref.ref(value) for value in saved._values if not value.requires_grad]
    del saved
    assert any(each() is not None for each in kept)
    first.sum().backward()
    gc.collect()
    assert [each() for each in kept if each() is not None and not each().requires_grad] == []
    assert entry_of(g).calls == 1


def test_an_output_that_eager_does_not_keep():
    """The history for higher-order derivatives does not keep an output's memory alive after the caller deletes it."""

    def f(x, w):
        logits = x @ w
        return logits, logits.log_softmax(-1).sum()

    for call in (f, compiled(f)):
        logits, loss = call(torch.ones(8, 4), torch.ones(4, 16, requires_grad=True))
        memory = logits.untyped_storage()._weak_ref()
        del logits
        assert torch.UntypedStorage._expired(memory)
        assert loss.grad_fn is not None
