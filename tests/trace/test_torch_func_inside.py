"""Compiled functions that call ``torch.func`` themselves: the transforms are part of what is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from tests.engine_helpers import compiled
from tests.func_helpers import MAKES, assert_same, behind_dynamo, body, numbers, outcome, scalar

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


def network(weights, x):
    """Run a small network."""
    first, bias, second = weights
    return torch.tanh(x @ first + bias) @ second


def weights():
    """Make its weights."""
    return numbers(4, 8) / 4, numbers(8) / 8, numbers(8, 2) / 4


class Cubed(torch.autograd.Function):
    """Has a derivative, and a rule for vmap that torch makes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        """Compute the cube."""
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save the input."""
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        """Multiply with the derivative."""
        return gradient * 3 * ctx.saved_tensors[0] ** 2


def several_dimensions(x, y):
    """Map over other dimensions than the first, and in parts."""
    both = vmap(lambda a, b: (a * b, b.sin()), in_dims=(1, None), out_dims=(1, 0))(x, y)
    return *both, vmap(body, chunk_size=2)(x), vmap(vmap(body, in_dims=0), in_dims=1)(x)


def gradients(x):
    """Take gradients, their like, and gradients of these."""
    first = grad(lambda y: (scalar(y), y.cos()), has_aux=True)(x)
    return grad_and_value(scalar)(x), first, grad(lambda y: grad(scalar)(y).sum())(x)


def products(x, v):
    """Multiply with Jacobians and Hessians from the left."""
    out, function = vjp(body, x)
    return out, function(v), vjp(grad(scalar), x)[1](v)


def per_sample(first, bias, second, x, y):
    """Take gradients of each sample."""
    loss = lambda own, a, b: (network(own, a) - b).square().sum()  # noqa: E731
    return vmap(grad(loss), in_dims=(None, 0, 0))((first, bias, second), x, y)


def jacobians(first, bias, second, x):
    """Take the Jacobian of each sample."""
    return vmap(jacrev(lambda a: network((first, bias, second), a)))(x)


def residual(first, bias, second, x):
    """Take the residual of an equation."""
    u = lambda a: network((first, bias, second), a)[0]  # noqa: E731
    slope, curvature = vmap(jacrev(u))(x), vmap(jacrev(jacrev(u)))(x)
    return (slope[:, 0] + vmap(u)(x) * slope[:, 1] - 0.01 * curvature[:, 1, 1]).square().mean()


def closure(x, w):
    """Read an outer tensor inside."""
    return vmap(lambda row: (row * w).sum())(x), grad(lambda v: (v * w).sum() ** 2)(w)


def writes_inside(x):
    """Write tensors, and views of them, that the mapped function made."""

    def each(row):
        y = row * 1
        y.mul_(2)[0] = row[1]
        y.view(2, 2)[0].mul_(row[:2])
        return y.sin()

    return vmap(each)(x), grad(lambda z: (z * 1).mul_(z).sum())(x)


def writes_the_argument(x):
    """Write the caller's tensor inside, and views of it that the transform gave back."""
    out = vmap(lambda row: row.mul_(2))(x)
    vmap(lambda row: row[:2])(x).add_(1)
    return out, x + 1


def gives_back(x, w):
    """Return views and a tensor that `vmap` did not map."""
    return vmap(lambda row: row.view(2, 2)[0])(x), vmap(lambda row: row)(x), vmap(lambda row: w)(x)


def stops_gradients(x):
    """Detach, and leave grad mode, inside and outside."""

    def inside(y):
        with torch.no_grad():
            constant = y * y
        return (constant * y + y.detach() * y).sum()

    with torch.no_grad():
        outside = grad(scalar)(x)
    return grad(inside)(x) + outside + x.cos()


def custom(x):
    """Apply a custom Function."""
    return vmap(grad(lambda row: Cubed.apply(row).sum()))(x), vmap(Cubed.apply)(x)


def caught(x):
    """Go on after an error inside."""
    try:
        x = vmap(lambda row: row.view(3, 3))(x)
    except RuntimeError:
        x = x * 2
    return vmap(body)(x)


