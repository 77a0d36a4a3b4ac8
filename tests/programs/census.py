"""Ordinary programs, as users write them, which every version of the engine must compile.

Each function returns ``(program, args)`` or ``(program, args, kwargs)``. Each program is compiled as a whole, directly.
"""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.engine_helpers import leaf, nonleaf

SCALE = 0.5
Pair = namedtuple("Pair", "first second")  # as users write it


@dataclass
class Batch:
    """A batch of a data loader."""

    x: Tensor
    weight: float = 2.0


class Block(nn.Module):
    """A layer with parameters, a buffer, a flag, a number and a hook."""

    def __init__(self, width: int = 8, *, residual: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.residual = residual
        self.scale = 0.7
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Count the call and transform."""
        self.calls.add_(1)
        y = functional.gelu(self.linear(self.norm(x))) * self.scale
        return x + y if self.residual else y


class LoRA(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter."""
        return self.base(x) + x @ self.down.t() @ self.up.t()


class Tied(nn.Module):
    """An embedding whose weight is the decoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.decode = nn.Linear(8, 10, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict tokens."""
        return self.decode(self.embed(tokens))


class Straight(torch.autograd.Function):
    """Round, and pass the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Round."""
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient where the input lies between -1 and 1."""
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


def mlp() -> Any:
    """Three layers."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)), (torch.randn(2, 8),)


def convolutions() -> Any:
    """Batch norm in training counts."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), (torch.randn(2, 3, 8, 8),)


def transformer_layer() -> Any:
    """Attention with dropout."""
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (leaf(2, 4, 8),)


def attention() -> Any:
    """Causal attention, written with plain ops."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v

    return program, (leaf(2, 4, 8), leaf(2, 4, 8, seed=1), leaf(2, 4, 8, seed=2))


def fused_attention() -> Any:
    """Torch's attention."""
    return functional.scaled_dot_product_attention, (leaf(1, 2, 4, 8), leaf(1, 2, 4, 8), leaf(1, 2, 4, 8))


def recurrent() -> Any:
    """An LSTM and its state."""
    return nn.LSTM(4, 8, batch_first=True), (leaf(2, 5, 4),)


def gru_cell_loop() -> Any:
    """A loop in Python.

    The cell changes rows of the width 32 in place. aotlab computes the same values in dense memory. Both widths are
    whole numbers of vectors on every CPU, so torch's kernels round equally; see `differences.ipynb`.
    """
    cell = nn.GRUCell(4, 32)

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, xs: Tensor) -> Tensor:
            h = xs.new_zeros(xs.shape[1], 32)
            states = []
            for x in xs:
                h = self.cell(x, h)
                states.append(h)
            return torch.stack(states)

    return Loop(), (leaf(5, 2, 4),)


def block() -> Any:
    """A module that counts its calls."""
    return Block(), (leaf(2, 8),)


def lora() -> Any:
    """Frozen and trained parameters."""
    return LoRA(), (torch.randn(2, 8),)


def tied() -> Any:
    """One parameter at two places."""
    return Tied(), (torch.randint(0, 10, (2, 3)),)


def embedding_bag() -> Any:
    """A sum of embeddings."""
    return nn.EmbeddingBag(10, 4, mode="sum"), (torch.randint(0, 10, (2, 3)),)


def spectral() -> Any:
    """A parametrized layer in evaluation."""
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (leaf(2, 8),)


def cross_entropy() -> Any:
    """A loss."""
    return functional.cross_entropy, (leaf(4, 10), torch.randint(0, 10, (4,)))


