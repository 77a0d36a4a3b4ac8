"""The reports of several ranks: how they are joined, gathered and read, and the differences between them."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import aotlab
from aotlab.errors import UsageError
from aotlab.report import COLUMNS, MIME_TYPE, Report, gather
from aotlab.report.collectives import collectives, waited
from aotlab.report.counts import counted
from aotlab.report.html import fragment
from aotlab.report.mime import bundle, plain
from aotlab.report.model import GraphBreakRow, Node, Refusal, WaitRow
from aotlab.report.ranks import alone, differences_of_ranks, joined


def recorded(*sizes: int) -> Report:
    """Return the report of a function that is called with inputs of these sizes."""

    @aotlab.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with Report.record("job") as recording:
        for size in sizes:
            step(torch.ones(size))
    return recording.report()


@pytest.fixture(scope="module")
def usual() -> Report:
    """Return the report of a rank with one graph."""
    return recorded(4, 4)


@pytest.fixture(scope="module")
def recompiled() -> Report:
    """Return the report of a rank that recompiles."""
    return recorded(4, 6)


def as_ranks(*reports: Report) -> list[Report]:
    """Give each report its rank in one job."""
    return [replace(each, rank=rank, world_size=len(reports)) for rank, each in enumerate(reports)]


def refused(report: Report) -> Report:
    """Add a refusal to a report."""
    refusal = Refusal(graph=1, error="E", reason="RandomOp", message="no", outcome="ran eagerly", at_ns=0)
    return replace(report, frames=(replace(report.frames[0], refusals=(refusal,)),))


def broken(report: Report) -> Report:
    """Add a graph break to a report."""
    row = GraphBreakRow(frame="step", reason="print", words="calls print", where="a.py:3", at_ns=0, line=None)
    return replace(report, graph_break_rows=(row,))


def test_equal_ranks_have_no_differences(usual: Report) -> None:
    """Ranks that did the same have no differences, and the text says so."""
    report = joined(as_ranks(usual, usual), {})
    assert report.rank_rows == ()
    assert differences_of_ranks(report) == ["2 ranks: no differences between the ranks"]
    assert (alone(report), report.verdict) == ("", usual.verdict)


def test_a_recompile_of_one_rank_comes_first(usual: Report, recompiled: Report) -> None:
    """The rank, the function and the reason are named first, also in the verdict; the new graph is not named twice."""
    report = joined(as_ranks(usual, recompiled), {})
    (row,) = report.rank_rows
    assert (row.rank, row.reference, row.fact, row.graph, row.subject) == (1, 0, "recompile", 1, "x.size(0)")
    assert row.sentence.startswith("Rank 1 alone recompiled `step` (graph 1, ")
    assert "`x.size(0)` is 6 where the compiled entry expects 4" in row.sentence
    assert "mark_dynamic" in row.suggestion
    assert report.verdict == f"{row.sentence} {usual.verdict}"
    assert plain(report).splitlines()[2] == f"  {row.sentence}"
    assert "Rank 1 alone recompiled" in fragment(report)
    summary = counted(report).summary
    assert summary is not None
    assert (summary.alone, summary.apart_ranks) == ("rank 1 recompiled alone", 1)


def test_the_smaller_group_of_ranks_is_named(usual: Report, recompiled: Report) -> None:
    """If most ranks recompile, the rows are about the ranks that do not; several ranks are named together."""
    first = joined(as_ranks(recompiled, usual, usual), {}).rank_rows[0]
    assert (first.rank, first.change) == (0, "recompiled alone")
    first = joined(as_ranks(recompiled, usual, recompiled), {}).rank_rows[0]
    assert (first.rank, first.reference, first.change) == (1, 0, "did not recompile alone")
    rows = joined(as_ranks(usual, recompiled, usual, recompiled, usual), {}).rank_rows
    assert [(row.rank, row.change) for row in rows] == [(1, "recompiled"), (3, "recompiled")]
    assert rows[0].sentence.startswith("Only ranks 1 and 3 recompiled")


def test_refusals_graph_breaks_and_errors(usual: Report) -> None:
    """Missing ranks and errors come first, then refusals and graph breaks of one rank."""
    reports = as_ranks(usual, refused(usual), replace(broken(usual), ended="ValueError: no"), usual)
    report = joined(reports[:3], {3: "sent no report within 60 s"})
    sentences = [row.sentence for row in report.rank_rows]
    assert sentences == [
        "Rank 3 sent no report within 60 s.",
        "Rank 2 ended with ValueError: no.",
        "Rank 1 alone refused to compile `step` (graph 1): RandomOp; the call ran eagerly.",
        "Rank 2 alone had a graph break in `step`: calls print.",
    ]
    assert alone(report) == "rank 3 is missing"


def test_graphs_and_guards_are_compared() -> None:
    """Ranks whose first graphs differ have rows about nodes and guards, in both directions of the values."""
    report = joined(as_ranks(recorded(4), recorded(5)), {})
    rows = {(row.fact, row.subject): row for row in report.rank_rows}
    guard = rows["guard", "x"]
    assert ("(4,)" in guard.expected, "(5,)" in guard.value, guard.sentence) == (True, True, "")
    assert rows["node", "mul"].change == "other shape"
    assert alone(report) == ""


def test_tables_have_the_rank(usual: Report, recompiled: Report) -> None:
    """Each table of a gathered report begins with the rank and has the rows of all ranks; no other report has it."""
    report = joined(as_ranks(usual, recompiled), {})
    assert all(getattr(report, name).columns[0] == "rank" for name in COLUMNS)
    assert all("rank" not in getattr(usual, name).columns for name in COLUMNS if name != "ranks")
    assert report.recompiles["rank"].tolist() == [1]
    assert report.calls["rank"].tolist() == [0, 0, 1, 1]
    assert str(report.calls["rank"].dtype) == "Int64"
    assert "rank" in report.calls.attrs["columns"]


def test_it_is_saved_and_shown_in_a_notebook(usual: Report, recompiled: Report, tmp_path: Path) -> None:
    """JSON and a notebook's output have all ranks. If they do not fit, the output has one rank and a note."""
    report = joined(as_ranks(usual, recompiled), {})
    assert Report.load(report.save(tmp_path / "r.json")) == report
    shown = Report.from_dict(bundle(report)[MIME_TYPE])
    assert [each.rank for each in shown.rank_reports] == [1]
    assert shown.rank_reports[0].frames[0].graphs[0].nodes
    noise = "".join(map(chr, torch.randint(33, 120, (600_000,), generator=torch.Generator().manual_seed(0)).tolist()))
    shown = Report.from_dict(bundle(joined(as_ranks(usual, replace(recompiled, notes=(noise,))), {}))[MIME_TYPE])
    assert shown.rank_reports == ()
    assert any("only rank 0" in note for note in shown.notes)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> float:
    """Imitate a job whose ranks share a store; the result is the timeout of its group in seconds."""
    if not dist.is_available():
        pytest.skip("this torch has no distributed package")
    store = dist.HashStore()
    monkeypatch.setattr(gather, "store_of_job", lambda: (store, 1.0))
    monkeypatch.setattr(gather, "_gatherings", repeat(0))
    return 1.0


