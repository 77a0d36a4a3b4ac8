"""Measure the memory of a call over time, and its peak, beyond the memory that was in use before the call.

On CUDA, the caching allocator records the peak. On CPU, torch's allocator does not record it. But the profiler records
every allocation and release with its size. The running sum of these sizes is the memory in use, and the maximum of the
sum is the peak. The result is exact and the same in every run.

A release counts only if the call itself allocated the memory. For memory that was allocated before, the profiler
reports no size, or the size of an older allocation at the same address. Memory that does not come from torch's CPU
allocator is not counted: scratch space of oneDNN and MKL, stack buffers of Inductor's kernels, numpy's arrays.
"""

from __future__ import annotations

import gc
import json
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from aotlab._torch import pytree, storage_key
from aotlab.errors import UsageError

#: A measured curve has about this many points at most.
MOST_POINTS = 300

_PART = "aotlab part: "


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The memory of one call in bytes.

    ``peak_bytes`` is the largest amount of memory in use during the call, minus the memory in use before the call.
    ``kept_bytes`` is the memory in use after the call, while the result of the call is alive, minus the memory in use
    before the call. ``method`` names the method of measurement.
    """

    device: str
    peak_bytes: int
    kept_bytes: int
    method: str


def measure_memory(call: Callable[[], object], *, device: str | torch.device = "cpu", warmup: int = 1) -> MemoryUse:
    """Measure the peak memory of ``call()``.

    ``warmup`` is the number of calls that run before the measured call, so that compilation, and buffers that only the
    first call allocates, are not measured. The result of the measured call is alive when ``kept_bytes`` is read. So
    ``kept_bytes`` includes the values that a forward saves for its backward.

    Raises
    ------
    UsageError
        The device is neither a CPU nor a cuda device.

    Examples
    --------
    >>> x = torch.ones(1000)
    >>> measure_memory(lambda: x.add(x).mul(x)).peak_bytes
    8000
    """
    where = _measurable(device)
    for _ in range(warmup):
        call()
    gc.collect()
    return _on_cuda(call, where) if where.type == "cuda" else _on_cpu(call)


def memory_curve(
    parts: Iterable[tuple[str, Callable[[], object]]], *, device: str | torch.device = "cpu"
) -> dict[str, tuple[int, ...]]:
    """Measure the memory in use over time, minus the memory in use before the first part.

    Parameters
    ----------
    parts
        The parts of a call, for example ``"forward"`` and ``"backward"``, each with its name. `training_parts` makes
        them for a training step.
    device
        A CPU or a cuda device.

    Returns
    -------
    dict[str, tuple[int, ...]]
        For each part, the bytes in use after each op, and after each allocation outside of ops (by a compiled kernel's
        code). The last number is the bytes in use after the part. If there are more than `MOST_POINTS` numbers, groups
        of consecutive numbers are replaced by their largest number. Memory that an op frees before it ends, its
        workspace, is counted only in `measure_memory`.

    Raises
    ------
    UsageError
        The device is neither a CPU nor a cuda device.

    Examples
    --------
    >>> x = torch.ones(1000)
    >>> memory_curve([("forward", lambda: x.add(x).mul(x))])
    {'forward': (4000, 8000, 4000)}
    """
    where = _measurable(device)
    gc.collect()
    results = []
    with _profiler(where) as profiler:
        for name, call in parts:
            with record_function(_PART + name):
                results.append(call())
                if where.type == "cuda":
                    torch.cuda.synchronize(where)
    events = _events(profiler)
    changes = _changes(events, where)
    times = [change["ts"] for change in changes]
    in_use = [0, *accumulate(_of_this_call(changes))]
    ops = _outermost_ops(events)
    ends = [end for _, end in ops]
    inside = {n for n, at in enumerate(times) if (k := bisect_left(ends, at)) < len(ops) and ops[k][0] <= at}
    # After an op that changed the memory, the memory in use is the sum of all changes until its end.
    moments = {bisect_right(times, ends[bisect_left(ends, times[n])]) for n in inside}
    moments |= {n + 1 for n, change in enumerate(changes) if n not in inside and change["args"]["Bytes"] > 0}
    curves = {}
    for event in events:
        if event["name"].startswith(_PART) and event.get("cat") == "user_annotation":
            first, last = (bisect_right(times, event["ts"] + each) for each in (0, event["dur"]))
            within = sorted(each for each in moments if first < each <= last)
            curves[event["name"].removeprefix(_PART)] = _thinned([in_use[each] for each in (*within, last)])
    return curves


def _outermost_ops(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return when each op began and ended, in order of time, without the ops that other ops call."""
    ops: list[tuple[float, float]] = []
    for event in sorted((each for each in events if each.get("cat") == "cpu_op"), key=lambda each: each["ts"]):
        is_op = "::" in event["name"] and not event["name"].startswith("autograd::")
        if is_op and (not ops or event["ts"] >= ops[-1][1]):
            ops.append((event["ts"], event["ts"] + event["dur"]))
    return ops


