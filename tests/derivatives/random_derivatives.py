"""Random programs of differentiable ops, and callers that take their higher-order derivatives.

All computation is in float64, so that another order of sums changes only the last digits. A program is source text, so
that a failing one can be read.
"""

from __future__ import annotations

import linecache
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

SIZE = 3


class Cube(torch.autograd.Function):
    """Saves its input and an intermediate that has no autograd history."""

    @staticmethod
    def forward(ctx, x):
        """Save both."""
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx, gradient):
        """Use both."""
        x, square = ctx.saved_tensors
        return gradient * (square + 2 * x * x)


class Attribute(torch.autograd.Function):
    """Keeps its result as an attribute."""

    @staticmethod
    def forward(ctx, x):
        """Keep it."""
        ctx.result = x.sigmoid()
        return ctx.result

    @staticmethod
    def backward(ctx, gradient):
        """Use it."""
        return gradient * ctx.result * (1 - ctx.result)


class Pair(torch.autograd.Function):
    """Takes two tensors and makes two."""

    @staticmethod
    def forward(ctx, x, y):
        """Save both inputs."""
        ctx.save_for_backward(x, y)
        return x * y, x + y.sin()

    @staticmethod
    def backward(ctx, first, second):
        """Use it."""
        x, y = ctx.saved_tensors
        return first * y + second, first * x + second * y.cos()


class Once(torch.autograd.Function):
    """Has a backward that must not be differentiated."""

    @staticmethod
    def forward(ctx, x):
        """Save it."""
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        """Use it."""
        return gradient * ctx.saved_tensors[0].cos()


def again(function: Callable[..., Any], *args: Tensor) -> Any:
    """Compute again in the backward."""
    return checkpoint(function, *args, use_reentrant=False)


def inner(value: Tensor, argument: Tensor, *, create_graph: bool = True) -> Tensor:
    """Differentiate inside of the program."""
    return torch.autograd.grad(
        value.sum(),
        argument,
        create_graph=create_graph,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )[0]


