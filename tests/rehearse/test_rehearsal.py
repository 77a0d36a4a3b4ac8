"""Kernels for cards that are not there: compiled, described, run by Triton's interpreter; and nothing stays of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install 'aotlab[rehearse]'")
if torch.cuda.is_available():
    pytest.skip("there is a GPU here", allow_module_level=True)

import triton

import aotlab
from aotlab.errors import UsageError
from aotlab.rehearse import CARDS, Kernel, RehearsalBackend, rehearse
from tests.rehearse.programs import PROGRAMS

pytestmark = pytest.mark.tier("full")
#: Loops over blocks end with an error there.
OLD_INTERPRETER = triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0"


def only(kernels: list[Kernel]) -> Kernel:
    """Return the only kernel."""
    (kernel,) = kernels
    return kernel


def test_a_kernel_is_described() -> None:
    """A kernel is described by its source, its compiled code, its use of the card, and the bytes that a call moves."""
    kernel = only(rehearse(lambda x, y: x.sin() + y, torch.randn(1000, 10), torch.randn(10)))
    assert (kernel.graph, kernel.calls) == ("inference", 1)
    assert "@triton.jit" in kernel.source
    assert ".visible .entry triton_" in kernel.ptx
    assert kernel.cubin.startswith(b"\x7fELF")
    assert 8 <= kernel.registers <= 255
    assert (kernel.shared, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0)
    assert (kernel.bytes_read, kernel.bytes_written) == (40_000 + 40, 40_000)
    blocks, *others = kernel.grid
    assert others == [1, 1]
    assert 10_000 / 1024 <= blocks <= 10_000 / 32


def test_a_reduction_takes_shared_memory() -> None:
    """One kernel in one block per row."""
    kernel = only(rehearse(lambda x: x.softmax(-1), torch.randn(64, 3000)))
    assert kernel.grid == (64, 1, 1)
    assert kernel.shared > 0
    assert kernel.warps > 1
    assert kernel.bytes_written == 64 * 3000 * 4


def test_the_forward_and_the_backward_of_a_training_call() -> None:
    """Both graphs are compiled, and the arguments are left without a gradient."""
    x = torch.randn(16, 64, requires_grad=True)
    kernels = rehearse(lambda x: torch.nn.functional.layer_norm(x, (64,)).sum(), x)
    assert {kernel.graph for kernel in kernels} == {"forward", "backward"}
    assert x.grad is None


@pytest.mark.parametrize("card", CARDS)
def test_each_card_has_its_own_code(card: str) -> None:
    """The PTX is for its architecture."""
    kernel = only(rehearse(lambda x: x.exp(), torch.randn(100), card=card))
    assert f".target sm_{CARDS[card].capability}" in kernel.ptx


def facts() -> dict[str, Any]:
    """Return the state that a rehearsal changes temporarily."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import async_compile, config
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._triton import has_triton
    from triton.runtime.driver import driver

    owners = {
        torch.cuda: ("is_available", "get_device_properties", "current_device", "_lazy_init", "_DeviceGuard"),
        CudaInterface: ("is_available", "get_compute_capability", "is_triton_capable"),
        async_compile.AsyncCompile: ("triton",),
        triton_helpers: ("set_driver_to_gpu",),
        torch._C._dynamo.guards: ("_empty_strided_cuda",),
        FakeTensorMode: ("avoid_device_init",),
        config: ("force_disable_caches", "compile_threads"),
    }
    found: dict[str, Any] = {
        f"{owner}.{name}": vars(owner).get(name, "none") if owner is not config else getattr(config, name)
        for owner, names in owners.items()
        for name in names
    }
    found["driver"] = driver._active
    found["stream"] = hasattr(torch._C, "_cuda_getCurrentRawStream")
    found["modes"] = len(torch.overrides._get_current_function_mode_stack())
    return {**found, "has_triton": has_triton(), "available": torch.cuda.is_available()}


def boom(x: torch.Tensor) -> torch.Tensor:
    """Compute something."""
    return x * 2


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Afterwards torch and Triton are as before, also if the compilation failed, and the CPU's kernels are C++."""
    before = facts()
    if fails:
        from torch._inductor import graph

        monkeypatch.setattr(graph.GraphLowering, "codegen", None)
        with pytest.raises(Exception, match="NoneType"):
            rehearse(boom, torch.ones(3))
        monkeypatch.undo()
    else:
        rehearse(boom, torch.ones(3))
    assert facts() == before
    with aotlab.Report.record() as recording:
        compiled: Any = aotlab.compile(boom, backend="inductor")
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert {kernel.language for frame in recording.frames for kernel in frame.graphs[0].kernels} == {"c++"}


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown card, a process of the other kind, and a machine with a GPU."""
    with pytest.raises(UsageError, match="there is no card 'h900'; there are h100, h200"):
        RehearsalBackend("h900")
    with pytest.raises(UsageError, match="Set TRITON_INTERPRET=1 before Python starts"):
        RehearsalBackend("h100", interpret=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="there is a GPU here"):
        rehearse(boom, torch.ones(3))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Run all programs in a process in which Triton interprets."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rehearse.programs"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("name", [*PROGRAMS, "seeded_dropout"])
def test_interpreted_kernels_equal_eager(interpreted: dict[str, Any], name: str) -> None:
    """Results, arguments and gradients, by the kernels that Inductor wrote for the card."""
    if OLD_INTERPRETER and name in ("reductions", "long_reduction"):
        pytest.skip("Triton 3.6 interprets loops with NumPy before 2.4 only")
    assert interpreted[name]["differences"] == []
    assert interpreted[name]["kernels"]
    assert all(kernel.startswith("triton_") for kernel in interpreted[name]["kernels"])


def test_there_are_ten_programs() -> None:
    """There are at least as many programs as the requirement asks."""
    found: dict[str, Callable[..., Any]] = PROGRAMS
    assert len(found) >= 10


def test_ops_that_look_at_values() -> None:
    """The run that says how kernels are called finds no values in memory that they would have filled."""
    bag, words = torch.nn.EmbeddingBag(10, 4), torch.randint(0, 10, (3, 4))
    assert len(rehearse(bag, words)) > 0
    assert len(rehearse(lambda x: torch.linalg.inv(x.exp()) * 2, torch.randn(4, 4))) == 2


@pytest.mark.parametrize(
    ("function", "dtype", "told"),
    [
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), torch.float32, "an inner graph"),
        (lambda x: x.sin(), torch.bfloat16, "Tesla T4 does not support bfloat16, the dtype of `.*`"),
    ],
    ids=["a graph inside", "bfloat16"],
)
def test_what_is_not_rehearsed(function: Callable[..., Any], dtype: torch.dtype, told: str) -> None:
    """One error says so."""
    with pytest.raises(UsageError, match=told):
        rehearse(function, torch.randn(3, dtype=dtype), card="t4")


def test_constants_and_ops_without_kernels() -> None:
    """A kernel reads a constant tensor of the graph. A library op runs between the kernels."""
    kernel = only(rehearse(lambda x: x + torch.tensor([1.0, 2.0, 3.0]), torch.randn(3)))
    assert (kernel.bytes_read, kernel.bytes_written) == (24, 12)
    assert len(rehearse(lambda x: torch.linalg.svd(x.sin())[1] * 2, torch.randn(4, 4))) == 2


def test_fake_arguments_are_refused() -> None:
    """They have nothing to run on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4)
    with pytest.raises(UsageError, match="fake tensor"):
        rehearse(lambda x: x.sin(), x)
