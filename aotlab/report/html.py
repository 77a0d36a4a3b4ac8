"""The report as a page of its own, and as the summary that stands in a notebook's output.

`page` draws as JupyterLab does, by the script that the build of ``extension/`` leaves in ``static/``. `fragment` is for
readers without it: text and tables, without scripts, put together from `aotlab.report.markup`, so that nothing of the
user's can become markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import resources

from aotlab.report.counts import summary
from aotlab.report.markup import Markup, clean, element, join
from aotlab.report.model import Frame, GraphBreakRow, Miss, Report, TimingRow
from aotlab.report.parts import cell, fold, grid, heading, mark, words
from aotlab.report.sections import graph_section
from aotlab.report.story import cell_section
from aotlab.report.tables import COLUMNS, table
from aotlab.report.text import amount, duration, listed, place

#: Of how many functions, or stretches of a cell, the first graph is open.
MOST_OPENED = 3

#: The class is named twice so that these rules outrank JupyterLab's; colours are left to what shows the notebook.
_STYLE = Markup(
    ".aotlab-report.aotlab-report :is(td,th){text-align:left;vertical-align:top}"
    ".aotlab-report .verdict{font-weight:600}"
)
_PAGE_STYLE = Markup(
    ":root{color-scheme:light dark}body{font:14px/1.45 system-ui,sans-serif;margin:1.2rem}"
    ":is(td,th){padding:2px 10px 2px 0}pre,code{font-family:ui-monospace,monospace}"
)

_SYMBOLS = {"verified": "✓", "unverified": "●", "different": "✗", "partly": "!", "nothing": "!"}
_ENGINES = ("eager", "upstream", "aotlab")
_PHASES = ("forward", "backward", "total")


def page(report: Report) -> str:
    """Write ``report`` as an HTML document that needs nothing else.

    The script draws it from the report's JSON in the page. Where the package was installed without the script, the
    page has the summary and all tables instead; where scripts are off, the summary.
    """
    script, style = _built("page.js"), _built("page.css")
    if script is not None and style is not None:
        data = json.dumps(replace(report, summary=summary(report)).to_dict(sparse=True), separators=(",", ":"))
        body = join(
            element("div", id="aotlab-page"),
            element("noscript", fragment(report)),
            # No text can end the element early: what could begin a tag is written as a number.
            element("script", Markup(data.replace("<", "\\u003c")), type="application/json", id="aotlab-data"),
            element("script", script, type="module"),
        )
    else:
        style, body = _PAGE_STYLE, join(fragment(report, footer=False), _tables(report))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{report.name} – aotlab report" if report.name else "aotlab report"),
        element("style", style),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body), lang='en')}\n"


@cache
def _built(name: str) -> Markup | None:
    """Return what the build of ``extension/`` made; None where it was not built."""
    path = resources.files("aotlab.report").joinpath("static", name)
    return Markup(path.read_text(encoding="utf-8").replace("</", "<\\/")) if path.is_file() else None


def _tables(report: Report) -> Markup:
    """Write all tables as pandas does."""
    found = {name: table(report, name) for name in COLUMNS}
    return join(
        *[
            fold(name, amount(len(rows), "row"), Markup(clean(rows.to_html(index=False, border=0, na_rep=""))))
            for name, rows in found.items()
            if len(rows)
        ]
    )


def fragment(report: Report, *, footer: bool = True) -> Markup:
    """Write a summary of ``report`` that can stand in another page.

    It has the cell's lines, inputs, outputs, recompiles and differences; the ``footer`` says where the rest is.
    """
    frames = [_frame(frame, opened=index < MOST_OPENED) for index, frame in enumerate(report.frames)]
    rest = "A summary: JupyterLab with aotlab draws all of it; `report.to_html(path)` writes it."
    return element(
        "div",
        element("style", _STYLE),
        _header(report),
        cell_section(report),
        *frames,
        _graph_breaks(report),
        _timings(report.timing_rows),
        _differences(report),
        element("footer", words(rest)) if footer else None,
        kind="aotlab-report",
    )


def _header(report: Report) -> Markup:
    found = summary(report)
    environment = report.environment
    tracers = sorted({graph.tracer for frame in report.frames for graph in frame.graphs if graph.tracer})
    facts = [
        report.name,
        f"tracer that ran: {listed(tracers)}" if tracers else "",
        f"torch {environment.torch}",
        f"Python {environment.python}",
        f"aotlab {environment.aotlab}",
        *[str(device) for device in environment.devices[:9]],
    ]
    return element(
        "header",
        element("p", f"{_SYMBOLS[found.state]} ", words(found.sentence), kind=f"verdict {found.state}"),
        *[element("p", element("b", fact.title), " ", words(fact.sentence)) for fact in found.facts],
        element("p", " · ".join(fact for fact in facts if fact)),
        *[element("p", words(note)) for note in report.notes],
    )


def _frame(frame: Frame, *, opened: bool) -> Markup:
    refused = {refusal.graph: refusal for refusal in frame.refusals}
    return element(
        "section",
        element("h2", element("code", frame.name), " ", element("small", place(frame.line)) if frame.line else None),
        *[
            graph_section(graph, refused.get(graph.index), opened=opened and index == 0)
            for index, graph in enumerate(frame.graphs)
        ],
        _recompiles(frame),
    )


def _recompiles(frame: Frame) -> Markup | None:
    again = [graph for graph in frame.graphs if graph.misses]
    if not again:
        return None
    rows = [
        [
            cell(f"{graph.index}"),
            cell(*map(_miss, graph.misses)),
            cell(f"{graph.status} in an earlier run" if graph.reused else graph.status),
            cell(duration(graph.at_ns)),
            cell(duration(graph.duration_ns)),
        ]
        for graph in again
    ]
    columns = ("graph", "why no earlier graph served", "outcome", "at", "took")
    return join(heading("Recompiles", f"{len(again)}"), grid(columns, rows))


def _miss(miss: Miss) -> Markup:
    earlier = "" if miss.graph is None else f"graph {miss.graph}: "
    where = "" if miss.line is None else f" {place(miss.line)}."
    hint = f" To avoid it: {miss.suggestion}." if miss.suggestion else ""
    return element("div", earlier, words(miss.sentence), f".{where}{hint}")


def _graph_breaks(report: Report) -> Markup | None:
    if not report.graph_break_rows:
        return None
    rows = [
        [cell(row.where), cell(words(row.words), _in_dynamos_words(row)), cell(duration(row.at_ns))]
        for row in report.graph_break_rows
    ]
    return join(heading("Graph breaks", f"{len(rows)}"), grid(("frame", "reason", "at"), rows))


def _in_dynamos_words(row: GraphBreakRow) -> Markup | None:
    return None if row.words == row.reason else fold("in Dynamo’s words", "", element("pre", row.reason))


def _timings(rows: Sequence[TimingRow]) -> Markup | None:
    if not rows:
        return None
    ordered = sorted(rows, key=lambda row: (row.frame or "", _rank(_PHASES, row.phase), _rank(_ENGINES, row.engine)))
    cells = [
        [
            cell(row.frame or ""),
            cell(row.phase),
            cell(row.engine),
            cell(duration(row.median_ns)),
            cell(f"{duration(row.p10_ns)} to {duration(row.p90_ns)}"),
            cell("; ".join([*([f"noise, since {row.noise}"] if row.noise else []), *map(str, row.ratios)])),
        ]
        for row in ordered
    ]
    columns = ("function", "phase", "engine", "median", "10th to 90th percentile", "ratios")
    return join(heading("Timings", f"on {listed(sorted({row.device for row in rows}))}"), grid(columns, cells))


def _rank(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name), "") if name in order else (len(order), name)


def _differences(report: Report) -> Markup | None:
    different = [row for row in report.verification_rows if not row.equal]
    if not different:
        return None
    rows = [
        [
            cell(row.engine),
            cell(row.kind),
            cell(row.subject),
            cell(row.expected),
            cell(row.actual),
            cell(words(row.sentence)),
        ]
        for row in different
    ]
    about = summary(report)
    columns = ("engine", "observable", "of", "eager has", "it has", "difference")
    return join(
        heading("Verification"),
        element("p", mark(f"{about.different:,} of {about.compared:,} differ from eager")),
        grid(columns, rows),
    )