def in_a_checkpoint(x):
    """Compute it again in the backward."""
    return checkpoint(lambda y: vmap(body)(y), x, use_reentrant=False)


def descent(x):
    """Learn inside."""
    weight = torch.ones(4, 2)
    for _ in range(3):
        weight = weight - 0.1 * grad(lambda w: (x @ w).square().mean())(weight)
    return x @ weight


def batched_gradients(x):
    """Let autograd take several gradients at once."""
    y = body(x)
    found = torch.autograd.grad(y, x, torch.eye(12).view(12, 3, 4), is_grads_batched=True, create_graph=True)
    return found[0], torch.autograd.functional.jacobian(body, x[0], vectorize=True)


def beside_a_view(x):
    """Use a view of the argument besides."""
    row = x[0]
    return vmap(torch.sin)(x) * row


def dropped(x):
    """Draw other numbers for each sample, and the same."""
    first = vmap(grad(lambda row: torch.dropout(row, 0.5, True).square().sum()), randomness="different")(x)
    return first, vmap(lambda row: torch.dropout(row, 0.5, True), randomness="same")(x)


COMPILED = {
    dropped: (numbers(3, 4),),
    several_dimensions: (numbers(3, 4), numbers(3)),
    gradients: (numbers(4),),
    products: (numbers(4), numbers(4)),
    per_sample: (*weights(), numbers(3, 4), numbers(3, 2)),
    jacobians: (*weights(), numbers(3, 4)),
    residual: (*weights(), numbers(3, 4)),
    closure: (numbers(3, 4), numbers(4)),
    writes_inside: (numbers(3, 4),),
    writes_the_argument: (numbers(3, 4),),
    gives_back: (numbers(3, 4), numbers(4)),
    stops_gradients: (numbers(4),),
    custom: (numbers(3, 4),),
    caught: (numbers(3, 4),),
    in_a_checkpoint: (numbers(3, 4),),
    descent: (numbers(3, 4),),
    batched_gradients: (numbers(3, 4),),
    beside_a_view: (numbers(3, 4),),
}


def forward_mode(x, v):
    """Take derivatives forwards."""
    return jvp(body, (x,), (v,)), jacfwd(body)(x), hessian(scalar)(x), jvp(grad(scalar), (x,), (v,))


def linearized(x, v):
    """Linearize."""
    out, function = linearize(body, x)
    return out, function(v)


def functionalized(x):
    """Functionalize inside."""
    return torch.func.functionalize(lambda y: (y * 1).add_(1))(x)


EAGERLY = {
    forward_mode: (numbers(4), numbers(4)),
    linearized: (numbers(4), numbers(4)),
    functionalized: (numbers(4),),
}


def calls(function, given, order):
    """Return a function that makes two calls and differentiates their results ``order`` times."""

    def use(make):
        f, found = make(function), []
        for _ in range(2):
            leaves = [tensor.clone().requires_grad_() for tensor in given]
            inputs = [leaf * 1 for leaf in leaves]
            results = [r for r in tree_flatten(f(*inputs))[0] if isinstance(r, torch.Tensor)]
            # a use of an input outside would be summed after all those inside, which rounds otherwise
            used = [*results, *inputs] if function is writes_the_argument else results
            gradients = [r for r in used if r.requires_grad]
            found += [results, inputs]
            for n in range(order):
                loss = sum((each * each.cos()).sum() for each in gradients)
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=n + 1 < order)
                found.append(gradients)
                gradients = [each for each in gradients if each is not None and each.requires_grad]
        return found

    return use


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("program", COMPILED, ids=lambda program: program.__name__)
def test_is_compiled(program, make, order):
    """Values, gradients and writes are eager's; in second derivatives some sums are rounded otherwise."""
    if program is batched_gradients and make is behind_dynamo:
        pytest.skip("Dynamo leaves it to Python; a compiled backward has no batched gradients with histories")
    if program is caught and make is behind_dynamo:
        pytest.skip("Dynamo itself raises the error that the function catches")
    if program is custom and make is behind_dynamo and torch.__version__.startswith("2.15"):
        pytest.skip("on torch 2.15 Dynamo itself takes no custom Function under vmap")
    made = []

    def making(function):
        made.append(make(function))
        return made[-1]

    use = calls(program, COMPILED[program], order)
    expected, _, state = outcome(use, lambda f: f)
    found, notices, state_after = outcome(use, making)
    assert_same(expected, found, exact=order == 1)
    assert state_after == state
    assert notices == []
    if make is compiled:
        assert (made[0].calls.compiled, made[0].calls.eager) == (2, 0)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("program", EAGERLY, ids=lambda program: program.__name__)
