"""The report as a page: static, self-contained, readable in light and dark, without scripts and without a network.

`page` is a file of its own, `fragment` what stands in it, and, in a short form, in a notebook's output. Both are put
together from `aotlab.report.markup`, so that nothing of the user's can become markup. Bars are plain boxes whose widths
are percentages of the scale beside them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import resources

from aotlab.report.counts import summary
from aotlab.report.legend import legend
from aotlab.report.markup import Markup, element, join
from aotlab.report.model import Call, Frame, GraphBreakRow, Miss, Report, TimingRow
from aotlab.report.parts import cell, fold, grid, heading, mark, track, words
from aotlab.report.sections import graph_section
from aotlab.report.spent import KINDS, REST
from aotlab.report.story import cell_section
from aotlab.report.text import amount, duration, listed, place

#: How many calls the strip shows.
MOST_CALLS = 150
#: Of how many functions, or stretches of a cell, the first graph is open.
MOST_OPENED = 3

#: The style of the short form, which leaves colours to what shows the notebook. The class is named twice so that these
#: rules outrank JupyterLab's.
_SHORT_STYLE = Markup(
    ".aotlab-report.aotlab-report :is(td,th){text-align:left;vertical-align:top}"
    ".aotlab-report.aotlab-report :is(table,pre,p){margin:0 0 .3em}"
    ".aotlab-report .verdict{font-weight:600}"
)

_SHORT_FOOTER = words(
    "A summary: JupyterLab with aotlab installed draws all of it; `%%aotcompile -o report` keeps the report, "
    "`report.to_html(path)` writes it."
)

_PAGE_STYLE = Markup(
    ":root { color-scheme: light dark; } body { margin: 0; } .aotlab-page { padding: 1.4rem 1.2rem 3rem; }"
    "@media (prefers-color-scheme: dark) { body { background: #14181d; } } .aotlab-page > div { margin: 0 auto; }"
)

_SYMBOLS = {"verified": "✓", "unverified": "●", "different": "✗", "partly": "!", "nothing": "!"}
_ENGINES = ("eager", "upstream", "aotlab")
_PHASES = ("forward", "backward", "total")


def page(report: Report) -> str:
    """Write ``report`` as an HTML document that needs nothing else.

    It is drawn as in JupyterLab, by the same script, from the report's JSON in the page. Where scripts are off, and
    where the package was installed without the script, the summary stands there instead.
    """
    title = f"{report.name} – aotlab report" if report.name else "aotlab report"
    script, style = _built("page.js"), _built("page.css")
    if script and style:
        data = json.dumps(replace(report, summary=summary(report)).to_dict(sparse=True), separators=(",", ":"))
        body = join(
            element("div", id="aotlab-page"),
            element("noscript", fragment(report, short=True)),
            # No text can end the element early: the characters that could begin a tag are written as numbers.
            element("script", Markup(data.replace("<", "\\u003c")), type="application/json", id="aotlab-data"),
            element("script", script, type="module"),
        )
    else:
        style = join(_PAGE_STYLE, _style())
        body = element("div", fragment(report), kind="aotlab-page")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", style),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', body), lang='en')}\n"


@cache
def _built(name: str) -> Markup | None:
    """Return what the build of ``extension/`` made; None where it was not built."""
    path = resources.files("aotlab.report").joinpath("static", name)
    return Markup(path.read_text(encoding="utf-8").replace("</", "<\\/")) if path.is_file() else None


def fragment(report: Report, *, short: bool = False) -> str:
    """Write ``report`` as one element that can stand in another page.

    The ``short`` form, for notebooks, has the cell's lines, inputs, outputs, recompiles and differences, and says where
    the rest is.
    """
    frames = [_frame(frame, opened=index < MOST_OPENED, short=short) for index, frame in enumerate(report.frames)]
    return element(
        "div",
        element("style", _SHORT_STYLE) if short else None,
        _header(report),
        cell_section(report, short=short),
        *frames,
        _graph_breaks(report),
        None if short else _time(report),
        _timings(report.timing_rows),
        _verification(report, short=short),
        None if short else legend(report),
        element("footer", _SHORT_FOOTER) if short else _footer(report),
        kind="aotlab-report",
    )


@cache
def _style() -> Markup:
    """Return the style sheet without comments and indentation."""
    text = resources.files("aotlab.report").joinpath("page.css").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return Markup("\n".join(line.strip() for line in text.splitlines() if line.strip()))


# The head of the page


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
        report.created,
    ]
    return element(
        "header",
        element(
            "p",
            element("b", f"{_SYMBOLS[found.state]} "),
            element("span", words(found.sentence)),
            kind=f"verdict {found.state}",
        ),
        *[element("p", element("b", fact.title), " ", words(fact.sentence), kind="happened") for fact in found.facts],
        element("p", " · ".join(fact for fact in facts if fact), kind="facts"),
        *[element("p", words(note), kind="note") for note in report.notes],
    )


def _time(report: Report) -> Markup | None:
    rows = [row for row in report.time_rows if row.duration_ns]
    if len(rows) < 2:
        return None
    begin, cells = 0, []
    for row in rows:
        bar = track(begin, begin + row.duration_ns, report.duration_ns, "input")
        begin += row.duration_ns
        cells.append(
            [
                cell(KINDS.get(row.kind, row.kind), kind="words"),
                cell("" if row.kind == REST else f"{row.count:,}", kind="number"),
                cell(bar, kind="bar"),
                cell(duration(row.duration_ns), kind="number"),
            ]
        )
    about = f"{duration(report.duration_ns)}, each moment counted once"
    return fold("Where the time went", about, grid(("what", "times#", "when", "time#"), cells))


def _footer(report: Report) -> Markup:
    switches = ", ".join(f"{switch.name}={switch.value!r}" for switch in report.environment.config)
    recorded = f"Recorded over {duration(report.duration_ns)} on {report.environment.platform}"
    return element("footer", f"{recorded}; report version {report.version}. Switches: {switches or 'none recorded'}.")


def _frame(frame: Frame, *, opened: bool, short: bool) -> Markup:
    refused = {refusal.graph: refusal for refusal in frame.refusals}
    return element(
        "section",
        element("h2", element("code", frame.name), " ", element("small", place(frame.line)) if frame.line else None),
        *[
            graph_section(graph, refused.get(graph.index), opened=opened and index == 0, short=short)
            for index, graph in enumerate(frame.graphs)
        ],
        None if short else _calls(frame),
        _recompiles(frame),
    )


def _calls(frame: Frame) -> Markup | None:
    calls = frame.calls
    if not calls.total:
        return None
    marks = [
        mark(f"{calls.compiled:,} compiled", "good") if calls.compiled else None,
        mark(f"{calls.eager:,} eager", "warn") if calls.eager else None,
    ]
    return join(
        heading("Calls", amount(calls.total, "call")),
        element("p", *marks),
        _strip(calls.recent[-MOST_CALLS:]) if len(calls.recent) > 1 else None,
    )


def _strip(recent: Sequence[Call]) -> Markup:
    """Draw the last calls as bars whose heights are the logarithms of their times."""
    logs = [math.log10(max(call.duration_ns, 1)) for call in recent]
    low, high = min(logs), max(logs)
    bars = [
        element(
            "i",
            kind="eager" if not call.compiled else "cold" if call.cold else None,
            style=f"height:{15 + 85 * (value - low) / max(high - low, 1):.0f}%",
            title=_about_call(call),
        )
        for call, value in zip(recent, logs, strict=True)
    ]
    fastest, slowest = min(c.duration_ns for c in recent), max(c.duration_ns for c in recent)
    text = (
        f"The last {amount(len(recent), 'call')}, {duration(fastest)} to {duration(slowest)}, on a logarithmic scale."
    )
    kinds = (("warm", "compiled code"), ("cold", "compiled first"), ("eager", "eager"))
    key = [element("span", element("i", kind=kind), name) for kind, name in kinds]
    return join(element("div", *bars, kind="calls"), element("p", element("span", text), *key, kind="key"))


def _about_call(call: Call) -> str:
    if not call.compiled:
        return f"{duration(call.duration_ns)}, eager"
    served = "an unknown graph" if call.graph is None else f"graph {call.graph}"
    return f"{duration(call.duration_ns)}, {served}{', compilation included' if call.cold else ''}"


def _recompiles(frame: Frame) -> Markup | None:
    again = [graph for graph in frame.graphs if graph.misses]
    if not again:
        return None
    rows = [
        [
            cell(f"{graph.index}", kind="number"),
            cell(*map(_miss, graph.misses), kind="words"),
            cell(
                mark(graph.status, "good" if graph.status == "compiled" else "warn"),
                element("span", "in an earlier run", kind="soft") if graph.reused else None,
            ),
            cell(duration(graph.at_ns), kind="number"),
            cell(duration(graph.duration_ns), kind="number"),
        ]
        for graph in again
    ]
    return join(
        heading("Recompiles", f"{len(again)}"),
        grid(("graph#", "why no earlier graph served", "outcome", "at#", "took#"), rows),
    )


def _miss(miss: Miss) -> Markup:
    earlier = "" if miss.graph is None else f"graph {miss.graph}: "
    where = "" if miss.line is None else f" {place(miss.line)}."
    hint = f" To avoid it: {miss.suggestion}." if miss.suggestion else ""
    return element("div", earlier, words(miss.sentence), element("span", f".{where}{hint}", kind="soft"))


def _in_dynamos_words(row: GraphBreakRow) -> Markup | None:
    return None if row.words == row.reason else fold("in Dynamo’s words", "", element("pre", row.reason))


def _graph_breaks(report: Report) -> Markup | None:
    if not report.graph_break_rows:
        return None
    rows = [
        [
            cell(row.where, kind="name"),
            cell(words(row.words), _in_dynamos_words(row), kind="words"),
            cell(duration(row.at_ns), kind="number"),
        ]
        for row in report.graph_break_rows
    ]
    return join(heading("Graph breaks", f"{len(rows)}"), grid(("frame", "reason", "at#"), rows))


# Measurements and verification


def _timings(rows: Sequence[TimingRow]) -> Markup | None:
    if not rows:
        return None
    groups: dict[tuple[str, str], list[TimingRow]] = {}
    for row in rows:
        groups.setdefault((row.frame or "", row.device), []).append(row)
    found = []
    for (frame, device), members in groups.items():
        # The phases of one function share a scale, so that forward and backward can be compared, too.
        scale = max(max(row.p90_ns, row.median_ns) for row in members)
        phases = sorted({row.phase for row in members}, key=lambda phase: _rank(_PHASES, phase))
        cards = [_card(phase, [row for row in members if row.phase == phase], scale) for phase in phases]
        title = element("p", element("code", frame), element("span", f" on {device}", kind="soft")) if frame else None
        found += [title, element("div", *cards, kind="pair")]
    devices = listed(sorted({row.device for row in rows}))
    return join(
        heading(
            "Timings",
            f"medians on {devices}; lines, and ranges of ratios, go from the 10th to the 90th percentile",
        ),
        *found,
    )


def _card(phase: str, rows: Sequence[TimingRow], scale: int) -> Markup:
    cells: list[Markup] = []
    for row in sorted(rows, key=lambda row: _rank(_ENGINES, row.engine)):
        tone = f"engine-{row.engine}" if row.engine in _ENGINES else "engine-eager"
        cells += [
            element("span", f"{row.engine} "),
            track(0, row.median_ns, scale, tone, whisker=(row.p10_ns, row.p90_ns), note=_spread(row)),
            element("span", f"{duration(row.median_ns)} ", kind="number"),
            element("span", f"{'; '.join(map(str, row.ratios))} ", kind="soft"),
        ]
    repeats = sorted({row.repeats for row in rows})
    about = f"{' or '.join(map(str, repeats))} repeats"
    again = next((f", the same code against itself {row.again:.2f}×" for row in rows if row.again), "")
    noise = listed(list(dict.fromkeys(row.noise for row in rows if row.noise)))
    return element(
        "div",
        element("p", f"{phase.capitalize()} ", element("small", about + again)),
        element("p", f"Noise: {noise}.", kind="soft") if noise else None,
        element("div", *cells, kind="rows"),
        kind="card",
    )


def _spread(row: TimingRow) -> str:
    return (
        f"min {duration(row.min_ns)}, 10 % {duration(row.p10_ns)}, "
        f"median {duration(row.median_ns)}, 90 % {duration(row.p90_ns)}"
    )


def _rank(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name), "") if name in order else (len(order), name)


def _verification(report: Report, *, short: bool) -> Markup | None:
    rows = report.verification_rows
    about = summary(report)
    if not rows or (short and not about.different):
        return None
    different = [row for row in rows if not row.equal]
    engines = listed(sorted({row.engine for row in rows}))
    head = heading("Verification", f"{engines} against eager")
    if different:
        shown = [
            [
                cell(row.engine),
                cell(mark(row.kind, "bad")),
                cell(row.subject, kind="name"),
                cell(row.expected),
                cell(row.actual),
                cell(row.sentence, kind="words"),
            ]
            for row in different
        ]
        open_part = join(
            element("p", mark(f"{about.different:,} of {about.compared:,} differ", "bad")),
            grid(("engine", "observable", "of", "eager has", "it has", "difference"), shown),
        )
    else:
        open_part = element("p", mark(f"all {about.compared:,} equal", "good"))
    if short:
        return join(head, open_part)
    everything = [
        [
            cell(mark("equal", "good") if row.equal else mark("differs", "bad")),
            cell(row.engine),
            cell("" if row.call is None else str(row.call), kind="number"),
            cell(row.kind),
            cell(row.subject, kind="name"),
            cell(row.expected),
        ]
        for row in rows
    ]
    table = grid(("", "engine", "call#", "observable", "of", "eager has"), everything)
    uncovered = (
        "Each graph was compared by itself, on copies of its inputs; the Python between the graphs is not covered."
        if report.cell is not None and report.cell.parts
        else None
    )
    return join(
        head,
        open_part,
        element("p", uncovered, kind="soft") if uncovered else None,
        fold("Everything that was compared", amount(about.compared, "observable"), table),
    )
