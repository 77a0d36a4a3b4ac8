"""The steps of a program: the bytes that each call and each step of the epilogue reads, writes and makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from aotlab.report.cut import fitting
from aotlab.report.model import Access, Report, Step
from aotlab.report.writes import runs


def reported(function: Callable[..., Any], *args: Any, frontend: str = "direct", **options: Any) -> Report:
    """Compile a function, call it once, and return the report."""
    with Report.record() as recording:
        aotlab.compile(function, backend="eager", frontend=frontend, **options)(*args)
    return recording.report()


def steps_of(report: Report) -> tuple[Step, ...]:
    """Return the steps of the report's only graph."""
    ((graph,),) = [frame.graphs for frame in report.frames]
    return graph.steps


def told(report: Report, *columns: str) -> list[tuple[str | None, ...]]:
    """Return columns of the table of steps; None for a missing value."""
    rows = report.steps[list(columns)].itertuples(index=False)
    return [tuple(None if value is pd.NA else value for value in row) for row in rows]


def alias(x: Tensor) -> Tensor:
    """Write an input, and then a part of it through two views."""
    x.add_(1)
    y = x.t()
    y[0].mul_(2)
    return y


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_the_alias_program(frontend: str) -> None:
    """Each call of the program has its exact bytes and its nodes; the epilogue follows in the order of its code."""
    report = reported(alias, torch.zeros(3, 4), frontend=frontend)
    (out,) = report.outputs["name"]
    column = "#0 bytes 0–4, 16–20, 32–36"
    scatter = "t, select, mul, t_1, select_scatter, t_2"
    assert told(report, "kind", "step", "nodes", "reads", "writes", "makes") == [
        ("call", "x.add_(1)", "add", "#0 bytes 0–48", "#0 bytes 0–48", None),
        ("call", "x.t()", None, None, None, "#0 bytes 0–48"),
        ("call", "x.t()[0]", None, None, None, column),
        ("call", "x.t()[0].mul_(2)", scatter, column, column, None),
        ("epilogue", f"{out} = x.t()", None, None, None, "#0 bytes 0–48"),
        ("epilogue", "x.copy_(t_2)", "t_2", None, "#0 bytes 0–48", None),
    ]
    first = alias.__code__.co_firstlineno
    assert report.steps["line"].dropna().tolist() == [first + 2, first + 3, first + 4, first + 4]
    (graph,) = report.frames[0].graphs
    (runtime,) = [code.text for stage in graph.stages if stage.name == "runtime" for code in stage.codes]
    assert runtime.index(" = x.t()") < runtime.index("x.copy_(")
    names = {node.name for node in graph.nodes if node.stage == "trace"}
    assert {name for step in graph.steps for name in step.nodes} <= names
    assert Report.from_json(report.to_json()) == report


def test_one_storage_has_one_number() -> None:
    """Two graphs name a storage that both use by one number, and temporary storages of both by different numbers."""

    def first(x: Tensor) -> Tensor:
        x[1:].add_(1)
        return (x * 2).sum()

    def second(x: Tensor, total: Tensor) -> Tensor:
        return ((x * total).exp() + 1)[0]

    x = torch.ones(2, 2)
    with Report.record() as recording:
        total = aotlab.compile(first, backend="eager")(x)
        aotlab.compile(second, backend="eager")(x, total)
    graphs = [frame.graphs[0] for frame in recording.report().frames]
    named = [
        {access.tensor: access.storage for step in graph.steps for access in (*step.reads, *step.writes)}
        for graph in graphs
    ]
    assert named[0]["x"] == named[0]["x[1:]"] == named[1]["x"] == 0
    made = [[access.storage for step in graph.steps for access in step.makes] for graph in graphs]
    assert named[1]["total"] in made[0]
    temporaries = [{number for number in each if number < 0} for each in made]
    assert temporaries == [{-1}, {-2, -3}]


def assigned(x: Tensor, index: Tensor) -> None:
    """Write elements that an index selects, and then a row."""
    x[index] = 1.0
    x[0] = 2.0


def reads_another_row(x: Tensor, index: Tensor) -> None:
    """Write a row, and read another row of the same tensor."""
    x[0].add_(x[1])


def into_out(x: Tensor, index: Tensor) -> None:
    """Write through the argument ``out``."""
    torch.add(x, 1, out=x)


def in_place_function(x: Tensor, index: Tensor) -> None:
    """Write in place through a function of ``torch.nn.functional``."""
    torch.nn.functional.relu(x, inplace=True)


def listed(x: Tensor, index: Tensor) -> None:
    """Write the tensors of a list."""
    torch._foreach_mul_([x], 2.0)


def hidden(x: Tensor, index: Tensor) -> None:
    """Write a column through an alias that autograd does not know."""
    x.detach()[:, 3].zero_()


def transposed(x: Tensor, index: Tensor) -> None:
    """Change the sizes in place, and then write a row."""
    x.t_()
    x[0].neg_()


WRITES: list[tuple[Callable[..., None], list[str]]] = [
    (assigned, ["#0 bytes 0–32 (perhaps)", "#0 bytes 0–16"]),
    (reads_another_row, ["#0 bytes 0–16"]),
    (into_out, ["#0 bytes 0–32"]),
    (in_place_function, ["#0 bytes 0–32"]),
    (listed, ["#0 bytes 0–32"]),
    (hidden, ["#0 bytes 12–16, 28–32"]),
    (transposed, ["#0 bytes 0–4, 16–20"]),
]


