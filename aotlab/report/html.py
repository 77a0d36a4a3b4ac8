"""The report as a page: static, self-contained, readable in light and dark, without scripts and without a network.

`page` is a file of its own, `fragment` the same inside of a notebook's output. Both are put together from
`aotlab.report.markup`, so that nothing of the user's can become markup. Bars are plain boxes whose widths are
percentages of the scale beside them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources

from aotlab.errors import UserLine
from aotlab.ir.specs import SymExpr
from aotlab.report.markup import Child, Markup, element, join
from aotlab.report.model import (
    Call,
    Code,
    Frame,
    Graph,
    Input,
    Kernel,
    Node,
    Output,
    Refusal,
    Report,
    Span,
    Storage,
    TensorInfo,
    TimingRow,
)
from aotlab.report.text import amount, data_size, duration, known_size, listed, sizes
from aotlab.report.verdict import verdict

#: How many nodes of one graph the page lists; a reader who wants all of them wants the table.
MOST_NODES = 400
#: How many storages the map draws one by one.
MOST_STORAGES = 60
#: How many calls the strip shows.
MOST_CALLS = 150

_SYMBOLS = {"verified": "✓", "unverified": "●", "different": "✗", "partly": "!", "nothing": "!"}
_ENGINES = ("eager", "upstream", "aotlab")
_PHASES = ("forward", "backward", "total")


def page(report: Report) -> str:
    """Write ``report`` as an HTML document that needs nothing else."""
    title = f"{report.name} – aotlab report" if report.name else "aotlab report"
    style = Markup(
        ":root { color-scheme: light dark; } body { margin: 0; } .aotlab-page { padding: 1.4rem 1.2rem 3rem; }"
    )
    backdrop = Markup(
        "@media (prefers-color-scheme: dark) { body { background: #14181d; } } .aotlab-page > div { margin: 0 auto; }"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", join(style, backdrop)),
    )
    body = element("body", element("div", fragment(report), kind="aotlab-page"))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def fragment(report: Report) -> str:
    """Write ``report`` as one element that can stand in another page; it brings its style along."""
    frames = [_frame(report, frame) for frame in report.frames]
    return element(
        "div",
        element("style", _style()),
        _header(report),
        *frames,
        _graph_breaks(report),
        _timings(report.timing_rows),
        _verification(report),
        _cell(report),
        _footer(report),
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
    found = verdict(report)
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
            element("span", found.sentence),
            kind=f"verdict {found.state}",
        ),
        element("p", " · ".join(fact for fact in facts if fact), kind="facts"),
        *[element("p", note, kind="note") for note in report.notes],
    )


def _footer(report: Report) -> Markup:
    switches = ", ".join(f"{switch.name}={switch.value!r}" for switch in report.environment.config)
    recorded = f"Recorded over {duration(report.duration_ns)} on {report.environment.platform}"
    return element("footer", f"{recorded}; report version {report.version}. Switches: {switches or 'none recorded'}.")


def _cell(report: Report) -> Markup | None:
    if report.cell is None:
        return None
    count = report.cell.execution_count
    return _details("The cell", "" if count is None else f"In [{count}]", _pre(report.cell.source))


# One frame, one graph


def _frame(report: Report, frame: Frame) -> Markup:
    refused = {refusal.graph: refusal for refusal in frame.refusals}
    return element(
        "section",
        element("h2", element("code", frame.name), " ", element("small", _place(frame.line)) if frame.line else None),
        *[_graph(graph, refused.get(graph.index), opened=index == 0) for index, graph in enumerate(frame.graphs)],
        _calls(frame),
        _recompiles(frame),
    )


def _graph(graph: Graph, refusal: Refusal | None, *, opened: bool) -> Markup:
    kind = {True: "training", False: "inference", None: None}[graph.training]
    facts = [
        graph.status if graph.status != "earlier" else "compiled before the recording began",
        kind,
        f"backend {graph.backend}" if graph.backend else None,
        f"frontend {graph.frontend}" if graph.frontend else None,
        duration(graph.duration_ns) if graph.duration_ns is not None else None,
        amount(graph.calls, "call"),
    ]
    return element(
        "details",
        element("summary", f"Graph {graph.index} ", element("small", " · ".join(fact for fact in facts if fact))),
        element(
            "div",
            element("p", f"Compiled again: {graph.reason}", kind="note") if graph.reason else None,
            element("p", f"The backward raises: {graph.backward_error}", kind="note") if graph.backward_error else None,
            _refusal(refusal),
            _stages(graph),
            _inputs(graph.inputs),
            _outputs(graph.outputs),
            _storage_map(graph.storages),
            _saved(graph),
            _kernels(graph.kernels),
            _guards(graph),
            _codes(graph),
            _nodes(graph.nodes),
            kind="inside",
        ),
        kind="graph",
        open="" if opened else None,
    )


def _refusal(refusal: Refusal | None) -> Markup | None:
    if refusal is None:
        return None
    return element(
        "p",
        element("span", refusal.reason, kind="mark warn"),
        f"{refusal.message} ",
        element("span", f"({'it ran eagerly' if refusal.outcome == 'ran eagerly' else refusal.outcome})", kind="soft"),
        kind="note",
    )


def _stages(graph: Graph) -> Markup | None:
    if not graph.stages:
        return None
    total = sum(stage.duration_ns for stage in graph.stages)
    begin = 0
    rows = []
    for stage in graph.stages:
        bar = _track(begin, begin + stage.duration_ns, total, "input")
        begin += stage.duration_ns
        rows.append(
            [
                _cell_of(stage.name, kind="name"),
                _cell_of(bar, kind="bar"),
                _cell_of(duration(stage.duration_ns), kind="number"),
                _cell_of("" if stage.node_count is None else f"{stage.node_count:,}", kind="number"),
                _cell_of(stage.summary, kind="words"),
            ]
        )
    return join(
        _heading("Stages", f"{duration(total)} in {amount(len(graph.stages), 'stage')}{_unaccounted(graph, total)}"),
        _grid(("stage", "when", "time#", "ops#", "what it did"), rows),
    )


def _unaccounted(graph: Graph, total: int) -> str:
    """Say how much of the compilation lay between the stages, where that is worth a word."""
    rest = (graph.duration_ns or 0) - total
    return f"; {duration(rest)} more between them" if rest > total // 20 else ""


def _inputs(inputs: Sequence[Input]) -> Markup | None:
    if not inputs:
        return None
    rows = [
        [
            _cell_of(row.name, kind="name"),
            _cell_of(row.kind),
            _cell_of(element("code", row.value or "") if row.tensor is None else _tensor(row.tensor)),
            _cell_of("" if row.tensor is None else data_size(row.tensor.nbytes), kind="number"),
            _cell_of("" if row.storage is None else f"#{row.storage}", kind="number"),
            _cell_of(*_grad_marks(row.tensor)),
            _cell_of(*_mutation_marks(row), kind="words"),
        ]
        for row in inputs
    ]
    mutated = sum(row.mutated for row in inputs if row.duplicate_of is None)
    return join(
        _heading("Inputs", f"{len(inputs)}, {mutated} mutated"),
        _grid(("name", "kind", "tensor or value", "bytes#", "storage#", "autograd", "what happened to it"), rows),
    )


def _mutation_marks(row: Input) -> list[Markup]:
    marks = []
    flags = (
        (row.mutates_data, "data mutated"),
        (row.mutates_metadata, "metadata mutated"),
        (row.mutates_storage, "storage replaced"),
    )
    marks += [_mark(text, "write") for flag, text in flags if flag]
    if row.mutated:
        # Without a gradient there is nothing that a mutation could be hidden from.
        if row.mutation_hidden_from_autograd and row.tensor is not None and row.tensor.requires_grad:
            marks.append(_mark("hidden from autograd"))
        if row.mutation_under_no_grad:
            marks.append(_mark("under no_grad"))
        if row.mutation_type is not None:
            marks.append(element("span", f"{row.mutation_type.removeprefix('mutated ')} ", kind="soft"))
    if row.duplicate_of is not None:
        marks.append(_mark(f"same tensor as {row.duplicate_of}", "alias"))
    if row.overlaps:
        marks.append(_mark(f"shares bytes with {listed(row.overlaps)}", "alias"))
    before = row.tensor is not None and row.tensor.requires_grad
    if row.requires_grad_after is not None and row.requires_grad_after != before:
        marks.append(_mark(f"requires_grad becomes {row.requires_grad_after}", "blue"))
    if not marks and row.tensor is not None:
        unknown = row.mutates_data is None
        marks.append(element("span", "not traced" if unknown else "–", kind="soft"))
    return marks


def _grad_marks(tensor: TensorInfo | None) -> list[Markup]:
    if tensor is None or not tensor.requires_grad:
        return []
    return [_mark("requires grad", "blue"), element("span", "leaf" if tensor.is_leaf else "non-leaf", kind="soft")]


def _outputs(outputs: Sequence[Output]) -> Markup | None:
    if not outputs:
        return None
    rows = []
    for row in outputs:
        chain = None
        relation = row.relation
        if row.views is not None and relation.endswith(row.views):
            relation, chain = relation.removesuffix(row.views).rstrip(": "), row.views
        rows.append(
            [
                _cell_of(row.name, kind="name"),
                _cell_of(element("code", row.raw_type) if row.tensor is None else _tensor(row.tensor)),
                _cell_of("" if row.storage is None else f"#{row.storage}", kind="number"),
                _cell_of(_mark("requires grad", "blue") if row.requires_grad else None),
                _cell_of(
                    _mark(row.output_type, "alias" if row.base is not None else "") if row.tensor is not None else None,
                    join(relation, ": ", element("code", chain)) if chain else relation,
                    kind="words",
                ),
            ]
        )
    aliased = sum(row.base is not None for row in outputs)
    return join(
        _heading("Outputs", f"{len(outputs)}, {aliased} aliased"),
        _grid(("name", "tensor or type", "storage#", "autograd", "what it shares memory with"), rows),
    )


# Memory


def _storage_map(storages: Sequence[Storage]) -> Markup | None:
    if not storages:
        return None
    # A storage is of interest if something happens in it: shared, written, or made by the graph.
    interesting = [s for s in storages if len(s.spans) > 1 or s.owner != "input" or any(p.mutated for p in s.spans)]
    drawn = (interesting or list(storages))[:MOST_STORAGES]
    shown = {storage.number for storage in drawn}
    rest = [storage for storage in storages if storage.number not in shown]
    cells: list[Markup] = []
    for storage in drawn:
        owner = {"input": "the caller's", "intermediate": "an intermediate of the graph"}.get(storage.owner, "new")
        where = f"{data_size(storage.nbytes)} on {storage.device}, {owner}"
        cells.append(element("div", f"#{storage.number} ", element("small", where), kind="storage"))
        for span in storage.spans:
            cells += _span(span, storage)
    left = None
    if rest:
        known = sum(storage.nbytes for storage in rest if isinstance(storage.nbytes, int))
        left = element("p", f"{amount(len(rest), 'more storage')} ({data_size(known)}), not drawn.", kind="soft")
    key = element(
        "p",
        *[
            element("span", element("i", kind=kind), text)
            for kind, text in (("input", "input"), ("input written", "input that is written"), ("output", "output"))
        ],
        kind="key",
    )
    return join(
        _heading("Storages", "who lives in which bytes"),
        element("div", *cells, kind="map"),
        key,
        left,
    )


def _span(span: Span, storage: Storage) -> list[Markup]:
    kind = f"{span.role} written" if span.mutated else span.role
    who = element("div", span.name, kind="who")
    if span.start is None or span.stop is None:
        return [who, element("div", "symbolic", kind="soft"), element("div", "", kind="bytes")]
    whole = storage.nbytes if isinstance(storage.nbytes, int) else span.stop
    return [
        who,
        _track(span.start, span.stop, whole, kind),
        element("div", f"bytes {span.start:,} – {span.stop:,}", kind="bytes"),
    ]


def _saved(graph: Graph) -> Markup | None:
    if not graph.training:
        return None
    if not graph.saved:
        return _heading("Saved for backward", "nothing")
    most = max(known_size(row.nbytes) for row in graph.saved)
    rows = [
        [
            _cell_of(row.name, kind="name"),
            _cell_of(_tensor(row.tensor)),
            _cell_of(_track(0, known_size(row.nbytes), most, "output" if row.new_bytes else "held"), kind="bar"),
            _cell_of(data_size(row.nbytes), kind="number"),
            _cell_of(
                row.reason,
                join(" ", _mark("an input")) if row.is_input else None,
                join(" ", _mark("an output")) if row.is_output else None,
                _line(row.line),
                kind="words",
            ),
            _cell_of(element("code", listed(row.used_by, 4)) if row.used_by else None, kind="long"),
        ]
        for row in graph.saved
    ]
    new = sum(row.new_bytes for row in graph.saved)
    held = sum(known_size(row.nbytes) for row in graph.saved) - new
    about = f"{amount(len(graph.saved), 'value')}: {data_size(new)} of new memory"
    if held:
        about += f"; {data_size(held)} that the caller holds anyway"
    return join(
        _heading("Saved for backward", about),
        _grid(("value", "tensor", "share", "bytes#", "why", "used by"), rows),
    )


# What the compiler made


def _kernels(kernels: Sequence[Kernel]) -> Markup | None:
    if not kernels:
        return None
    written = [kernel for kernel in kernels if kernel.language != "extern"]
    folds = [
        _details(
            element("code", kernel.name),
            f"{kernel.language} · {kernel.kind} · {kernel.graph_name}",
            _pre(kernel.source),
        )
        for kernel in written
    ]
    # A library's kernels have no source of their own, only calls: one fold for those of each graph.
    called: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        if kernel.language == "extern":
            called.setdefault(kernel.graph_name, []).append(kernel)
    for graph_name, calls in called.items():
        counts = Counter(kernel.name for kernel in calls)
        names = [name if count == 1 else f"{name} × {count}" for name, count in counts.items()]
        about = f"extern · {calls[0].kind} · {graph_name}"
        sources = "\n".join(kernel.source.strip() for kernel in calls)
        folds.append(_details(element("code", listed(names)), about, _pre(sources)))
    languages = listed(sorted({kernel.language for kernel in written}))
    about = [f"{len(written)} written in {languages}" if written else None]
    about.append(f"{len(kernels) - len(written)} called from libraries" if called else None)
    return join(_heading("Kernels", ", ".join(part for part in about if part)), *folds)


def _guards(graph: Graph) -> Markup | None:
    if not graph.guards:
        return None
    rows = [
        [_cell_of(guard.kind), _cell_of(guard.subject, kind="name"), _cell_of(guard.sentence, kind="words")]
        for guard in graph.guards
    ]
    table = _grid(("kind", "about", "assumption"), rows)
    return join(
        _heading("Guards", "what a call must fulfil to be served by this graph"),
        _details(amount(len(graph.guards), "guard"), "", table),
    )


def _codes(graph: Graph) -> Markup | None:
    pieces = [(stage.name, code) for stage in graph.stages for code in stage.codes]
    if not pieces:
        return None
    return join(
        _heading("Code", "what each stage handed on"),
        *[
            _details(
                join(element("span", stage, kind="mark blue"), code.title),
                amount(len(code.text.splitlines()), "line"),
                _code(code),
            )
            for stage, code in pieces
        ],
    )


def _nodes(nodes: Sequence[Node]) -> Markup | None:
    """List the nodes of the trace, which are where every later graph's come from."""
    traced = [node for node in nodes if node.stage == "trace"]
    if not traced:
        return None
    rows = [
        [
            _cell_of(node.name, kind="name"),
            _cell_of(element("code", node.target if node.op == "call_function" else node.op)),
            _cell_of(element("code", f"{node.dtype}{sizes(node.shape)}") if node.dtype else None, kind="nowrap"),
            _cell_of(_mark(node.phase, "warn" if node.phase == "backward" else "blue")),
            _cell_of(_line(node.line), kind="words"),
        ]
        for node in traced[:MOST_NODES]
    ]
    more = len(traced) - len(rows)
    about = f"{amount(len(traced), 'node')}, each with the line that caused it"
    table = _grid(("node", "op", "value", "phase", "user's line"), rows)
    left = element("p", f"{more:,} more nodes: see report.nodes.", kind="note") if more else None
    return _details(f"Nodes of the {traced[0].part} graph", about, join(table, left))


