"""Write one compiled graph in the summary: its arguments and outputs."""

from __future__ import annotations

from collections.abc import Sequence

from aotlab.report.counts import count
from aotlab.report.markup import Markup, element, join
from aotlab.report.model import Counts, Graph, Input, Output, Refusal, TensorInfo
from aotlab.report.parts import cell, grid, heading, mark, tensor_cell, words
from aotlab.report.text import amount, data_size, duration, listed
from aotlab.report.verdict import DIFFERS


def graph_section(graph: Graph, refusal: Refusal | None, *, opened: bool) -> Markup:
    """Write one graph as an element that the reader can open; if ``opened`` is true, it is open at first.

    ``refusal`` is the refusal of this graph; None if the graph was not refused.
    """
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
    return element(
        "details",
        element("summary", f"Graph {graph.index} ", element("small", " · ".join(fact for fact in facts if fact))),
        element("p", "Compiled again: ", words(graph.misses[0].sentence)) if graph.misses else None,
        _refusal(refusal),
        _inputs(graph.inputs, counts),
        _outputs(graph.outputs, counts),
        open="" if opened else None,
    )


def _refusal(refusal: Refusal | None) -> Markup | None:
    if refusal is None:
        return None
    different = refusal.message.startswith(DIFFERS)
    return element(
        "p",
        mark("differs from eager, not used" if different else refusal.reason),
        f"{refusal.message} ({'it ran eagerly' if refusal.outcome == 'ran eagerly' else refusal.outcome})",
    )


def _inputs(inputs: Sequence[Input], counts: Counts) -> Markup | None:
    if not counts.inputs:
        return None
    rows = [
        [
            cell(row.name, f" → {row.placeholder}" if row.part_of and row.placeholder else None),
            cell(row.kind),
            cell(element("code", row.value or "") if row.tensor is None else tensor_cell(row.tensor)),
            cell("" if row.tensor is None else data_size(row.tensor.nbytes)),
            cell("" if row.storage is None else f"#{row.storage}"),
            cell(_autograd(row.tensor)),
            cell(*_what_happened(row)),
        ]
        for row in inputs
    ]
    columns = ("name", "kind", "tensor or value", "bytes", "storage", "autograd", "what happened to it")
    return join(heading("Inputs", f"{counts.inputs:,}, {counts.mutated:,} mutated"), grid(columns, rows))


def _what_happened(row: Input) -> list[Markup | str]:
    """List the changes of an input, and the inputs that it shares memory with."""
    flags = (
        (row.mutates_data, "data mutated"),
        (row.mutates_metadata, "metadata mutated"),
        (row.mutates_storage, "storage replaced"),
    )
    marks = [text for flag, text in flags if flag]
    if row.mutated:
        # A mutation can be hidden from autograd only if the tensor requires grad.
        if row.mutation_hidden_from_autograd and row.tensor is not None and row.tensor.requires_grad:
            marks.append("hidden from autograd")
        if row.mutation_under_no_grad:
            marks.append("under no_grad")
        if row.mutation_type is not None:
            marks.append(row.mutation_type.removeprefix("mutated "))
        marks += row.steps
    if row.synthetic_base is not None:
        marks.append(f"{'' if row.kind == 'base' else 'window of '}synthetic base {row.synthetic_base}")
    if row.duplicate_of is not None:
        marks.append(f"same tensor as {row.duplicate_of}")
    if row.overlaps:
        marks.append(f"shares bytes with {listed(row.overlaps)}")
    before = row.tensor is not None and row.tensor.requires_grad
    if row.requires_grad_after is not None and row.requires_grad_after != before:
        marks.append(f"requires_grad becomes {row.requires_grad_after}")
    if not marks and row.tensor is not None:
        return ["not traced" if row.mutates_data is None else "–"]
    return [mark(text) for text in marks]


def _autograd(tensor: TensorInfo | None) -> str:
    if tensor is None or not tensor.requires_grad:
        return ""
    return f"requires grad, {'leaf' if tensor.is_leaf else 'non-leaf'}"


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
                cell(row.name, f" → {row.node}" if row.part_of and row.node else None),
                cell(element("code", row.raw_type) if row.tensor is None else tensor_cell(row.tensor)),
                cell("" if row.storage is None else f"#{row.storage}"),
                cell("requires grad" if row.requires_grad else ""),
                cell(
                    mark(row.output_type) if row.tensor is not None else None,
                    join(relation, ": ", element("code", chain)) if chain else relation,
                ),
            ]
        )
    columns = ("name", "tensor or type", "storage", "autograd", "what it shares memory with")
    return join(heading("Outputs", f"{counts.outputs:,}, {counts.aliased:,} aliased"), grid(columns, rows))
