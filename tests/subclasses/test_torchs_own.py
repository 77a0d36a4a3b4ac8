"""Torch's own subclasses: `DTensor` in one process, and subclasses that run eagerly."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import aotlab
from tests.subclasses.kinds import plain, same

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
if dist.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor


@pytest.fixture(scope="module")
def mesh():
    """Make a group of this process alone."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


PROGRAMS = {
    "alone": lambda t, w: t * 2,
    "two of different placement": lambda t, w: (t @ w).relu(),
    "redistributed": lambda t, w: t.redistribute(t.device_mesh, [Replicate()]) * 2,
    "gathered": lambda t, w: t.full_tensor() * 2,
    "local": lambda t, w: t.to_local() * 2 + w.to_local(),
    "made inside": lambda t, w: DTensor.from_local(t.to_local() * 2, t.device_mesh, [Shard(0)]) @ w,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("grad", [False, True])
def test_distributed(name, grad, mesh):
    """Results and gradients, their placements too, are eager's."""

    def make():
        made = [(0, Shard(0)), (1, Replicate())]
        return [distribute_tensor(plain(i, (4, 4)), mesh, [p]).requires_grad_(grad) for i, p in made]

    compiled = aotlab.compile(PROGRAMS[name], backend="eager")
    for _ in range(2):
        ours, theirs = make(), make()
        result, expected = compiled(*ours), PROGRAMS[name](*theirs)
        assert same(result, expected)
        if grad:
            for each in (result, expected):
                each.backward(each.detach())  # a gradient that is placed as the result is
            assert same([t.grad for t in ours], [t.grad for t in theirs], versions=False)
    assert compiled.calls.compiled == 2
    assert len(compiled.entries) == 1


def test_ten_steps(mesh):
    """Ten steps of SGD on a module with distributed parameters agree with eager."""
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        distribute_module(net, mesh)
        call = aotlab.compile(net, backend="eager") if compiles else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(10):
            optimizer.zero_grad()
            loss = call(distribute_tensor(plain(step), mesh, [Shard(0)])).square().mean()
            loss.backward()
            optimizer.step()
        found.append([p.detach() for p in net.parameters()])
        assert not compiles or (call.compiled.calls.compiled, len(call.compiled.entries)) == (10, 1)
    assert same(*found)
