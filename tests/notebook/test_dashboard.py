"""The dashboard widget: its contents, how it follows a running cell, and how much of it a saved notebook keeps."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

from aotlab.errors import UsageError
from aotlab.notebook import dashboard as module
from aotlab.notebook import live
from aotlab.notebook.dashboard import Dashboard, dashboard
from aotlab.report.model import MIME_TYPE, Environment, Report, TimingRow

VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(autouse=True)
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a bundle in the place of the built one, so that these tests need no build."""
    (tmp_path / "dashboard.js").write_text("export default {render() {}}", encoding="utf-8")
    (tmp_path / "dashboard.css").write_text(".aotlab-report {}", encoding="utf-8")
    monkeypatch.setattr(module, "STATIC", tmp_path)
    for name in ("VSCODE_PID", "VSCODE_CWD", "JPY_SESSION_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def empty(identifier: str = "") -> Report:
    """Make a report with nothing in it."""
    return Report(
        environment=Environment(aotlab="0", torch="2", python="3", platform="x"), identifier=identifier, name="mine"
    )


ROW = TimingRow(engine="eager", phase="forward", median_ns=5, min_ns=1, p10_ns=1, p90_ns=9, repeats=3)


class Live:
    """A live report that measures at once."""

    def __init__(self) -> None:
        self.identifier = uuid.uuid4().hex
        self.now = empty(self.identifier)
        self.error: Exception | None = None

    def report(self) -> Report:
        """Return the current report."""
        return self.now

    def measure(self, progress: Callable[[str], None]) -> Report:
        """Add a timing."""
        progress("timing f")
        if self.error is not None:
            raise self.error
        self.now = self.now.with_timings([ROW])
        return self.now


@pytest.fixture
def running() -> Live:
    """Register a live report."""
    found = Live()
    live.register(found)
    return found


def shown(widget: Dashboard) -> dict[str, Any]:
    """Return the data that a front end receives for the displayed widget."""
    data, metadata = widget._repr_mimebundle_()
    assert metadata == {}
    return data


def test_a_plain_report_is_drawn(static: Path) -> None:
    """The widget carries the report's JSON, and the built code; it cannot be measured."""
    widget = dashboard(empty())
    assert (widget.report["name"], widget.progress, widget.live) == ("mine", "", False)
    assert Report.from_dict(widget.report).summary is not None
    assert widget._esm == (static / "dashboard.js").read_text(encoding="utf-8")
    assert widget._css == (static / "dashboard.css").read_text(encoding="utf-8")
    assert {"report", "progress", "live", "_esm", "_css"} <= set(widget.keys)


def test_a_recording_is_drawn_as_it_stands() -> None:
    """A recording is accepted instead of a report."""
    with Report.record("in the making") as recording:
        assert dashboard(recording).report["name"] == "in the making"


@pytest.mark.parametrize("wrong", [None, 7, {"version": 1}, "report.json", Report])
def test_what_is_no_report_is_refused(wrong: object) -> None:
    """The error names the object that was passed instead of a report."""
    with pytest.raises(UsageError, match="a dashboard shows a report, not a "):
        dashboard(wrong)  # type: ignore[arg-type]


def test_without_the_build_the_error_names_the_command(static: Path) -> None:
    """In a checkout without a build, the error names the command to run."""
    (static / "dashboard.js").unlink()
    with pytest.raises(UsageError, match=r"no .*dashboard\.js.*npm ci --ignore-scripts && npm run build:widget"):
        dashboard(empty())


def test_large_reports_are_cut() -> None:
    """The data that the widget sends is no larger than a report message may be."""
    widget = dashboard(empty().with_timings([ROW] * 20_000))
    assert len(json.dumps(widget.report)) <= live.MOST_SENT
    assert widget.report["notes"][-1].startswith("This output is cut to fit a notebook")


def test_changes_are_followed(running: Live) -> None:
    """A dashboard of a running cell shows each pushed change until it is closed."""
    widget = dashboard(running.now)
    assert widget.live
    running.now = empty(running.identifier).with_timings([ROW])
    live.changed(running.identifier)
    live._pushes.flush()
    assert len(widget.report["timing_rows"]) == 1
    widget.close()
    assert live._registry.viewers(running.identifier) == ()


def test_a_request_measures(running: Live) -> None:
    """The button's message brings timings, and the progress is gone at the end."""
    widget = dashboard(running)
    said: list[str] = []
    widget.observe(lambda change: said.append(change["new"]), "progress")
    widget._handle_custom_msg({"kind": "measure"}, [])
    assert said == ["timing f", ""]
    assert len(widget.report["timing_rows"]) == 1


def test_a_failed_measurement_is_said(running: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error's text is sent as a message each time, even if it is the same, and the progress disappears."""
    running.error = UsageError("its inputs are gone")
    widget = dashboard(running)
    sent: list[object] = []
    monkeypatch.setattr(widget, "send", sent.append)
    for _ in range(2):
        widget._handle_custom_msg({"kind": "measure"}, [])
    assert sent == 2 * [{"kind": "error", "message": "its inputs are gone"}]
    assert widget.progress == ""


def test_a_forgotten_report_cannot_be_measured(running: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel has let go of the live form, the widget stays as a still."""
    widget = dashboard(running)
    monkeypatch.setattr(live, "_registry", live._Registry())
    widget._handle_custom_msg({"kind": "measure"}, [])
    assert (widget.live, widget.progress, widget.report["name"]) == (False, "", "mine")


@pytest.mark.parametrize("content", [None, [], 7, "measure", {}, {"kind": ["measure"]}, {"kind": "other"}])
def test_garbage_is_ignored(running: Live, content: object) -> None:
    """Messages that make no sense do nothing and raise nothing."""
    widget = dashboard(running)
    widget._answer(widget, content, [])
    assert (widget.progress, widget.live) == ("", True)


def test_a_displayed_dashboard_is_the_reports_bundle(running: Live) -> None:
    """The saved output draws from JSON, or else from HTML, and refers to no widget that will not exist."""
    data = shown(dashboard(running))
    assert list(data) == [MIME_TYPE, "text/html", "text/plain"]
    assert data[MIME_TYPE]["identifier"] == running.identifier
    running.now = running.now.with_timings([ROW])
    assert len(Report.from_dict(shown(dashboard(running))[MIME_TYPE]).timing_rows) == 1


def test_formats_can_be_chosen() -> None:
    """``display(…, include=…)`` and ``exclude`` hold, as for a report."""
    widget = dashboard(empty())
    assert list(widget._repr_mimebundle_(include={"text/plain"})[0]) == ["text/plain"]
    assert list(widget._repr_mimebundle_(exclude={"text/plain"})[0]) == [MIME_TYPE, "text/html"]


@pytest.mark.parametrize(
    ("environment", "asked", "expected"),
    [
        ({}, None, False),
        ({}, True, True),
        ({"VSCODE_PID": "7"}, None, True),
        ({"VSCODE_PID": "7"}, False, False),
        ({"VSCODE_PID": "7", "JPY_SESSION_NAME": "/work/a.ipynb"}, None, False),
    ],
)
def test_the_widget_is_referred_to_where_nothing_else_is_live(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], asked: bool | None, expected: bool
) -> None:
    """In VS Code, or on request, the bundle refers to the widget, and still contains the HTML."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    widget = dashboard(empty(), widget_view=asked)
    data = shown(widget)
    assert (VIEW in data, "text/html" in data) == (expected, True)
    if expected:
        assert data[VIEW]["model_id"] == widget.model_id


def test_colab_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colab's own module tells that the front end is Colab."""
    monkeypatch.setitem(sys.modules, "google.colab", module)
    assert module._only_widgets()


def test_dashboards_stand_within_other_widgets() -> None:
    """A box of dashboards refers to them as widgets."""
    box = ipywidgets.HBox([dashboard(empty()), dashboard(empty())])
    assert all(isinstance(child, Dashboard) for child in box.children)
