"""Gradients are summed in eager's order, and computed of what has eager's strides: they are eager's to the bit."""

import pytest
import torch
from torch.nn import functional

from aotlab import config
from tests.engine_helpers import behind, compiled, heard_events

#: Terms of these sizes are rounded otherwise in each order in which they are added up.
SIZES = (1.0, 1e4, 1e-3, 3e2)


def made(*shape: int, seed: int) -> torch.Tensor:
    """Make a leaf."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def attended(x, scale, *weights):
    """Return what three products of one intermediate give, and two of these, as a decoder its cache."""
    h = (x * scale).tanh()
    q, k, v = (h @ w * size for w, size in zip(weights, SIZES, strict=False))
    return functional.softmax(q @ k.mT, -1) @ v, k, v


def from_input(x, scale, *weights):
    """Use an input in each of several segments."""
    a = x @ weights[0] * SIZES[0]
    b = (x @ weights[1] * SIZES[1] + a).sin()
    c = (x @ weights[2] * SIZES[2] * b).tanh()
    return (x * scale * c).sum(), a, b, c


def from_output(x, scale, *weights):
    """Use an output in each of several segments."""
    h = (x * scale).sin()
    a = h @ weights[0] * SIZES[0]
    b = h @ weights[1] * SIZES[1] + a.cos()
    return h, a, b, (h * SIZES[3] + b).sin()


def twice_in_one(x, scale, *weights):
    """Send two gradients of one segment past one of another."""
    h = (x * scale).tanh()
    first = h @ weights[0] * SIZES[1]
    k = h @ weights[1] * SIZES[2]
    last = h @ weights[2] * SIZES[3]
    return first * last + k.sin(), k


PROGRAMS = (attended, from_input, from_output, twice_in_one)


def gradients(function, backward, *arguments):
    """Call it and return the gradients of all arguments."""
    for each in arguments:
        each.grad = None
    backward(function(*arguments))
    return [each.grad for each in arguments]


def equal(left, right):
    """Tell whether two gradients are the same bit for bit, or are both None."""
    return left is right if left is None or right is None else torch.equal(left, right)


def of_first(results):
    """Run the backward of the first result."""
    results[0].sum().backward()


def of_all(results):
    """Run one backward for all results, of which the caller uses each twice."""
    sum(((r * 0.3).sum() + (r * 1e3).cos().sum() for r in results), torch.zeros(())).backward()


def one_by_one(results):
    """Run one backward after the other."""
    for n, result in enumerate(results):
        (result * (n + 0.1)).sum().backward(retain_graph=True)


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("backward", [of_first, of_all, one_by_one])
@pytest.mark.parametrize("program", PROGRAMS)
def test_order_of_sums(program, backward, frontend):
    """What several segments send to one edge is summed as eager sums it."""
    torch.compiler.reset()
    arguments = made(4, 8, 8, seed=0), made(8, seed=1), *(made(8, 8, seed=n) for n in range(2, 5))
    f = compiled(program, frontend=frontend)
    for _ in range(2):
        expected, found = gradients(program, backward, *arguments), gradients(f, backward, *arguments)
        assert list(map(equal, expected, found)) == [True] * 5


def test_the_order_matters():
    """These programs could tell: summed in another order, terms like theirs give something else."""
    h = made(4, 8, 8, seed=0)
    a, b, c = (torch.autograd.grad((h @ made(8, 8, seed=n)).sin().sum() * SIZES[n], h)[0] for n in (1, 2, 3))
    assert not torch.equal(a + b + c, c + b + a)


def bias(x, b):
    """Add a bias, whose gradient is a sum over rows."""
    return x.sin() + b


def both(x, b):
    """Do more with it."""
    return functional.layer_norm(x.exp() * b, (64,), b) @ x.mT


LAYOUTS = {
    "as it is": lambda g: g,
    "permuted": lambda g: g.mT.contiguous().mT,
    "expanded": lambda g: g[:, :1].expand_as(g),
    "one value": lambda g: g[:1, :1].expand_as(g),
    "with gaps": lambda g: torch.stack([g, g], -1)[..., 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", [bias, both])
def test_strides_of_what_arrives(program, layout):
    """A backward computes with a gradient as it is laid out: values and strides are eager's."""
    x, b = made(256, 64, seed=0), made(64, seed=1)
    f = compiled(program)
    gradient = LAYOUTS[layout](torch.randn(program(x, b).shape, generator=torch.Generator().manual_seed(3)) * 1e3)
    for _ in range(2):
        expected = torch.autograd.grad(program(x, b), [x, b], gradient)
        found = torch.autograd.grad(f(x, b), [x, b], gradient)
        assert [torch.equal(a, c) for a, c in zip(expected, found, strict=True)] == [True, True]
        assert [a.stride() for a in expected] == [c.stride() for c in found]
    assert len(behind(f).entries) == 1


def test_gradient_that_is_handed_on():
    """A backward that passes a gradient through unchanged returns the caller's memory, as in eager."""
    x = made(3, 4, seed=0)
    f = compiled(lambda x: (x + 0.0, x.sum()))
    gradient = torch.ones(4, 3).t()
    expected = torch.autograd.grad((x + 0.0), x, gradient)[0]
    found = torch.autograd.grad(f(x)[0], x, gradient)[0]
    assert expected.stride() == found.stride()
    assert (expected.data_ptr() == gradient.data_ptr()) == (found.data_ptr() == gradient.data_ptr())


def backwards(f):
    """Return how many backwards a function has compiled, by way of the events."""
    return [event for event in f if type(event).__name__ == "BackwardCompiled"]


def test_the_same_backward_serves():
    """If the first op normalizes a gradient's layout, no other backward is compiled for the gradient's strides."""
    x, w = made(6, 4, seed=0), made(4, 4, seed=1)
    with heard_events() as seen:
        f = compiled(lambda x, w: (x @ w).relu())
        (f(x, w)).sum().backward()
        assert backwards(seen) == []
        h = compiled(lambda x, w: (x.view(2, 12) * 2).view(6, 4) + w[0])
        torch.autograd.grad(h(x, w), x, torch.ones(4, 6).t())
        assert len(backwards(seen)) == 1  # a view of it cannot be had


def test_many_layouts():
    """After many different gradient layouts, further ones are copied to the usual layout.

    No new backward is compiled.
    """
    x, b = made(6, 4, seed=0), made(4, seed=1)
    f = compiled(bias)
    for step in range(1, 40):
        whole = torch.randn(6, 4 * step, generator=torch.Generator().manual_seed(step))
        gradient = whole[:, ::step]
        expected = torch.autograd.grad(bias(x, b), [x, b], gradient)
        found = torch.autograd.grad(f(x, b), [x, b], gradient)
        torch.testing.assert_close(expected, found)


def test_under_a_dispatch_mode():
    """A mode of the caller's is not asked about the fake tensors of a backward that is compiled under it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.extend(type(a) for a in args if isinstance(a, torch.Tensor))
            return func(*args, **(kwargs or {}))

    seen: list[type] = []
    x, b = made(6, 4, seed=0), made(4, seed=1)
    f = compiled(bias)
    gradient = torch.randn(4, 6).t()
    with config.patch(fallback="error"):
        y = f(x, b)
        with Counting():
            found = torch.autograd.grad(y, [x, b], gradient)
    expected = torch.autograd.grad(bias(x, b), [x, b], gradient)
    assert [torch.equal(a, c) for a, c in zip(expected, found, strict=True)] == [True, True]
    assert torch.Tensor in seen
    assert set(seen) <= {torch.Tensor, torch.nn.Parameter}
