"""Programs that stock `torch.compile` compiles while `test_observe` observes them."""

from __future__ import annotations

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor


def aliases(compiled):
    """Write an argument that overlaps another one."""

    def overlapping(x, y, z):
        x.mul_(2)
        return x + y.sum() + z.sum()

    base = torch.zeros(20)
    compiled(overlapping)(base[4:8], base[6:10], base[12:])


def views(compiled):
    """Return views of an argument, the argument and new tensors."""

    def slices(x, n):
        x.mul_(n)
        return x[1:].t(), x.select(1, -1), x, (x + 1)[1:], x.view(-1)[::2]

    compiled(slices)(torch.zeros(40)[4:20].view(4, 4), 3)


def subclass(compiled):
    """Take a wrapper subclass."""

    def wrapped(t, u):
        return t * 2 + u

    u = torch.ones(2, requires_grad=True)
    compiled(wrapped)(TwoTensor(torch.ones(2), torch.zeros(2)), u)


def names(compiled):
    """Take arguments with similar names, numbers and sizes that vary, and tensors from closures."""
    weight, state = torch.ones(3, requires_grad=True), {"n": torch.zeros(3)}

    def similar(x_1, x1, a, *rest):
        state["n"].add_(1)
        return x_1 * weight + x1 * a + rest[0] + state["n"]

    compiled(similar, dynamic=True)(torch.ones(3), torch.ones(3) * 2, 0.5, torch.ones(3)).sum().backward()


class Model(nn.Module):
    """A module with a parameter under two names, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, index):
        """Count the calls."""
        self.calls += 1
        return self.out(self.embedding(index))


def modules(compiled):
    """Call a user's module and two of a library."""
    model = compiled(Model())
    criterion = nn.CrossEntropyLoss()
    criterion(model(torch.arange(3)), torch.arange(3)).backward()
    net = compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    net(torch.ones(2, 4))
    linear = compiled(nn.Linear(4, 2))
    linear(torch.ones(2, 4))


def optimizer(compiled):
    """Compile a step of an optimizer, whose tensors are attributes of Dynamo's graph."""
    model = nn.Linear(4, 4, bias=False)
    adam = torch.optim.Adam(model.parameters())
    step = compiled(adam.step)
    model(torch.ones(2, 4)).sum().backward()
    step()


def breaks(compiled):
    """Break the graph twice."""

    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        z = y.cos()
        print(end="")
        return z + 1

    compiled(broken)(torch.ones(3))


def higher_order(compiled):
    """Compile a function that takes functions."""

    def either(x):
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))

    compiled(either, fullgraph=True)(torch.ones(3))


def again(compiled):
    """Compile the same code after a reset."""

    def twice(x):
        return x + 1

    compiled(twice)(torch.ones(3))
    torch.compiler.reset()
    compiled(twice)(torch.ones(3))


PROGRAMS = (aliases, views, subclass, names, modules, optimizer, breaks, higher_order, again)


def _failing(module, example_inputs):
    raise ValueError("this compiler fails")


def _passing(module, example_inputs):
    return module.forward


def failures():
    """Yield a function for each way to fail."""

    def good(x):
        return x * 2

    def prints(x):
        print("hello")
        return x

    x = torch.ones(3, requires_grad=True)
    yield lambda: torch.compile(good, backend="aot_eager")(x)
    yield lambda: torch.compile(lambda x: x * 3, backend=_failing)(x)
    yield (
        lambda: (
            torch.compile(lambda x: x * 4, backend=aot_autograd(fw_compiler=_passing, bw_compiler=_failing))(x)
            .sum()
            .backward()
        )
    )
    yield lambda: torch.compile(prints, backend="aot_eager", fullgraph=True)(x)


if __name__ == "__main__":
    import sys
    import warnings

    import aotlab

    warnings.simplefilter("ignore")
    with aotlab.observe(caches=False) as report:
        for program in (aliases, subclass, names, breaks):
            torch.compiler.reset()
            program(lambda function, **settings: torch.compile(function, backend="aot_eager", **settings))
        torch.compiler.reset()
        torch.compile(lambda x: (x.sin() + 1) @ x)(torch.ones(4, 4, requires_grad=True)).sum().backward()
    report.report().save(sys.argv[1])
