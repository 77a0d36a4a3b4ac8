"""Under autocast a compiled call casts separately, and autocast's cache for eager code does not change."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody writes it
from torch.utils.checkpoint import checkpoint

import aotlab
from tests.engine_helpers import compiled, leaf


def casting(dtype=torch.bfloat16, *, cache=None):
    """Return autocast on the CPU."""
    return torch.autocast("cpu", dtype=dtype, cache_enabled=cache)


def multiply(x, w):
    """Cast both."""
    return x @ w


def twice(x, w):
    """Use one cast at two places."""
    return (x @ w).sin() @ w


def both(x, w):
    """Use the leaf itself as well."""
    return x @ w + w.sum()


def differentiated(x, w):
    """Take a gradient inside, with respect to the leaf."""
    y = (x @ w).float().square()
    return y * torch.autograd.grad(y.sum(), w, create_graph=True)[0].sum()


def renewed(x, w):
    """Write the leaf after its use."""
    y = x @ w
    with torch.no_grad():
        w.mul_(0.5)
    return y


def checkpointed(x, w):
    """Use a checkpoint, whose backward casts again."""
    return checkpoint(twice, x, w, use_reentrant=False)


def region(function, *, calls=1, around=casting):
    """Call several times in a region; return all results, and all gradients."""
    w = leaf(8, 8, seed=1)
    xs = [leaf(8, 8, seed=2 + n) for n in range(calls)]
    with around():
        results = [function(x, w) for x in xs]
        loss = sum(result.float().square().sum() for result in results)
    loss.backward()
    return [result.detach() for result in results], [w.grad, *(x.grad for x in xs)]


def cast_of(x, w):
    """Return the leaf's cast from autocast's cache, which casts now if there is none."""
    return (x @ w).grad_fn._saved_mat2


@pytest.mark.parametrize("around", [casting, lambda: casting(cache=False), lambda: casting(torch.float16)])
@pytest.mark.parametrize("program", [multiply, twice, both, differentiated, renewed, checkpointed])
def test_one_call_in_a_region(program, around):
    """Within one call, casts are reused and gradients are summed as in eager, bit for bit."""
    f = compiled(program)
    for _ in range(2):
        (expected, gradients), (actual, own) = region(program, around=around), region(f, around=around)
        for e, a in zip([*expected, *gradients], [*actual, *own], strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
    assert f.calls.compiled == 2


@pytest.mark.parametrize("program", [multiply, twice, both, checkpointed])
def test_several_calls_in_a_region(program):
    """Several calls have eager's values.

    Gradients that eager sums in bfloat16, through a shared cast, are more precise.
    """
    f = compiled(program)
    (expected, gradients), (actual, own) = region(program, calls=3), region(f, calls=3)
    assert all(torch.equal(e, a) for e, a in zip(expected, actual, strict=True))
    assert all(torch.equal(e, a) for e, a in zip(gradients[1:], own[1:], strict=True))
    e, a = gradients[0], own[0]
    torch.testing.assert_close(a, e, rtol=0, atol=2 * e.abs().max().item() * torch.finfo(torch.bfloat16).eps)
    assert f.calls.compiled == 3


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_a_module_and_its_layers(frontend):
    """A model with norms and convolutions in other memory formats agrees with eager.

    It is called several times before one backward.
    """

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
            self.norm = nn.GroupNorm(2, 4)
            self.head = nn.Linear(4 * 25, 3)

        def forward(self, x):
            return self.head(self.norm(self.convolution(x)).relu().flatten(1))

    torch.compiler.reset()
    torch.manual_seed(0)
    net = Net()
    xs = torch.randn(3, 4, 2, 5, 5)
    found = []
    for call in (net, aotlab.compile(net, backend="eager", frontend=frontend)):
        for _ in range(2):
            net.zero_grad()
            with casting():
                loss = sum(F.cross_entropy(call(x), torch.tensor([0, 1, 2, 0])) for x in xs)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in net.parameters())])
    for each in found[1:]:
        assert torch.equal(each[0], found[0][0])
        for e, a in zip(found[0], each, strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=2 * e.abs().max().item() * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("program", [multiply, twice, renewed])
def test_what_is_kept_for_eager_code(program, before):
    """A trace inside a region neither clears autocast's cache nor adds an entry that eager would use."""
    f = compiled(program)
    x, w = leaf(8, 8), leaf(8, 8, seed=1)
    with casting():
        kept = cast_of(x, w) if before else None
        f(x, w)
        own = cast_of(x, w)
        assert kept is None or own is kept
        f(x, w)
        assert cast_of(x, w) is own
        assert type(own) is torch.Tensor
        assert own.dtype is torch.bfloat16
        (gradient,) = torch.autograd.grad((x @ w).sum(), w)
    assert torch.allclose(gradient, x.detach().bfloat16().float().sum(0)[:, None].expand(8, 8), atol=0.1)


def test_nothing_outlives_the_region():
    """Autocast's cache keeps neither the caller's leaf nor a traced tensor alive after the region."""
    f = compiled(multiply)
    w = leaf(8, 8, seed=1)
    with casting():
        f(leaf(8, 8, seed=2), w).sum().backward()
        kept = cast_of(leaf(8, 8), w)
    gone = [weakref.ref(kept), weakref.ref(w)]
    del kept, w
    gc.collect()
    assert [each() for each in gone] == [None, None]
