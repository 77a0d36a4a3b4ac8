"""The time line: activities that are nested, recompiles and graph breaks, and the export for Perfetto."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import aotlab
from aotlab.report import Report
from aotlab.report.spent import Spent
from aotlab.report.timeline import with_moments


def test_activities_are_nested() -> None:
    """An activity has the depth and the own time that its place among the others gives.

    The stage ``capture`` and the compilation overlap in part, so the compilation begins at the end of the capture.
    """
    spent = Spent(100)
    spent.add("capture", 120, 10, entry=3)
    spent.add("trace", 150, 20, entry=3)
    spent.add("between", 170, 55, entry=3)
    spent.add("compiled", 180, 75, entry=3)
    rows = [(row.stage, row.start_ns, row.duration_ns, row.own_ns, row.depth) for row in spent.timeline({})]
    assert rows == [
        ("compiled", 5, 75, 15, 0),
        ("capture", 10, 10, 10, 1),
        ("between", 20, 50, 30, 1),
        ("trace", 30, 20, 20, 2),
    ]


def test_kernels_that_overlap_are_in_separate_rows() -> None:
    """Kernels that compile at the same time have different threads; the stage that waits for them is in thread 0."""
    spent = Spent(0)
    spent.add_kernel("first", 30, 20, entry=3)
    spent.add_kernel("second", 25, 10, entry=3)
    spent.add_kernel("third", 40, 10, entry=3, engine="upstream")
    spent.add("compile", 50, 45, entry=3)
    rows = [(row.phase, row.start_ns, row.thread, row.depth, row.engine) for row in spent.timeline({3: ("f", 0)})]
    assert rows == [
        ("compilation by the backend", 5, 0, 0, "aotlab"),
        ("first", 10, 1, 0, "aotlab"),
        ("second", 15, 2, 0, "aotlab"),
        ("third", 30, 1, 0, "upstream"),
    ]


def recorded() -> Report:
    """Record two compilations of one function. The dtype of the second call differs."""

    def double(x: Tensor) -> Tensor:
        return x * 2

    with Report.record("double") as recording:
        compiled = aotlab.compile(double, backend="eager")
        compiled(torch.ones(3))
        compiled(torch.ones(3, dtype=torch.float64))
    return recording.report()


def test_stages_and_recompiles() -> None:
    """The time line has the stages of each graph in their order, and the recompile with its reason."""
    report = recorded()
    table = report.timeline
    for graph in (0, 1):
        stages = table[(table.graph == graph) & table.stage.isin(report.stages.stage)]
        assert stages.stage.tolist() == report.stages[report.stages.graph == graph].stage.tolist()
    moment = table[table.stage == "recompile"].iloc[0]
    assert (moment.graph, moment.phase) == (1, report.recompiles.reason.iloc[0])
    assert moment.start_ns == table[table.graph == 1].start_ns.min() > table[table.graph == 0].start_ns.max()
    assert (table.start_ns + table.duration_ns).max() <= report.duration_ns


def test_a_graph_of_an_earlier_run_is_no_recompile() -> None:
    """If the code runs again, its graphs are reused, and nothing is compiled."""
    report = recorded()
    rows = [row for row in report.timeline_rows if row.stage != "recompile"]
    (frame,) = report.frames
    reused = replace(frame, graphs=tuple([replace(graph, reused=True) for graph in frame.graphs]))
    assert with_moments(rows, [frame], ()) == report.timeline_rows
    assert with_moments(rows, [reused], ()) == tuple(rows)


def test_perfetto(tmp_path: Path) -> None:
    """The trace has one event per row, in microseconds, and a recompile is an instant event."""
    report = recorded()
    events = json.loads(report.to_perfetto(tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {(each["name"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"}
    rows = report.timeline[report.timeline.stage != "recompile"]
    assert spans == {(row.phase, row.start_ns / 1000, row.duration_ns / 1000) for row in rows.itertuples()}
    assert [each["name"] for each in events if each["ph"] == "i"] == report.recompiles.reason.tolist()


def test_figure(tmp_path: Path) -> None:
    """The figure has a bar for each activity and a line for each recompile. Without activities, it says so."""
    report = recorded()
    (axes,) = report.plot_timeline().axes
    bars = sorted((round(bar.get_x() * 1e9), round(bar.get_width() * 1e9)) for bar in axes.patches)
    rows = report.timeline[report.timeline.stage != "recompile"]
    assert bars == sorted(zip(rows.start_ns, rows.duration_ns, strict=True))
    assert [line.get_xdata()[0] for line in axes.lines] == [
        row.start_ns / 1e9 for row in report.timeline.itertuples() if row.stage == "recompile"
    ]
    report.plot_timeline().savefig(tmp_path / "timeline.svg")
    (axes,) = Report(environment=report.environment).plot_timeline().axes
    assert axes.texts[0].get_text() == "The time line is empty: nothing was compiled or called."
