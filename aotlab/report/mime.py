"""The forms in which a notebook stores a report: JSON for our renderer, HTML for others, text for terminals."""

from __future__ import annotations

import json
from dataclasses import replace

from aotlab.report.counts import count, counted
from aotlab.report.cut import fitting
from aotlab.report.html import fragment
from aotlab.report.markup import clean
from aotlab.report.model import MIME_TYPE, Graph, Report
from aotlab.report.text import amount, duration, first_line
from aotlab.report.verdict import verdict
from aotlab.report.wrappers import trees

#: One output adds at most this many bytes to a notebook's file.
CAP = 200_000


def bundle(report: Report, *, live: bool = False) -> dict[str, object]:
    """Return the MIME bundle of ``report``, cut so that it adds at most `CAP` bytes to a notebook.

    If ``live`` is true, the kernel still has the report, and the page can request the rest from the kernel. Then the
    bundle leaves out guards, kernels (the backend's output code contains their sources too), and comparisons in which
    aotlab agrees with eager; their counts remain. The bundle never contains a widget, because a widget does not work
    after the saved notebook is opened again.
    """
    report = counted(report)
    frames = []
    for frame in report.frames:
        graphs = map(bare, frame.graphs)
        less = [replace(graph, guards=(), kernels=()) if live else graph for graph in graphs]
        frames.append(replace(frame, graphs=tuple(less)))
    rows = tuple([row for row in report.verification_rows if not (live and row.equal)])
    report = replace(report, frames=tuple(frames), verification_rows=rows)
    fitting_bundle: dict[str, object] = {}

    def fits(cut: Report) -> bool:
        nonlocal fitting_bundle
        # Check the JSON first, because it is fast; writing the HTML of a large report takes seconds.
        if len(json.dumps(cut.to_dict(sparse=True))) > CAP:
            return False
        candidate = _bundle(cut)
        if embedded_size(candidate) > CAP:
            return False
        fitting_bundle = candidate
        return True

    small = fitting(report, fits, CAP)
    return fitting_bundle or _bundle(small)


def bare(graph: Graph) -> Graph:
    """Remove the names of nodes from the rows of inputs and outputs, unless some of these rows are parts of wrappers.

    The page shows the placeholder, the node and the gradient of each tensor only for graphs with wrappers.
    """
    placeholders = tuple([replace(each, kind="") for each in graph.placeholders])
    if any(row.part_of for row in graph.inputs) or any(row.part_of for row in graph.outputs):
        return replace(graph, placeholders=placeholders)
    inputs = tuple([replace(row, placeholder="", gradient="") for row in graph.inputs])
    outputs = tuple([replace(row, node="", tangent="") for row in graph.outputs])
    return replace(graph, placeholders=placeholders, inputs=inputs, outputs=outputs)


def embedded_size(data: dict[str, object]) -> int:
    """Return the number of bytes that a bundle adds to a notebook's file.

    nbformat writes JSON with an indentation of one space. The data of an output are nested five levels deep, and a text
    is written as a list of its lines.
    """
    written = {kind: each.splitlines(keepends=True) if isinstance(each, str) else each for kind, each in data.items()}
    return len(json.dumps([[[[[written]]]]], indent=1, ensure_ascii=False).encode())


def plain(report: Report) -> str:
    """Return a few lines of text: the verdict, the cell's lines that ran eagerly and why, and one line per graph."""
    lines = [verdict(report).sentence]
    eager = [part for part in report.cell.parts if part.how == "eager"] if report.cell is not None else []
    lines += [f"  {part.lines} ran eagerly: {first_line(part.reason, 300)}" for part in eager[:10]]
    for frame in report.frames[:20]:
        calls = frame.calls
        counted = f"{amount(calls.total, 'call')}, {calls.compiled} compiled, {calls.eager} eager"
        # a stock compilation that was only observed, or made for comparison, has no calls that were counted
        lines.append(f"  {frame.name}: {counted if calls.total or frame.engine == 'aotlab' else frame.engine}")
        for graph in frame.graphs[:10]:
            counts = count(graph)
            lines.append(
                f"    graph {graph.index}: {graph.status} in {duration(graph.duration_ns)}, "
                f"{amount(counts.inputs, 'input')} ({counts.mutated} mutated), "
                f"{amount(counts.outputs, 'output')} ({counts.aliased} aliased), {amount(counts.kernels, 'kernel')}"
            )
            lines += [f"      {line}" for line in trees(graph)]
    lines += [f"  note: {note}" for note in report.notes]
    return clean("\n".join(lines))


def _bundle(report: Report) -> dict[str, object]:
    html = fragment(report)
    return {MIME_TYPE: report.to_dict(sparse=True), "text/html": html, "text/plain": plain(report)}
