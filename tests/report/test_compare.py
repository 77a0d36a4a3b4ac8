"""Two runs side by side: differences that are known, times with their noise, and large graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aotlab
from aotlab.report import Report, TimingRow
from aotlab.report.compare import aligned, compared, differences
from aotlab.report.html import page
from aotlab.report.mime import bundle
from aotlab.report.model import Kernel, RunRow


def recorded(program: Callable[..., torch.Tensor]) -> Report:
    """Compile a program and run a step of it, and return its report."""
    step = aotlab.compile(backend="eager")(program)
    with aotlab.Report.record() as report:
        step(torch.ones(2, 3, requires_grad=True), torch.ones(4)).sum().backward()
    return report.report()


def first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply and add."""
    y.add_(1)
    return (x * 2).exp() + y[:3]


def second(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Do nearly the same."""
    return (x * 2).exp().sin() + y[:3]


def rows(report: Report, fact: str) -> list[tuple[str, str, str, str]]:
    """Return the rows of one kind that differ."""
    return [
        (row.subject, row.before, row.after, row.change)
        for row in report.run_rows
        if row.fact == fact and row.same is False
    ]


def test_a_known_difference() -> None:
    """Nodes, mutations and saved values that differ are rows; all others are counted only."""
    second.__name__ = second.__qualname__ = "first"
    report = compared(recorded(first), recorded(second), names=("run 3", "run 4"))
    forward = [row for row in report.run_rows if row.part == "forward graph"]
    assert [(row.before, row.after, row.change) for row in forward] == [
        ("5 ops", "5 ops", "5 differ"),
        ("aten.add.Tensor(primals_2) float32[4]", "", "removed"),
        ("", "aten.sin(exp) float32[2, 3]", "added"),
        ("aten.slice.Tensor(add) float32[3]", "aten.slice.Tensor(primals_2) float32[3]", "other inputs"),
        ("aten.add.Tensor(exp, slice_1) float32[2, 3]", "aten.add.Tensor(sin, slice_1) float32[2, 3]", "other inputs"),
        ("output(add, add_1, exp)", "output(add, exp)", "other inputs"),
    ]
    assert rows(report, "mutation") == [
        ("all mutated inputs", "1", "0", "1 differs"),
        ("y", "data: mutated out of graph", "", "removed"),
    ]
    assert rows(report, "output") == []
    code = "float32[2, 3] of return (x * 2).exp()"
    assert rows(report, "saved") == [
        (f"{code} + y[:3]", "saved", "not saved", "removed"),
        (f"{code}.sin() + y[:3]", "not saved", "saved", "added"),
    ]
    assert differences(report)[0].startswith("run 3 and run 4: ")
    html = page(report)
    assert "run 3 and run 4" in html
    data = bundle(report)
    assert str(data["text/plain"]).startswith("run 3 and run 4")
    assert "aten.sin(exp)" in str(data["text/html"])
    assert Report.from_json(report.to_json()) == report


def test_the_same_program_twice() -> None:
    """Two runs of the same code have no differences, whatever their times are."""
    report = compared(recorded(first), recorded(first))
    assert differences(report) == [f"before and after: no differences, in {len(report.run_rows)} facts"]


def test_an_op_that_runs_at_another_time_is_no_difference() -> None:
    """The order of independent ops depends on the partitioner. An op that has moved is not removed and added."""
    base = recorded(first)
    (frame,) = base.frames
    (graph,) = frame.graphs
    (n, *_) = [
        n
        for n, node in enumerate(graph.nodes)
        if (node.stage, node.part, node.op) == ("partition", "forward", "call_function")
    ]
    nodes = [*graph.nodes[:n], *graph.nodes[n + 1 : n + 3], graph.nodes[n], *graph.nodes[n + 3 :]]
    moved = replace(base, frames=(replace(frame, graphs=(replace(graph, nodes=tuple(nodes)),)),))
    assert graph.nodes != moved.frames[0].graphs[0].nodes
    assert rows(compared(base, moved), "node") == []


def test_kernels() -> None:
    """Kernels are compared by their code, whatever their order, names and buffers are."""

    def kernel(name: str, source: str, language: str = "triton", registers: int | None = None) -> Kernel:
        return Kernel(
            name=name, language=language, graph_name="g", kind="forward", source=source, registers=registers
        )  # fmt: skip

    def with_kernels(*kernels: Kernel) -> Report:
        (frame,) = base.frames
        return replace(base, frames=(replace(frame, graphs=(replace(frame.graphs[0], kernels=kernels),)),))

    base = recorded(first)
    add, mul = kernel("add_0", "def add_0(): a"), kernel("mul_1", "def mul_1(): b", registers=20)
    before = with_kernels(add, mul, kernel("mm", "mm(buf1)", "extern"))
    same = with_kernels(kernel("mm", "mm(buf7)", "extern"), replace(mul, name="mul_0", source="def mul_0(): b"), add)
    assert rows(compared(before, same), "kernel") == []
    after = with_kernels(
        add, replace(mul, registers=40), kernel("mm", "mm(buf1)", "extern"), kernel("mm", "", "extern")
    )
    assert rows(compared(before, after), "kernel") == [
        ("all kernels", "1 extern, 2 triton", "2 extern, 2 triton", "3 differ"),
        ("mul_1", "1 × forward, triton, 20 registers", "", "removed"),
        ("mm", "1 × forward, extern", "2 × forward, extern", ""),
        ("mul_1", "", "1 × forward, triton, 40 registers", "added"),
    ]


def timed(report: Report, engine: str, low: int, high: int, *, again: float = 1.0, repeats: int = 50) -> Report:
    """Add a measurement to a report."""
    median = (low + high) // 2
    row = TimingRow(
        engine=engine, phase="total", median_ns=median, min_ns=low, p10_ns=low, p90_ns=high, repeats=repeats,
        frame="first", graph=0, again=again,
    )  # fmt: skip
    return report.with_timings([row])


def change(before: Report, after: Report, engine: str = "aotlab") -> tuple[str, bool | None]:
    """Return how the time of an engine changed."""
    found = compared(before, after).run_rows
    (row,) = [row for row in found if row.fact == "time" and row.part == "total" and row.subject == engine]
    return row.change, row.same


def test_times_differ_only_beyond_the_noise() -> None:
    """A factor is written only if the ranges are apart, eager did not change too, and the machine is the same."""
    base = recorded(first)
    slow, fast = timed(base, "aotlab", 200, 220), timed(base, "aotlab", 100, 110)
    assert change(slow, fast) == ("about 2.0× faster", False)
    assert change(fast, slow) == ("about 2.0× slower", False)
    assert change(slow, timed(base, "aotlab", 190, 240)) == ("no difference beyond the noise", True)
    assert change(slow, timed(base, "aotlab", 180, 195)) == ("no difference beyond the noise", True)
    assert change(slow, timed(base, "aotlab", 100, 110, again=1.9)) == ("no difference beyond the noise", True)
    assert change(slow, timed(base, "aotlab", 100, 110, repeats=4)) == ("not comparable: fewer than 5 calls", None)
    busy = timed(slow, "eager", 400, 440), timed(fast, "eager", 200, 220)
    assert change(*busy) == ("not comparable: eager is about 2.0× faster", None)
    assert change(*busy, engine="eager") == ("about 2.0× faster", False)
    quiet = timed(slow, "eager", 200, 220), timed(fast, "eager", 200, 220)
    assert change(*quiet) == ("about 2.0× faster", False)
    other = replace(fast, environment=replace(fast.environment, threads=99))
    assert change(slow, other) == ("not comparable: other machine", None)


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_alignment(before: list[int], after: list[int]) -> None:
    """Each element occurs once, in order, and pairs are equal."""
    pairs = aligned(before, after)
    assert [i for i, _ in pairs if i is not None] == list(range(len(before)))
    assert [j for _, j in pairs if j is not None] == list(range(len(after)))
    assert all(before[i] == after[j] for i, j in pairs if i is not None and j is not None)


@pytest.mark.parametrize("kinds", [1, 300])
def test_large_graphs(kinds: int) -> None:
    """An op that was inserted into ten thousand nodes is the only difference, also if most nodes are alike."""
    before = [(n * 7 + n // 5) % kinds for n in range(10_000)]
    after = [*before[:4000], -1, *before[4000:]]
    pairs = aligned(before, [*after, -2])
    assert [pair for pair in pairs if None in pair] == [(None, 4000), (None, 10_001)]


def test_texts_are_escaped() -> None:
    """A name with markup is text in the page and in the notebook's output."""
    hostile = replace(recorded(first), name="<b>")
    row = RunRow(fact="code", subject="<img src=x>", before="<script>", after="", same=False)
    report = replace(compared(hostile, hostile), run_rows=(row,))
    assert "<img" not in str(bundle(report)["text/html"])
    assert "<img src=x>" not in page(report)
