"""Custom autograd Functions: their backwards are traced, and their views and writes are eager's."""

from __future__ import annotations

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
