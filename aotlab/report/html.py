"""Write the report as a separate HTML page, and as the summary in a notebook's output.

`page` draws the report as JupyterLab does, with the script that the build of ``extension/`` writes to ``static/``.
`fragment` writes the summary for readers without that script: text and tables, but no scripts. The summary is built
from `aotlab.report.markup`, so the user's text can never become markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources

from aotlab.report.columns import COLUMNS
from aotlab.report.compare import differences
from aotlab.report.counts import count_frame, counted, summary
from aotlab.report.markup import Markup, clean, element, join
from aotlab.report.model import Frame, Graph, GraphBreakRow, Miss, Report, TimingRow
from aotlab.report.packing import pack
from aotlab.report.parts import cell, fold, grid, heading, mark, words
from aotlab.report.ranks import differences_of_ranks
from aotlab.report.sections import graph_section
from aotlab.report.story import cell_section
from aotlab.report.tables import table
from aotlab.report.text import amount, duration, listed, place

#: For this many functions, the first graph is shown opened. All other graphs are folded.
MOST_OPENED = 3

#: The class is repeated so that these rules override JupyterLab's rules. The notebook's theme sets the colours.
_STYLE = Markup(
    ".aotlab-report.aotlab-report :is(td,th){text-align:left;vertical-align:top}"
    ".aotlab-report .verdict{font-weight:600}"
)
_PAGE_STYLE = Markup(
    ":root{color-scheme:light dark}body{font:14px/1.45 system-ui,sans-serif;margin:1.2rem}"
    ":is(td,th){padding:2px 10px 2px 0}pre,code{font-family:ui-monospace,monospace}"
)

_SYMBOLS = {
    "verified": "✓",
    "unverified": "●",
    "different": "✗",
    "partly": "!",
    "nothing": "!",
    "idle": "○",
    "running": "◌",
}
_ENGINES = ("eager", "upstream", "aotlab")
_PHASES = ("forward", "backward", "total")


def page(*reports: Report) -> str:
    """Write reports as an HTML document that needs no other file.

    The document contains each report as compressed JSON (see `aotlab.report.packing`), and the page's script, which
    draws the reports. If the package was installed without the script, the document contains the summaries and all
    tables instead. A browser without JavaScript shows the summaries.
    """
    script, style = _built("page.js"), _built("page.css")
    if script is not None and style is not None:
        body = join(*[_data(report) for report in reports], element("script", script, type="module"))
    else:
        style = _PAGE_STYLE
        body = join(*[join(fragment(report, footer=False), _tables(report)) for report in reports])
    names = [report.name or listed([frame.name for frame in report.frames], 3) for report in reports]
    name = listed(list(dict.fromkeys(filter(None, names))), 3)
    told = " ".join([summary(report).sentence for report in reports])
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{name} – aotlab report" if name else "aotlab report"),
        element("meta", name="description", content=told),
        element("style", style),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body), lang='en')}\n"


def _data(report: Report) -> Markup:
    """Write the place where the page's script draws ``report``, with the report's data."""
    data = json.dumps(pack(counted(report).to_dict(sparse=True)))
    return element(
        "div",
        element("noscript", fragment(report)),
        # Escape "<", so that no text in the report can end the element early.
        element("script", Markup(data.replace("<", "\\u003c")), type="application/json"),
        kind="aotlab-page",
    )


@cache
def _built(name: str) -> Markup | None:
    """Return a file that the build of ``extension/`` wrote; None if the extension was not built."""
    path = resources.files("aotlab.report").joinpath("static", name)
    return Markup(path.read_text(encoding="utf-8").replace("</", "<\\/")) if path.is_file() else None


def _tables(report: Report) -> Markup:
    """Write all tables in pandas' HTML form."""
    tables = {name: table(report, name) for name in COLUMNS}
    return join(
        *[
            fold(name, amount(len(rows), "row"), Markup(clean(rows.to_html(index=False, border=0, na_rep=""))))
            for name, rows in tables.items()
            if len(rows)
        ]
    )


