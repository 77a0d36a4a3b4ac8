"""torchao: int8 weights in inference, and training with fake quantization, agree with eager."""

from __future__ import annotations

import warnings

import pytest
import torch

import aotlab
from aotlab import events
from tests.subclasses.kinds import parts, plain, same

pytestmark = pytest.mark.tier("full")
with warnings.catch_warnings():  # warnings of torchao's imports
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao", reason='needs torchao: pip install "aotlab[subclasses]"', exc_type=ImportError)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig


def net():
    """Make two layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("grad_mode", [False, True])
def test_int8_weights(backend, grad_mode):
    """The graphs unwrap int8 weights into data and scales."""
    model = net()
    quantize_(model, Int8WeightOnlyConfig())
    compiled = aotlab.compile(model, backend=backend)
    with torch.set_grad_enabled(grad_mode):
        for step in range(3):
            ours, theirs = compiled(plain(step, (4, 64))), model(plain(step, (4, 64)))
            assert backend != "eager" or same(ours, theirs, versions=False)
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert (compiled.compiled.calls.compiled, len(compiled.compiled.entries)) == (3, 1)
    dtypes = [part.dtype for part in parts(model[0].weight)[1]]
    assert torch.int8 in dtypes
    assert len(dtypes) > 1


def prepare(model):
    """Have weights quantised and back in each forward."""
    quantize_(model, QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int8, "per_channel"), step="prepare"))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_fake_quantised_weights(backend):
    """Ten steps agree with eager; Dynamo captures torchao's layers, which keep their scales as attributes."""
    found, served = [], []
    for compiles in (True, False):
        model = net()
        prepare(model)
        call = aotlab.compile(model, backend=backend, frontend="dynamo") if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(10):
            optimizer.zero_grad()
            with events.listen(served.append):
                out = call(plain(step, (4, 64)))
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        found.append((losses, [p.detach() for p in model.parameters()], model[0].weight_fake_quantizer.scale.detach()))
    entries = [event.entry for event in served if isinstance(event, events.Called)]
    assert len(entries) == 10
    assert None not in entries
    if backend == "eager":
        assert same(*found)
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)
