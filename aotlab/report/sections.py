"""One compiled graph on the page: its stages, arguments, outputs, memory, kernels, guards and code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from aotlab.report.counts import count
from aotlab.report.markup import Markup, element, join
from aotlab.report.model import (
    AutogradNode,
    Counts,
    Graph,
    Input,
    Kernel,
    Node,
    Output,
    Refusal,
    Span,
    Storage,
    TensorInfo,
)
from aotlab.report.parts import (
    cell,
    code_block,
    fold,
    grid,
    heading,
    line_cell,
    mark,
    preformatted,
    tensor_cell,
    track,
    words,
)
from aotlab.report.text import amount, data_size, duration, known_size, listed, sizes
from aotlab.report.verdict import DIFFERS

#: How many nodes of one graph the page lists; a reader who wants all of them wants the table.
MOST_NODES = 400
#: How many storages the map draws one by one.
MOST_STORAGES = 60


def graph_section(graph: Graph, refusal: Refusal | None, *, opened: bool, short: bool) -> Markup:
    """Write one graph: a fold with everything that is known of it, or if ``short`` with its inputs and outputs."""
    counts = count(graph)
    kind = {True: "training", False: "inference", None: None}[graph.training]
    status = "compiled in an earlier run of the cell" if graph.reused and graph.status == "compiled" else graph.status
    facts = [
        status if status != "earlier" else "compiled before the recording began",
        kind,
        f"backend {graph.backend}" if graph.backend else None,
        f"frontend {graph.frontend}" if graph.frontend else None,
        duration(graph.duration_ns) if graph.duration_ns is not None else None,
        amount(graph.calls, "call"),
    ]
    rest = (
        ()
        if short
        else (
            _storage_map(graph.storages, counts),
            _autograd(graph.autograd),
            _saved(graph, counts),
            _kernels(graph.kernels, counts),
            _guards(graph, counts),
            _codes(graph),
            _nodes(graph.nodes, counts),
        )
    )
    return element(
        "details",
        element("summary", f"Graph {graph.index} ", element("small", " · ".join(fact for fact in facts if fact))),
        element(
            "div",
            element("p", "Compiled again: ", words(graph.misses[0].sentence), kind="note") if graph.misses else None,
            element("p", f"The backward raises: {graph.backward_error}", kind="note") if graph.backward_error else None,
            _refusal(refusal),
            None if short else _stages(graph, counts),
            _inputs(graph.inputs, counts),
            _outputs(graph.outputs, counts),
            *rest,
            kind="inside",
        ),
        kind="graph",
        open="" if opened else None,
    )


def _refusal(refusal: Refusal | None) -> Markup | None:
    if refusal is None:
        return None
    different = refusal.message.startswith(DIFFERS)
    return element(
        "p",
        mark("differs from eager, not used" if different else refusal.reason, "bad" if different else "warn"),
        f"{refusal.message} ",
        element("span", f"({'it ran eagerly' if refusal.outcome == 'ran eagerly' else refusal.outcome})", kind="soft"),
        kind="note different" if different else "note",
    )


def _stages(graph: Graph, counts: Counts) -> Markup | None:
    if not graph.stages:
        return None
    total = counts.stages_ns
    later = [stage for stage in graph.stages if stage.name == "backward"]
    shown = [stage for stage in graph.stages if stage.name != "backward"] if len(later) > 1 else graph.stages
    columns = ("stage", "when", "time#", "ops#", "what it did")
    begin = 0
    rows = []
    for stage in (*shown, *(later if shown is not graph.stages else ())):
        bar = track(begin, begin + stage.duration_ns, total, "input")
        begin += stage.duration_ns
        rows.append(
            [
                cell(stage.name, kind="name"),
                cell(bar, kind="bar"),
                cell(duration(stage.duration_ns), kind="number"),
                cell("" if stage.node_count is None else f"{stage.node_count:,}", kind="number"),
                cell(stage.summary, kind="words"),
            ]
        )
    took = duration(sum(stage.duration_ns for stage in later))
    return join(
        heading("Stages", f"{duration(total)} in {amount(counts.stages, 'stage')}{_unaccounted(graph, total)}"),
        grid(columns, rows[: len(shown)]),
        fold(f"{amount(len(later), 'backward')} compiled later", took, grid(columns, rows[len(shown) :]))
        if len(rows) > len(shown)
        else None,
    )


def _unaccounted(graph: Graph, total: int) -> str:
    """Say how much of the compilation lay between the stages, where that is worth a word."""
    rest = (graph.duration_ns or 0) - total
    return f"; {duration(rest)} more between them" if graph.status == "compiled" and rest > total // 20 else ""


def _inputs(inputs: Sequence[Input], counts: Counts) -> Markup | None:
    if not counts.inputs:
        return None
    rows = [
        [
            cell(row.name, kind="name"),
            cell(row.kind),
            cell(element("code", row.value or "") if row.tensor is None else tensor_cell(row.tensor)),
            cell("" if row.tensor is None else data_size(row.tensor.nbytes), kind="number"),
            cell("" if row.storage is None else f"#{row.storage}", kind="number"),
            cell(*_grad_marks(row.tensor)),
            cell(*mutation_marks(row), kind="words"),
        ]
        for row in inputs
    ]
    return join(
        heading("Inputs", f"{counts.inputs:,}, {counts.mutated:,} mutated"),
        grid(("name", "kind", "tensor or value", "bytes#", "storage#", "autograd", "what happened to it"), rows),
    )


def mutation_marks(row: Input) -> list[Markup]:
    """Mark what happened to an input, and with whom it shares memory."""
    marks = []
    flags = (
        (row.mutates_data, "data mutated"),
        (row.mutates_metadata, "metadata mutated"),
        (row.mutates_storage, "storage replaced"),
    )
    marks += [mark(text, "write") for flag, text in flags if flag]
    if row.mutated:
        # Without a gradient there is nothing that a mutation could be hidden from.
        if row.mutation_hidden_from_autograd and row.tensor is not None and row.tensor.requires_grad:
            marks.append(mark("hidden from autograd"))
        if row.mutation_under_no_grad:
            marks.append(mark("under no_grad"))
        if row.mutation_type is not None:
            marks.append(element("span", f"{row.mutation_type.removeprefix('mutated ')} ", kind="soft"))
        marks += [mark(step, "write") for step in row.steps]
    if row.synthetic_base is not None:
        marks.append(mark(f"window of synthetic base {row.synthetic_base}", "alias"))
    if row.duplicate_of is not None:
        marks.append(mark(f"same tensor as {row.duplicate_of}", "alias"))
    if row.overlaps:
        marks.append(mark(f"shares bytes with {listed(row.overlaps)}", "alias"))
    before = row.tensor is not None and row.tensor.requires_grad
    if row.requires_grad_after is not None and row.requires_grad_after != before:
        marks.append(mark(f"requires_grad becomes {row.requires_grad_after}", "blue"))
    if not marks and row.tensor is not None:
        unknown = row.mutates_data is None
        marks.append(element("span", "not traced" if unknown else "–", kind="soft"))
    return marks


def _grad_marks(tensor: TensorInfo | None) -> list[Markup]:
    if tensor is None or not tensor.requires_grad:
        return []
    return [mark("requires grad", "blue"), element("span", "leaf" if tensor.is_leaf else "non-leaf", kind="soft")]


def _outputs(outputs: Sequence[Output], counts: Counts) -> Markup | None:
    if not counts.outputs:
        return None
    rows = []
    for row in outputs:
        chain = None
        relation = row.relation
        if row.views is not None and relation.endswith(row.views):
            relation, chain = relation.removesuffix(row.views).rstrip(": "), row.views
        rows.append(
            [
                cell(row.name, kind="name"),
                cell(element("code", row.raw_type) if row.tensor is None else tensor_cell(row.tensor)),
                cell("" if row.storage is None else f"#{row.storage}", kind="number"),
                cell(mark("requires grad", "blue") if row.requires_grad else None),
                cell(
                    mark(row.output_type, "alias" if row.base is not None else "") if row.tensor is not None else None,
                    join(relation, ": ", element("code", chain)) if chain else relation,
                    kind="words",
                ),
            ]
        )
    return join(
        heading("Outputs", f"{counts.outputs:,}, {counts.aliased:,} aliased"),
        grid(("name", "tensor or type", "storage#", "autograd", "what it shares memory with"), rows),
    )


# Memory


def _storage_map(storages: Sequence[Storage], counts: Counts) -> Markup | None:
    if not storages:
        return None
    # A storage is of interest if something happens in it: shared, written, or made by the graph.
    interesting = [s for s in storages if len(s.spans) > 1 or s.owner != "input" or any(p.mutated for p in s.spans)]
    drawn = (interesting or list(storages))[:MOST_STORAGES]
    more = counts.storages - len(drawn)
    cells: list[Markup] = []
    for storage in drawn:
        owner = {"input": "the caller's", "intermediate": "an intermediate of the graph"}.get(storage.owner, "new")
        where = f"{data_size(storage.nbytes)} on {storage.device}, {owner}"
        cells.append(element("div", f"#{storage.number} ", element("small", where), kind="storage"))
        for span in storage.spans:
            cells += _span(span, storage)
    left = None
    if more:
        known = counts.storage_bytes - sum(
            known_size(storage.nbytes) for storage in drawn if storage.nbytes is not None
        )
        left = element("p", f"{amount(more, 'more storage')} ({data_size(known)}), not drawn.", kind="soft")
    key = element(
        "p",
        *[
            element("span", element("i", kind=kind), text)
            for kind, text in (("input", "input"), ("input written", "input that is written"), ("output", "output"))
        ],
        kind="key",
    )
    return join(
        heading("Storages", "who lives in which bytes"),
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
        track(span.start, span.stop, whole, kind),
        element("div", f"bytes {span.start:,} – {span.stop:,}{', written' if span.mutated else ''}", kind="bytes"),
    ]


def _autograd(nodes: Sequence[AutogradNode]) -> Markup | None:
    if not nodes:
        return None
    rows = [
        [
            cell(str(node.number), kind="number"),
            cell(element("code", listed(node.makes)), kind="words"),
            cell(element("code", listed(node.goes_to)) if node.goes_to else None, kind="words"),
        ]
        for node in nodes
    ]
    about = (
        "one for the whole call"
        if len(nodes) == 1
        else f"{len(nodes)}, as the outputs hang on each other or reach different inputs"
    )
    return join(
        heading("Autograd nodes", about), grid(("node#", "what comes out of it", "where its gradients go"), rows)
    )


def _saved(graph: Graph, counts: Counts) -> Markup | None:
    if not graph.training:
        return None
    if not counts.saved:
        return heading("Saved for backward", "nothing")
    most = max((known_size(row.nbytes) for row in graph.saved), default=0)
    rows = [
        [
            cell(row.name, kind="name"),
            cell(tensor_cell(row.tensor)),
            cell(track(0, known_size(row.nbytes), most, "output" if row.new_bytes else "held"), kind="bar"),
            cell(data_size(row.nbytes), kind="number"),
            cell(
                words(row.reason),
                join(" ", mark("an input")) if row.is_input else None,
                join(" ", mark("an output")) if row.is_output else None,
                line_cell(row.line),
                kind="words",
            ),
            cell(element("code", listed(row.used_by, 4)) if row.used_by else None, kind="long"),
        ]
        for row in graph.saved
    ]
    about = f"{amount(counts.saved, 'value')}: {data_size(counts.saved_bytes)} of new memory"
    if counts.held_bytes:
        about += f"; {data_size(counts.held_bytes)} that the caller holds anyway"
    return join(
        heading("Saved for backward", about),
        grid(("value", "tensor", "share", "bytes#", "why", "used by"), rows),
    )


# What the compiler made


def _kernels(kernels: Sequence[Kernel], counts: Counts) -> Markup | None:
    if not counts.kernels:
        return None
    written = [kernel for kernel in kernels if kernel.language != "extern"]
    folds = [
        fold(
            element("code", kernel.name),
            f"{kernel.language} · {kernel.kind} · {kernel.graph_name}",
            preformatted(kernel.source),
        )
        for kernel in written
    ]
    # A library's kernels have no source of their own, only calls: one fold for those of each graph.
    called: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        if kernel.language == "extern":
            called.setdefault(kernel.graph_name, []).append(kernel)
    for graph_name, calls in called.items():
        times = Counter(kernel.name for kernel in calls)
        names = [name if often == 1 else f"{name} × {often}" for name, often in times.items()]
        about = f"extern · {calls[0].kind} · {graph_name}"
        sources = "\n".join(kernel.source.strip() for kernel in calls)
        folds.append(fold(element("code", listed(names)), about, preformatted(sources)))
    languages = listed(sorted({kernel.language for kernel in written}))
    own = counts.kernels - counts.kernels_called
    parts = [f"{own:,} written{f' in {languages}' if languages else ''}"] if own else []
    parts += [f"{counts.kernels_called:,} called from libraries"] if counts.kernels_called else []
    # Behind one title: a model's kernels would push everything else off the page.
    return fold("Kernels", ", ".join(parts), element("div", *folds, kind="inside"))


def _guards(graph: Graph, counts: Counts) -> Markup | None:
    if not counts.guards:
        return None
    rows = [
        [cell(guard.kind), cell(guard.subject, kind="name"), cell(words(guard.sentence), kind="words")]
        for guard in graph.guards
    ]
    table = grid(("kind", "about", "assumption"), rows)
    return join(
        heading("Guards", "what a call must fulfil to be served by this graph"),
        fold(amount(counts.guards, "guard"), "", table),
    )


def _codes(graph: Graph) -> Markup | None:
    pieces = [(stage.name, code) for stage in graph.stages for code in stage.codes]
    if not pieces:
        return None
    return join(
        heading("Code", "what each stage handed on"),
        *[
            fold(
                join(element("span", stage, kind="mark blue"), code.title),
                amount(len(code.text.splitlines()), "line"),
                code_block(code),
            )
            for stage, code in pieces
        ],
    )


def _nodes(nodes: Sequence[Node], counts: Counts) -> Markup | None:
    """List the nodes of the trace, which are where every later graph's come from."""
    traced = [node for node in nodes if node.stage == "trace"]
    if not counts.nodes:
        return None
    rows = [
        [
            cell(node.name, kind="name"),
            cell(element("code", node.target if node.op == "call_function" else node.op)),
            cell(element("code", f"{node.dtype}{sizes(node.shape)}") if node.dtype else None, kind="nowrap"),
            cell(mark(node.phase, "warn" if node.phase == "backward" else "blue")),
            cell(line_cell(node.line), kind="words"),
        ]
        for node in traced[:MOST_NODES]
    ]
    more = counts.nodes - len(rows)
    about = f"{amount(counts.nodes, 'node')}, each with the line that caused it"
    table = grid(("node", "op", "value", "phase", "user's line"), rows)
    left = element("p", f"{more:,} more nodes: see report.nodes.", kind="note") if more else None
    part = traced[0].part if traced else "joint"
    return fold(f"Nodes of the {part} graph", about, join(table, left))