# Calls


def _calls(frame: Frame) -> Markup | None:
    calls = frame.calls
    if not calls.total:
        return None
    marks = [
        _mark(f"{calls.compiled:,} compiled", "good") if calls.compiled else None,
        _mark(f"{calls.eager:,} eager", "warn") if calls.eager else None,
    ]
    return join(
        _heading("Calls", amount(calls.total, "call")),
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
    again = [graph for graph in frame.graphs if graph.reason is not None]
    if not again:
        return None
    rows = [
        [
            _cell_of(f"{graph.index}", kind="number"),
            _cell_of(graph.reason or "", kind="words"),
            _cell_of(_mark(graph.status, "good" if graph.status == "compiled" else "warn")),
            _cell_of(duration(graph.at_ns), kind="number"),
            _cell_of(duration(graph.duration_ns), kind="number"),
        ]
        for graph in again
    ]
    return join(
        _heading("Recompiles", f"{len(again)}"),
        _grid(("graph#", "why no earlier graph served", "outcome", "at#", "took#"), rows),
    )


def _graph_breaks(report: Report) -> Markup | None:
    if not report.graph_break_rows:
        return None
    rows = [
        [
            _cell_of(row.frame, kind="name"),
            _cell_of(row.reason, kind="words"),
            _cell_of(duration(row.at_ns), kind="number"),
        ]
        for row in report.graph_break_rows
    ]
    return join(_heading("Graph breaks", f"{len(rows)}"), _grid(("frame", "reason", "at#"), rows))


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
        _heading("Timings", f"medians on {devices}; the thin line goes from the 10th to the 90th percentile"), *found
    )


