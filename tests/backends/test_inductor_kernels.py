"""Each kernel that Inductor compiles is an activity of the time line, and says whether a cache had it."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest
import torch

import aotlab
from aotlab._torch import kernels_reported
from aotlab.report import Report
from aotlab.report.spent import KERNEL


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_are_on_the_time_line(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time line has the report's kernels, within the stage that compiles them; the second time from a cache."""
    from torch._inductor import async_compile

    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: threads)
    number = random.random()  # so that no cache has the kernels

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * number).sum(0) + x.sin()

    for suffix in ("", " (from a cache)"):
        with Report.record() as recording:
            aotlab.compile(f, backend="inductor")(torch.ones(8, 8))
        report = recording.report()
        names = [f"{kernel}{suffix}" for kernel in report.kernels.name]
        table = report.timeline
        kernels, (stage,) = table[table.stage == KERNEL], table[table.stage == "compile"].itertuples()
        assert names == kernels.phase.tolist() != []
        assert stage.start_ns <= kernels.start_ns.min()
        assert (kernels.start_ns + kernels.duration_ns).max() <= stage.start_ns + stage.duration_ns
        assert (kernels.frame.unique().tolist(), kernels.graph.unique().tolist()) == ([stage.frame], [0])
        # The kernels' time is a part of the stage's, so it does not count twice.
        assert KERNEL not in report.time.kind.tolist()
        assert report.time.duration_ns.sum() == report.duration_ns


def test_triton_kernels_compile_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton kernel is ready when the other process has compiled it, and takes the time that this process says."""
    from torch._dynamo.utils import counters
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    futures = {name: Future() for name in ("compiled", "failed")}

    def triton(_self: AsyncCompile, name: str, _source: str) -> object:
        counters["inductor"]["async_compile_cache_hit"] += name == "cached"
        return LambdaFuture(futures[name].result, future=futures[name]) if name in futures else object()

    monkeypatch.setattr(AsyncCompile, "triton", triton)
    heard: list[tuple[str, str]] = []
    took: dict[str, int] = {}

    def report(what: str, name: str, duration_ns: int) -> None:
        heard.append((what, name))
        took[name] = duration_ns

    with kernels_reported(report):
        for name in ("compiled", "failed", "cached", "here"):
            AsyncCompile().triton(name, "the kernel's source")
    begins = [("kernel begins", name) for name in ("compiled", "failed", "cached")]
    assert [*begins, ("cached kernel", "cached"), ("kernel begins", "here"), ("kernel", "here")] == heard
    futures["compiled"].set_result(("the kernel", 2_500))
    futures["failed"].set_exception(RuntimeError("no registers"))
    assert heard[-2:] == [("kernel", "compiled"), ("kernel", "failed")]
    assert (took["compiled"], took["failed"]) == (2_500_000, 0)
    assert AsyncCompile.triton is triton
