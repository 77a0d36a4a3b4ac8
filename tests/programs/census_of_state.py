"""Programs that once ran eagerly: their sizes depend on values, or the caller sees their writes.

As in `tests.programs.census`, each function returns ``(program, args)``, and each program is compiled as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.engine_helpers import leaf

#: Dynamo calls this op for ``x.untyped_storage().resize_(size)``.
resize_ = torch.ops.inductor.resize_storage_bytes_


class Counted(nn.Module):
    """A layer that counts its calls in a number, and warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """Count the call and transform."""
        self.steps += 1
        return self.linear(x) * min(1.0, self.steps / 10)


class SumsNorms(torch.autograd.Function):
    """Add the norm of each gradient to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        """Keep the buffer."""
        ctx.total = total
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Write the buffer."""
        ctx.total.add_(gradient.norm())
        return gradient * 2, None


def experts() -> Any:
    """A mixture of experts that finds its rows by `nonzero`."""

    def program(x: Tensor, choice: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(3):
            rows = (choice == expert).nonzero()[:, 0]
            out = out.index_add(0, rows, torch.tanh(x[rows] * (expert + 1)))
        return out

    return program, (leaf(5, 3), torch.tensor([0, 2, 0, 1, 2]))


def masks() -> Any:
    """A loss over the tokens that are not padding."""

    def program(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        kept = labels != 0
        return x[kept].exp().sum(), torch.masked_select(labels, kept)

    return program, (leaf(4, 3), torch.tensor([1, 0, 2, 0]))


def counter() -> Any:
    """A number in a module that changes with each call."""
    return Counted(), (torch.randn(2, 4),)


def set_to_require_grad() -> Any:
    """An argument that is set to require grad."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        x.requires_grad_()
        return (x * w).sum()

    return program, (torch.randn(3), leaf(3))


def views_of_one_base() -> Any:
    """Two views of a tensor with a history, one of them written."""

    def program(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return (a.sum() * b).sin()

    base = leaf(3, 3) * 1
    return program, (base[0], base.t())


def filled_at_random() -> Any:
    """A transposed matrix that is filled with random numbers."""
    return lambda x: (x.t().uniform_(), x * 2)[1], (torch.zeros(5, 4),)


def backward_that_writes() -> Any:
    """A backward that writes a buffer."""
    return SumsNorms.apply, (leaf(2, 3), torch.zeros(()))


def gathered() -> Any:
    """Memory that is allocated for a gathered parameter and freed after its use, as FSDP does it."""

    def program(x: Tensor, full: Tensor, shard: Tensor) -> Tensor:
        with torch.no_grad():
            resize_(full, 4 * full.numel())
            full.copy_(torch.cat([shard, shard]).view(4, 4))
        y = x @ full
        resize_(full, 0)
        return y

    full = torch.empty(4, 4)
    full.untyped_storage().resize_(0)
    return program, (torch.randn(2, 4), full, torch.randn(8))


PROGRAMS = [
    experts, masks, counter, set_to_require_grad, views_of_one_base, filled_at_random, backward_that_writes, gathered,
]  # fmt: skip
