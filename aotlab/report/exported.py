"""One compiled graph as it would be exported: forward, joint, and what goes in and comes out.

    found = report.export("step")
    found.signature          # placeholder → what it is in the program; output → whose gradient or new value it is
    print(found.joint)

All of it is in the report, also in one that was loaded: nothing is traced or run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aotlab.errors import UsageError
from aotlab.report.markup import Markup, clean, element, join
from aotlab.report.model import Frame, Graph, Report
from aotlab.report.parts import cell, fold, grid, heading
from aotlab.report.tables import table
from aotlab.report.text import amount, listed

if TYPE_CHECKING:
    import pandas as pd

#: So many nodes of a graph are shown in a notebook.
_MOST_NODES = 300


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExportedGraph:
    """The graphs of one compiled entry, and their signature.

    Attributes
    ----------
    frame, graph
        Which it is in the report's tables.
    joint
        The code of the graph that computes outputs and gradients together; None if nothing is differentiated.
    forward, backward
        The code of the two graphs that the partitioner made of it, or of the forward alone; None if there is none.
    signature
        One row per input of the joint (or else the forward) graph, then one per output: the node, what it is and of
        what in the program, its dtype and shape. The columns are those of ``report.signature``.
    """

    report: Report
    frame: str
    graph: int
    joint: str | None
    forward: str | None
    backward: str | None
    signature: pd.DataFrame

    def nodes(self, part: str) -> pd.DataFrame:
        """Return the nodes of the ``"joint"``, ``"forward"`` or ``"backward"`` graph, as in ``report.nodes``."""
        found = _of(table(self.report, "nodes"), self.frame, self.graph)
        rows = found[(found["part"] == part) & found["stage"].isin(("trace", "partition"))]
        if rows.empty:
            known = dict.fromkeys(found[found["stage"].isin(("trace", "partition"))]["part"])
            raise UsageError(f"there is no {part} graph; there is {listed(list(known)) or 'none'}")
        first = rows["stage"].iloc[0]
        made: pd.DataFrame = rows[rows["stage"] == first].reset_index(drop=True)
        return made

    def __repr__(self) -> str:
        wanted = self.signature[["direction", "node", "kind", "target", "dtype", "shape"]].fillna("")
        codes = [code for code in (self.joint, self.forward) if code is not None]
        return clean("\n\n".join([f"{self.frame}, graph {self.graph}", wanted.to_string(index=False), *codes]))

    def _repr_html_(self) -> str:
        columns = ("node", "kind", "target", "dtype", "shape")
        found = [heading(f"{self.frame}, graph {self.graph}")]
        for direction, title in (("input", "Inputs"), ("output", "Outputs")):
            rows = self.signature[self.signature["direction"] == direction]
            found.append(fold(title, f"{len(rows):,}", _grid(rows, columns), opened=True))
        for part, code in (("joint", self.joint), ("forward", self.forward)):
            if code is not None:
                nodes = self.nodes(part)
                shown = _grid(nodes[:_MOST_NODES], ("name", "op", "target", "inputs", "dtype", "shape", "line"))
                more = len(nodes) - _MOST_NODES
                note = (
                    element("p", f"… and {amount(more, 'more node')}: .nodes({part!r}) has all") if more > 0 else None
                )
                found.append(fold(f"{part} graph", amount(len(nodes), "node"), join(shown, note)))
        return str(element("div", *found))


def _grid(rows: pd.DataFrame, columns: tuple[str, ...]) -> Markup:
    texts = rows[list(columns)].astype("string").fillna("")
    return grid(columns, [[cell(text) for text in row] for row in texts.itertuples(index=False)])


def export(report: Report, graph: int | str | None = None, *, frame: str | None = None) -> ExportedGraph:
    """Find a graph of a report: by its number, by its function's name, by the name of what the backend compiled."""
    known = [(each, one) for each in report.frames for one in each.graphs if one.placeholders or one.results]
    chosen = [pair for pair in known if frame in (None, pair[0].name) and _is_meant(graph, *pair)]
    if len(chosen) != 1:
        names = listed([f"graph={one.index}, frame={each.name!r}" for each, one in known], 10)
        what = "" if graph is None else f" {graph!r}"
        what += "" if frame is None else f" of {frame!r}"
        found = "several graphs are meant" if chosen else f"there is no traced graph{what}"
        raise UsageError(f"{found}; choose one of: {names}" if known else "the report has no graph that was traced")
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
        signature=_of(table(report, "signature"), of.name, one.index),
    )


def _is_meant(wanted: int | str | None, frame: Frame, graph: Graph) -> bool:
    if isinstance(wanted, str):
        return wanted in (frame.name, frame.name.rpartition("<locals>.")[2], *[each.name for each in graph.compiled])
    return wanted in (None, graph.index)


def _of(rows: pd.DataFrame, frame: str, graph: int) -> pd.DataFrame:
    found: pd.DataFrame = rows[(rows["frame"] == frame) & (rows["graph"] == graph)].reset_index(drop=True)
    found.attrs.update(rows.attrs)
    return found
