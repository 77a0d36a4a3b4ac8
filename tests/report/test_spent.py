"""Where the time went: each moment counts once, and all of them are counted."""

from __future__ import annotations

import time

import pytest
import torch

from aotlab.report import Report
from aotlab.report.model import TimeRow
from aotlab.report.spent import Spent


def sums(rows: tuple[TimeRow, ...]) -> dict[str, tuple[int, int]]:
    """Return time and count by kind."""
    return {row.kind: (row.duration_ns, row.count) for row in rows}


def test_what_holds_others_has_what_they_leave() -> None:
    """A call from 10 to 100 contains a trace from 20 to 50, and two backwards in the rest."""
    spent = Spent(0)
    spent.add("trace", 50, 30)
    spent.add("backward", 70, 10)
    spent.add("backward", 90, 10)
    spent.add("compiled", 100, 90)
    spent.add("eager", 130, 20)
    assert sums(spent.rows(200)) == {
        "trace": (30, 1),
        "backward": (20, 2),
        "compiled": (40, 1),
        "eager": (20, 1),
        "rest": (90, 1),
    }


def test_captures_in_a_comparison_belong_to_it() -> None:
    """Captures of the ``torch.compile`` that is used for comparison count as verification.

    Other captures keep their row.
    """
    spent = Spent(0)
    spent.add("dynamo", 10, 10)
    spent.add("dynamo", 30, 10)
    spent.add("verification", 40, 25)
    spent.add("compiled", 50, 45)
    assert sums(spent.rows(50)) == {"dynamo": (10, 2), "verification": (25, 1), "compiled": (15, 1), "rest": (0, 1)}


def test_nothing_counts_twice() -> None:
    """Intervals of two threads may overlap.

    An interval that began before the recording counts from the recording's beginning.
    """
    spent = Spent(100)
    spent.add("eager", 110, 50)
    spent.add("trace", 150, 30)
    spent.add("trace", 160, 30)
    rows = spent.rows(200)
    assert sums(rows)["eager"] == (10, 1)
    assert sums(rows)["trace"] == (40, 2)
    assert sum(row.duration_ns for row in rows) == 100


def test_calls_after_the_run_add_to_it() -> None:
    """The pause between the run and a later call of a function that it defined is nobody's."""
    spent = Spent(0)
    spent.add("trace", 10, 10)
    spent.end(30)
    spent.add("compiled", 1000, 5)
    assert sums(spent.rows(2000)) == {"trace": (10, 1), "compiled": (5, 1), "rest": (20, 1)}


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_recording_is_accounted_for() -> None:
    """The rows add up to the time on an outside clock.

    Dynamo, the trace, calls and pauses have separate rows.
    """
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    compiled = torch.compile(model, backend="aotlab", options={"compiler": "eager"})
    began = time.perf_counter_ns()
    with Report.record() as recording:
        compiled(torch.ones(4, 8)).sum().backward()
        time.sleep(0.2)
    took = time.perf_counter_ns() - began
    table = recording.time
    found = dict(zip(table["kind"], table["duration_ns"], strict=True))
    assert took * 0.9 - 20e6 <= sum(found.values()) <= took
    assert found["rest"] >= 0.2e9
    assert min(found["dynamo"], found["trace"], found["partition"], found["compiled"]) > 0
    (frame,) = recording.frames
    (graph,) = frame.graphs
    assert found["trace"] == next(stage.duration_ns for stage in graph.stages if stage.name == "trace")
    assert sum(found.values()) == recording.duration_ns
