"""The dashboard as a widget. It draws one report with the same code as our JupyterLab extension.

The displayed form depends on the application that shows the notebook. *In JupyterLab and Notebook*, a displayed
dashboard is the report's own MIME bundle, as if the report itself were displayed. Our extension draws the report from
the JSON in the bundle, and asks the kernel for the live report. Without the extension, the static HTML is shown. The
bundle does not refer to a widget, because JupyterLab prefers a widget to everything else in a bundle, and shows "model
not found" instead of the HTML if the notebook is opened again without its kernel. *In VS Code and Colab*, which cannot
use the extension, the bundle also refers to the widget. The argument ``widget_view`` overrides this choice, for other
applications.

Inside other widgets (``ipywidgets.HBox([dashboard(a), dashboard(b)])``) a dashboard is always the widget.
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
from aotlab.report.model import Report, Views

#: The directory to which the build of ``extension/`` writes the widget's code and style.
STATIC = Path(__file__).parents[1] / "report" / "static"

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Dashboard(anywidget.AnyWidget):
    """A widget that shows one report and follows it while it changes.

    Parameters
    ----------
    report
        A `Report`, a recording, or a live report (a report that can still change, see `aotlab.notebook.live`). If the
        kernel still has the live report from which a plain `Report` was made, the live report is shown.
    widget_view
        Whether the displayed bundle refers to the widget. If None, the bundle does so in VS Code and Colab only.

    Attributes
    ----------
    report
        The report as JSON, cut to the size limit of a notebook's output.
    progress
        The progress of a running measurement, or "" if none is running. If a measurement fails, every view of the
        widget receives one message with the reason, ``{"kind": "error", "message": "…"}``.
    live
        Whether the kernel still has the live report, so that its graphs can be measured.

    Raises
    ------
    UsageError
        The widget's code has not been built, or ``report`` is not a report.
    """

    report = traitlets.Dict().tag(sync=True)
    progress = traitlets.Unicode().tag(sync=True)
    live = traitlets.Bool().tag(sync=True)

    _esm = traitlets.Unicode().tag(sync=True)
    _css = traitlets.Unicode().tag(sync=True)

    #: A function that stops following the report, or None. It is defined on the class because a widget whose
    #: construction failed is closed, too.
    _stop: Callable[[], None] | None = None

    def __init__(self, report: Views[Report] | LiveReport, *, widget_view: bool | None = None) -> None:
        if isinstance(report, type) or not callable(getattr(report, "report", None)):
            raise UsageError(f"a dashboard shows a report, not a {type(report).__qualname__}: {report!r:.80}")
        first = report.report()
        live_report = find(first.identifier) if first.identifier else None
        self._source: Views[Report] | LiveReport = live_report if live_report is not None else report
        self._identifier = first.identifier
        self._widget_view = _only_widgets() if widget_view is None else widget_view
        self._lock = threading.RLock()
        message = report_message(self._source.report())
        super().__init__(
            report=message["report"],
            live=live_report is not None,
            _esm=_built("dashboard.js"),
            _css=_built("dashboard.css"),
        )
        if live_report is not None:
            self._stop = watch(self._identifier, self._receive)
        self.on_msg(self._answer)

    def close(self) -> None:
        """Close the widget and stop following the report."""
        if self._stop is not None:
            self._stop()
        super().close()

    def _receive(self, message: Message) -> None:
        """Update the widget from a message about the report. Can be called from any thread."""
        with self._lock, contextlib.suppress(Exception):  # sending fails if the page or the widget is closed
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
        """Answer a request from the page: for a measurement, a choice to apply, or an uncut part of the report.

        Invalid requests are ignored.
        """
        asked = content if isinstance(content, dict) else {}
        kind = asked.get("kind")
        if kind in ("measure", "apply"):
            request_measurement(self._identifier, self._receive, asked if kind == "apply" else None)
        elif kind in PARTS:
            send_part(self._identifier, content, self._receive)

    def _repr_mimebundle_(self, **chosen: Any) -> tuple[dict[str, object], dict[str, object]]:
        include: Container[str] | None = chosen.get("include")
        exclude: Container[str] | None = chosen.get("exclude")
        data = bundle(self._source.report())
        if self._widget_view:
            data[_WIDGET_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        selected = {
            kind: each
            for kind, each in data.items()
            if (include is None or kind in include) and (exclude is None or kind not in exclude)
        }
        return selected, {}


def dashboard(report: Views[Report] | LiveReport, *, widget_view: bool | None = None) -> Dashboard:
    """Show a report as a dashboard: tables, storage map, code of each stage, timings, verification.

    Parameters
    ----------
    report
        A `Report` (from ``%%aotcompile -o``, `Report.record` or `Report.load`) or a recording.
    widget_view
        See `Dashboard`. Only needed in applications that support widgets but not JupyterLab extensions. VS Code and
        Colab are recognized.

    Returns
    -------
    Dashboard
        The widget. Show it as a cell's last expression, with ``display``, or inside other widgets.

    Raises
    ------
    UsageError
        The widget's code has not been built, or ``report`` is not a report.
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
    """Tell whether VS Code or Colab shows the notebook. They show widgets, but support no JupyterLab extensions."""
    # `VSCODE_PID` alone proves nothing: a Jupyter server that was started from a terminal in VS Code has it, too. But
    # kernels of a Jupyter server also have `JPY_SESSION_NAME`, the notebook's name. Kernels of VS Code do not have it.
    in_vscode = "VSCODE_PID" in os.environ and "JPY_SESSION_NAME" not in os.environ
    return in_vscode or "google.colab" in sys.modules
