"""Dropout masks of zeros and ones are saved as bools, and so are numbers computed from bools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aotlab
from aotlab.bench.memory import kept_by_eager, measure_memory
from tests.engine_helpers import same

PARTITIONERS = [aotlab.default_partition, aotlab.min_cut_rematerialization_partition]


def stack() -> nn.Module:
    """Six layers whose dropout saves a mask in addition to the activations."""
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.SiLU(), nn.Dropout(0.1))))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_a_stack_keeps_no_more_than_with_upstreams_min_cut(partitioner):
    """A stack of layers keeps no more than with upstream's min cut.

    It keeps less than eager, which saves masks as floats.
    """
    model, x = stack(), torch.randn(64, 64)
    ours = aotlab.compile(model, backend="eager", partitioner=partitioner)
    upstream = torch.compile(model, backend="aot_eager_decomp_partition")
    kept = measure_memory(lambda: ours(x)).kept_bytes
    assert kept <= 1.02 * measure_memory(lambda: upstream(x)).kept_bytes
    assert kept < kept_by_eager(model, x)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "scan", [pytest.param(True, marks=pytest.mark.tier("full")), pytest.param(False, marks=pytest.mark.tier("long"))]
)
def test_mamba_keeps_no_more_than_what_dynamo_captured(scan):
    """Mamba keeps no more than the graph that Dynamo captured keeps when it runs eagerly.

    When transformers' Mamba is compiled, it uses an associative scan unless its config says otherwise. The scan keeps
    more than eager's loop. Without the scan, the default partitioner keeps eager's bytes.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.MambaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=8, use_associative_scan=scan
    )
    model, tokens = transformers.MambaForCausalLM(config).train(), torch.randint(0, 50, (2, 32))

    def kept(function: Callable[..., Any]) -> int:
        torch._dynamo.reset()
        return measure_memory(lambda: function(input_ids=tokens, labels=tokens, use_cache=False).loss).kept_bytes

    captured = kept(torch.compile(model, backend="eager"))
    assert scan or captured == kept(model)
    ours, least = (
        kept(aotlab.compile(model, backend="eager", frontend="dynamo", partitioner=each)) for each in PARTITIONERS
    )
    assert ours <= captured
    assert least <= min(1.02 * kept(torch.compile(model, backend="aot_eager_decomp_partition")), kept(model))


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize(
    "program",
    [
        lambda x: functional.dropout(x, 0.3).sin(),
        lambda x: functional.dropout(x.double(), 0.3) * x,
        lambda x: functional.alpha_dropout(x, 0.3) * x,
        lambda x: functional.dropout1d(x, 0.5) ** 2,
        lambda x: x * torch.bernoulli(x.sigmoid()),
        lambda x: x * torch.empty_like(x).bernoulli_(0.5).mul_(2),
        lambda x: functional.dropout(x.t(), 0.5).exp(),
        lambda x: ((x > 0).float() * -3 + 1) * x.exp(),
        lambda x: (x.exp() > 1).to(torch.float64).neg().exp() * x,
    ],
)
def test_as_in_eager(program, partitioner):
    """Results equal eager's bit for bit, also in second derivatives."""

    def with_derivatives(x: Tensor) -> tuple[Tensor, Tensor]:
        y = program(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, gradient

    def make(function):
        return aotlab.compile(function, backend="eager", frontend="direct", partitioner=partitioner)

    x = torch.randn(4, 6).requires_grad_()
    same(program, x, make=make)
    same(with_derivatives, x, make=make)


def test_drawn_numbers_that_are_returned():
    """Returned random numbers belong to the caller. They are also saved as bools only if the backward needs them."""

    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drawn = torch.empty_like(x).bernoulli_(0.5)
        scaled = drawn / 0.5
        return drawn, scaled, x.exp() * scaled

    same(program, torch.randn(3, 4).requires_grad_())


def test_written_between():
    """A dropout mask that is written no longer has its drawn values, so it cannot be stored as bits."""

    def program(x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        y = x.exp() * mask.div_(0.5)
        mask.add_(1)
        return y * mask * x

    for function in (program, aotlab.compile(program, backend="eager", frontend="direct")):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            function(torch.randn(3, 4).requires_grad_()).sum().backward()

    def without_history(x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        mask.div_(0.5)[0].add_(1)
        return x.exp() * mask

    same(without_history, torch.randn(3, 4).requires_grad_())
