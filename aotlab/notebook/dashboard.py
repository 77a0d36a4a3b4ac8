"""The dashboard as a widget: one report, drawn by the same code that our JupyterLab extension draws with.

Which of two things is shown depends on where. *In JupyterLab and Notebook* a displayed dashboard is the report's own
MIME bundle, as if the report itself had been displayed: our extension draws it from the JSON and asks the kernel for
the live form, and where the extension is missing the static HTML stands there. The bundle holds no reference to a
widget, since JupyterLab prefers that to everything else in a bundle, and shows "model not found" in place of the HTML
when the notebook is opened again without its kernel. *In VS Code and Colab*, which cannot have the extension, the
bundle refers to the widget as well. ``widget_view`` says so or otherwise for front ends that we do not recognize.

Within other widgets (``ipywidgets.HBox([dashboard(a), dashboard(b)])``) a dashboard is the widget everywhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from aotlab.errors import UsageError
from aotlab.notebook.live import PARTS, LiveReport, Message, find, report_message, request_measurement, send_part, watch
from aotlab.report.mime import bundle
from aotlab.report.views import Views

#: Where the build of ``extension/`` puts the widget's code and style.
STATIC = Path(__file__).parents[1] / "report" / "static"

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Dashboard(anywidget.AnyWidget):
    """One report as a widget, which follows it while it changes.

    Parameters
    ----------
    report
        A `Report`, a recording, or a live report. A plain report of a cell whose live form the kernel still has is
        shown live.
    widget_view
        Whether displaying it refers to the widget, or else to the report alone; None: the former in VS Code and Colab.

    Attributes
    ----------
    report
        The report as JSON has it, cut to what a notebook's output may hold.
    progress
        What a running measurement is at; empty if none is. Why one failed comes as a message, ``{"kind": "error",
        "message": "…"}``, which every view of the widget hears once.
    live
        Whether the kernel still has the live form, so that it can be measured.

    Raises
    ------
    UsageError
        The widget's code has not been built, or ``report`` is no report.
    """

    report = traitlets.Dict().tag(sync=True)
    progress = traitlets.Unicode().tag(sync=True)
    live = traitlets.Bool().tag(sync=True)

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)

    #: Ends the following; on the class, since a widget that could not be made is closed too.
    _stop: Callable[[], None] | None = None

    def __init__(self, report: Views | LiveReport, *, widget_view: bool | None = None) -> None:
        if isinstance(report, type) or not callable(getattr(report, "report", None)):
            raise UsageError(f"a dashboard shows a report, and this is a {type(report).__qualname__}: {report!r:.80}")
        first = report.report()
        known = find(first.identifier) if first.identifier else None
        self._source: Views | LiveReport = known if known is not None else report
        self._identifier = first.identifier
        self._widget_view = _only_widgets() if widget_view is None else widget_view
        self._lock = threading.RLock()
        message = report_message(self._source.report())
        super().__init__(
            report=message["report"],
            live=known is not None,
            _esm=_built("dashboard.js"),
            _css=_built("dashboard.css"),
        )
        if known is not None:
            self._stop = watch(self._identifier, self._receive)
        self.on_msg(self._answer)

    def close(self) -> None:
        """Close the widget; it follows the report no longer."""
        if self._stop is not None:
            self._stop()
        super().close()

    def _receive(self, message: Message) -> None:
        """Show what a message about the report says; from any thread."""
        with self._lock, contextlib.suppress(Exception):  # a front end may be gone, and a widget closed
            kind = message["kind"]
            if kind == "report":
                with self.hold_sync():
                    self.set_trait("report", message["report"])
                    self.set_trait("progress", "")
            elif kind == "progress":
                self.set_trait("progress", message["text"])
            elif kind in PARTS:
                self.send(message)
            elif kind == "error":
                self.set_trait("progress", "")
                self.send(message)
            else:
                self.set_trait("live", False)
                self.set_trait("progress", "")

    def _answer(self, widget: object, content: object, buffers: object) -> None:
        """Do what the front end asks for; nothing is raised, whatever it sends."""
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "measure":
            request_measurement(self._identifier, self._receive)
        elif kind in PARTS:
            send_part(self._identifier, content, self._receive)

    def _repr_mimebundle_(self, **chosen: Any) -> tuple[dict[str, object], dict[str, object]]:
        include: Container[str] | None = chosen.get("include")
        exclude: Container[str] | None = chosen.get("exclude")
        data = bundle(self._source.report(), live=self.live)
        if self._widget_view:
            data[_WIDGET_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        kept = {
            kind: each
            for kind, each in data.items()
            if (include is None or kind in include) and (exclude is None or kind not in exclude)
        }
        return kept, {}


def dashboard(report: Views | LiveReport, *, widget_view: bool | None = None) -> Dashboard:
    """Show a report as a dashboard: tables, storage map, code of each stage, timings, verification.

    Parameters
    ----------
    report
        A `Report` (from ``%%aotcompile -o``, `Report.record` or `Report.load`) or a recording.
    widget_view
        See `Dashboard`; needed only in front ends that take widgets and no JupyterLab extensions, VS Code and Colab
        excepted, which are recognized.

    Returns
    -------
    Dashboard
        Show it as a cell's last expression, by ``display``, or within other widgets.

    Raises
    ------
    UsageError
        The widget's code has not been built, or ``report`` is no report.
    """
    return Dashboard(report, widget_view=widget_view)


def _built(name: str) -> str:
    path = STATIC / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"the dashboard has not been built: there is no {path}. In a checkout, "
            "`cd extension && npm ci --ignore-scripts && npm run build:widget` builds it"
        ) from None


def _only_widgets() -> bool:
    """Tell whether the front end shows widgets and is known to take no extensions of JupyterLab's."""
    # Jupyter's server may have been started from a terminal in VS Code; it names the notebook to its kernels.
    in_vscode = "VSCODE_PID" in os.environ and "JPY_SESSION_NAME" not in os.environ
    return in_vscode or "google.colab" in sys.modules
