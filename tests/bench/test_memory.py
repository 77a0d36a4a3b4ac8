"""Peak memory of a call, in exact bytes."""

from __future__ import annotations

import pytest
import torch

from aotlab.bench.memory import MemoryUse, measure_memory
from aotlab.errors import UsageError


def test_the_peak_counts_what_is_alive_at_once() -> None:
    """Two tensors of 4,000 bytes are alive while the second is made; the result keeps one."""
    x = torch.ones(1000)
    found = measure_memory(lambda: x.add(x).mul(x))
    assert (found.peak_bytes, found.kept_bytes, found.device) == (8000, 4000, "cpu")


def test_memory_that_was_in_use_before_does_not_count() -> None:
    """Writing in place needs nothing."""
    x = torch.ones(1000)
    found = measure_memory(lambda: x.mul_(x))
    assert (found.peak_bytes, found.kept_bytes) == (0, 0)


def test_what_the_call_did_not_take_is_no_release_of_its_own() -> None:
    """The release of memory that the call did not allocate is counted correctly.

    Torch's profiler confuses the size of a tensor with the size that an earlier profile saw at the same address.
    """
    size = 1000
    held: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    measure_memory(lambda: held.extend(torch.empty(size) for _ in range(100)), warmup=0)
    addresses = {each.data_ptr() for each in held}
    held.clear()  # released outside of a profile: it goes on knowing the addresses
    others.extend(torch.empty(size) for _ in range(200))
    assert addresses & {each.data_ptr() for each in others}

    def call() -> torch.Tensor:
        others.clear()
        return torch.empty(size)

    found = measure_memory(call, warmup=0)
    assert (found.peak_bytes, found.kept_bytes) == (4 * size, 4 * size)


def test_a_forward_keeps_what_its_backward_needs() -> None:
    """``exp`` saves its result for the backward, ``add`` saves nothing. The measured memory shows the difference."""
    x = torch.zeros(1000, requires_grad=True)
    saves = measure_memory(lambda: x.exp().sum())
    saves_nothing = measure_memory(lambda: x.add(x).sum())
    assert saves.kept_bytes - saves_nothing.kept_bytes == 4000


def test_first_calls_stay_out() -> None:
    """Memory that only the first call allocates is not counted."""
    kept: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        if not kept:
            kept.append(torch.empty(1_000_000))
        return kept[0].add(0.0) if len(kept) > 1 else kept[0]

    assert measure_memory(call).peak_bytes == 0


def test_other_devices_are_refused() -> None:
    """There is no method for devices other than cpu and cuda."""
    with pytest.raises(UsageError, match="not on meta"):
        measure_memory(lambda: None, device="meta", warmup=0)


@pytest.mark.gpu
def test_cuda_reports_the_allocators_mark() -> None:
    """On cuda the same program needs the same bytes, in the allocator's blocks of 512."""
    x = torch.ones(1024, device="cuda")
    found = measure_memory(lambda: x.add(x).mul(x), device="cuda")
    assert (found.peak_bytes, found.kept_bytes) == (8192, 4096)
    assert isinstance(found, MemoryUse)
