"""Common uses of higher-order derivatives, compiled directly and behind Dynamo, equal eager bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import functional as derivatives
from torch.autograd import grad
from torch.nn import functional

from tests.engine_helpers import behind_dynamo, compiled

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


def pair():
    """Make two leaves."""
    return torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)


def scalar(x, w):
    """Compute a number."""
    return ((x @ w).tanh().exp() * x).sum()


def matrix(x, w):
    """Compute a matrix."""
    return (x @ w).tanh().exp().sin()


def hessian(make):
    """Take a Hessian, and differentiate it."""
    given = pair()
    found = [part for row in derivatives.hessian(make(scalar), given, create_graph=True) for part in row]
    return [*found, *grad(sum(part.square().sum() for part in found), given)]


def jacobian(make):
    """Take a Jacobian, and differentiate it."""
    given = pair()
    found = derivatives.jacobian(make(matrix), given, create_graph=True)
    return [*found, *grad(sum(part.square().sum() for part in found), given)]


def batched_jacobian(make):
    """Take a Jacobian of all rows at once."""
    return derivatives.jacobian(make(matrix), pair(), vectorize=True)


def products(make):
    """Multiply with Jacobians and Hessians, from both sides."""
    given, vectors = pair(), tuple(each.detach() for each in pair())
    found = [*derivatives.vjp(make(matrix), given, vectors[0], create_graph=True)[1]]
    found.append(derivatives.jvp(make(matrix), given, vectors, create_graph=True)[1])
    found += grad(sum(each.square().sum() for each in found), given)
    found += derivatives.hvp(make(scalar), given, vectors)[1]
    return [*found, *derivatives.vhp(make(scalar), given, vectors)[1]]


def gradient_penalty(make):
    """Train a critic with a penalty on its gradient between two batches."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    critic, optimizer = make(model), torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        real, fake, ratio = torch.randn(5, 4), torch.randn(5, 4), torch.rand(5, 1)
        between = (ratio * real + (1 - ratio) * fake).requires_grad_()
        (g,) = grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (g.norm(2, 1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def penalty_of_the_same_call(make):
    """Train with a loss of the outputs and of their gradient, of one call."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
    critic, optimizer = make(model), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        x = torch.randn(5, 4, requires_grad=True)
        y = critic(x)
        (g,) = grad(y.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (functional.softplus(-y).mean() + g.square().sum(1).mean()).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def equation_residual(make):
    """Train a network to solve Burgers' equation."""
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    network, optimizer = make(model), torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(4):
        x, t = torch.rand(10, 1, requires_grad=True), torch.rand(10, 1, requires_grad=True)
        u = network(torch.cat([x, t], 1))
        u_x, u_t = grad(u.sum(), [x, t], create_graph=True)
        (u_xx,) = grad(u_x.sum(), x, create_graph=True)
        loss = (u_t + u * u_x - 0.01 * u_xx).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def inner_loops(make):
    """Learn where to begin to learn."""
    weight, bias = torch.randn(4, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    task = make(lambda x, y, weight, bias: functional.mse_loss((x @ weight + bias).tanh(), y))
    found = []
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randn(6, 1)
        fast = [weight, bias]
        for _ in range(3):
            steps = grad(task(x, y, *fast), fast, create_graph=True)
            fast = [own - 0.1 * step for own, step in zip(fast, steps, strict=True)]
        found += grad(task(x, y, *fast), [weight, bias])
        with torch.no_grad():
            weight -= 0.1 * found[-2]
            bias -= 0.1 * found[-1]
    return found


def with_dropout(make):
    """Differentiate twice through masks: they are drawn once."""
    function = make(lambda x, w: functional.dropout((x @ w).tanh(), 0.5) * x)
    given = pair()
    (g,) = grad(function(*given).sum(), given[0], create_graph=True)
    return [g, *grad(g.square().sum(), given), torch.rand(2)]


def with_statistics(make):
    """Differentiate twice through batch norm, which counts the call once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    x = torch.randn(6, 4, requires_grad=True)
    (g,) = grad(make(model)(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def by_backward(make):
    """Call backward() with create_graph, and differentiate ``.grad``."""
    x, w = pair()
    make(matrix)(x, w).sum().backward(create_graph=True)
    loss = x.grad.square().sum() + w.grad.pow(3).sum()
    x.grad = w.grad = None
    loss.backward()
    return [x.grad, w.grad]


@pytest.mark.parametrize("make", [compiled, behind_dynamo])
@pytest.mark.parametrize(
    "work",
    [
        hessian, jacobian, batched_jacobian, products, gradient_penalty, penalty_of_the_same_call, equation_residual,
        inner_loops, with_dropout, with_statistics, by_backward,
    ],
)  # fmt: skip
def test_derivatives(work, make):
    """The results equal eager's bit for bit."""
    found = []
    for step in (lambda function: function, make):
        torch.manual_seed(0)
        found.append(work(step))
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_on_inductor():
    """Inductor's kernels compute higher-order derivatives too."""
    found = []
    for step in (lambda function: function, lambda function: compiled(function, backend="inductor")):
        torch.manual_seed(0)
        given = pair()
        function = step(scalar)
        (g,) = grad(function(*given), given[0], create_graph=True)
        found.append([g, *grad(g.square().sum() + function(*given), given)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_backward_that_cannot_be_traced_leaves_the_call_to_eager():
    """A backward that cannot be traced, here with a sparse gradient, runs the call eagerly.

    The trace's own exception was once taken for an error of eager's backward.
    """
    weight = nn.Parameter(torch.ones(5))
    g = compiled(lambda i: weight.gather(0, i, sparse_grad=True).sum())
    g(torch.tensor([0, 1, 1])).backward()
    assert weight.grad.is_sparse
    assert torch.equal(torch.tensor([1.0, 2, 0, 0, 0]), weight.grad.to_dense())
    assert g.calls.eager == 1
