"""Run a test's function in two or more processes, with a limit on the time, and train beside eager."""

from __future__ import annotations

import gc
import multiprocessing
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

#: A process that waits longer for another raises. Torch's default is half an hour.
WAITING = timedelta(seconds=60)
#: Modules that are imported once for all tests, because this takes longer than most tests.
_IMPORTED_ONCE = ["aotlab", "torch._dynamo", "torch._inductor.config", "torch.distributed.fsdp"]
#: A test that takes longer fails.
SECONDS = 180.0


def run(function, meeting, *args, count=2):
    """Call ``function(rank, *args)`` in ``count`` processes of one group. Fail if one of them raises or hangs."""
    multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)
    settings = {"nprocs": count, "join": False, "start_method": "forkserver"}
    group = processes.start_processes(_process, args=(function, str(meeting), count, args), **settings)
    end = time.monotonic() + SECONDS
    while not group.join(timeout=1.0):
        if time.monotonic() > end:
            for process in group.processes:
                process.kill()
            pytest.fail(f"the processes took longer than {SECONDS:.0f} s")


def _process(rank, function, meeting, count, args):
    torch.set_num_threads(1)
    meeting = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=WAITING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # such as a notice that a call runs eagerly
            function(rank, *args)
    finally:
        torch.compiler.reset()
        gc.collect()  # torch may hang if the last wrapper is freed after its group
        dist.destroy_process_group()


def assert_same(name, ours, theirs):
    """Check that two lists of tensors are equal bit for bit, None included."""
    assert len(ours) == len(theirs) > 0, name
    for n, (mine, wanted) in enumerate(zip(ours, theirs, strict=True)):
        assert (mine is None) == (wanted is None), (name, n)
        assert mine is None or torch.equal(mine, wanted), (name, n)
