"""From events to a report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from traceback import FrameSummary
from typing import Any

import pytest
import torch

import aotlab
from aotlab import config, events
from aotlab.report import Recording, Report
from aotlab.report.collect import RECENT_CALLS
from aotlab.report.dynamo_breaks import graph_break
from aotlab.report.verdict import ROUNDS


def test_frames_and_graphs_are_numbered_in_order_of_appearance(report: Report) -> None:
    """Each function is a frame; its entries are numbered from 0, whatever the engine calls them."""
    assert [frame.name for frame in report.frames] == ["step", "dropout_net"]
    assert [graph.index for graph in report.frames[0].graphs] == [0, 1]
    assert [graph.entry for graph in report.frames[0].graphs] == [101, 102]
    assert [[(m.graph, m.sentence) for m in graph.misses] for graph in report.frames[0].graphs] == [
        [],
        [(0, "`x` has shape (8, 5), this entry was compiled for (4, 5)")],
    ]
    assert report.notes == ()


def test_functions_of_one_name_are_told_apart(story: Any) -> None:
    """Two functions called ``step`` become two frames with different names."""
    with Report.record() as recording:
        story.compiled(function_id=1)
        story.compiled(function_id=2)
    assert [frame.name for frame in recording.report().frames] == ["step", "step #2"]


def test_a_graph_says_who_made_it(report: Report) -> None:
    """Frontend, backend, training and times come from the events."""
    graph = report.frames[0].graphs[0]
    assert (
        graph.status,
        graph.frontend,
        graph.backend,
        graph.training,
        graph.grad_mode,
    ) == ("compiled", "direct", "inductor", True, True)
    assert graph.duration_ns == 950_000_000


def test_calls_are_counted_and_the_last_ones_kept(story: Any) -> None:
    """Counters count all calls, the ring keeps the last thousand."""
    with Report.record() as recording:
        entry = story.compiled()
        story.called(entry, times=RECENT_CALLS + 5)
        story.called(None, times=2)
    calls = recording.report().frames[0].calls
    assert (calls.total, calls.compiled, calls.eager) == (RECENT_CALLS + 7, RECENT_CALLS + 5, 2)
    assert len(calls.recent) == RECENT_CALLS
    assert [call.compiled for call in calls.recent[-3:]] == [True, False, False]
    assert [call.graph for call in calls.recent[-3:-1]] == [0, None]
    assert recording.report().frames[0].graphs[0].calls == RECENT_CALLS + 5


def test_calls_of_an_entry_from_before_the_recording(story: Any) -> None:
    """An entry that was compiled earlier is known by its calls alone, and the verdict says so."""
    with Report.record() as recording:
        story.called(77, times=2)
    (graph,) = recording.report().frames[0].graphs
    assert (graph.status, graph.calls, graph.entry) == ("earlier", 2, 77)
    assert recording.verdict == "Nothing was compiled: 2 calls ran code that was compiled before the recording began."


def test_snapshots_do_not_follow_what_later_stages_rewrite(report: Report) -> None:
    """The story destroys the joint graph after the partition; the report still has it."""
    trace = report.frames[0].graphs[0].stages[3]
    assert trace.name == "trace"
    assert "return" in trace.codes[0].text
    joint = [node for node in report.frames[0].graphs[0].nodes if node.stage == "trace"]
    assert joint[-1].op == "output"


def test_a_recording_answers_like_a_report_at_any_time(story: Any) -> None:
    """During the block and after it, tables, fields and methods equal those of the current report."""
    with Report.record("half") as recording:
        assert len(recording.inputs) == 0
        entry = story.compiled()
        assert len(recording.inputs) == 6
        before = recording.report()
        story.called(entry)
        assert len(recording.calls) == 1
    assert before.frames[0].calls.total == 0
    assert recording.name == "half"
    assert recording.report() is recording.report()
    assert recording.frames == recording.report().frames
    assert recording.to_json() == recording.report().to_json()
    with pytest.raises(AttributeError, match="has no attribute 'no_such_field'"):
        _ = recording.no_such_field
    with pytest.raises(AttributeError):
        _ = recording._repr_no_such_format_


def test_nothing_is_heard_after_the_block(story: Any) -> None:
    """The listener is removed after the block, also if the block raises, and the finished report does not change."""

    def fail() -> None:
        raise KeyError("the user's")

    with Report.record() as recording:
        story.compiled()
    with pytest.raises(KeyError), Report.record():
        fail()
    story.compiled(function_id=9)
    assert not events.listening()
    assert len(recording.report().frames) == 1


def test_recordings_nest(story: Any) -> None:
    """Two recordings at a time each hear everything that happens during their block."""
    with Report.record() as outer:
        story.compiled(function_id=1)
        with Report.record() as inner:
            story.compiled(function_id=2)
    assert (len(outer.report().frames), len(inner.report().frames)) == (2, 1)


def test_calls_from_many_threads_are_all_counted(story: Any) -> None:
    """Nothing is lost when threads call at the same time, and reports can be made meanwhile."""
    with Report.record() as recording:
        entry = story.compiled()
        threads = [threading.Thread(target=story.called, args=(entry,), kwargs={"times": 500}) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            recording.report()
        for thread in threads:
            thread.join()
    assert recording.report().frames[0].calls.total == 2000


def test_what_cannot_be_recorded_is_noted_and_hurts_nobody(story: Any) -> None:
    """A record that the report cannot describe leads to a note, not to an error in the user's compile."""
    with Report.record() as recording:
        entry = story.started()
        story.stage(entry, "trace", object(), 5)
        events.emit(events.CompileFinished(entry=entry, duration_ns=10, guards=()))
    report = recording.report()
    assert report.frames[0].graphs[0].status == "compiled"
    (note,) = report.notes
    assert note.startswith("StageFinished could not be recorded: AttributeError")


