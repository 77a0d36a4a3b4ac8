"""Operations that Dynamo or a trace skips, but eager does not: with both frontends, the result is eager's."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody writes it
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.errors import RandomOpError
from tests.engine_helpers import refusing

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]
WAYS = {
    "direct": lambda f: aotlab.compile(f, backend="eager"),
    "dynamo": lambda f: aotlab.compile(f, backend="eager", frontend="dynamo"),
    "backend": lambda f: torch.compile(f, backend="aotlab", options={"compiler": "eager"}),
}
ways = pytest.mark.parametrize("compile", WAYS.values(), ids=WAYS)


class NoneForUnused(torch.autograd.Function):
    """Distinguishes an unused output from an output with a zero gradient."""

    @staticmethod
    def forward(ctx, x):
        """Return two results."""
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        """Add 100 if there are both."""
        return first * 2 if second is None else first * 2 + 100


@ways
def test_gradients_that_are_none(compile):
    """The backward of a custom Function gets None where eager gives it None."""

    def f(x):
        return NoneForUnused.apply(x)[0].sum()

    x = torch.ones(3, requires_grad=True)
    compile(f)(x).backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@ways
def test_hooks_registered_later(compile):
    """Forward hooks on a module or on one inside: they are run from the next call on, until they are removed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    compiled = compile(model)
    x = torch.ones(1, 2, requires_grad=True)
    torch.testing.assert_close(compiled(x), model(x))
    handle = model[0].register_forward_hook(lambda module, args, out: out * 3)
    assert torch.equal(compiled(x), model(x))
    handle.remove()
    torch.testing.assert_close(compiled(x), model(x))
    with model[1].register_forward_pre_hook(lambda module, args: (args[0] + 7,)):
        assert torch.equal(compiled(x), model(x))


def test_backward_hooks_registered_later():
    """Behind Dynamo; the direct frontend refuses them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    compiled = WAYS["dynamo"](model)
    x = torch.ones(1, 2, requires_grad=True)
    compiled(x).sum().backward()
    x.grad = None
    model[0].register_full_backward_hook(lambda module, into, out: (into[0] * 0 + 5,))
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((1, 2), 5.0))


@ways
def test_numpy_seeds_numpy(compile):
    """It does not seed torch: masks of dropout continue to differ. The direct frontend refuses it."""

    def f(x):
        np.random.seed(0)  # the global generator is what this is about
        return F.dropout(x, 0.5)

    def masks(f):
        torch.manual_seed(3)
        return [f(torch.ones(32)) for _ in range(2)]

    np.random.seed(1)  # as above
    if compile is WAYS["direct"]:
        with refusing(RandomOpError, match=r"numpy\.random"):
            masks(compile(f))
    else:
        assert all(map(torch.equal, masks(compile(f)), masks(f)))


@ways
@pytest.mark.parametrize("masked", [1, 3])
def test_padding_of_transformers(compile, masked):
    """Eager's encoder returns zeros at padded places, and no more places than the longest sequence has."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 5, dtype=torch.bool)
    mask[:, -masked:] = True
    mask[1, 1:] = True
    compiled = compile(lambda x, mask: encoder(x, src_key_padding_mask=mask) * 1)
    inside = compile(encoder)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        torch.testing.assert_close(inside(x, src_key_padding_mask=mask), expected)
        torch.testing.assert_close(inside(x), encoder(x))
        if compile is not WAYS["direct"]:  # which takes no captured module
            torch.testing.assert_close(compiled(x, mask), expected)
    assert not expected[1, 1:].any()


def test_other_backends_are_left_alone():
    """With another backend, Dynamo reads such values as before."""

    def f(x):
        return NoneForUnused.apply(x)[0].sum()

    WAYS["dynamo"](f)
    x = torch.ones(3, requires_grad=True)
    torch.compile(f, backend="eager", fullgraph=True)(x).backward()
    assert torch.equal(x.grad, torch.full((3,), 102.0))


class Scaled(torch.autograd.Function):
    """Scale by a number."""

    @staticmethod
    def forward(ctx, x, number):
        """Keep the number."""
        ctx.number = number
        return x * number

    @staticmethod
    def backward(ctx, gradient):
        """Scale by it again."""
        return gradient * ctx.number, None


def _checkpointed(function, x):
    return checkpoint(function, x, use_reentrant=False)


def _choose(x, scale):
    """Choose by a value; in eager by Python, because torch 2.15's `cond` takes no float that varies there, either."""
    functions = (lambda y: y * scale), (lambda y: y / scale)
    if torch.compiler.is_compiling():
        return torch.cond(x.sum() > 0, *functions, (x,))
    return functions[x.sum() <= 0](x)


#: Programs in which a function that torch calls is the first to take floats. Some floats are used outside, too.
WITH_FLOATS = {
    "checkpoint": lambda model, x, scale: _checkpointed(lambda y: model(y) * scale, x),
    "more checkpoints": lambda model, x, scale: (
        _checkpointed(lambda y: _checkpointed(model, y * scale) + model(y), x) + _checkpointed(model, x) * scale
    ),
    "Function": lambda model, x, scale: Scaled.apply(model(x), scale),
    "cond": lambda model, x, scale: model(_choose(x, scale)) * scale,
}


@pytest.mark.parametrize("way", ["dynamo", "backend"])
@pytest.mark.parametrize("program", WITH_FLOATS.values(), ids=WITH_FLOATS)
def test_floats_that_vary(program, way):
    """Dynamo passes some numbers as tensors.

    In functions that torch calls, they are numbers again, with their current values.
    """

    def outcome(compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Dropout(0.1), nn.BatchNorm1d(3))
        call, found = compile(lambda x, scale: program(model, x, scale)), []
        for size in (4, 5):
            result = call(torch.randn(size, 3), size / 3)
            result.square().sum().backward()
            found += [result, *(parameter.grad.clone() for parameter in model.parameters()), *model.buffers()]
            model[1].eps, model[2].p, model[3].momentum = 0.01, 0.2, 0.3
        return [each.tolist() for each in found]

    ways = {
        "dynamo": lambda f: aotlab.compile(f, backend="eager", frontend="dynamo", dynamic=True),
        "backend": lambda f: torch.compile(f, backend="aotlab", options={"compiler": "eager"}, dynamic=True),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*eagerly")
        found = outcome(ways[way])
    assert outcome(lambda f: f) == found