def test_a_missing_rank_is_named(usual: Report, recompiled: Report, job: float) -> None:
    """Rank 0 waits as long as the timeout of the group, for all ranks together, and names the missing ranks."""
    first, second, *_ = as_ranks(usual, recompiled, usual, usual)
    assert gather.exchanged(second) == second
    begin = time.monotonic()
    report = gather.exchanged(first)
    assert time.monotonic() - begin < 2 * job
    assert [(row.rank, row.change) for row in report.rank_rows[:2]] == [(2, "is missing"), (3, "is missing")]
    assert report.rank_rows[0].value == "sent no report within 1 s"
    assert [replace(each, summary=None) for each in report.rank_reports] == [second]


def test_a_report_that_cannot_be_read_is_named(usual: Report, job: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with another version of the report is named, and the gathering goes on."""
    first, second = as_ranks(usual, usual)
    with monkeypatch.context() as patch:
        patch.setattr(gather, "_text", lambda report: '{"version": 99, "environment": {}}')
        gather.exchanged(second)
    (row,) = gather.exchanged(first).rank_rows
    assert (row.rank, "version 99" in row.value) == (1, True)


def test_without_a_group(usual: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process is rank 0 of one. Several processes without a group get their own reports, with a note."""
    with Report.record(ranks="gather") as recording:
        pass
    assert (recording.report().rank, recording.report().rank_rows) == (0, ())
    monkeypatch.setattr(gather, "store_of_job", lambda: None)
    report = gather.exchanged(as_ranks(usual, usual)[1])
    assert "were not gathered" in report.notes[-1]


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank writes into the folder, also after an error. The reader names absent ranks and skips earlier jobs."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with Report.record("one", ranks=tmp_path / "all"):
        pass
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="no"), Report.record("one", ranks=tmp_path / "all"):
        raise ValueError("no")
    stale = replace(recorded(), rank=7, world_size=8, created="2000-01-01T00:00:00+00:00")
    gather.written(stale, tmp_path / "all")
    (report,) = gather.read_all(tmp_path / "all")
    assert [row.sentence for row in report.rank_rows] == [
        "Rank 2 wrote no report.",
        "Rank 1 ended with ValueError: no.",
    ]
    assert gather.read_all(tmp_path) == []
    monkeypatch.setenv("RANK", "0")
    with Report.record(ranks=tmp_path / "all"):
        assert not (tmp_path / "all" / "rank-0.json").exists()
    monkeypatch.delenv("RANK")
    gather.prepared(tmp_path / "all")  # this process may be any rank
    assert (tmp_path / "all" / "rank-0.json").exists()


