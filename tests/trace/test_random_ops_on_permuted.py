"""Dropout and ``bernoulli_`` of tensors whose dimensions are not in the order of their memory."""

from __future__ import annotations

import functools

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional

from aotlab.quirks import random_order
from tests.engine_helpers import compiled, same

MAKERS = {
    "transposed": lambda: torch.rand(30, 20).t(),
    "permuted": lambda: torch.rand(3, 4, 5).permute(2, 0, 1),
    "large": lambda: torch.rand(65, 64, 33).permute(1, 2, 0),
    "channels last": lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "a dimension of one": lambda: torch.rand(1, 6, 8).transpose(1, 2),
    "one in the middle": lambda: torch.rand(4, 1, 3).permute(2, 0, 1),
}

PROGRAMS = {
    "dropout": lambda x: functional.dropout(x, 0.4),
    "dropout in place": lambda x: functional.dropout(x, 0.4, inplace=True) * 2,
    "bernoulli_": lambda x: (x * 1).bernoulli_(0.3),
    "several": lambda x: (
        functional.dropout(functional.dropout(x.sin(), 0.4).t(), 0.2) if x.dim() == 2 else x,
        torch.rand(3),
    ),
    "alpha": lambda x: functional.alpha_dropout(x, 0.3, training=True),
}

_LIBRARY = torch.library.Library("draws", "FRAGMENT")
_LIBRARY.define("turned(Tensor x) -> Tensor")
_LIBRARY.impl("turned", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("draws::turned", torch.empty_like, lib=_LIBRARY)
torch.library.register_autograd("draws::turned", lambda ctx, gradient: gradient.clone(), lib=_LIBRARY)

#: Which way a kernel goes differs from processor to processor; eager has the call where it goes by indices.
EAGERLY = not (random_order._goes_along_memory(torch.float32) and random_order._goes_along_memory(torch.float64))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_numbers_are_eagers(program, make):
    """Values, strides, gradients and the generator's state are eager's, and the call is compiled."""
    eagerly = EAGERLY and not (program is PROGRAMS["several"] and make().dim() != 2)
    same(program, make(), eagerly=eagerly)
    same(program, make().requires_grad_() * 1, eagerly=eagerly)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_a_layer_of_torchs_own(frontend, backend):
    """A Transformer's layer, batch first, is trained with eager's numbers; its attention's result is transposed."""
    torch.compiler.reset()
    found = []
    for make in (lambda m: m, functools.partial(compiled, backend=backend, frontend=frontend)):
        torch.manual_seed(0)
        module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double()
        call = make(module)
        with torch._inductor.config.patch(fallback_random=True):
            call(torch.ones(3, 5, 8).double()).exp().sum().backward()  # squares would have no gradient behind a norm
        if frontend == "direct" and call is not module:
            assert call.compiled.calls.compiled == 1 - EAGERLY
        found.append([*(p.grad for p in module.parameters()), torch.get_rng_state()])
    torch.testing.assert_close(*found)


def test_after_a_batch_norm():
    """Its result lies row by row on the CPU, whatever it is given; torch's fake says otherwise."""

    def program(x: Tensor) -> Tensor:
        return functional.dropout(functional.batch_norm(x, None, None, training=True), 0.5)

    same(program, torch.rand(6, 5).t(), eagerly=False)
    same(program, torch.rand(6, 5).t().requires_grad_() * 1, eagerly=False)


def test_after_another_op():
    """Torch's fake says how its result lies."""

    def program(x: Tensor) -> Tensor:
        return functional.dropout(x.flip(0), 0.5)

    same(program, torch.rand(6, 5).t())
    same(program, torch.rand(6, 5).t().requires_grad_() * 1)


@pytest.mark.parametrize("why", ["another's op", "by indices"])
def test_where_it_is_not_certain_eager_runs(why, monkeypatch):
    """Nobody says whether the fake of somebody else's op is right; or the kernel that draws goes by indices."""

    def program(x: Tensor) -> Tensor:
        x = torch.ops.draws.turned(x) if why == "another's op" else x * 1
        return functional.dropout(x, 0.5)

    if why == "by indices":
        monkeypatch.setattr(random_order, "_goes_along_memory", lambda *_: False)
    same(program, torch.rand(6, 5).t(), eagerly=True)
    same(program, torch.rand(6, 5).t().requires_grad_() * 1, eagerly=True)