@pytest.mark.parametrize(("function", "writes"), WRITES, ids=[each.__name__ for each, _ in WRITES])
def test_bytes_written(function: Callable[..., None], writes: list[str]) -> None:
    """Each way to write a tensor has its bytes, and the steps after the graph store all of them."""
    report = reported(function, torch.zeros(2, 4), torch.tensor([1]))
    rows = told(report, "kind", "writes")
    assert [written for kind, written in rows if kind == "call" and written] == writes
    assert [written for kind, written in rows if kind != "call" and written] == ["#0 bytes 0–32"]


def test_running_statistics() -> None:
    """A call that writes to arguments without a sign of it in its name writes exactly these arguments."""

    def normalized(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, variance, training=True)

    call, *copies = steps_of(reported(normalized, torch.randn(3, 2), torch.zeros(2), torch.ones(2)))
    assert [access.tensor for access in call.writes] == ["mean", "variance"]
    assert [access.tensor for access in call.reads] == ["x", "mean", "variance"]
    assert [access.tensor for copy in copies for access in copy.writes] == ["mean", "variance"]


def test_positions_count_from_the_first_byte_of_the_storage() -> None:
    """Inputs with offsets keep their places after writes, and so do their views. The epilogue writes their base."""

    def both(a: Tensor, b: Tensor) -> Tensor:
        b.mul_(2)
        view = a[1:]
        view.add_(1)
        return b[1:]

    memory = torch.zeros(10)
    a, b = memory[2:6], memory[4:8]
    report = reported(both, a, b)
    assert told(report, "writes", "makes") == [
        ("#0 bytes 16–32", None),
        (None, "#0 bytes 12–24"),
        ("#0 bytes 12–24", None),
        (None, "#0 bytes 20–32"),
        ("#0 bytes 0–40", None),
        (None, "#0 bytes 20–32"),
    ]
    (offset,) = report.outputs["offset"]
    assert offset == both(a, b).storage_offset()


def test_symbolic_sizes_have_their_values_in_the_traced_call() -> None:
    """With dynamic sizes, the steps have the bytes of the traced call."""
    report = reported(lambda x: x.mul_(2)[1:], torch.zeros(3, 2), dynamic=True)
    assert report.inputs["varies"].tolist() == [True]
    assert told(report, "writes", "makes")[:2] == [("#0 bytes 0–24", None), (None, "#0 bytes 8–24")]


def test_a_call_on_a_tensor_subclass_has_unknown_bytes() -> None:
    """The calls of a program with wrapper subclasses are steps without bytes; the epilogue's copies have theirs."""
    call, *copies = steps_of(reported(lambda x: x.mul_(2), TwoTensor(torch.zeros(2), torch.ones(2))))
    assert (call.kind, call.reads, call.writes, call.makes) == ("call", (), (), ())
    assert [access.tensor for copy in copies for access in copy.writes] == ["x.a", "x.b"]


def test_an_offset_without_a_base() -> None:
    """A written input that is no view of another tensor, but has an offset, keeps its place."""
    x = torch.zeros(0).set_(torch.zeros(8).untyped_storage(), 5, (3,))
    report = reported(lambda x: (x[:1], x.mul_(2)[1:])[1], x)
    write, view = ("#0 bytes 20–32", None), (None, "#0 bytes 24–32")
    assert told(report, "writes", "makes") == [(None, "#0 bytes 20–24"), write, view, write, view]
    assert report.outputs["offset"].tolist() == [6]


def test_a_cut_report_keeps_the_writes() -> None:
    """If the steps are cut, those that write and those after the graph remain."""

    def long(x: Tensor) -> Tensor:
        y = x
        for _ in range(30):
            y = y.sin()
        x.add_(y)
        return x.t()

    report = reported(long, torch.zeros(2, 2))
    small = fitting(report, lambda cut: len(steps_of(cut)) <= 20)
    assert len(steps_of(small)) == 20
    needed = [step for step in steps_of(report) if step.writes or step.kind != "call"]
    assert steps_of(small)[-len(needed) :] == tuple(needed)


def test_the_figure_has_the_steps_and_their_bytes() -> None:
    """Each step of a shared storage is a row; reads and writes have different hatches at the bytes of the table."""
    report = reported(alias, torch.zeros(3, 4))
    (axes,) = report.plot_storages().axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [label.split(": ")[-1] for label in labels] == report.steps["step"].tolist()
    drawn: dict[str, list[tuple[float, float, float]]] = {}
    for bars in axes.collections:
        for path in bars.get_paths():
            box = path.get_extents()
            drawn.setdefault(bars.get_hatch() or "", []).append((round(box.y1), box.x0, box.x1))

    def bytes_of(name: str) -> list[tuple[float, float, float]]:
        rows: list[tuple[float, float, float]] = []
        for row, step in enumerate(steps_of(report)):
            accesses: tuple[Access, ...] = getattr(step, name)
            rows += [(row, *each) for access in accesses for each in runs([access.bytes] if access.bytes else []) or ()]
        return rows

    assert drawn["////"] == bytes_of("writes")
    assert drawn["...."] == bytes_of("reads")


def test_a_figure_without_storages_says_so() -> None:
    """A report of nothing, and a report without shared memory, have a figure with a sentence."""
    with Report.record() as nothing:
        pass
    for report, sentence in (
        (nothing.report(), "There are no storages: nothing was compiled."),
        (reported(lambda x: x + 1, torch.zeros(2)), "No storage is shared or written"),
    ):
        (axes,) = report.plot_storages().axes
        assert axes.texts[0].get_text().startswith(sentence)
