"""`DTensor` and `DistributedDataParallel` on two processes: each has a part of the weights or of the data."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import aotlab
from tests.subclasses.kinds import plain, same
from tests.test_pipeline import HARMLESS, poison

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.tier("full"),
]
if dist.is_available():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel


def sharded(name, module, mesh):
    """Shard the weights by rows in one layer and by columns in the next."""
    place = {"0": Shard(0), "2": Shard(1)}.get(name)
    for key, parameter in list(module.named_parameters(recurse=False)) if place else []:
        placements = [Replicate() if key == "bias" and name == "2" else place]
        module.register_parameter(key, torch.nn.Parameter(distribute_tensor(parameter, mesh, placements)))


def train(mesh, kind, *, compiles):
    """Train ten steps; return losses, gradients of the last step and parameters, and how calls were served."""
    is_sharded = kind == "sharded"  # the weights are sharded, or else the batches
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    distribute_module(net, mesh, sharded if is_sharded else None)
    call = aotlab.compile(net, backend="eager") if compiles else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        batch = distribute_tensor(plain(step, (6, 4)), mesh, [Replicate() if is_sharded else Shard(0)])
        loss = call(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if compiles:
        assert (call.compiled.calls.compiled, len(call.compiled.entries)) == (10, 1)
    return losses, [p.grad for p in net.parameters()], [p.detach() for p in net.parameters()]


def process(rank, kind, meeting):
    """Be one of the two: train compiled and eagerly."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        aotlab.config.fallback = "error"
        with pytest.MonkeyPatch.context() as patch:
            poison(patch, HARMLESS)
            ours = train(mesh, kind, compiles=True)
        theirs = train(mesh, kind, compiles=False)
        assert same(ours, theirs, versions=False)
        if kind == "sharded":
            assert [tuple(p.to_local().shape) for p in ours[2]] == [(4, 4), (4,), (2, 4), (2,)]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_ten_steps(kind, tmp_path):
    """Ten steps of SGD equal eager bit for bit in both processes; an error in one of them fails the test."""
    processes.spawn(process, args=(kind, str(Path(tmp_path, "meeting"))), nprocs=2)


def train_in_parallel(rank, way):
    """Train on this process's own batches, and compare with eager."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    ours, theirs = copy.deepcopy(net), DistributedDataParallel(net)
    if way == "wrapped":
        call = DistributedDataParallel(aotlab.compile(ours, backend="eager"))
    else:
        call = aotlab.compile(DistributedDataParallel(ours), backend="eager", frontend=way)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ours, theirs)]
    for step in range(3):
        batch = plain(2 * step + rank, (6, 4))
        for module, optimizer in zip((call, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            optimizer.step()
    assert same(list(ours.parameters()), list(net.parameters()), versions=False)


def process_in_parallel(rank, way, meeting):
    """Be one of the two."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        train_in_parallel(rank, way)
    finally:
        torch.compiler.reset()
        gc.collect()  # torch may hang if the last wrapper is freed after its group
        dist.destroy_process_group()


@pytest.mark.parametrize("way", ["direct", "dynamo", "wrapped"])
def test_data_in_parallel(way, tmp_path):
    """Three steps with gradients averaged over both processes, bit for bit as in eager."""
    processes.spawn(process_in_parallel, args=(way, str(Path(tmp_path, "meeting"))), nprocs=2)