def add_in_place() -> Any:
    """A written argument."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * 2

    return program, (nonleaf(3, 4), leaf(3, 4, seed=1))


def write_row() -> Any:
    """A written view."""

    def program(x: Tensor, row: Tensor) -> Tensor:
        x[0] = row * 2
        x[:, 1].mul_(3)
        return x.sum(0)

    return program, (nonleaf(3, 4), leaf(4, seed=1))


def boxes() -> Any:
    """Columns of one tensor that are written with others."""

    def program(boxes: Tensor) -> Tensor:
        boxes = boxes * 1
        boxes[:, 2:] -= boxes[:, :2]
        boxes[:, 0].add_(boxes[:, 2], alpha=0.5)
        return boxes

    return program, (leaf(5, 4),)


def kv_cache() -> Any:
    """A cache that is filled."""

    def program(cache: Tensor, k: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(1, position, k)
        return cache[:, :3] @ k.transpose(-2, -1)

    return program, (torch.zeros(2, 6, 4), torch.randn(2, 1, 4), torch.tensor([2]))


def ema() -> Any:
    """A moving average without gradients."""

    def program(average: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            average.mul_(0.9).add_(value, alpha=0.1)
        return (value - average).square().sum()

    return program, (torch.zeros(4), leaf(4))


def sgd_by_hand() -> Any:
    """Parameters written under no_grad."""

    @torch.no_grad()
    def program(w: Tensor, gradient: Tensor, momentum: Tensor) -> None:
        momentum.mul_(0.9).add_(gradient)
        w.sub_(momentum, alpha=0.1)

    return program, (leaf(3, 4), torch.randn(3, 4), torch.zeros(3, 4))


def transpose_in_place() -> Any:
    """A step that changes sizes."""

    def program(x: Tensor) -> Tensor:
        x.t_()
        return x * 2

    return program, (torch.randn(2, 3),)


def views_out() -> Any:
    """Views of an argument and of a result."""

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        return x.t(), y, y.view(-1), y[0]

    return program, (nonleaf(2, 3), leaf(3, 4))


def chunks() -> Any:
    """Several views by one op."""
    return lambda x: (x * 2).chunk(2, dim=-1), (leaf(2, 8),)


def argument_returned() -> Any:
    """An argument itself."""
    return lambda x: (x, x + 1), (leaf(3),)


def two_windows() -> Any:
    """Two views of one buffer, one of them written."""
    buffer = torch.randn(8)

    def program(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return a[:2] + b[:2]

    return program, (buffer[:5], buffer[3:])


def same_twice() -> Any:
    """One tensor as two arguments."""
    x = leaf(3)
    return lambda a, b: a * b.sin(), (x, x)


def gradient_inside() -> Any:
    """A gradient that is part of the result."""

    def program(x: Tensor) -> Tensor:
        (g,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return (g.norm(dim=-1) - 1).square().mean()

    return program, (leaf(2, 3),)


def func_inside() -> Any:
    """Transforms of torch.func."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).tanh().sum()

    return lambda w, x: torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x), (leaf(3), leaf(4, 3))


def checkpointed() -> Any:
    """A layer that is computed again."""
    linear = nn.Linear(4, 4)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: self.linear(y).tanh(), x, use_reentrant=False)

    return Again(), (leaf(2, 4),)


def custom_function() -> Any:
    """An autograd.Function."""
    return lambda x: Straight.apply(x) * x, (leaf(3, 4),)


