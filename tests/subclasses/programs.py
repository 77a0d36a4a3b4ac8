"""Random programs over wrappers and tensors: ops, views, writes, results, and arguments with `requires_grad`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.subclasses.kinds import plain, two

SHAPE = (3, 3)
UNARY: dict[str, Callable[..., Any]] = {
    "sin": torch.sin, "exp": torch.exp, "double": lambda t: t * 2, "relu": torch.relu, "clone": torch.clone,
}  # fmt: skip
VIEWS: dict[str, Callable[..., Any]] = {
    "t": lambda t: t.t(), "row": lambda t: t[0].expand(3, 3), "view": lambda t: t.view(3, 3),
    "transposed twice": lambda t: t.t().t(), "detach": lambda t: t.detach(),
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {"mul": torch.mul, "add": torch.add, "mm": torch.mm}
WRITES: dict[str, Callable[..., Any]] = {
    "add_": lambda t: t.add_(1), "mul_": lambda t: t.mul_(0.5), "first row": lambda t: t[0].mul_(2),
    "no_grad": lambda t: _under_no_grad(t),
}  # fmt: skip


def _under_no_grad(t):
    with torch.no_grad():
        t.sub_(0.25)


def nested(i, shape):
    """Make a wrapper of wrappers."""
    return TwoTensor(two(i, shape), two(i + 1, shape))


def program(seed):
    """Make a program from a seed, a function that makes its arguments, and its text."""
    choose = random.Random(seed)
    kinds = [choose.choice(("two", "two", "plain", "nested")) for _ in range(choose.randint(1, 3))]
    modes = [choose.choice(("no", "leaf", "leaf", "inner")) for _ in kinds]
    shares = len(kinds) > 1 and choose.random() < 0.15
    steps: list[tuple[str, Any, int, int]] = []
    count = len(kinds)
    for _ in range(choose.randint(1, 6)):
        what = choose.choices(("unary", "view", "binary", "write", "made", "part"), (6, 4, 6, 3, 1, 1))[0]
        table = {"unary": UNARY, "view": VIEWS, "binary": BINARY, "write": WRITES}.get(what)
        steps.append(
            (what, choose.choice(sorted(table)) if table else "", choose.randrange(count), choose.randrange(count))
        )
        count += what != "write"
    results = sorted({choose.randrange(count) for _ in range(choose.randint(1, 3))}, reverse=choose.random() < 0.5)

    def function(*arguments):
        pool = list(arguments)
        for what, name, i, j in steps:
            if what == "unary":
                pool.append(UNARY[name](pool[i]))
            elif what == "view":
                pool.append(VIEWS[name](pool[i]))
            elif what == "binary":
                pool.append(BINARY[name](pool[i], pool[j]))
            elif what == "write":
                WRITES[name](pool[i])
            elif what == "made":
                one = pool[i]
                pool.append(one if isinstance(one, TwoTensor) else TwoTensor(one.detach(), one.detach() * 2))
            else:
                pool.append(pool[i].a if isinstance(pool[i], TwoTensor) else pool[i])
        return [pool[k] for k in results]

    def make():
        made = []
        for n, (kind, mode) in enumerate(zip(kinds, modes, strict=True)):
            one = {"two": two, "plain": plain, "nested": nested}[kind](n, SHAPE)
            if shares and n and isinstance(made[-1], TwoTensor) and mode == "no":
                one = made[-1] if kind == "plain" else TwoTensor(made[-1].a, made[-1].b)
            elif mode != "no":
                one = one.requires_grad_() * 1 if mode == "inner" else one.requires_grad_()
            made.append(one)
        return made

    return function, make, f"{kinds} {modes} {'shares' if shares else ''} {steps} -> {results}"
