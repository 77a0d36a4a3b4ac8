"""Tensor, sequence and loss parallelism (DTensor) compiled, on two processes, beside the same model run eagerly."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

import aotlab
from tests.distributed.models import Llama, loss_of
from tests.distributed.processes import assert_same, run

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.tier("full"),
]
if dist.is_available():
    import torch.distributed._functional_collectives as collectives
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )


def _plans(kind):
    """Return the plans of the whole model and of each block."""
    layers = ("attention.q", "attention.k", "attention.v", "gate", "up")
    if kind == "tensor":
        block = {name: ColwiseParallel() for name in layers}
        return {}, {**block, "attention.out": RowwiseParallel(), "down": RowwiseParallel()}
    by_row = {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "down")}
    block = {
        "norm": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        **{name: ColwiseParallel() for name in layers[:3]},
        **{name: ColwiseParallel(input_layouts=Shard(1)) for name in layers[3:]},
        **by_row,
    }
    head = (
        {"output_layouts": Shard(-1), "use_local_output": False} if kind == "loss" else {"output_layouts": Replicate()}
    )
    whole = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), **head),
    }
    return whole, block


def _compiled(way, model):
    if way == "direct":
        return aotlab.compile(model, backend="eager")
    if way == "dynamo":
        return aotlab.compile(model, backend="eager", frontend="dynamo")
    if way == "registered":
        return torch.compile(model, backend="aotlab", options={"compiler": "eager"})
    return model


def train(way, kind, rank, *, steps, groups=1):
    """Train, and return all losses and the whole parameters. ``way`` is None for eager.

    With several ``groups`` of processes, FSDP2 shards the parameters over the groups. Each group gets other batches.
    """
    count = dist.get_world_size() // groups
    mesh = init_device_mesh("cpu", (groups, count), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Llama()
    whole, of_block = _plans(kind)
    for n, block in enumerate(model.blocks):
        parallelize_module(block, mesh["tensor"], of_block)
        block = aotlab.compile(block, backend="eager") if way == "blocks" else block
        model.blocks[n] = fully_shard(block, mesh=mesh["data"]) if groups > 1 else block
    parallelize_module(model, mesh["tensor"], whole)
    model = fully_shard(model, mesh=mesh["data"]) if groups > 1 else model
    call = _compiled(way, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, wanted = Llama.batch(step + 100 * (rank // count))
        with loss_parallel() if kind == "loss" else nullcontext():
            loss = loss_of(call(tokens), wanted)
            loss.backward()
        optimizer.step()
        results.append(_whole(loss.detach()))
    return [*results, *(_whole(each.detach()) for each in model.parameters())]


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _ways(rank, kind, ways, groups=1):
    wanted = train(None, kind, rank, steps=10, groups=groups)
    for way in ways:
        assert_same((kind, way), train(way, kind, rank, steps=10, groups=groups), wanted)


@pytest.mark.parametrize("kind", ["tensor", "sequence", "loss"])
def test_ten_steps(kind, tmp_path):
    """Ten steps of a small Llama equal eager bit for bit, and no part of the model runs eagerly."""
    captured = {"tensor": "dynamo", "sequence": "registered", "loss": "registered"}[kind]
    run(_ways, tmp_path / "meeting", kind, ("direct", "blocks", captured))


def _with_fsdp(rank):
    _ways(rank, "tensor", ("blocks",), groups=2)
    _ways(rank, "sequence", ("blocks",), groups=2)


def test_ten_steps_with_fsdp(tmp_path):
    """Four processes: two groups, over which FSDP2 shards the parameters, of two processes with tensor parallelism."""
    run(_with_fsdp, tmp_path / "meeting", count=4)


def _programs(rank):
    mesh = init_device_mesh("cpu", (2,))

    def redistributed(x):
        return x.redistribute(mesh, [Replicate()]).sin(), (x * 2).to_local()

    def regrouped(x):
        return DTensor.from_local(x.to_local(), mesh, [Partial()]).full_tensor(), x.mean()

    def written(x):
        x.to_local().mul_(2)
        return x.mul_(3) + 1

    torch.manual_seed(0)
    values = torch.randn(4, 6)
    for program in (redistributed, regrouped, written):
        ours = aotlab.compile(program, backend="eager")
        for placement in (Shard(0), Shard(1), Replicate()):
            found = []
            for call in (program, ours):
                x = distribute_tensor(values.clone(), mesh, [placement])
                result = call(x)
                result = result if isinstance(result, tuple) else (result,)
                found.append([_whole(each) for each in (*result, x)])
            assert_same((program.__name__, placement), *found)
        assert (ours.calls.total, ours.calls.eager, ours.calls.by_dynamo) == (3, 0, 0)


def _collectives(rank):
    group = dist.group.WORLD

    def program(x, w):
        y = collectives.all_gather_tensor_autograd(x @ w, 0, group)
        y = collectives.reduce_scatter_tensor_autograd(y * y, "sum", 0, group)
        return y, collectives.all_reduce(y.detach(), "sum", group)

    ours = aotlab.compile(program, backend="eager")
    found = []
    for call in (program, ours):
        torch.manual_seed(rank)
        x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
        y, total = call(x, w)
        (y * y).sum().backward()  # torch 2.11 needs contiguous gradients
        found.append([y.detach() + 0, total + 0, w.grad])
    assert_same("collectives", *found)
    assert (ours.calls.total, ours.calls.eager, ours.calls.by_dynamo) == (1, 0, 0)


@pytest.mark.parametrize("function", [_programs, _collectives])
def test_programs(function, tmp_path):
    """Programs that redistribute a DTensor, write it, or call collectives are compiled, and equal eager bit for bit."""
    run(function, tmp_path / "meeting")
