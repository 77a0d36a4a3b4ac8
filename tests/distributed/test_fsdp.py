"""FSDP2 (`fully_shard`) over compiled modules, and compiled, on two processes, beside FSDP2 run eagerly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import aotlab
from tests.distributed.models import MODELS, Checkpointed, loss_of
from tests.distributed.processes import assert_same, run

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.tier("full"),
]
if dist.is_available():
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def _by_aotlab(module):
    return aotlab.compile(module, backend="eager")


def _by_dynamo(module):
    return torch.compile(module, backend="aotlab", options={"compiler": "eager"})


def _built(way, kind, mesh, *, checkpointed=False, **settings):
    """Make a sharded model. Return it, and the callable that runs it."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    blocks = model.blocks
    compiler = _by_dynamo if way == "registered" else _by_aotlab
    for n, block in enumerate(blocks):
        block = Checkpointed(block) if checkpointed else block
        block = compiler(block) if way in ("blocks inside", "registered") else block
        fully_shard(block, mesh=mesh, **settings)
        blocks[n] = compiler(block) if way == "blocks outside" else block
    fully_shard(model, mesh=mesh, **settings)
    return model, _by_dynamo(model) if way == "whole" else model


def train(way, kind, rank, *, steps=10, rounds=1, reload=False, **settings):
    """Train, and return all losses, and the whole parameters and buffers. ``way`` is None for eager."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, call = _built(way, kind, mesh, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        for n in range(rounds):
            model.set_requires_gradient_sync(n + 1 == rounds)
            inputs, wanted = MODELS[kind].batch(1000 * rank + 10 * step + n)
            loss = loss_of(call(inputs), wanted)
            loss.backward()
            results.append(loss.detach())
        optimizer.step()
    if way in ("blocks inside", "blocks outside"):
        for block in model.blocks:
            calls = block.compiled.calls
            assert (calls.total, calls.eager, calls.by_dynamo) == (steps * rounds, 0, 0)
            assert len(block.compiled.entries) == 1
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if reload:
        again, call = _built(way, kind, mesh, **settings)
        again.load_state_dict(model.state_dict())
        with torch.no_grad():
            results.append(call(MODELS[kind].batch(rank)[0]))
    return [*results, *(whole[name] for name in sorted(whole))]


WAYS = {
    "llama": ("blocks inside", "blocks outside", "registered", "whole"),
    "resnet": ("blocks inside", "blocks outside"),
}  # fmt: skip


def _ways(rank):
    for kind in MODELS:
        wanted = train(None, kind, rank)
        for way in WAYS[kind]:
            assert_same((kind, way), train(way, kind, rank), wanted)


def test_ten_steps(tmp_path):
    """Ten steps equal eager bit for bit: FSDP2 frees the parameters after each forward, and gathers them again."""
    run(_ways, tmp_path / "meeting")


def _on_four(rank):
    for kind in MODELS:
        assert_same(kind, train("blocks inside", kind, rank), train(None, kind, rank))


def test_ten_steps_on_four_processes(tmp_path):
    """Ten steps on four processes equal eager bit for bit."""
    run(_on_four, tmp_path / "meeting", count=4)


def _settings(rank):
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rows = {
        "parameters stay": {"reshard_after_forward": False},
        "accumulated, and loaded into another model": {"rounds": 2, "reload": True},
        "mixed precision": {"mp_policy": bfloat16},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "checkpointed": {"checkpointed": True},
    }
    for name, settings in rows.items():
        wanted = train(None, "llama", rank, steps=3, **settings)
        for way in ("blocks inside", "blocks outside"):
            assert_same((name, way), train(way, "llama", rank, steps=3, **settings), wanted)


def test_settings(tmp_path):
    """The modes of FSDP2 agree with eager."""
    run(_settings, tmp_path / "meeting")