def fragment(report: Report, *, footer: bool = True) -> Markup:
    """Write a summary of ``report`` that another page can embed.

    It contains the verdict, the cell's lines, inputs, outputs, recompiles, graph breaks, timings and differences from
    eager. If ``footer`` is true, the last line says how to see the whole report.
    """
    frames = [_frame(frame, opened=index < MOST_OPENED) for index, frame in enumerate(report.frames)]
    footnote = "A summary: JupyterLab with aotlab draws all of it; `report.to_html(path)` writes it."
    return element(
        "div",
        element("style", _STYLE),
        _header(report),
        _runs(report),
        _ranks(report),
        cell_section(report),
        *frames,
        _graph_breaks(report),
        _timings(report.timing_rows),
        _differences(report),
        element("footer", words(footnote)) if footer else None,
        kind="aotlab-report",
    )


def _header(report: Report) -> Markup:
    head = summary(report)
    environment = report.environment
    engines = sorted({frame.engine for frame in report.frames if frame.graphs})
    facts = [
        report.name,
        f"compiled by {listed(engines)}" if engines else "",
        f"torch {environment.torch}",
        f"Python {environment.python}",
        f"aotlab {environment.aotlab}",
        *[str(device) for device in environment.devices[:9]],
    ]
    return element(
        "header",
        element("p", f"{_SYMBOLS[head.state]} ", words(head.sentence), kind=f"verdict {head.state}"),
        *[element("p", element("b", fact.title), " ", words(fact.sentence)) for fact in head.facts],
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
            cell(_miss(graph.misses[0])),
            cell(f"{graph.status} in an earlier run" if graph.reused else graph.status),
            cell(duration(graph.at_ns)),
            cell(duration(graph.duration_ns)),
        ]
        for graph in again
    ]
    columns = ("graph", "why no earlier graph served", "outcome", "at", "took")
    return join(heading("Recompiles", f"{count_frame(frame).recompiles:,}"), grid(columns, rows), *_advice(again))


def _miss(miss: Miss) -> Markup:
    earlier = "" if miss.graph is None else f"graph {miss.graph}: "
    where = "" if miss.line is None else f" {place(miss.line)}."
    return element("div", earlier, words(miss.sentence), f".{where}")


def _advice(graphs: Sequence[Graph]) -> list[Markup]:
    """Write how to avoid recompiles. Advice that applies to several values is written once, with all these values."""
    subjects: dict[str, dict[str, None]] = {}
    for miss in (graph.misses[0] for graph in graphs):
        subjects.setdefault(miss.suggestion, {})[f"`{miss.subject}`" if miss.subject else "this"] = None
    told = [f"To avoid recompiles for {listed(list(names))}: {text}." for text, names in subjects.items() if text]
    return [element("p", words(each)) for each in told]


def _graph_breaks(report: Report) -> Markup | None:
    rows = [
        [cell(row.where), cell(words(row.words), _in_dynamos_words(row)), cell(duration(row.at_ns))]
        for row in report.graph_break_rows
        if not row.library
    ]
    if not rows:
        return None
    return join(heading("Graph breaks", f"{summary(report).breaks:,}"), grid(("frame", "reason", "at"), rows))


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
            cell("; ".join([*([f"too close to call: {row.noise}"] if row.noise else []), *row.comparisons])),
        ]
        for row in ordered
    ]
    columns = ("function", "phase", "engine", "median", "10th to 90th percentile", "ratios")
    return join(heading("Timings", f"on {listed(sorted({row.device for row in rows}))}"), grid(columns, cells))


def _rank(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name), "") if name in order else (len(order), name)


def _runs(report: Report) -> Markup | None:
    if not report.run_names:
        return None
    title, *lines = differences(report)
    return join(heading(title), element("pre", "\n".join(lines)))


def _ranks(report: Report) -> Markup | None:
    if not report.rank_reports and not report.rank_rows:
        return None
    title, *lines = differences_of_ranks(report)
    return join(heading(title), element("pre", "\n".join(lines)))


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