def _thinned(values: list[int]) -> tuple[int, ...]:
    """Return at most about `MOST_POINTS` values; each is the largest of a group of consecutive values."""
    size = -(-len(values) // MOST_POINTS)
    return tuple([max(values[i : i + size]) for i in range(0, len(values), size)])


def kept_by_eager(function: Callable[..., object], *args: object) -> int:
    """Return the number of bytes that eager mode saves for the backward of ``function(*args)``.

    Memory that several saved tensors share is counted once. The memory of the arguments and of the results is not
    counted, nor is the memory of the parameters and buffers if ``function`` is a module.

    Examples
    --------
    >>> kept_by_eager(lambda x: x.sin().sin().sin(), torch.ones(10, requires_grad=True))
    80
    """
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        result = function(*args)
    parameters = [*function.parameters(), *function.buffers()] if isinstance(function, torch.nn.Module) else []
    free = {storage_key(tensor) for tensor in (*parameters, *_strided((args, result)))}
    held = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in _strided(saved)}
    return sum(nbytes for key, nbytes in held.items() if key not in free)


def _strided(value: object) -> list[torch.Tensor]:
    return [
        each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor) and each.layout == torch.strided
    ]


def _on_cuda(call: Callable[[], object], device: torch.device) -> MemoryUse:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    held = torch.cuda.memory_allocated(device) - before
    del result
    return MemoryUse(
        device=str(device), peak_bytes=peak, kept_bytes=held, method="high-water mark of torch's cuda allocator"
    )


def _on_cpu(call: Callable[[], object]) -> MemoryUse:
    with _profiler(torch.device("cpu")) as profiler:
        result = call()
    changes = _changes(_events(profiler), torch.device("cpu"))
    del result
    in_use = list(accumulate(_of_this_call(changes), initial=0))
    return MemoryUse(
        device="cpu",
        peak_bytes=max(in_use),
        kept_bytes=in_use[-1],
        method="running sum of the allocations that torch's profiler saw",
    )


def _measurable(device: str | torch.device) -> torch.device:
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"memory is measured on cpu and cuda, not on {where.type}")
    return where


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else ())]
    return profile(activities=activities, profile_memory=True, acc_events=True)


def _events(profiler: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _changes(events: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Return the records of allocations and releases on a device, in order of time."""
    number = {"cpu": 0, "cuda": 1}[device.type]
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == number]
    return sorted(changes, key=lambda event: event["ts"])


def _of_this_call(changes: list[dict[str, Any]]) -> Iterator[int]:
    """Yield the sizes of the call's allocations, and the negative sizes of releases of memory that it allocated.

    For a release of other memory, yield 0. ``changes`` are the profiler's records of allocations and releases, in order
    of time.
    """
    taken: set[int] = set()
    for change in changes:
        address, nbytes = change["args"]["Addr"], change["args"]["Bytes"]
        if nbytes > 0:
            taken.add(address)
            yield nbytes
        else:
            yield nbytes if address in taken else 0
            taken.discard(address)
