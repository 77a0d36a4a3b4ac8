"""Counts and facts always describe the whole report, even if it was cut.

The facts are sentences about the user's tensors.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import aotlab
from aotlab.report import Cell, Report
from aotlab.report.counts import count, count_frame, summary
from aotlab.report.cut import fitting
from aotlab.report.html import fragment
from aotlab.report.model import Frame, Graph, Input


def of_a_model(report: Report, times: int = 400) -> Report:
    """Make a report with hundreds of everything."""
    frame = report.frames[0]
    graph = frame.graphs[0]
    tables = ("nodes", "inputs", "outputs", "storages", "saved", "kernels", "guards")
    large = replace(graph, **{name: getattr(graph, name) * times for name in tables})
    graphs = (large, *(replace(graph, index=i) for i in range(1, 70)))
    rows = [{"kind": "value", "subject": f"out[{i}]", "equal": i > 0, "sentence": "no"} for i in range(2000)]
    return replace(report, frames=(replace(frame, graphs=graphs), *report.frames[1:])).with_verification(rows)


def facts(report: Report) -> dict[str, str]:
    """Return the facts by their keys."""
    return {fact.key: fact.sentence for fact in summary(report).facts}


def with_graph(report: Report, graph: Graph) -> Report:
    """Return a report about one graph."""
    return replace(report, frames=(Frame(name="f", function="f", graphs=(graph,)),))


def test_counts_are_those_of_the_whole_report(report: Report) -> None:
    """A cut changes no count: the cut report has the counts of the full tables.

    The test counts the tables row by row.
    """
    whole = of_a_model(report)
    cut = Report.from_json(fitting(whole, lambda small: len(small.to_json()) < 200_000).to_json())
    (before, *_), (after, *_) = whole.frames[0].graphs, cut.frames[0].graphs
    assert len(after.saved) < len(before.saved)
    assert len(cut.frames[0].graphs) < 70
    counts = count(after)
    assert counts == count(before)
    assert counts.saved == len(before.saved)
    assert counts.saved_bytes == sum(0 if row.is_input or row.is_output else int(row.nbytes) for row in before.saved)  # type: ignore[arg-type]
    assert counts.aliased == len([row for row in before.outputs if row.base is not None])
    assert count_frame(cut.frames[0]).graphs == 70
    assert summary(cut) == summary(whole)
    assert (summary(cut).compared, summary(cut).different) == (2000, 1)


@pytest.mark.parametrize("table", ["Inputs", "Outputs"])
def test_the_page_shows_them(report: Report, table: str) -> None:
    """The summary of a report that was cut has the headings of the whole one's."""
    whole = of_a_model(report)
    pages = [fragment(each) for each in (whole, fitting(whole, lambda cut: len(cut.to_json()) < 100_000))]
    assert len(pages[1]) < len(pages[0]) / 2
    heads = [re.findall(rf"<h3>{table}.*?</h3>", page)[:1] for page in pages]
    assert heads[0]
    assert heads[0] == heads[1]


def test_what_was_written_through_another_tensor(report: Report) -> None:
    """It is not said to be written outside the graphs."""
    alias = Input(name="flat", kind="alias", overlaps=("a", "b"), mutates_data=True)
    python = Input(name="log", kind="input", mutates_data=True, mutates_metadata=True)
    told = facts(report.with_cell(Cell(source="f(x)", mutated_outside=(alias, python))))["mutated"]
    assert "flat (data, through a, b)" in told
    assert "log (data, metadata, outside the graphs)" in told


def test_nothing_is_claimed_of_a_refused_graph(report: Report) -> None:
    """That it mutated nothing is not known."""
    graph = replace(report.frames[0].graphs[0], status="refused", training=None, outputs=(), inputs=())
    assert facts(with_graph(report, graph)) == {}
    plain = replace(graph, status="compiled", training=False)
    assert facts(with_graph(report, plain)) == {"mutated": "nothing", "aliases": "no output shares memory"}


def test_saved_values_that_share_memory_take_it_once() -> None:
    """A value and a view of it are one piece of memory, here as for eager."""

    def two(x: torch.Tensor) -> torch.Tensor:
        value = torch.tanh(x)
        flat = value.view(-1)
        return value.sin().sum() + (flat * flat * flat).sum()

    x = torch.randn(30, 30, requires_grad=True)
    with aotlab.Report.record() as recording:
        aotlab.compile(two, backend="eager")(x)
    report = recording.report()
    (graph,) = report.frames[0].graphs
    kept: dict[int, int] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        result = two(x)  # alive, so that no two storages have one address
    assert count(graph).saved_bytes == sum(kept.values()) == 2 * 30 * 30 * 4
    assert [row.shares for row in graph.saved] == ["", "tanh", ""]
    assert "3 values, 7.03 KiB of new memory" in facts(report)["saved"]
    assert "7.03 KiB of new memory" in next(stage.summary for stage in graph.stages if stage.name == "partition")
    del result


def test_what_is_saved_is_that_of_one_call(report: Report) -> None:
    """One call uses one of a function's graphs. So the memory is the maximum over the graphs, not the sum."""
    graph = next(graph for frame in report.frames for graph in frame.graphs if graph.saved)
    one = with_graph(report, graph)
    frame = one.frames[0]
    several = replace(one, frames=(replace(frame, graphs=(graph, replace(graph, index=1, saved=graph.saved[:1]))),))
    assert summary(several).counts.saved_bytes == summary(one).counts.saved_bytes == count(graph).saved_bytes
    assert summary(several).counts.saved == len(graph.saved) + 1
    assert facts(several)["saved"] == f"{facts(one)['saved']}, at most, by one call of each function"
