"""The data that a notebook receives, and that it stays small."""

from __future__ import annotations

import html
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from aotlab.report import MIME_TYPE, Report, cut
from aotlab.report.collect import Recording
from aotlab.report.counts import counted, summary
from aotlab.report.cut import fitting
from aotlab.report.mime import CAP, bare, bundle, embedded_size, plain
from aotlab.report.model import Cell, Code, Graph, Kernel, TimelineRow

#: A kernel of some length, as Inductor writes it.
SOURCE = """
extern "C" void KERNEL(const float* in_ptr0, const float* in_ptr1, float* out_ptr0, float* out_ptr1)
{
    for (int64_t x0 = 0; x0 < 768; x0 += 8)
    {
        auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + x0, 8);
        auto tmp1 = at::vec::Vectorized<float>::loadu(in_ptr1 + x0, 8);
        auto tmp2 = tmp0 * tmp1;
        tmp2.store(out_ptr0 + x0);
    }
}
"""


def noise(characters: int, seed: int = 0) -> str:
    """Return text that gzip makes only half as long."""
    return random.Random(seed).randbytes(characters // 2).hex()


def big(report: Report, *, kernels: int = 40, graphs: int = 1, text: int = 20_000) -> Report:
    """Make a report of a large model out of a small one."""
    graph = report.frames[0].graphs[0]
    large = replace(
        graph,
        kernels=tuple(
            Kernel(name=f"k{i}", language="c++", graph_name="g", kind="forward", source=noise(text, i))
            for i in range(kernels)
        ),
        stages=tuple(
            replace(stage, codes=(Code(title="joint", language="python", text=noise(2 * text)),))
            for stage in graph.stages
        ),
    )
    copies: tuple[Graph, ...] = tuple(replace(large, index=i) for i in range(graphs))
    return replace(report, frames=(replace(report.frames[0], graphs=copies), *report.frames[1:]))


def test_the_bundle_has_json_html_and_text_and_no_widget(report: Report) -> None:
    """Our renderer, any front end, and a terminal are served; nothing needs a kernel."""
    found = bundle(report)
    assert list(found) == [MIME_TYPE, "text/html", "text/plain"]
    assert str(found["text/html"]).startswith('<div class="aotlab-report">')
    assert str(found["text/plain"]).splitlines()[0] == report.verdict


def embedded(report: Report) -> Report:
    """Return the report as a notebook stores it, with counts instead of the parts that no notebook shows."""
    frames = [
        replace(frame, graphs=tuple(replace(bare(graph), nodes=graph.nodes) for graph in frame.graphs))
        for frame in counted(report).frames
    ]
    return replace(report, frames=tuple(frames), summary=summary(report))


def test_the_json_is_a_report_with_its_verdict(report: Report) -> None:
    """A small report is embedded with its nodes; reading it back gives the report, counts and its summary."""
    read = Report.from_dict(json.loads(json.dumps(bundle(report)[MIME_TYPE])))
    assert read.summary is not None
    assert (read.summary.sentence, read.summary.state) == (report.verdict, "partly")
    assert read == embedded(report)


def test_graphs_kernels_and_nodes_survive(report: Report) -> None:
    """The report of a model with 5,000 nodes and long kernels is embedded as a whole, in 300 KB."""
    graph = report.frames[0].graphs[0]
    node = next(node for node in graph.nodes if node.line is not None)
    nodes = [
        replace(node, name=f"add_{i}", inputs=(f"add_{i - 1}", f"mul_{i // 3}"), module=f"transformer.h.{i // 800}.mlp")
        for i in range(5000)
    ]
    kernels = [
        Kernel(name=f"k{i}", language="c++", graph_name="g", kind="forward", source=SOURCE.replace("KERNEL", f"k{i}"))
        for i in range(300)
    ]
    large = replace(graph, nodes=tuple(nodes), kernels=tuple(kernels))
    whole = replace(report, frames=(replace(report.frames[0], graphs=(large,)),))
    assert len(whole.to_json()) > 1_500_000
    found = bundle(whole)
    assert embedded_size(found) <= CAP
    assert Report.from_dict(json.loads(json.dumps(found[MIME_TYPE]))) == embedded(whole)


def test_nodes_are_left_out_if_there_is_no_room(report: Report) -> None:
    """If the nodes are too many even when they are compressed, the rest of the report is still whole."""
    frame = report.frames[0]
    graph = frame.graphs[0]
    nodes = [replace(graph.nodes[0], name=noise(100, i)) for i in range(5000)]
    graphs = (replace(graph, nodes=tuple(nodes)), *frame.graphs[1:])
    whole = replace(report, frames=(replace(frame, graphs=graphs), *report.frames[1:]))
    found = bundle(whole)
    assert embedded_size(found) <= CAP
    (first, *others) = Report.from_dict(found[MIME_TYPE]).frames[0].graphs
    assert first == replace(embedded(whole).frames[0].graphs[0], nodes=())
    assert others == list(embedded(whole).frames[0].graphs[1:])


def test_jupyter_finds_the_methods(recording: Recording) -> None:
    """The display methods honour include and exclude, and a recording is displayed like its report."""
    assert recording._repr_mimebundle_() == bundle(recording.report())
    assert list(recording._repr_mimebundle_(include={"text/plain"})) == ["text/plain"]
    assert list(recording._repr_mimebundle_(exclude={MIME_TYPE})) == ["text/html", "text/plain"]
    assert recording._repr_html_() == bundle(recording.report())["text/html"]
    assert str(recording) == plain(recording.report())


@pytest.mark.parametrize(
    "size",
    [
        {},
        {"kernels": 2000, "text": 2000},
        {"kernels": 3, "graphs": 60, "text": 5000},
    ],
)
def test_an_output_is_capped_and_says_what_is_missing(report: Report, size: dict[str, int]) -> None:
    """Large reports are cut to the cap, in JSON and HTML, with a visible note.

    They still list the compiled functions.
    """
    whole = big(report, **size)
    found = bundle(whole)
    assert embedded_size(found) <= CAP
    read = Report.from_dict(found[MIME_TYPE])
    note = read.notes[-1]
    assert note.startswith("This output is cut to fit a notebook: ")
    assert note in html.unescape(str(found["text/html"]))
    assert re.search(r"in (Stages|Kernels) ", note)
    assert note.endswith("report.to_html(path) writes all of it.")
    assert read.verdict == whole.verdict
    assert embedded_size(found) > 60_000  # the mildest cut that fits, not the harshest


def test_what_is_missing_is_said_by_tab_and_with_the_reports_variable(report: Report) -> None:
    """A note names the tab that lost something, and the variable of the cell's report."""
    cell = Cell(source="f(x)", options="--backend eager -o train")
    read = Report.from_dict(bundle(big(report, kernels=2000).with_cell(cell))[MIME_TYPE])
    assert re.search(r"in Kernels [\d,]+ of [\d,]+ rows", read.notes[-1])
    assert read.notes[-1].endswith(". train.to_html(path) writes all of it.")


def test_the_size_is_that_of_the_notebook_file(report: Report) -> None:
    """The estimate is at least the size that nbformat adds to a file."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat, which comes with JupyterLab")
    found: Any = bundle(big(report))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x")])
    before = len(nbformat.writes(notebook).encode())
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", data=found)]
    added = len(nbformat.writes(notebook).encode()) - before
    assert added <= CAP


def test_a_cut_never_hides_a_difference(report: Report) -> None:
    """With thousands of equal rows the one that differs stays, and so does the verdict."""
    rows: list[dict[str, Any]] = [
        {"kind": "value", "subject": f"out[{i}]", "equal": True, "expected": noise(400, i)} for i in range(4000)
    ]
    rows.append({"kind": "stride", "subject": "out[1]", "equal": False, "sentence": "strides differ"})
    whole = report.with_verification(rows)
    read = Report.from_dict(bundle(whole)[MIME_TYPE])
    assert len(read.verification_rows) < 4001
    assert read.verification_rows[0].sentence == "strides differ"
    assert "NOT equal to eager: 1 of 4,001 observables differ" in read.verdict


def test_a_cut_keeps_the_longest_phases(report: Report) -> None:
    """Of thousands of phases, the longest stay, in their order."""
    rows = [TimelineRow(phase=noise(200, i), start_ns=i, duration_ns=i % 7, frame="f" * 200) for i in range(10_000)]
    read = Report.from_dict(bundle(replace(report, timeline_rows=tuple(rows)))[MIME_TYPE])
    kept = [row.start_ns for row in read.timeline_rows]
    assert 0 < len(kept) < 1429
    assert kept == [i for i in range(10_000) if i % 7 == 6][: len(kept)]
    assert any("in Timing" in note for note in read.notes)


def test_the_harshest_cut_leaves_the_verdict(report: Report) -> None:
    """Even under the smallest cap, the verdict and the note about the cut remain."""
    whole = big(report)
    smallest = fitting(whole, lambda cut: False)
    assert smallest.frames == ()
    assert smallest.verdict == whole.verdict
    assert len(json.dumps(smallest.to_dict())) < 4000


def test_a_huge_name_or_message_is_cut_too(report: Report) -> None:
    """One string alone cannot exceed the cap either."""
    monstrous = replace(report, name=noise(1_000_000), notes=(noise(1_000_000),))
    assert embedded_size(bundle(monstrous)) <= CAP


@pytest.mark.parametrize("over", [1, 3, 22, 23, 60])
def test_the_note_about_a_cut_is_not_longer_than_what_was_cut(over: int) -> None:
    """A text a few characters over the limit is left whole; one that is cut becomes shorter."""
    limits = cut.Limits(code=1000, rows=100, graphs=10, text=500)
    value = "v" * (500 + over)
    found = cut._Cutter(limits).visit("message", value)
    assert found == (value if over <= 22 else f"{'v' * 500}\n… {over} characters cut …")
    assert len(found) <= len(value)


def test_text_that_json_cannot_carry_is_cleaned(report: Report) -> None:
    """A lone surrogate in user code would break the message to the front end."""
    found = bundle(replace(report, name="a\ud800b"))
    json.dumps(found, ensure_ascii=False).encode()
    assert Report.from_dict(found[MIME_TYPE]).name == "a\ufffdb"


def test_plain_text_is_a_few_lines(report: Report) -> None:
    """A terminal gets the verdict and a line per frame and graph."""
    assert plain(report).splitlines()[1:] == [
        "  step: 5 calls, 4 compiled, 1 eager",
        "    graph 0: compiled in 950 ms, 6 inputs (1 mutated), 7 outputs (5 aliased), 2 kernels",
        "    graph 1: compiled in 950 ms, 6 inputs (1 mutated), 7 outputs (5 aliased), 2 kernels",
        "  dropout_net: 0 calls, 0 compiled, 0 eager",
        "    graph 0: refused in 2.00 ms, 6 inputs (0 mutated), 0 outputs (0 aliased), 0 kernels",
    ]


def test_a_report_of_the_same_graphs_is_cut_once(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged cell that runs again shows its report without trying every way to cut it."""
    whole = big(report)
    first = bundle(whole)
    cuts: list[cut.Limits] = []
    original = cut._cut
    monkeypatch.setattr(cut, "_cut", lambda told, limits: (cuts.append(limits), original(told, limits))[1])
    assert bundle(replace(whole, created="later"))["text/plain"] == first["text/plain"]
    assert len(cuts) == 1
    bundle(big(report, graphs=2))
    assert len(cuts) > 2
