"""Models of transformers and diffusers with dropout, on Inductor with eager's numbers: three steps are eager's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._inductor.config

import aotlab
from aotlab import events
from tests.engine_helpers import heard_events
from tests.training.models import bert, detr, gemma, loss_of, segformer, unet

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600),
]  # fmt: skip


def train(model, call, batch):
    """Return the losses of three steps, the parameters after them, and where the random generator is then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = loss_of(call(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.detach() for parameter in model.parameters()], torch.get_rng_state()


CASES = [
    *[pytest.param(make, "eager", marks=pytest.mark.tier("full")) for make in (bert, segformer)],
    *[pytest.param(make, "eager", marks=pytest.mark.tier("long")) for make in (gemma, detr, unet)],
    *[pytest.param(make, "inductor", marks=pytest.mark.tier("full")) for make in (gemma,)],
    *[pytest.param(make, "inductor", marks=pytest.mark.tier("long")) for make in (bert, segformer, detr, unet)],
]


@pytest.mark.parametrize(("make", "backend"), CASES)
def test_three_steps_are_eagers(make, backend):
    """All of it compiled: bit for bit on the eager backend; on Inductor close, with the same random numbers."""
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    other = copy.deepcopy(model)
    expected = train(model, model, batch)
    with torch._inductor.config.patch(fallback_random=True), heard_events() as heard:
        found = train(other, aotlab.compile(other, backend=backend, frontend="dynamo"), batch)
    exact = {"rtol": 0, "atol": 0} if backend == "eager" else {}
    torch.testing.assert_close(found, expected, **exact)
    assert not [event for event in heard if isinstance(event, events.CompileFailed)]