def test_runs_eagerly(program, make):
    """Programs that a trace cannot represent run eagerly, with one notice per graph. No transform level stays open."""
    use = calls(program, EAGERLY[program], 2)
    expected, _, state = outcome(use, lambda f: f)
    found, notices, state_after = outcome(use, make)
    assert_same(expected, found)
    assert state_after == state
    assert len(notices) == len(set(notices)) > 0
    assert len(notices) == 1 or make is behind_dynamo


class PerSample(nn.Module):
    """Takes the gradients of each sample with respect to its own parameters."""

    def __init__(self):
        """Make a network."""
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        """Take gradients, and call the network under vmap."""
        parameters = dict(self.net.named_parameters())
        found = vmap(jacrev(lambda p, row: functional_call(self.net, p, (row,)).sum()), in_dims=(None, 0))(
            parameters, x
        )
        return *found.values(), vmap(self.net)(x), vmap(jacrev(self.net))(x)


class Ensemble(nn.Module):
    """Runs several models at once."""

    def __init__(self):
        """Make the models."""
        super().__init__()
        self.nets = nn.ModuleList([nn.Linear(4, 2) for _ in range(3)])

    def forward(self, x):
        """Stack their parameters."""
        parameters, buffers = stack_module_state(list(self.nets))
        call = lambda p, b, x: functional_call(self.nets[0], (p, b), (x,))  # noqa: E731
        return (vmap(call, in_dims=(0, 0, None))(parameters, buffers, x),)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("kind", [PerSample, Ensemble])
def test_of_a_module(kind, make):
    """A module may use ``torch.func`` with its own parameters."""

    def use(make):
        torch.manual_seed(0)
        model = kind()
        results = make(model)(numbers(5, 4))
        sum(each.square().sum() for each in results).backward()
        return [*results, *(p.grad for p in model.parameters())]

    expected, _, state = outcome(use, lambda f: f)
    found, _, state_after = outcome(use, make)
    assert_same(expected, found)
    assert state_after == state


def raises(x):
    """Raise inside."""
    raise ValueError("mine")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: vmap(raises)(x),
        lambda x: vmap(lambda row: row.view(3, 3))(x),
        lambda x: grad(lambda y: y)(x),
        lambda x: vmap(lambda row: row * row.sum().item())(x),
        lambda x: vmap(lambda row: row if row.sum() > 1 else -row)(x),
        lambda x: vmap(torch.rand_like)(x),
        lambda x: jvp(body, (x,), (x[:1],)),
    ],
)
def test_errors_are_eagers(function):
    """An error inside a transform is raised as in eager, and the transform's level is closed."""
    expected, _, state = outcome(lambda make: make(function)(numbers(3, 4)), lambda f: f)
    found, _, state_after = outcome(lambda make: make(function)(numbers(3, 4)), compiled)
    assert_same(expected, found)
    assert state_after == state


def test_a_graph_that_raises_leaves_its_transforms():
    """An error at run time closes the transform levels that a graph of Dynamo opened.

    Dynamo's graphs have no ``finally``.
    """

    def function(x, n):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            return vmap(grad(lambda row: (row[n] * row).sum()))(dual)

    def use(make):
        f = make(function)
        with pytest.raises((IndexError, RuntimeError)):
            f(numbers(3, 4), torch.tensor([9]))
        return f(numbers(3, 4), torch.tensor([1]))

    expected, _, state = outcome(use, lambda f: f)
    found, _, state_after = outcome(use, behind_dynamo)
    assert_same(expected, found)
    assert state_after == state
