"""The phases and times of compilations, beside a clock and torch's own counters."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics

import aotlab
from aotlab.upstream import compilations
from aotlab.upstream.phases import STAGES, phases_of
from aotlab.upstream.trace_log import TraceLog
from aotlab.upstream.trace_report import report_of


def log_of(*events):
    """Make a log. An event is its kind, its name, its time in µs, and the number of its frame or None."""
    log = TraceLog(name="log")
    for kind, name, at, frame, *own_id in events:
        head = {"chromium_event": {}} | ({} if frame is None else {"frame_id": frame, "frame_compile_id": 0})
        log.add(head, json.dumps({"ph": kind, "name": name, "ts": at, "args": {"compile_id": own_id and own_id[0]}}))
    return log


def times(log):
    """Return the time of each stage in µs."""
    return {row.kind: row.duration_ns / 1000 for row in report_of([log], name="", again="").time_rows}


def test_each_moment_is_counted_once():
    """The time of a stage excludes the stages inside of it. A phase with an unknown name is of the stage around."""
    log = log_of(
        ("B", "dynamo", 0, 0),
        ("B", "bytecode_tracing", 10, 0),
        ("E", "bytecode_tracing", 30, 0),
        ("B", "GraphLowering.codegen", 30, 0),
        ("B", "Scheduler.codegen", 40, 0),
        ("B", "compile_file", 50, 0),
        ("E", "compile_file", 80, 0),
        ("E", "Scheduler.codegen", 90, 0),
        ("E", "GraphLowering.codegen", 95, 0),
        ("E", "dynamo", 100, 0),
        ("B", "unheard_of", 200, 0),
        ("E", "unheard_of", 207, 0),
    )
    expected = {"capture": 20, "code generation": 35, "compilation of kernels": 30, "rest of Dynamo": 15, "rest": 7}
    assert times(log) == expected
    (frame,) = report_of([log], name="", again="").frames
    stages = {stage.name: stage.duration_ns / 1000 for stage in frame.graphs[0].stages}
    assert stages == {("other records" if name == "rest" else name): took for name, took in expected.items()}
    assert frame.graphs[0].duration_ns == 107_000


def test_other_threads():
    """Threads that compile kernels work while the compiling thread waits: their time is not added."""
    log = log_of(
        ("B", "dynamo", 0, 0),
        ("B", "async_compile.wait", 10, 0),
        ("B", "compile_file", 11, None, "None"),
        ("B", "compile_file", 12, None, "None"),
        ("E", "compile_file", 50, None, "None"),
        ("E", "compile_file", 60, None, "None"),
        ("E", "async_compile.wait", 61, 0),
        ("E", "dynamo", 70, 0),
    )
    assert times(log) == {"compilation of kernels": 51, "rest of Dynamo": 19, "rest": 0}
    rows = report_of([log], name="", again="").timeline
    columns = ["phase", "start_ns", "duration_ns", "own_ns", "thread", "depth"]
    assert rows[columns].values.tolist() == [
        ["dynamo", 0, 70_000, 19_000, 0, 0],
        ["async_compile.wait", 10_000, 51_000, 51_000, 0, 1],
        ["compile_file", 11_000, 39_000, 0, 1, 0],
        ["compile_file", 12_000, 48_000, 0, 2, 0],
    ]
    assert rows.graph.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (  # an exception left a phase open
            (("B", "dynamo", 0, 0), ("B", "bytecode_tracing", 5, 0), ("E", "dynamo", 20, 0)),
            {"capture": 15, "rest of Dynamo": 5, "rest": 0},
        ),
        (  # the process died
            (("B", "dynamo", 0, 0), ("B", "bytecode_tracing", 5, 0), ("E", "bytecode_tracing", 8, 0)),
            {"capture": 3, "rest of Dynamo": 5, "rest": 0},
        ),
        (  # the observation began during a compilation
            (("E", "bytecode_tracing", 5, 0), ("E", "dynamo", 9, 0), ("B", "dynamo", 10, 1), ("E", "dynamo", 14, 1)),
            {"rest of Dynamo": 4, "rest": 0},
        ),
        (  # a compilation during another one, and a clock that was set back
            (
                ("B", "dynamo", 0, 0),
                ("B", "dynamo", 10, 1),
                ("E", "dynamo", 30, 1),
                ("E", "dynamo", 40, 0),
                ("B", "dynamo", 60, 2),
                ("E", "dynamo", 50, 2),
            ),
            {"rest of Dynamo": 40, "rest": 0},
        ),
        (  # an autotuner that runs with the first call names the compilation itself
            (
                ("B", "dynamo", 0, 0),
                ("E", "dynamo", 10, 0),
                ("B", "CachingAutotuner.benchmark_all_configs", 20, None, "0/0"),
                ("E", "CachingAutotuner.benchmark_all_configs", 25, None, "0/0"),
            ),
            {"autotuning": 5, "rest of Dynamo": 10, "rest": 0},
        ),
    ],
)
def test_damaged_and_unusual_logs(events, expected):
    """The times of a log that is not complete are those of the phases that it has."""
    assert times(log_of(*events)) == expected
    assert sum(expected.values()) == report_of([log_of(*events)], name="", again="").duration_ns / 1000
    if any("Autotuner" in name for _, name, *_ in events):
        assert report_of([log_of(*events)], name="", again="").timeline.graph.tolist() == [0, 0]


def test_phases_of_one_name_belong_to_one_stage():
    """No name of a phase or record is matched by an earlier stage than its own."""
    log = log_of(("B", "dynamo", 0, 0), ("B", "PyCodeCache.load_by_key_path", 1, 0), ("E", "dynamo", 2, 0))
    assert [each.stage for each in phases_of(log.records)] == ["rest of Dynamo", "compilation of kernels"]
    assert len({name for name, _, _ in STAGES}) == len(STAGES)


def test_records_without_a_stage(monkeypatch):
    """Records with unknown names are kept as text. Long texts are cut, and their last line says so."""
    monkeypatch.setattr(compilations, "MOST_CHARACTERS", 10)
    log = TraceLog(name="log")
    id_ = {"frame_id": 0, "frame_compile_id": 0}
    log.add({"dynamo_start": {}} | id_, "")
    log.add({"artifact": {"name": "news", "encoding": "string"}, "has_payload": "x"} | id_, "short")
    log.add({"more_news": {}, "has_payload": "x"} | id_, "0123456789abc")
    for n in range(2):
        log.add({"counted": {"n": n}} | id_, "")
    log.add({"artifact": {"name": "fx_graph_cache_hit", "encoding": "json"}, "has_payload": "x"} | id_, "{}")
    log.add({"artifact": {"name": "stray", "encoding": "json"}, "has_payload": "x"}, "{}")
    report = report_of([log], name="", again="")
    stages = {
        stage.name: {code.title: code.text for code in stage.codes} for stage in report.frames[0].graphs[0].stages
    }
    assert stages["caches"] == {"fx graph cache hit": "{}"}
    assert stages["other records"] == {
        "news": "short",
        "more_news": "0123456789\n… 3 more characters are in the log",
        "dynamo_start": "{}",
        "counted": '{"n": 0}\n{"n": 1}'[:10] + "\n… 7 more characters are in the log",
    }
    assert any("stray (1)" in note for note in report.notes)


@pytest.mark.tier("full")  # it compiles with Inductor
def test_times_beside_a_clock_and_counters():
    """The times of stages add up to at most the time on a clock, and to most of it. torch counts the same durations."""
    torch.compiler.reset()
    torch.compile(lambda x: x.neg())(torch.ones(2))  # import the compiler
    before = {name: len(durations) for name, durations in compilation_time_metrics.items()}

    def step(x, w):
        return (x @ w).relu().sin().sum()

    w = torch.randn(16, 16, requires_grad=True)
    with aotlab.observe(caches=False) as report:
        begin = time.perf_counter_ns()
        loss = torch.compile(step)(torch.randn(8, 16), w)
        forward = time.perf_counter_ns()
        loss.backward()
        clock = time.perf_counter_ns() - begin
    rows = report.time.set_index("kind").duration_ns
    assert 0.8 * clock < rows.sum() <= clock
    assert {"capture", "trace", "partition", "lowering", "code generation", "guards"} <= set(rows.index)
    (graph,) = report.frames[0].graphs
    assert sum(stage.duration_ns for stage in graph.stages) == graph.duration_ns == rows.sum()
    timeline = report.timeline[report.timeline.thread == 0]
    assert timeline.own_ns.sum() == timeline[timeline.depth == 0].duration_ns.sum() == rows.sum()
    backward = timeline[timeline.phase == "entire_backward_compile"]
    assert backward.start_ns.item() + backward.duration_ns.item() <= clock
    assert backward.duration_ns.item() <= clock - (forward - begin)
    new = {name: durations[before.get(name, 0) :] for name, durations in compilation_time_metrics.items()}
    counters = {"entire_frame_compile": "_compile.compile_inner", "inductor_compile": "compile_fx_inner"}
    for name in ("bytecode_tracing", "aot_collect_metadata", "build_guards", "GraphLowering.run", *counters):
        counted = sum(new[counters.get(name, name)]) * 1e9
        assert timeline[timeline.phase == name].duration_ns.sum() == pytest.approx(counted, rel=0.01, abs=100_000), name
    stage = rows["lowering"]
    assert stage == pytest.approx(sum(new["GraphLowering.run"]) * 1e9, rel=0.2)  # a cache may be read inside