def node(name: str, target: str, nbytes: int, *inputs: str, stage: str = "partition", part: str = "forward") -> Node:
    """Return a node of a graph."""
    return Node(
        stage=stage, part=part, name=name, op="call_function", target=target, phase="forward",
        nbytes=nbytes, inputs=inputs,
    )  # fmt: skip


def test_collectives_and_their_bytes() -> None:
    """A collective has the bytes of its inputs and of its result; waiting is no collective, and each counts once."""
    nodes = [
        node("x", "x", 8),
        node("first", "_c10d_functional.all_gather_into_tensor.default", 16, "x", stage="trace", part="joint"),
        node("gathered", "_c10d_functional.all_gather_into_tensor.default", 16, "x"),
        node("waited", "_c10d_functional.wait_tensor.default", 16, "gathered"),
        node("y", "aten.mul.Tensor", 16, "waited"),
        node("sent", "_c10d_functional_autograd.all_to_all_single.default", 16, "y", part="backward"),
    ]
    rows = [(row.part, row.name, row.op, row.input_bytes, row.output_bytes) for row in collectives(nodes)]
    assert rows == [
        ("forward graph", "gathered", "all_gather_into_tensor", 8, 16),
        ("backward graph", "sent", "all_to_all_single", 0, 16),
    ]


def test_time_in_collectives_counts_once() -> None:
    """If several collectives run at the same time, this time is added to the first of them only."""
    spans = [("all_reduce", 10, 20), ("all_gather", 5, 12), ("all_reduce", 11, 15), ("all_reduce", 30, 31)]
    assert {row.op: (row.count, row.duration_ns) for row in waited(spans)} == {
        "all_gather": (1, 7),
        "all_reduce": (3, 9),
    }


@pytest.mark.parametrize(("seconds", "named"), [((3, 1, 4), [(1, 0)]), ((2, 3, 4), []), ((0.2, 0.05, 0.2), [])])
def test_the_rank_that_waited_least(usual: Report, seconds: tuple[float, ...], named: list[tuple[int, int]]) -> None:
    """The rank that waited much less than all others is named, but not first. Ranks without times have no such row."""
    reports = as_ranks(*[replace(usual, duration_ns=10 * 10**9) for _ in seconds])
    timed = [
        replace(report, wait_rows=(WaitRow(op="barrier", count=1, duration_ns=round(waits * 1e9)),))
        for report, waits in zip(reports, seconds, strict=True)
    ]
    report = joined(timed, {})
    rows = [(row.rank, row.reference) for row in report.rank_rows if row.fact == "waiting"]
    assert (rows, alone(report), report.verdict) == (named, "", usual.verdict)
    if named:
        assert "waiting in collectives: 3.00 s of 10.0 s on rank 0, 1.00 s of 10.0 s" in plain(report)
    assert not any(row.fact == "waiting" for row in joined(reports, {}).rank_rows)


def test_reports_without_times_of_collectives(usual: Report) -> None:
    """A report that an earlier version wrote has no rows about waiting, and can be read."""
    values = usual.to_dict()
    del values["wait_rows"]
    assert Report.from_dict(values) == usual


def test_the_profiler_is_in_use() -> None:
    """Torch has one profiler: before the block it is an error, and in the block there are no times, and a warning."""
    with torch.profiler.profile(), pytest.raises(UsageError, match="on already"), Report.record(waits=True):
        pass
    warned = pytest.warns(UserWarning, match="no waiting times")
    with warned, Report.record(waits=True) as report, torch.profiler.profile() as profile:
        torch.ones(3)
    assert (len(report.waits), "aten::ones" in [event.name for event in profile.events()]) == (0, True)
