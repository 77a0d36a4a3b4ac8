"""Streams, precisions and devices, which can go wrong on a GPU. The same code runs on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.engine_helpers import behind, compiled, same

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_GPU = pytest.mark.gpu
DEVICES = pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=ON_GPU)], ids=str)


def leaf(*shape: int, device: torch.device) -> Tensor:
    """Make a leaf that requires grad."""
    return torch.randn(*shape, device=device, requires_grad=True)


@DEVICES
def test_on_streams_of_its_own(device: torch.device) -> None:
    """Forward, a write and backward run on the caller's stream in order, and synchronize with no other stream."""
    streams: Any = torch.get_device_module(device)
    on: Callable[[Any], AbstractContextManager[None]] = streams.stream

    def step(x: Tensor, w: Tensor) -> Tensor:
        x.mul_(0.5)
        return (x @ w).relu()

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        w = leaf(512, 512, device=device)
        results = []
        for _ in range(3):
            stream = streams.Stream()
            stream.wait_stream(streams.current_stream())
            with on(stream):
                x = torch.randn(512, 512, device=device)
                for _ in range(20):  # is still running when the call begins
                    x = (x @ x).tanh()
                out = function(x, w)
                results += [x, out.detach(), *torch.autograd.grad(out.sum(), w)]
            streams.current_stream().wait_stream(stream)
        streams.synchronize()
        return results

    candidate = compiled(step, fullgraph=True)
    for one, other in zip(run(candidate), run(step), strict=True):
        assert torch.equal(one, other)
    assert behind(candidate).calls.compiled == 3


@DEVICES
def test_autocast_and_scaled_gradients(device: torch.device) -> None:
    """Steps in half precision, one of which is skipped because its gradients are not finite, equal eager's."""
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16

    def train(make: Callable[[nn.Module], Any]) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).to(device)
        run, optimizer = make(model), torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler(device.type, init_scale=64.0, growth_interval=2)
        scales, seen = [], []
        for n in range(4):
            x = torch.randn(5, 8, device=device) * (float("inf") if n == 2 else 1.0)
            with torch.autocast(device.type, dtype):
                out = run(x)
                loss = out.float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            seen += [out.detach(), *(p.detach().clone() for p in model.parameters())]
        return scales, seen

    made: list[Any] = []

    def make(model: nn.Module) -> Any:
        made.append(compiled(model, fullgraph=True))
        return made[-1]

    (scales, found), (known_scales, expected) = train(make), train(lambda model: model)
    assert scales == known_scales == [64.0, 128.0, 64.0, 64.0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert behind(made[0]).calls.eager == 0


@DEVICES
def test_moved_without_waiting(device: torch.device) -> None:
    """A function may copy pinned memory to the device asynchronously."""

    def step(batch: Tensor, w: Tensor) -> Tensor:
        return batch.to(device, non_blocking=True) @ w

    batch = torch.randn(256, 256)
    same(step, batch.pin_memory() if device.type == "cuda" else batch, leaf(256, 3, device=device))


@DEVICES
@pytest.mark.parametrize("grad", [False, True], ids=["constant", "leaf"])
def test_a_number_on_the_cpu(device: torch.device, grad: bool) -> None:
    """A scalar on the CPU among inputs on the device is read and written there, and so is its gradient."""

    def step(x: Tensor, scale: Tensor, count: Tensor) -> Tensor:
        count += 1
        return (x * scale).sin() / count

    same(step, leaf(4, 3, device=device), torch.tensor(1.5, requires_grad=grad), torch.tensor(2.0))


@DEVICES
def test_on_two_devices(device: torch.device) -> None:
    """Inputs on the CPU, next to inputs on a GPU, are read, written and returned on the CPU.

    Each gradient is on its input's device.
    """

    def step(x: Tensor, y: Tensor, log: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log.add_(1)
        moved = y.to(x.device)
        return x * moved, y.exp(), log.t()

    same(step, leaf(4, 3, device=device), leaf(4, 3, device=CPU), torch.zeros(2, 3))


@DEVICES
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_attention_in_training(checkpointed: bool, device: torch.device) -> None:
    """Attention's backward draws no random numbers.

    Without dropout its forward draws none, so a checkpoint may repeat it.
    """

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, k.sin())

    def step(q: Tensor, k: Tensor) -> Any:
        return (checkpoint(attend, q, k, use_reentrant=False) if checkpointed else attend(q, k)) * 2

    same(step, *(leaf(2, 4, 16, 8, device=device) for _ in range(2)))


@ON_GPU
def test_the_first_attention_of_a_process() -> None:
    """Torch chooses the order of its attention kernels at the first attention of a process.

    This is not taken for a setting that the function changes.
    """
    program = (
        "import torch, aotlab; q = torch.randn(1, 2, 16, 8, device='cuda');"
        "attend = torch.nn.functional.scaled_dot_product_attention;"
        "f = aotlab.compile(lambda q: attend(q, q, q), backend='eager', fullgraph=True);"
        "f(q); f(q); assert len(f.entries) == 1, f.entries"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("size", "device"), [(4, CPU), pytest.param(3, GPU, marks=ON_GPU)], ids=["another size", "another device"]
)
def test_what_cannot_be_added(size: int, device: torch.device) -> None:
    """The error, and the write that happens before it, are eager's."""

    def step(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        z.add_(1)
        return x + y

    same(step, torch.ones(3), torch.ones(size, device=device), torch.zeros(2), eagerly=True, entries=None)


@ON_GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus() -> None:
    """Each part runs on the device of its inputs, whatever device is current."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y.mul_(2)
        return x.sin() + y.to(x.device), y.sum(0)

    same(step, leaf(4, 3, device=GPU), torch.randn(4, 3, device="cuda:1"))