def test_a_stage_that_the_report_does_not_know_is_timed(story: Any) -> None:
    """Later stages may come; their time and size are shown without their record."""
    with Report.record() as recording:
        entry = story.started()
        story.stage(entry, "quantized", object(), 5, 9)
    report = recording.report()
    (stage,) = report.frames[0].graphs[0].stages
    assert (stage.name, stage.duration_ns, stage.node_count) == ("quantized", 5, 9)
    assert report.frames[0].graphs[0].status == "compiling"
    assert report.notes == ()


def test_a_refusal_names_class_argument_line_and_outcome(report: Report) -> None:
    """The class, reason, argument, line and outcome of a RefusedError arrive in the report."""
    (refusal,) = report.frames[1].refusals
    assert (
        refusal.error,
        refusal.reason,
        refusal.argument,
        refusal.line.line if refusal.line else None,
        refusal.outcome,
    ) == ("RandomOpError", "RandomOp", "x", 3, "raised")
    assert report.frames[1].graphs[0].status == "refused"


def test_a_backward_for_a_pattern_of_tangents(story: Any) -> None:
    """A backward that is derived at run time adds a stage, a compiled graph with its pattern, and its kernels."""
    with Report.record() as recording:
        story.backward(story.compiled())
    graph = recording.report().frames[0].graphs[0]
    assert (
        graph.stages[-1].name,
        graph.stages[-1].summary,
        graph.stages[-1].node_count,
    ) == ("backward", "for gradients of results 2 of 2", 2)
    assert [compiled.pattern for compiled in graph.compiled] == [(), (), (False, True)]
    assert len(graph.kernels) == 3


def test_the_time_of_a_stage_is_its_own(story: Any) -> None:
    """A backward that is derived meanwhile is a stage, and is counted once."""
    with Report.record() as recording:
        entry = story.compiled()
        story.backward(entry)
        record = events.StageFinished(entry=entry, stage="later", duration_ns=90_000_000, nodes=None, record=None)
        events.emit(record)
    stages = recording.report().frames[0].graphs[0].stages[-2:]
    assert [(each.name, each.duration_ns) for each in stages] == [("backward", 7_000_000), ("later", 83_000_000)]


def test_the_switches_are_those_of_the_beginning(story: Any) -> None:
    """The environment contains the configuration at the beginning of the recording."""
    with config.patch(recompile_limit=3), Report.record() as recording:
        config.recompile_limit = 5
    switches = {switch.name: switch.value for switch in recording.report().environment.config}
    assert set(config.__annotations__) == set(switches)
    assert switches["recompile_limit"] == 3


@pytest.mark.parametrize(
    ("tell_story", "expected"),
    [
        (
            lambda story: None,
            "Nothing was compiled: no function compiled by aotlab was called during the recording.",
        ),
        (lambda story: story.called(None), "Nothing was compiled: 1 call ran eagerly."),
        (lambda story: story.started(), "Nothing was compiled: the recording ended before a compilation did."),
        (
            lambda story: story.refused(),
            "Nothing was compiled: step was refused, RandomOpError: `aten.bernoulli` draws random numbers, "
            "at /home/ada/work/model.py:3 (x.mul_(2)) [random-op]",
        ),
        (
            lambda story: story.refused(outcome="ran eagerly"),
            "Nothing was compiled: step ran eagerly, RandomOpError: `aten.bernoulli` draws random numbers, "
            "at /home/ada/work/model.py:3 (x.mul_(2)) [random-op]",
        ),
        (
            lambda story: story.compiled(),
            "Compiled step: 1 graph (training), backend inductor, on cpu, in 950 ms; not verified.",
        ),
    ],
)
def test_the_verdict(story: Any, tell_story: Callable[[Any], None], expected: str) -> None:
    """The first line lists the compiled functions. If nothing was compiled, it says so and gives the reason."""
    with Report.record() as recording:
        tell_story(story)
    assert expected == recording.verdict


