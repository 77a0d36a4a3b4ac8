"""One compiled graph in the form in which it would be exported: the forward, the joint graph, and their signature.

    found = report.export("step")
    found.signature          # the meaning of each placeholder and each output in the program
    print(found.joint)

`export` reads only the report, so it also works for a report that was loaded from a file. Nothing is traced or run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aotlab.errors import UsageError
from aotlab.report.markup import Markup, element, join
from aotlab.report.model import Frame, Graph, Report
from aotlab.report.parts import cell, fold, grid, heading
from aotlab.report.text import amount, listed
from aotlab.report.views import ExportedGraph, rows_of

if TYPE_CHECKING:
    import pandas as pd

#: A notebook shows at most this many nodes of a graph.
_MOST_NODES = 300


def exported_html(exported: ExportedGraph) -> str:
    """Write an exported graph as HTML: its signature and its first nodes."""
    columns = ("node", "kind", "target", "dtype", "shape")
    children = [heading(f"{exported.frame}, graph {exported.graph}")]
    for direction, title in (("input", "Inputs"), ("output", "Outputs")):
        rows = exported.signature[exported.signature["direction"] == direction]
        children.append(fold(title, f"{len(rows):,}", _grid(rows, columns), opened=True))
    for part, code in (("joint", exported.joint), ("forward", exported.forward)):
        if code is not None:
            nodes = exported.nodes(part)
            shown = _grid(nodes[:_MOST_NODES], ("name", "op", "target", "inputs", "dtype", "shape", "line"))
            hidden = len(nodes) - _MOST_NODES
            note = (
                element("p", f"… and {amount(hidden, 'more node')}: .nodes({part!r}) has all") if hidden > 0 else None
            )
            children.append(fold(f"{part} graph", amount(len(nodes), "node"), join(shown, note)))
    return str(element("div", *children))


def _grid(rows: pd.DataFrame, columns: tuple[str, ...]) -> Markup:
    texts = rows[list(columns)].astype("string").fillna("")
    return grid(columns, [[cell(text) for text in row] for row in texts.itertuples(index=False)])


def export(report: Report, graph: int | str | None = None, *, frame: str | None = None) -> ExportedGraph:
    """Find a graph of a report, and return it in the form in which it would be exported.

    ``graph`` is the graph's number within its frame, the frame's name (with or without the enclosing function), or the
    name of a compiled graph. ``frame`` is the frame's name. Either can be None, which matches every graph. Only graphs
    that were traced are considered, and exactly one of them must match.
    """
    traced = [(each, one) for each in report.frames for one in each.graphs if one.placeholders or one.results]
    chosen = [pair for pair in traced if frame in (None, pair[0].name) and _is_meant(graph, *pair)]
    if len(chosen) != 1:
        names = listed([f"graph={one.index}, frame={each.name!r}" for each, one in traced], 10)
        what = "" if graph is None else f" {graph!r}"
        what += "" if frame is None else f" of {frame!r}"
        problem = "several graphs are meant" if chosen else f"there is no traced graph{what}"
        raise UsageError(f"{problem}; choose one of: {names}" if traced else "the report has no graph that was traced")
    ((of, one),) = chosen
    codes = {
        code.title: code.text for stage in one.stages for code in stage.codes if stage.name in ("trace", "partition")
    }
    return ExportedGraph(
        report=report,
        frame=of.name,
        graph=one.index,
        joint=codes.get("joint graph"),
        forward=codes.get("forward graph"),
        backward=codes.get("backward graph"),
        signature=rows_of(report.signature, of.name, one.index),
    )


def _is_meant(wanted: int | str | None, frame: Frame, graph: Graph) -> bool:
    """Tell whether ``wanted``, an argument of `export`, selects ``graph`` of ``frame``; None selects every graph."""
    if isinstance(wanted, str):
        return wanted in (frame.name, frame.name.rpartition("<locals>.")[2], *[each.name for each in graph.compiled])
    return wanted in (None, graph.index)
