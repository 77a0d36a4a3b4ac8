"""What can be seen of a report: tables, a sentence, a page, a notebook's output.

`Views` is shared by `aotlab.report.model.Report` and by `aotlab.report.collect.Recording`, so that both answer alike:
a recording shows the report as it stands at that moment. The functions that draw know reports, and reports do not know
them: `aotlab.report` enters them in `DRAWING`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from aotlab.report.exported import ExportedGraph
    from aotlab.report.model import Report

#: The functions that draw a report, by name.
DRAWING: dict[str, Callable[..., Any]] = {}


class Views:
    """Tables and pages of whatever `report` returns."""

    __slots__ = ()

    @abstractmethod
    def report(self) -> Report:
        """Return the report that is shown."""

    @property
    def inputs(self) -> pd.DataFrame:
        """One row per argument of a graph: what it is, what it shares memory with, how it was mutated.

        Of a notebook's cell also the tensors that it wrote outside of the graphs, or under another name.
        """
        return self._table("inputs")

    @property
    def outputs(self) -> pd.DataFrame:
        """One row per output: what it is and what it aliases."""
        return self._table("outputs")

    @property
    def storages(self) -> pd.DataFrame:
        """One row per tensor in a storage: the bytes that it reaches."""
        return self._table("storages")

    @property
    def stages(self) -> pd.DataFrame:
        """One row per stage of the pipeline: wall time and size."""
        return self._table("stages")

    @property
    def nodes(self) -> pd.DataFrame:
        """One row per graph node and stage, with the user's line."""
        return self._table("nodes")

    @property
    def signature(self) -> pd.DataFrame:
        """One row per input and output of a traced graph: what it is in the program."""
        return self._table("signature")

    @property
    def autograd(self) -> pd.DataFrame:
        """One row per autograd node that a call of a graph makes, and thing that its gradients go to."""
        return self._table("autograd")

    @property
    def saved(self) -> pd.DataFrame:
        """One row per value that the forward keeps for the backward: bytes and reason."""
        return self._table("saved")

    @property
    def kernels(self) -> pd.DataFrame:
        """One row per kernel, with its source."""
        return self._table("kernels")

    @property
    def guards(self) -> pd.DataFrame:
        """One row per assumption of a compiled entry."""
        return self._table("guards")

    @property
    def calls(self) -> pd.DataFrame:
        """One row per call of a frame, for the last thousand of each.

        A frame is a function that aotlab compiled or, behind Dynamo, a piece of code that Dynamo captured: a call of a
        function that Dynamo split is a call of each of its pieces.
        """
        return self._table("calls")

    @property
    def recompiles(self) -> pd.DataFrame:
        """One row per graph that was compiled since none of its frame's earlier ones served, with the reason.

        The reason is the assumption that did not hold: of a guard of aotlab's, or, in its words, of one of Dynamo's.
        """
        return self._table("recompiles")

    @property
    def refusals(self) -> pd.DataFrame:
        """One row per function that could not be compiled, and what happened instead."""
        return self._table("refusals")

    @property
    def graph_breaks(self) -> pd.DataFrame:
        """One row per place where Dynamo split a function."""
        return self._table("graph_breaks")

    @property
    def time(self) -> pd.DataFrame:
        """One row per kind of work: where the time of the recording went, each moment counted once."""
        return self._table("time")

    @property
    def timings(self) -> pd.DataFrame:
        """One row per measurement: engine and phase, with median and spread."""
        return self._table("timings")

    @property
    def verification(self) -> pd.DataFrame:
        """One row per comparison with eager."""
        return self._table("verification")

    def describe(self) -> pd.DataFrame:
        """Return what the columns of all tables mean: one row per table and column, with dtype, meaning and unit.

        Each table has its own columns' meanings in ``attrs["columns"]``.
        """
        described: pd.DataFrame = DRAWING["describe"]()
        return described

    @property
    def verdict(self) -> str:
        """One line: what was compiled, on what, whether it was verified; or why nothing was compiled."""
        return str(DRAWING["verdict"](self.report()).sentence)

    def export(self, graph: int | str | None = None, *, frame: str | None = None) -> ExportedGraph:
        """Return one graph as it would be exported: ``.joint`` and ``.forward`` as code, ``.signature`` as a table.

        Parameters
        ----------
        graph
            Its number within its frame, the frame's name, or the name of what the backend compiled of it; may be left
            out where there is one only.
        frame
            The frame's name, where several have a graph of that number.

        Raises
        ------
        UsageError
            There is no such graph that was traced, or there are several.
        """
        found: ExportedGraph = DRAWING["export"](self.report(), graph, frame=frame)
        return found

    def plot_timings(self) -> Figure:
        """Draw the timings of forward and backward beside eager's as a matplotlib figure, a panel for each graph."""
        figure: Figure = DRAWING["figure"](self.report())
        return figure

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one self-contained page that opens anywhere, and return the path.

        It is drawn as in JupyterLab, from the whole report, loads nothing, and follows the light or dark scheme.
        """
        path = Path(path)
        path.write_text(DRAWING["page"](self.report()), encoding="utf-8")
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
