"""Custom autograd Functions: their backwards are traced, and their views and writes are eager's."""

from __future__ import annotations

import pytest
import torch

from aotlab.errors import RefusedError
from aotlab.verification import compare
from tests.engine_helpers import compiled, leaf, nonleaf, refusing, same, traced
from tests.functions import Viewed


def test_custom_function_outputs():
    """A custom autograd.Function: its own backward is traced, non-differentiable and marked outputs included."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            flags = x > 0
            ctx.mark_non_differentiable(flags)
            return x * 2, flags

        @staticmethod
        def backward(ctx, gradient, _):
            (x,) = ctx.saved_tensors
            return gradient * 2 + x * 0

    same(lambda x: Twice.apply(x * 1), leaf(3))


def test_custom_function_views():
    """A custom Function that returns a view of its input, or writes it, is eager's equal, compiled or not."""

    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view(-1)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.view(2, 3) * 3

    class Write(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    for function, argument in ((View, leaf(2, 3)), (Write, nonleaf(2, 3))):
        for program in (
            lambda x, f=function: f.apply(x),
            lambda x, f=function: f.apply(x * 1).sum(),
            lambda x, f=function: f.apply(x * 1),
            lambda x, f=function: (lambda y: (y, f.apply(y)))(x * 1),
        ):
            assert not compare(program, (argument,), candidate=compiled).differences
        # If a view from before the write is returned, too, eager makes its history again.
        before = lambda x, f=function: (lambda y: (y[0], f.apply(y)))(x * 1)  # noqa: E731
        same(before, argument, eagerly=function is View)


def test_views_of_a_custom_function_view_keep_its_backward():
    """Also where the argument is itself a view of another tensor that both have as their base."""
    x = leaf(2, 4)
    for argument in (x[0, 0].expand(2, 4), x.view(-1), x):
        f = traced(lambda x: Viewed.apply(x).view(-1) * 1, argument)
        out = f(argument)
        assert torch.autograd.grad(out.sum(), x)[0].sum() == 16
        with refusing(RefusedError):
            traced(lambda x: Viewed.apply(x).view(-1), argument)


def test_custom_functions_of_all_styles():
    """Custom functions with each of autograd's features are compiled.

    The features are once_differentiable, setup_context, needs_input_grad, set_materialize_grads and several outputs.
    """

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x)
            ctx.needs = ctx.needs_input_grad
            return x * y

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            assert ctx.needs == (True, False)
            return gradient * ctx.saved_tensors[0], None

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(x, factor):
            return x * factor, x + 1

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, first, second):
            total = first * ctx.factor if first is not None else 0
            return (total + second if second is not None else total), None

    class Fills(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            return first * 2 + second * 5

    same(lambda x, y: Once.apply(x, y), leaf(3), torch.ones(3))
    for backward in ("all", "first", "each"):
        same(lambda x: Split.apply(x, 3.0), leaf(3), backward=backward)
        same(lambda x: Fills.apply(x), leaf(3), backward=backward)


class _ViewOfNew(torch.autograd.Function):
    """Returns a view of a tensor that it makes, as `DTensor.to_local` does."""

    @staticmethod
    def forward(ctx, x):
        """Return a view of a new tensor."""
        ctx.save_for_backward(x)
        new = x.detach() ** 2
        return new.view_as(new)

    @staticmethod
    def backward(ctx, gradient):
        """Return twice the input, times the gradient."""
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_view_of_a_tensor_that_a_custom_function_makes():
    """The output is a view, and autograd forbids a write to it, as in eager; all derivatives are eager's."""
    for program in (_ViewOfNew.apply, lambda x: (_ViewOfNew.apply(x), x * 3, _ViewOfNew.apply(x + 1))):
        same(program, leaf(3))
        ours = compiled(program)
        for call in (program, ours):
            x = leaf(3)
            out = call(x)
            first = out[0] if isinstance(out, tuple) else out
            assert (first._is_view(), first._base.requires_grad) == (True, False)
            with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                first.mul_(2)
            (once,) = torch.autograd.grad(call(x)[0].sum(), x, create_graph=True)
            (twice,) = torch.autograd.grad(once.sum(), x)
            assert torch.equal(twice, 2 * torch.ones(3) if isinstance(out, tuple) else torch.tensor([2.0, 0, 0]))
        assert ours.calls.eager == 0