def hook_inside() -> Any:
    """A hook on an intermediate."""

    def program(x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return (y * 3).sum()

    return program, (leaf(4),)


def autocast_inside() -> Any:
    """Lower precision inside."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).float().sum()

    return program, (leaf(3, 4), leaf(4, 5))


def no_grad_inside() -> Any:
    """A target network's part."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            target = (x @ w).max(-1).values
        return functional.mse_loss((x @ w).mean(-1), target)

    return program, (leaf(3, 4), leaf(4, 5))


def detached() -> Any:
    """A detached value and a result without gradient."""
    return lambda x: (x * x.detach(), x.detach() + 1, x.argmax()), (leaf(3, 4),)


def dropouts() -> Any:
    """Random numbers."""
    return lambda x: functional.dropout(x, 0.3) + torch.rand_like(x), (leaf(3, 4),)


def containers() -> Any:
    """Dictionaries, dataclasses and named tuples."""

    def program(batch: Batch, options: dict[str, Any]) -> dict[str, Any]:
        y = batch.x * batch.weight * options["scale"]
        return {"pair": Pair(y, y.sum()), "batch": Batch(y.sin(), 3.0), "list": [y, options["name"]]}

    return program, (Batch(leaf(3)), {"scale": 2.0, "name": "a"})


def closure_and_global() -> Any:
    """Numbers from around the function."""
    factor = 3

    def program(x: Tensor, *, shift: float = 1.0) -> Tensor:
        return x * factor * SCALE + shift

    return program, (leaf(3),), {"shift": 2.0}


def list_of_layers() -> Any:
    """A loop over modules with an early result."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(4, residual=i % 2 == 0) for i in range(3)])

        def forward(self, x: Tensor, *, return_all: bool = False) -> Any:
            states = [x := layer(x) for layer in self.layers]
            return states if return_all else x

    return Stack(), (leaf(2, 4),), {"return_all": True}


def fourier() -> Any:
    """Complex numbers."""
    return lambda x: torch.fft.irfft(torch.fft.rfft(x) * 1j, n=x.shape[-1]), (leaf(2, 8),)


def indexing() -> Any:
    """Gather, scatter, top-k."""

    def program(x: Tensor, index: Tensor) -> Tensor:
        values, places = x.topk(2, dim=-1)
        summed = torch.zeros_like(x).scatter_add_(1, places, values)
        return summed.gather(1, index) + x[index[:, 0]][:, :2]

    return program, (leaf(3, 4), torch.tensor([[0, 1], [2, 0], [1, 1]]))


def masked_update() -> Any:
    """A masked write to a clone."""

    def program(x: Tensor) -> Tensor:
        y = x.clone()
        y[y < 0] = 0
        y.clamp_(max=1)
        return torch.where(y > 0.5, y, x.exp())

    return program, (leaf(3, 4),)


def einsum() -> Any:
    """Contractions and reshapes."""
    return lambda x, w: torch.einsum("bij,jk->bik", x, w).flatten(1).unsqueeze(0), (leaf(2, 3, 4), leaf(4, 5))


def power_iteration() -> Any:
    """Linear algebra with a buffer written."""

    def program(w: Tensor, u: Tensor) -> Tensor:
        with torch.no_grad():
            v = functional.normalize(w.t() @ u, dim=0)
            u.copy_(functional.normalize(w @ v, dim=0))
        return w / (u @ w @ v)

    return program, (leaf(3, 4), torch.randn(3))


def copied_model() -> Any:
    """A model and its frozen copy."""
    model = nn.Linear(4, 4)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = model, copy.deepcopy(model).requires_grad_(requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return functional.kl_div(
                self.student(x).log_softmax(-1), self.teacher(x).softmax(-1), reduction="batchmean"
            )

    return Student(), (torch.randn(2, 4),)


def channels_last() -> Any:
    """A convolution on channels-last images."""
    return nn.Conv2d(3, 4, 3, padding=1), (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),)


def inference() -> Any:
    """A model in evaluation without gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)).eval()

    class Infer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    return Infer(), (torch.randn(3, 4),)


def steps_of_a_scheduler() -> Any:
    """A buffer and a number that both belong to an object."""

    class Meter:
        def __init__(self) -> None:
            self.decay = 0.9

    meter = Meter()
    return lambda x, total: total.mul_(meter.decay).add_(x.detach().mean()) + x.sum(), (leaf(3), torch.zeros(()))


PROGRAMS = [
    mlp, convolutions, transformer_layer, attention, fused_attention, recurrent, gru_cell_loop, block, lora, tied,
    embedding_bag, spectral, cross_entropy, add_in_place, write_row, boxes, kv_cache, ema, sgd_by_hand,
    transpose_in_place,
    views_out, chunks, argument_returned, two_windows, same_twice, gradient_inside, func_inside, checkpointed,
    custom_function, hook_inside, autocast_inside, no_grad_inside, detached, dropouts, containers, closure_and_global,
    list_of_layers, fourier, indexing, masked_update, einsum, power_iteration, copied_model, channels_last, inference,
    steps_of_a_scheduler,
]  # fmt: skip
