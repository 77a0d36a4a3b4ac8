"""Random programs for the partitioners: typical training ops, with enough saved values that choices matter."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Program = Callable[..., tuple[Tensor, ...]]

#: Each takes one value of shape (4, 6, 8), another one, and a weight (8, 8); and returns one of that shape.
OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda x, y, w: x + y,
    "mul": lambda x, y, w: x * y,
    "div": lambda x, y, w: x / (y * y + 1),
    "sin": lambda x, y, w: x.sin(),
    "exp": lambda x, y, w: (x.tanh()).exp(),
    "sigmoid": lambda x, y, w: x.sigmoid() * y,
    "relu": lambda x, y, w: x.relu(),
    "leaky": lambda x, y, w: functional.leaky_relu(x, 0.1),
    "gelu": lambda x, y, w: functional.gelu(x),
    "silu": lambda x, y, w: functional.silu(x),
    "where": lambda x, y, w: torch.where(x > y, x, y * 2),
    "clamp": lambda x, y, w: x.clamp(-1, 1),
    "power": lambda x, y, w: (x * x + 1) ** 1.5,
    "scaled": lambda x, y, w: x * w[0] + w[1],
    "linear": lambda x, y, w: functional.linear(x, w, w[0]),
    "matmul": lambda x, y, w: x @ w,
    "attention": lambda x, y, w: (x @ y.transpose(-1, -2)).softmax(-1) @ x,
    "norm": lambda x, y, w: functional.layer_norm(x, (8,), w[0], w[1]),
    "group norm": lambda x, y, w: functional.group_norm(x, 3, w.flatten()[:6], w.flatten()[6:12]),
    "batch norm": lambda x, y, w: functional.batch_norm(x, None, None, training=True),
    "softmax": lambda x, y, w: functional.log_softmax(x, -1),
    "sum": lambda x, y, w: x + y.sum(-1, keepdim=True),
    "mean": lambda x, y, w: x * y.mean((0, 1)),
    "largest": lambda x, y, w: x + y.amax(-1, keepdim=True),
    "cumsum": lambda x, y, w: x.cumsum(1),
    "view": lambda x, y, w: x.view(2, 12, 8).transpose(1, 2).reshape(4, 6, 8),
    "permute": lambda x, y, w: x.permute(2, 0, 1).contiguous().view(4, 6, 8) * y,
    "chunk": lambda x, y, w: torch.cat([*reversed(x.chunk(2, -1))], -1),
    "stack": lambda x, y, w: torch.stack([x, y]).prod(0),
    "expand": lambda x, y, w: x * y[:, :1].expand(4, 6, 8),
    "index": lambda x, y, w: x[:, torch.tensor([5, 0, 1, 2, 4, 3])],
    "gather": lambda x, y, w: x.gather(-1, y.argsort(-1)),
    "topk": lambda x, y, w: x + y.topk(2, -1).values.sum(-1, keepdim=True),
    "dropout": lambda x, y, w: functional.dropout(x, 0.5),
    "noise": lambda x, y, w: x * torch.rand_like(y),
    "convolution": lambda x, y, w: functional.conv1d(x, w[:6, :6].unsqueeze(-1)),
    "pool": lambda x, y, w: functional.max_pool1d(x, 3, 1, 1),
    "in place": lambda x, y, w: (x * 2).add_(y).mul_(0.5),
    "window": lambda x, y, w: torch.cat([x[:2].sin(), y[2:]]),
    "filled": lambda x, y, w: torch.zeros_like(x).index_copy(0, torch.tensor([0, 2]), y[:2]) + x,
    "cast": lambda x, y, w: x.double().sin().float(),
    "twice": lambda x, y, w: (x + y).cos() * (x + y).sin(),
    "complex": lambda x, y, w: torch.view_as_real(torch.view_as_complex(x.view(4, 6, 4, 2)) ** 2).reshape(4, 6, 8),
    "unseen": lambda x, y, w: x + y.detach().exp().sin(),
}


def drawn(seed: int) -> tuple[Program, tuple[Tensor, ...]]:
    """Make the program of a seed, and arguments for it: a value that may require grad, and two weights that do."""
    draw = random.Random(seed)
    steps = [
        (draw.choice([*OPS]), draw.choice((-1, -1, -1, -2, 0)), draw.choice((-1, -2, 0)), draw.choice((0, 1)))
        for _ in range(draw.randint(2, 14))
    ]
    some, scalar = draw.random() < 0.4, draw.random() < 0.6

    def program(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for name, i, j, k in steps:
            values.append(OPS[name](values[max(i, -len(values))], values[max(j, -len(values))], weights[k]))
        last = values[-1].square().mean() if scalar else values[-1]
        return (last, values[len(values) // 2]) if some else (last,)

    program.__doc__ = ", ".join(f"{name}({i}, {j}, {k})" for name, i, j, k in steps)
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, generator=generator) for shape in ((4, 6, 8), (8, 8), (8, 8))]
    made[0].requires_grad_(draw.random() < 0.5)
    return program, (made[0], *(weight.requires_grad_() for weight in made[1:]))
