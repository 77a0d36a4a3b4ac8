"""The forms in which a notebook stores a report: JSON for our renderer, HTML for others, text for terminals."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from html import escape

from aotlab.report.compare import differences
from aotlab.report.counts import count, counted
from aotlab.report.cut import whole_or_cut
from aotlab.report.html import fragment
from aotlab.report.markup import clean
from aotlab.report.model import MIME_TYPE, Graph, Node, Report
from aotlab.report.packing import compressed, node_columns, pack
from aotlab.report.ranks import differences_of_ranks
from aotlab.report.text import amount, duration, first_line
from aotlab.report.verdict import verdict
from aotlab.report.wrappers import trees

#: One output adds at most this many bytes to a notebook's file.
CAP = 300_000

#: The compressed report, without nodes, has at most this many bytes, and the HTML at most that many. The nodes may have
#: the rest.
_MOST_PACKED, _MOST_HTML = 165_000, 80_000

#: A report with more characters of JSON is cut before it is written as HTML, because that would take seconds.
_MOST_WRITTEN = 200_000


def bundle(report: Report) -> dict[str, object]:
    """Return the MIME bundle of ``report``, cut so that it adds at most `CAP` bytes to a notebook.

    The report is compressed. It is cut only if it is too large after that. The nodes of graphs are added while there is
    room for them. The bundle never contains a widget, because a widget does not work after the saved notebook is opened
    again.
    """
    report = counted(report)
    small, data = _packed(report)
    found: dict[str, object] = {MIME_TYPE: data, "text/html": _html(small), "text/plain": plain(small)}
    data["gzip_nodes"] = _nodes(small, report, CAP - embedded_size(found))
    return found


def whole(report: Report) -> dict[str, object]:
    """Return the compressed form of ``report`` with all of its nodes. `Report.from_dict` reads it."""
    graphs = [tuple([replace(graph, nodes=()) for graph in frame.graphs]) for frame in report.frames]
    frames = [replace(frame, graphs=each) for frame, each in zip(report.frames, graphs, strict=True)]
    nodes = [[_packed_nodes(graph.nodes) for graph in frame.graphs] for frame in report.frames]
    return pack(replace(report, frames=tuple(frames)).to_dict(sparse=True), nodes)


def running_bundle(report: Report) -> dict[str, object]:
    """Return the MIME bundle of the small report of a running cell, which the bundle of the final report replaces."""
    assert report.running is not None
    line = f"aotlab · {report.running.text} …"
    data = counted(report).to_dict(sparse=True)
    return {MIME_TYPE: data, "text/html": f"<i>{escape(clean(line))}</i>", "text/plain": clean(line)}


def _packed(report: Report) -> tuple[Report, dict[str, object]]:
    """Return ``report`` as it was cut, and its compressed form without nodes."""
    frames = tuple([replace(frame, graphs=tuple(map(bare, frame.graphs))) for frame in report.frames])
    data: dict[str, object] = {}

    def fits(cut: Report) -> bool:
        nonlocal data
        candidate = pack(cut.to_dict(sparse=True))
        if len(json.dumps(candidate)) > _MOST_PACKED:
            return False
        data = candidate
        return True

    if report.rank_reports and fits(small := replace(report, frames=frames)):
        return small, data
    note = (f"This output has only rank {report.rank}. The page that to_html writes has all ranks.",)
    notes = (*report.notes, *(note if report.rank_reports else ()))
    small = whole_or_cut(replace(report, frames=frames, rank_reports=(), notes=notes), fits, "packed")
    return small, data or pack(small.to_dict(sparse=True))


def _nodes(small: Report, report: Report, room: int) -> list[list[str]]:
    """Return the compressed nodes of the graphs of ``report`` that its cut form ``small`` has, while there is room.

    ``room`` is the number of bytes that they may add to a notebook.
    """
    texts: list[list[str]] = []
    # A cut report has the first frames, and the first graphs of each.
    for kept, frame in zip(small.frames, report.frames, strict=False):
        texts.append([])
        for _, graph in zip(kept.graphs, frame.graphs, strict=False):
            text = _packed_nodes(graph.nodes)
            # A text is written on a line with an indentation.
            texts[-1].append(text if len(text) + 40 <= room else "")
            room -= len(texts[-1][-1]) + 40
    return texts


#: The nodes of the last graphs that were shown, and their compressed form, by the id of the nodes. A cell that runs
#: again shows the same nodes.
_packed_before: OrderedDict[int, tuple[tuple[Node, ...], str]] = OrderedDict()


def _packed_nodes(nodes: tuple[Node, ...]) -> str:
    """Return the nodes of a graph, compressed; an empty text for a graph without nodes."""
    if not nodes:
        return ""
    known = _packed_before.get(id(nodes))
    if known is None or known[0] is not nodes:
        known = nodes, compressed(node_columns(nodes))
        _packed_before[id(nodes)] = known
        if len(_packed_before) > 64:
            _packed_before.popitem(last=False)
    return known[1]


def _html(report: Report) -> str:
    """Return the summary of ``report`` as HTML that adds at most `_MOST_HTML` bytes to a notebook.

    The tables that the summary only counts are left out first.
    """
    frames = []
    for frame in report.frames:
        graphs = [replace(each, guards=(), kernels=(), saved=(), stages=(), steps=()) for each in frame.graphs]
        frames.append(replace(frame, graphs=tuple(graphs)))
    different = tuple([row for row in report.verification_rows if not row.equal])
    report = replace(report, frames=tuple(frames), verification_rows=different, timeline_rows=())
    html = ""

    def fits(cut: Report) -> bool:
        nonlocal html
        # Check the JSON first, because it is fast.
        if len(json.dumps(cut.to_dict(sparse=True))) > _MOST_WRITTEN:
            return False
        candidate = fragment(cut)
        if embedded_size({"text/html": candidate}) > _MOST_HTML:
            return False
        html = candidate
        return True

    small = whole_or_cut(report, fits, "html")
    return html or fragment(small)


def bare(graph: Graph) -> Graph:
    """Remove the nodes, tables that the page does not show, and the names of nodes in the rows of inputs and outputs.

    The names remain if some of these rows are parts of wrappers. The page shows the placeholder, the node and the
    gradient of each tensor only for graphs with wrappers.
    """
    graph = replace(graph, nodes=(), autograd=(), compiled=(), results=())
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
    """Return a few lines of text: the verdict, the cell's lines that ran eagerly and why, and one line per graph.

    For a report that compares two runs, return the differences.
    """
    if report.run_names:
        return clean("\n".join(differences(report)))
    lines = [
        verdict(report).sentence,
        *(differences_of_ranks(report) if report.rank_reports or report.rank_rows else ()),
    ]
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