def test_the_verdict_of_something_refused_beside_something_compiled(recording: Recording) -> None:
    """Refusals are named although other functions were compiled."""
    assert recording.verdict.endswith("not verified. 1 compilation refused, first dropout_net (RandomOp).")


def test_the_verdict_of_a_verified_report(story: Any) -> None:
    """Verification rows decide: one difference outweighs everything."""
    row = {"kind": "value", "subject": "out[0]", "equal": True}
    with Report.record() as recording:
        story.compiled()
    good = recording.report().with_verification([row, row])
    assert good.verdict.endswith("in 950 ms; verified: equal to eager on 2 observables.")
    upstream = good.with_verification([{**row, "equal": False, "engine": "upstream"}])
    assert upstream.verdict == good.verdict
    bad = good.with_verification([{**row, "equal": False}])
    assert bad.verdict.endswith("in 950 ms; NOT equal to eager: 1 of 3 observables differ.")


def test_the_verdict_does_not_claim_what_was_not_verified(story: Any) -> None:
    """Of two compiled functions one was compared with eager: the first line says that the other was not."""
    row = {"kind": "value", "subject": "out[0]", "equal": True}
    with Report.record() as recording:
        story.compiled(function_id=1)
        story.compiled(function_id=2)
    half = recording.report().with_verification([row], frame="step #2")
    assert half.verdict.endswith("verified: equal to eager on 1 observable, but step not verified.")
    whole = half.with_verification([row], frame="step")
    assert whole.verdict.endswith("verified: equal to eager on 2 observables.")


def test_storages_are_numbered_through_the_report(report: Report) -> None:
    """Equal storage numbers mean shared memory, in all graphs of the report."""
    graphs = [graph for frame in report.frames for graph in frame.graphs]
    numbers = [storage.number for graph in graphs for storage in graph.storages]
    assert len([graph for graph in graphs if graph.storages]) > 1
    assert numbers == list(range(len(numbers)))
    for graph in graphs:
        own = {storage.number for storage in graph.storages}
        assert {row.storage for row in (*graph.inputs, *graph.outputs)} - {None} <= own


def test_a_graph_that_was_not_traced_says_nothing_of_writes() -> None:
    """Neither of its inputs nor of their storages."""

    def refused(x: torch.Tensor) -> None:
        x.untyped_storage().resize_(24)

    with pytest.warns(match="untyped_storage"), Report.record() as recording:
        aotlab.compile(refused, backend="eager", frontend="direct")(torch.ones(3))
    (graph,) = recording.report().frames[0].graphs
    assert [row.mutates_data for row in graph.inputs] == [None]
    assert [span.mutated for storage in graph.storages for span in storage.spans] == [None]


SKIPPED = "Attempted to inline function marked as skipped\n  Developer debug context: qualname: f, filename: `{}`, why"


@pytest.mark.parametrize(
    ("file", "reason", "library"),
    [
        ("/home/me/train.py", SKIPPED.format("/env/site-packages/pandas/core/frame.py"), "pandas"),
        ("/env/site-packages/matplotlib/cbook.py", "Unsupported method call", "matplotlib"),
        ("/home/me/train.py", "attempted to trace numpy function with config.trace_numpy=False", "numpy"),
        ("/env/site-packages/transformers/modeling_utils.py", "logging.Logger method not supported", "logging"),
        # The program's own log, and code that computes with tensors.
        ("/home/me/train.py", "logging.Logger method not supported", ""),
        ("/home/me/train.py", SKIPPED.format("/env/site-packages/torch/optim/optimizer.py"), ""),
        ("/env/site-packages/transformers/models/llama.py", "generic_jump TensorVariable()", ""),
        ("/home/me/pandas.py", "call to print()", ""),
    ],
)
def test_calls_of_libraries_without_tensors(file: str, reason: str, library: str) -> None:
    """A break in such a library, or in the log of an installed package, is not counted against the program."""
    row = graph_break(FrameSummary(file, 3, "f"), reason, 0)
    assert library == row.library
    assert (row.words == f"calls {library}") == bool(library)


def test_a_step_that_runs_eagerly_by_design() -> None:
    """An optimizer's step that aotlab keeps from Dynamo is no fault either."""
    row = graph_break(FrameSummary("/home/me/train.py", 3, "f"), "aotlab: the step of Adam\n  Explanation: why\n", 0)
    assert (row.library, row.words) == ("torch.optim", f"steps Adam, {ROUNDS}")
