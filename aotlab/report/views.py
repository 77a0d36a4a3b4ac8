"""The views of a report: tables, a verdict, a page, a notebook's output.

`aotlab.report.model.Report` and `aotlab.report.collect.Recording` inherit from the class `Views`, so both have the same
attributes. The views of a recording show the events so far. `ExportedGraph` shows one graph of a report. The modules
with the functions that draw a report import `Report`, so `Views` cannot import them. Instead `aotlab.report` registers
these functions in `DRAWING`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aotlab.errors import UsageError
from aotlab.report.markup import clean
from aotlab.report.text import listed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: The functions that draw or export a report, by name. `aotlab.report` fills this dictionary.
DRAWING: dict[str, Callable[..., Any]] = {}


#: The class of the report that `Views.report` returns.
R_co = TypeVar("R_co", covariant=True)


class Views(Generic[R_co]):
    """The tables and pages of a report: the base class of `Report` and `Recording`.

    A subclass defines the method `report`, which returns the report that is shown.
    """

    __slots__ = ()

    @abstractmethod
    def report(self) -> R_co:
        """Return the report that is shown."""

    @property
    def inputs(self) -> pd.DataFrame:
        """One row per argument of a graph: its description, the tensors that it shares memory with, and its mutations.

        For a notebook's cell, there are also rows for tensors that the cell wrote outside of the graphs or through
        another name.
        """
        return self._table("inputs")

    @property
    def outputs(self) -> pd.DataFrame:
        """One row per output: its description and the tensors that it shares memory with."""
        return self._table("outputs")

    @property
    def engines(self) -> pd.DataFrame:
        """One row per fact about a graph that two engines compiled: aotlab beside stock `torch.compile`."""
        return self._table("engines")

    @property
    def runs(self) -> pd.DataFrame:
        """One row per fact about two runs that are compared; see `aotlab.runs.difference`."""
        return self._table("runs")

    @property
    def ranks(self) -> pd.DataFrame:
        """One row per difference between the ranks of a distributed job; see `Report.record`."""
        return self._table("ranks")

    @property
    def collectives(self) -> pd.DataFrame:
        """One row per collective of `torch.distributed` in a graph, with its bytes."""
        return self._table("collectives")

    @property
    def waits(self) -> pd.DataFrame:
        """One row per kind of collective that the process called: the number of calls and the time that they took."""
        return self._table("waits")

    @property
    def storages(self) -> pd.DataFrame:
        """One row per storage and tensor with this storage, with the range of bytes that the tensor covers."""
        return self._table("storages")

    @property
    def stages(self) -> pd.DataFrame:
        """One row per stage of the pipeline, with its wall time and size."""
        return self._table("stages")

    @property
    def nodes(self) -> pd.DataFrame:
        """One row per node of each stage's graphs, with the user line that caused the node."""
        return self._table("nodes")

    @property
    def signature(self) -> pd.DataFrame:
        """One row per input and output of a traced graph, with its kind and its name in the program."""
        return self._table("signature")

    @property
    def steps(self) -> pd.DataFrame:
        """One row per call of the program and per step of the epilogue, with the bytes that it reads and writes."""
        return self._table("steps")

    @property
    def autograd(self) -> pd.DataFrame:
        """One row per autograd node that a call adds to the caller's graph and per receiver of its gradients."""
        return self._table("autograd")

    @property
    def saved(self) -> pd.DataFrame:
        """One row per value that the forward saves for the backward, with its size in bytes and the reason."""
        return self._table("saved")

    @property
    def memory(self) -> pd.DataFrame:
        """One row per storage of a training step with a graph: its size, its kind, and the steps at which it is alive.

        The lifetimes are modelled from the ops of the graph.
        """
        return self._table("memory")

    @property
    def memory_curve(self) -> pd.DataFrame:
        """One row per op that allocates memory: the bytes that are alive at this op, by kind.

        Measured curves have one row per op that ran. They exist if the memory was measured, which
        ``%%aotcompile --time`` and `aotlab.bench.memory_curve` do.
        """
        return self._table("memory_curve")

    @property
    def budgets(self) -> pd.DataFrame:
        """One row per choice of saved values: its saved bytes, its peak, and the ops that the backward computes again.

        The rows are choices of memory budgets, from the least memory to the most, and the default partitioner's choice.
        """
        return self._table("budgets")

    @property
    def kernels(self) -> pd.DataFrame:
        """One row per kernel, with its source."""
        return self._table("kernels")

    @property
    def guards(self) -> pd.DataFrame:
        """One row per guard of a compiled entry."""
        return self._table("guards")

    @property
    def calls(self) -> pd.DataFrame:
        """One row per call of a frame; only the last thousand calls of each frame are stored.

        A frame is a function that aotlab compiled or, with the Dynamo frontend, a piece of code that Dynamo captured.
        If Dynamo split a function into several pieces, a call of the function has a row for each piece that ran.
        """
        return self._table("calls")

    @property
    def recompiles(self) -> pd.DataFrame:
        """One row per recompile and earlier graph, with the reason why the earlier graph did not accept the call.

        The reason is the guard that failed, which is a guard of aotlab or of Dynamo.
        """
        return self._table("recompiles")

    @property
    def refusals(self) -> pd.DataFrame:
        """One row per compilation that was refused or failed, with the error and the outcome of the call."""
        return self._table("refusals")

    @property
    def graph_breaks(self) -> pd.DataFrame:
        """One row per graph break: a place where Dynamo ended a graph, or a function that Dynamo did not capture."""
        return self._table("graph_breaks")

    @property
    def time(self) -> pd.DataFrame:
        """One row per kind of work, with the time that it took. Each moment of the recording is counted once."""
        return self._table("time")

    @property
    def timeline(self) -> pd.DataFrame:
        """One row per activity, with its begin, its duration and its depth: stages, phases of compilations, calls.

        A recompile and a graph break have a row without a duration; ``phase`` has the reason.
        """
        return self._table("timeline")

    @property
    def timings(self) -> pd.DataFrame:
        """One row per measurement of an engine and a phase, with median and spread."""
        return self._table("timings")

    @property
    def verification(self) -> pd.DataFrame:
        """One row per comparison with eager."""
        return self._table("verification")

    def describe(self) -> pd.DataFrame:
        """Return the meanings of the columns of all tables: one row per column, with its dtype, meaning and unit.

        Each table also has the meanings of its columns in ``attrs["columns"]``.
        """
        described: pd.DataFrame = DRAWING["describe"]()
        return described

    @property
    def verdict(self) -> str:
        """The report in one line: the compiled functions, the device, and whether the functions were verified.

        If nothing was compiled, the line says why.
        """
        return str(DRAWING["verdict"](self.report()).sentence)

    def export(self, graph: int | str | None = None, *, frame: str | None = None) -> ExportedGraph:
        """Return one graph in the form in which it would be exported.

        The result's ``joint`` and ``forward`` are code, and its ``signature`` is a table.

        Parameters
        ----------
        graph
            The number of the graph within its frame, the frame's name, or the name of one of its compiled graphs. Can
            be omitted if there is only one graph.
        frame
            The frame's name, if several frames have a graph with that number.

        Raises
        ------
        UsageError
            No graph that was traced matches, or several do.
        """
        exported: ExportedGraph = DRAWING["export"](self.report(), graph, frame=frame)
        return exported

    def plot_timings(self) -> Figure:
        """Draw the timings of forward and backward beside eager as a matplotlib figure, with one panel per graph."""
        figure: Figure = DRAWING["timing_figure"](self.report())
        return figure

    def plot_graph(self) -> Figure:
        """Draw the largest graph as a matplotlib figure: its modules, forward and backward, and the saved bytes."""
        figure: Figure = DRAWING["graph_figure"](self.report())
        return figure

    def plot_memory(self) -> Figure:
        """Draw the memory over time as a matplotlib figure, stacked by kind, with one panel per graph.

        Lines show the measured curves, if there are any.
        """
        figure: Figure = DRAWING["memory_figure"](self.report())
        return figure

    def plot_budgets(self) -> Figure:
        """Draw the memory budgets as a matplotlib figure: saved bytes and peak against the work that is done again."""
        figure: Figure = DRAWING["budgets_figure"](self.report())
        return figure

    def plot_timeline(self) -> Figure:
        """Draw the time line as a matplotlib figure: what ran when, with graph breaks and recompiles as lines."""
        figure: Figure = DRAWING["timeline_figure"](self.report())
        return figure

    def plot_storages(self) -> Figure:
        """Draw the shared and written storages as a matplotlib figure: the bytes that each step reads and writes."""
        figure: Figure = DRAWING["storages_figure"](self.report())
        return figure

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained HTML page, and return the path.

        The page draws the whole report as JupyterLab does. It needs no network, and follows the reader's light or dark
        scheme.
        """
        path = Path(path)
        path.write_text(DRAWING["page"](self.report()), encoding="utf-8")
        return path

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the time line as a trace for Perfetto (https://ui.perfetto.dev), and return the path.

        The trace has the rows of ``timeline``. Its times are in microseconds.
        """
        path = Path(path)
        DRAWING["perfetto"](self.report(), path)
        return path

    def __str__(self) -> str:
        return str(DRAWING["plain"](self.report()))

    def _repr_html_(self) -> str:
        return str(DRAWING["bundle"](self.report())["text/html"])

    def _repr_mimebundle_(
        self, include: Container[str] | None = None, exclude: Container[str] | None = None
    ) -> dict[str, object]:
        return {
            kind: data
            for kind, data in DRAWING["bundle"](self.report()).items()
            if (include is None or kind in include) and (exclude is None or kind not in exclude)
        }

    def _table(self, name: str) -> pd.DataFrame:
        table: pd.DataFrame = DRAWING["table"](self.report(), name)
        return table


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExportedGraph:
    """The graphs of one compiled entry, and their signature.

    Attributes
    ----------
    frame, graph
        The entry's key in the report's tables.
    joint
        The code of the joint graph; None if nothing is differentiated.
    forward, backward
        The code of the forward graph and of the backward graph. If nothing is differentiated, there is only a forward
        graph. None if the graph does not exist.
    signature
        One row per input of the joint graph (or of the forward graph, if there is no joint graph), then one row per
        output: the node, its kind and its name in the program, its dtype and shape. It has the same columns as
        ``report.signature``.
    """

    report: Views[object]
    frame: str
    graph: int
    joint: str | None
    forward: str | None
    backward: str | None
    signature: pd.DataFrame

    def nodes(self, part: str) -> pd.DataFrame:
        """Return the nodes of the ``"joint"``, ``"forward"`` or ``"backward"`` graph, as in ``report.nodes``."""
        graph_rows = rows_of(self.report.nodes, self.frame, self.graph)
        rows = graph_rows[(graph_rows["part"] == part) & graph_rows["stage"].isin(("trace", "partition"))]
        if rows.empty:
            parts = dict.fromkeys(graph_rows[graph_rows["stage"].isin(("trace", "partition"))]["part"])
            raise UsageError(f"the entry has no {part} graph; its graphs are: {listed(list(parts)) or 'none'}")
        first = rows["stage"].iloc[0]
        part_rows: pd.DataFrame = rows[rows["stage"] == first].reset_index(drop=True)
        return part_rows

    def __repr__(self) -> str:
        wanted = self.signature[["direction", "node", "kind", "target", "dtype", "shape"]].fillna("")
        codes = [code for code in (self.joint, self.forward) if code is not None]
        return clean("\n\n".join([f"{self.frame}, graph {self.graph}", wanted.to_string(index=False), *codes]))

    def _repr_html_(self) -> str:
        return str(DRAWING["exported"](self))


def rows_of(rows: pd.DataFrame, frame: str, graph: int) -> pd.DataFrame:
    """Return the rows of a table that belong to one graph."""
    graph_rows: pd.DataFrame = rows[(rows["frame"] == frame) & (rows["graph"] == graph)].reset_index(drop=True)
    graph_rows.attrs.update(rows.attrs)
    return graph_rows
