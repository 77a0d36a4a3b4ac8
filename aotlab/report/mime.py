"""What a notebook shows and keeps of a report: JSON for our renderer, HTML for everybody, text for terminals."""

from __future__ import annotations

import json
from dataclasses import replace

from aotlab.report.counts import count, summary
from aotlab.report.cut import fitting
from aotlab.report.html import fragment
from aotlab.report.markup import clean
from aotlab.report.model import MIME_TYPE, Graph, Report
from aotlab.report.text import amount, duration, first_line, lines_of
from aotlab.report.verdict import verdict
from aotlab.report.wrappers import trees

#: The most that one output may add to a notebook's file, in bytes.
CAP = 200_000


def bundle(report: Report, *, live: bool = False) -> dict[str, object]:
    """Return the MIME bundle of ``report``, cut so that it adds at most `CAP` bytes to a notebook.

    Of a report that is ``live``, so that its page asks the kernel for the rest, it holds only the counts of guards, of
    kernels, whose sources stand in the compiler's code, and of what is equal to eager. It never holds a widget: a saved
    notebook would reopen with a dead one.
    """
    told = summary(report)
    frames = []
    for frame in report.frames:
        graphs = [replace(bare(graph), counts=count(graph)) for graph in frame.graphs]
        if live:
            graphs = [replace(graph, guards=(), kernels=()) for graph in graphs]
        frames.append(replace(frame, graphs=tuple(graphs)))
    if sum(len(frame.graphs) for frame in frames) == 1:
        told = replace(told, counts=None)  # those of the only graph
    rows = tuple([row for row in report.verification_rows if not (live and row.equal)])
    report = replace(report, summary=told, frames=tuple(frames), verification_rows=rows)
    found: dict[str, object] = {}

    def fits(cut: Report) -> bool:
        nonlocal found
        # First the cheap half of the truth: the HTML of a large report takes seconds to write, its JSON does not.
        if len(json.dumps(cut.to_dict(sparse=True))) > CAP:
            return False
        made = _bundle(cut)
        if embedded_size(made) > CAP:
            return False
        found = made
        return True

    small = fitting(report, fits, CAP)
    return found or _bundle(small)


def bare(graph: Graph) -> Graph:
    """Leave out what stands for tensors in a graph, which the page says only where some are parts of wrappers."""
    placeholders = tuple([replace(each, kind="") for each in graph.placeholders])
    if any(row.part_of for row in graph.inputs) or any(row.part_of for row in graph.outputs):
        return replace(graph, placeholders=placeholders)
    inputs = tuple([replace(row, placeholder="", gradient="") for row in graph.inputs])
    outputs = tuple([replace(row, node="", tangent="") for row in graph.outputs])
    return replace(graph, placeholders=placeholders, inputs=inputs, outputs=outputs)


def embedded_size(data: dict[str, object]) -> int:
    """Return the bytes that a bundle adds to a notebook's file.

    nbformat writes JSON with an indentation of one, an output's data stands five levels deep, and text is written
    as a list of its lines.
    """
    written = {kind: each.splitlines(keepends=True) if isinstance(each, str) else each for kind, each in data.items()}
    return len(json.dumps([[[[[written]]]]], indent=1, ensure_ascii=False).encode())


def plain(report: Report) -> str:
    """Return a few lines of text: the verdict, what of a cell ran eagerly and why, then one line per graph."""
    lines = [verdict(report).sentence]
    eager = [part for part in report.cell.parts if part.how == "eager"] if report.cell is not None else []
    lines += [f"  {lines_of(part)} ran eagerly: {first_line(part.reason, 300)}" for part in eager[:10]]
    for frame in report.frames[:20]:
        calls = frame.calls
        lines.append(f"  {frame.name}: {amount(calls.total, 'call')}, {calls.compiled} compiled, {calls.eager} eager")
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