def _card(phase: str, rows: Sequence[TimingRow], scale: int) -> Markup:
    eager = next((row.median_ns for row in rows if row.engine == "eager"), None)
    cells: list[Markup] = []
    for row in sorted(rows, key=lambda row: _rank(_ENGINES, row.engine)):
        tone = f"engine-{row.engine}" if row.engine in _ENGINES else "engine-eager"
        ratio = ""
        if eager and row.engine != "eager":
            ratio = f"{row.median_ns / eager:.2f}× eager"
        cells += [
            element("span", f"{row.engine} "),
            _track(0, row.median_ns, scale, tone, whisker=(row.p10_ns, row.p90_ns), note=_spread(row)),
            element("span", f"{duration(row.median_ns)} ", kind="number"),
            element("span", f"{ratio} ", kind="soft nowrap"),
        ]
    repeats = sorted({row.repeats for row in rows})
    about = f"{' or '.join(map(str, repeats))} repeats"
    return element(
        "div",
        element("p", f"{phase.capitalize()} ", element("small", about)),
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


def _verification(report: Report) -> Markup | None:
    rows = report.verification_rows
    if not rows:
        return None
    different = [row for row in rows if not row.equal]
    engines = listed(sorted({row.engine for row in rows}))
    head = _heading("Verification", f"{engines} against eager")
    if different:
        shown = [
            [
                _cell_of(row.engine),
                _cell_of(_mark(row.kind, "bad")),
                _cell_of(row.subject, kind="name"),
                _cell_of(row.expected),
                _cell_of(row.actual),
                _cell_of(row.sentence, kind="words"),
            ]
            for row in different
        ]
        open_part = join(
            element("p", _mark(f"{len(different)} of {len(rows)} differ", "bad")),
            _grid(("engine", "observable", "of", "eager has", "it has", "difference"), shown),
        )
    else:
        open_part = element("p", _mark(f"all {len(rows)} equal", "good"))
    everything = [
        [
            _cell_of(_mark("equal", "good") if row.equal else _mark("differs", "bad")),
            _cell_of(row.engine),
            _cell_of("" if row.call is None else str(row.call), kind="number"),
            _cell_of(row.kind),
            _cell_of(row.subject, kind="name"),
            _cell_of(row.expected),
        ]
        for row in rows
    ]
    table = _grid(("", "engine", "call#", "observable", "of", "eager has"), everything)
    return join(head, open_part, _details("Everything that was compared", amount(len(rows), "observable"), table))


# Small parts


def _heading(title: str, about: str = "") -> Markup:
    return element("h3", f"{title} ", element("small", about) if about else None)


def _details(title: Child, about: str, content: Markup) -> Markup:
    return element("details", element("summary", title, " ", element("small", about) if about else None), content)


def _grid(columns: Sequence[str], rows: Iterable[Sequence[Markup]]) -> Markup:
    """Write a table; a column whose title ends in ``#`` holds numbers."""
    head = [
        element("th", title.removesuffix("#"), kind="number" if title.endswith("#") else None, scope="col")
        for title in columns
    ]
    body = [element("tr", *row) for row in rows]
    table = element("table", element("thead", element("tr", *head)), element("tbody", *body))
    return element("div", table, kind="scroll")


def _cell_of(*children: Child, kind: str | None = None) -> Markup:
    return element("td", *children, kind=kind)


def _mark(text: str, tone: str = "") -> Markup:
    # The space is for readers without the style sheet: JupyterLab drops it where a notebook is not trusted.
    return join(element("span", text, kind=f"mark {tone}".strip()), " ")


def _track(
    start: int,
    stop: int,
    scale: int,
    tone: str,
    whisker: tuple[int, int] | None = None,
    note: str | None = None,
) -> Markup:
    """Draw ``start`` to ``stop`` as a bar on a track that stands for 0 to ``scale``."""
    bars = [element("i", kind=tone, style=_extent(start, stop, scale))]
    if whisker is not None:
        bars.append(element("i", kind="whisker", style=_extent(*whisker, scale)))
    return element("span", *bars, kind="track", title=note)


def _extent(start: int, stop: int, scale: int) -> str:
    whole = max(scale, 1)
    left = min(100 * start / whole, 100)
    return f"left:{left:.2f}%;width:{max(min(100 * stop / whole, 100) - left, 0):.2f}%"


def _tensor(tensor: TensorInfo) -> Markup:
    return join(
        element("code", str(tensor), kind="nowrap"),
        element("span", f" {_layout(tensor)}", kind="line") if _layout(tensor) else None,
    )


def _layout(tensor: TensorInfo) -> str:
    """Say what is unusual about a tensor: strides of its own, an offset, another layout or type."""
    parts = []
    if tensor.layout != "strided":
        parts.append(tensor.layout)
    elif not _contiguous(tensor):
        parts.append(f"stride {sizes(tensor.stride)}")
    if tensor.offset != 0:
        parts.append(f"offset {tensor.offset}")
    if not tensor.device.startswith("cpu"):
        parts.append(tensor.device)
    if tensor.type_name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        parts.append(tensor.type_name)
    return ", ".join(parts)


def _contiguous(tensor: TensorInfo) -> bool:
    expected: int = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=False):
        if isinstance(size, SymExpr) or isinstance(step, SymExpr):
            return False
        if size != 1 and step != expected:
            return False
        expected *= max(size, 1)
    return True


def _line(line: UserLine | None) -> Markup | None:
    if line is None:
        return None
    code = join(element("code", line.code), " ") if line.code else None
    return element("span", " ", code, _place(line), kind="line")


def _place(line: UserLine) -> str:
    """Name a line; of a long path the last two parts say enough."""
    parts = re.split(r"[\\/]", line.file)
    name = line.file if line.file.startswith("<") else "/".join(parts[-2:])
    return f"{name}:{line.line}"


def _pre(text: str) -> Markup:
    return element("pre", text)


def _code(code: Code) -> Markup:
    """Write code with its comments subdued: in our graphs they say the shapes."""
    if code.language != "python":
        return _pre(code.text)
    lines: list[Child] = []
    for line in code.text.splitlines():
        before, mark, comment = line.partition("  # ")
        lines += [before, element("span", mark + comment, kind="comment") if mark else None, "\n"]
    return element("pre", *lines)
