"""Report each kernel that Inductor compiles, or finds in its caches."""

from __future__ import annotations

import linecache
import re
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from aotlab._torch.replaced import replaced

#: The events of a compilation. Before the first C++ kernel, a process prepares a header, which all C++ kernels include.
KernelEvent = Literal["header begins", "header", "kernel begins", "kernel", "cached kernel"]
#: Called with an event, the name of the kernel, and the duration of the work in ns. Any thread may make the call.
Report = Callable[[KernelEvent, str, int], None]


@contextmanager
def kernels_reported(report: Report) -> Iterator[None]:
    """Call ``report`` when a kernel that Inductor wants in the block begins to compile, and when it is ready.

    C++ kernels compile in threads, or in this thread if Inductor has only one thread. Triton kernels compile in other
    processes, or in this thread. For a kernel that was compiled before, and is loaded, the second event is
    ``"cached kernel"``.
    """
    from torch._inductor import codecache
    from torch._inductor.async_compile import AsyncCompile

    load = codecache.CppPythonBindingsCodeCache.__dict__["load_pybinding_async"].__func__
    compile_triton, prepare_header = AsyncCompile.triton, codecache._precompile_header
    header_ended = 0

    def load_reported(cls: Any, /, *args: Any, submit_fn: Any = None, **options: Any) -> Callable[[], Any]:
        name, began, missing = _assigned_name(), time.perf_counter_ns(), False
        report("kernel begins", name, 0)

        def submit(task: Callable[[], Any]) -> Any:  # Inductor calls this only if no cache has the kernel
            nonlocal missing
            missing = True
            return None if submit_fn is None else submit_fn(_timed(task, report, name))

        library: Callable[[], Any] = load(cls, *args, submit_fn=submit, **options)
        if not missing:
            report("cached kernel", name, time.perf_counter_ns() - max(began, header_ended))
        return _timed(library, report, name) if missing and submit_fn is None else library

    def triton_reported(self: Any, kernel_name: str, *args: Any, **options: Any) -> Any:
        began, hits = time.perf_counter_ns(), _cache_hits()
        report("kernel begins", kernel_name, 0)
        kernel = compile_triton(self, kernel_name, *args, **options)
        task = getattr(kernel, "future", None)  # the task of another process
        if task is None or _cache_hits() > hits:
            event: KernelEvent = "kernel" if _cache_hits() == hits else "cached kernel"
            report(event, kernel_name, time.perf_counter_ns() - began)
        else:  # the task's result is the kernel and the microseconds that the other process needed
            task.add_done_callback(
                lambda done: report("kernel", kernel_name, 0 if done.exception() else done.result()[1] * 1000)
            )
        return kernel

    def header_reported(*args: Any, **options: Any) -> Any:
        nonlocal header_ended
        began, is_first = time.perf_counter_ns(), not prepare_header.cache_info().currsize
        if is_first:
            report("header begins", "", 0)
        try:
            return prepare_header(*args, **options)
        finally:
            header_ended = time.perf_counter_ns()
            if is_first:
                report("header", "", header_ended - began)

    with (
        replaced(codecache.CppPythonBindingsCodeCache, "load_pybinding_async", classmethod(load_reported)),
        replaced(AsyncCompile, "triton", triton_reported),
        replaced(codecache, "_precompile_header", header_reported),
    ):
        yield


def _timed(task: Callable[[], Any], report: Report, name: str) -> Callable[[], Any]:
    """Return ``task``, which compiles a kernel, with a report of its duration."""

    def run() -> Any:
        began = time.perf_counter_ns()
        try:
            return task()
        finally:
            report("kernel", name, time.perf_counter_ns() - began)

    return run


def _assigned_name() -> str:
    """Return the name of the variable to which Inductor's generated module assigns the kernel that it loads now."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    assigned = re.match(r"(\w+) = async_compile\.", line)
    return assigned[1] if assigned else "kernel"


def _cache_hits() -> int:
    """Return how many Triton kernels Inductor has found in its caches."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["async_compile_cache_hit"])
