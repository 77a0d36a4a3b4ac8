"""Custom autograd Functions that several files of tests use."""

from __future__ import annotations

import torch


class Viewed(torch.autograd.Function):
    """Returns a view of its argument, with a gradient that is not a view's gradient."""

    @staticmethod
    def forward(ctx, value):
        """Make the view."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        """Double the gradient."""
        return gradient * 2


class Parted(torch.autograd.Function):
    """Gives back two results, and saves none."""

    @staticmethod
    def forward(ctx, value):
        """Double, and negate."""
        return value * 2, -value

    @staticmethod
    def backward(ctx, one, two):
        """Do what their backwards do."""
        return one * 2 - two


class PartedAndSaved(torch.autograd.Function):
    """Gives back two results, and saves the first of them."""

    @staticmethod
    def forward(ctx, value):
        """Double, and negate."""
        double, negative = value * 2, -value
        ctx.save_for_backward(double)
        return double, negative

    @staticmethod
    def backward(ctx, one, two):
        """Use the saved tensors."""
        (double,) = ctx.saved_tensors
        return (one + 1) * double - two