#: In these templates, `a` and `b` are defined names, `x` is an argument, and `v` is the name that is assigned or
#: written.
PURE = [
    "{a} * {b}", "{a} @ {b}", "{a} - {b} * {a}", "{a} / ({b} * {b} + 1)", "torch.addmm({a}, {a}, {b})",
    "torch.atan2({a}, {b} + 3)", "torch.outer({a}[0], {b}[:, 0])", "torch.where({a} > 0, {a} * {b}, {a}.sin())",
    "torch.stack([{a}, {b}]).sum(0)", "torch.cat([{a}[:1], {b}[1:]])", "{a}.masked_fill({b} > 0, 0.0)",
    "{a}.sin()", "{a}.tanh()", "{a}.exp().clamp(max=5.0)", "{a} * {a}", "torch.nn.functional.gelu({a})", "{a}.relu()",
    "{a}.softmax(-1)", "{a}.cumsum(0)", "{a}.t()", "{a}.detach()", "{a}.clone()", "{a}.flip(0)", "{a} * 0.5",
    "torch.nn.functional.layer_norm({a}, (3,))", "{a}.var(0, keepdim=True) + {a}", "{a}[:1].expand(3, 3)",
    "{a}.norm() * {b}", "{a}.unbind(0)[0].expand(3, 3)", "torch.linalg.inv({a} @ {a}.t() + torch.eye(3))",
    "torch.nn.functional.dropout({a} + 1, 0.3) * {b}",
]  # fmt: skip
SPECIAL = [
    "Cube.apply({a})", "Attribute.apply({a})", "Pair.apply({a}, {b})[0]", "Pair.apply({a}, {b})[1]", "Once.apply({a})",
    "again(torch.exp, {a}).clamp(max=5.0)", "again(torch.tanh, {a})", "again(lambda q, r: (q @ r).tanh(), {a}, {b})",
    "again(lambda q: again(torch.sin, q * 2) * q, {a})", "inner(({a} * {b}).tanh(), {x})", "inner({a}.sin(), {x})",
    "inner({a}.sin(), {x}, create_graph=False) * {b}", "torch.func.grad(lambda q: (q.sin() * q).sum())({a})",
    "torch.func.vmap(lambda r: r.sin() * r.sum())({a})",
]  # fmt: skip
WRITES = [
    "{v}.mul_({b})", "{v}.sin_()", "{v}.tanh_()", "{v}.add_({b})", "{v}[0].mul_({b}[0])", "{v}.t().mul_({b})",
    "{v}[1].sigmoid_()", "{v}[:, 0].copy_({b}[0])", "{v}.exp_().clamp_(max=5.0)",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function as text, and what its caller does.

    Attributes
    ----------
    source
        Defines ``program``.
    arguments
        For each argument whether it requires grad, and whether it is a leaf.
    differentiated
        The numbers of the results that are differentiated first.
    with_respect_to
        The numbers of the arguments with respect to which, and of results.
    order
        Up to which order.
    penalty
        Whether gradients are squared, before they are summed and differentiated again.
    ends_by_backward
        Whether the last derivative is taken by ``backward()``.
    seed
        Of all numbers.
    """

    source: str
    arguments: tuple[tuple[bool, bool], ...]
    differentiated: tuple[int, ...]
    with_respect_to: tuple[tuple[int, ...], tuple[int, ...]]
    order: int
    penalty: bool
    ends_by_backward: bool
    seed: int

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """Compile the source again and return its function."""
        name = f"<random derivatives {self.seed}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        names = dict(globals())
        exec(compile(self.source, name, "exec"), names)
        return names["program"]


def drawn(seed: int, *, writes_arguments: bool) -> Program:
    """Draw a program. If it writes arguments, none of its arguments is a leaf."""
    choices = random.Random(seed)
    names = list("abc"[: choices.choice([1, 2, 2, 3])])
    count, lines = len(names), []
    writes = writes_arguments or choices.random() < 0.4
    for number in range(choices.randint(2, 6)):
        new = f"v{number}"
        at_hand = {"a": choices.choice(names[-3:] + names[:count]), "b": choices.choice(names)}
        at_hand["x"] = choices.choice(names[:count])
        targets = names if writes_arguments else names[count:]
        if writes and targets and choices.random() < 0.3:
            lines.append(choices.choice(WRITES).format(v=choices.choice(targets), **at_hand))
            continue
        text = choices.choice(PURE if choices.random() < 0.65 else SPECIAL).format(**at_hand)
        if choices.random() < 0.05:
            lines += ["with torch.no_grad():", f"    {new} = {text}"]
        else:
            lines.append(f"{new} = {text}")
        names.append(new)
    made = names[count:] or names
    results = choices.sample(made, min(len(made), choices.choice([1, 1, 2, 3])))
    if made[-1] not in results:
        results[-1] = made[-1]
    body = textwrap.indent("\n".join(lines), "    ")
    requires = [choices.random() < 0.85 for _ in range(count)]
    requires[0] = requires[0] or not any(requires)
    chosen = [n for n in range(count) if requires[n] and choices.random() < 0.8] or [requires.index(True)]
    every = range(len(results))
    return Program(
        source=f"def program({', '.join(names[:count])}):\n{body}\n    return {', '.join(results)},\n",
        arguments=tuple((needs, not writes_arguments and choices.random() < 0.7) for needs in requires),
        differentiated=tuple(n for n in every if choices.random() < 0.7) or (len(results) - 1,),
        with_respect_to=(tuple(chosen), tuple(n for n in every if choices.random() < 0.25)),
        order=choices.choice([1, 2, 2, 2, 3]),
        penalty=choices.random() < 0.7,
        ends_by_backward=choices.random() < 0.3,
        seed=seed,
    )


Found = list[tuple[str, Tensor | None]]


def derivatives(function: Callable[..., tuple[Tensor, ...]], program: Program) -> Found:
    """Call a function and differentiate it as the program's caller does; return all that came of it, by names."""
    torch.manual_seed(program.seed)
    leaves = [(torch.rand(SIZE, SIZE) * 2 - 1).requires_grad_(needs) for needs, _ in program.arguments]
    arguments = [leaf if is_leaf else leaf * 1 for leaf, (_, is_leaf) in zip(leaves, program.arguments, strict=True)]
    results = function(*arguments)
    weights = iter(torch.rand(100, SIZE, SIZE))
    found: Found = [(f"result {n}", result.detach().clone()) for n, result in enumerate(results)]
    found += [(f"argument {n}", argument.detach().clone()) for n, argument in enumerate(arguments)]

    def total(tensors: list[Tensor | None]) -> Tensor | None:
        each = [t if not program.penalty else t * t for t in tensors if t is not None and t.requires_grad]
        terms = [(t * next(weights)).sum() for t in each]
        return sum(terms[1:], start=terms[0]) if terms else None

    some = [results[n] for n in program.differentiated]
    value = total(some) if any(result.requires_grad for result in some) else total(list(results))
    beside = [results[n] for n in program.with_respect_to[1] if results[n].requires_grad]
    towards = [arguments[n] for n in program.with_respect_to[0]] + beside
    for order in range(1, program.order + 1):
        if value is None:
            break
        if order == program.order > 1 and program.ends_by_backward:
            value.backward()
            found += [(f"leaf {n}", None if leaf.grad is None else leaf.grad.clone()) for n, leaf in enumerate(leaves)]
            break
        gradients = torch.autograd.grad(value, towards, create_graph=True, allow_unused=True)
        found += [(f"order {order}", None if g is None else g.detach().clone()) for g in gradients]
        found += [(f"order {order} goes on", torch.tensor(g is not None and g.requires_grad)) for g in gradients]
        value = total(list(gradients))
    return found
