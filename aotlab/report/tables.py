"""Make the pandas tables of a report: one generator of rows for each table of `aotlab.report.columns`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from aotlab.errors import UserLine
from aotlab.ir.specs import Size, SymExpr
from aotlab.report.columns import COLUMNS, LINE, RANK, TENSOR
from aotlab.report.model import MEMORY_KINDS, AppliedChoice, Frame, Graph, Input, Placeholder, Report, TensorInfo
from aotlab.report.steps import shown_bytes
from aotlab.report.text import place, sizes

if TYPE_CHECKING:
    import pandas as pd


Row = Mapping[str, object]


#: The value of the column ``frame`` in the rows of tensors that a notebook's cell changed outside of the cell's graphs.
OUTSIDE = "outside of the graphs"


def table(report: Report, name: str) -> pd.DataFrame:
    """Return the table ``name`` of ``report``, with the columns and dtypes in `COLUMNS`."""
    import pandas as pd

    columns = COLUMNS[name] if report.rank is None else {"rank": RANK, **COLUMNS[name]}
    rows = [
        [row[column] for column in columns]
        for each in (report, *report.rank_reports)
        for row in ({"rank": each.rank, **row} for row in _ROWS[name](each))
    ]
    # Start with dtype object, because pandas would convert a column of integers with missing values to floats.
    frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
    frame = frame.astype({column: dtype for column, (dtype, _) in columns.items()})
    frame.attrs["columns"] = {column: meaning for column, (_, meaning) in columns.items()}
    return frame


def _graphs(report: Report) -> Iterator[tuple[Frame, Graph, dict[str, object]]]:
    for frame in report.frames:
        for graph in frame.graphs:
            yield frame, graph, {"frame": frame.name, "graph": graph.index, "engine": frame.engine}


def _number(size: Size | None) -> int | None:
    return size.hint if isinstance(size, SymExpr) else size


def _tensor(tensor: TensorInfo | None) -> dict[str, object]:
    if tensor is None:
        return dict.fromkeys((*TENSOR, "requires_grad", "is_leaf"))
    return {
        "dtype": tensor.dtype,
        "shape": sizes(tensor.shape),
        "stride": sizes(tensor.stride),
        "offset": _number(tensor.offset),
        "byte_offset": _number(tensor.byte_offset),
        "nbytes": _number(tensor.nbytes),
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
    }


def _line(line: UserLine | None) -> dict[str, object]:
    if line is None:
        return dict.fromkeys(LINE)
    return {"file": line.file, "line": line.line, "function": line.function or None, "code": line.code or None}


def _input_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for index, row in enumerate(graph.inputs):
            yield {**key, **_input(index, row)}
    for index, row in enumerate(report.cell.mutated_outside if report.cell is not None else ()):
        yield {"frame": OUTSIDE, "graph": None, "engine": None, **_input(index, row)}


def _input(index: int, row: Input) -> Row:
    traced = row.mutates_data is not None
    return {
        "index": index,
        "name": row.name,
        "kind": row.kind,
        **_tensor(row.tensor),
        "requires_grad_after": row.requires_grad_after,
        "storage": row.storage,
        "duplicate_of": row.duplicate_of,
        "overlaps": ", ".join(row.overlaps) or None,
        "mutated": row.mutated if traced or row.mutated else None,
        "mutates_data": row.mutates_data,
        "mutates_metadata": row.mutates_metadata,
        "mutates_storage": row.mutates_storage,
        "mutation_hidden_from_autograd": row.mutation_hidden_from_autograd,
        "mutation_under_no_grad": row.mutation_under_no_grad,
        "mutation_type": row.mutation_type,
        "value": row.value,
        "steps": "; ".join(row.steps) or None,
        "written_at": "; ".join(map(place, row.written_at)) or None,
        "synthetic_base": row.synthetic_base,
        "varies": row.varies,
        "part_of": row.part_of or None,
        "placeholder": row.placeholder or None,
        "gradient": row.gradient or None,
    }


def _output_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for index, row in enumerate(graph.outputs):
            yield {
                **key,
                "index": index,
                "name": row.name,
                "output_type": row.output_type,
                "relation": row.relation,
                "base_kind": row.base_kind,
                "base": row.base,
                "views": row.views,
                **_tensor(row.tensor),
                "requires_grad": row.requires_grad if row.tensor is not None else None,
                "storage": row.storage,
                "raw_type": row.raw_type,
                "part_of": row.part_of or None,
                "node": row.node or None,
                "tangent": row.tangent or None,
            }


def _storage_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for storage in graph.storages:
            for span in storage.spans:
                yield {
                    **key,
                    "storage": storage.number,
                    "owner": storage.owner,
                    "nbytes": _number(storage.nbytes),
                    "device": storage.device,
                    "tensor": span.name,
                    "role": span.role,
                    "start": span.start,
                    "stop": span.stop,
                    "mutated": span.mutated,
                    "writes": span.writes,
                    "may_write": span.may_write,
                    "part_of": span.part_of or None,
                }


def _step_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for index, step in enumerate(graph.steps):
            yield {
                **key,
                "index": index,
                "kind": step.kind,
                "step": step.text,
                "nodes": ", ".join(step.nodes) or None,
                **{
                    name: "; ".join(map(shown_bytes, getattr(step, name))) or None
                    for name in ("reads", "writes", "makes")
                },
                **_line(step.line),
            }


def _stage_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for index, stage in enumerate(graph.stages):
            yield {
                **key,
                "index": index,
                "stage": stage.name,
                "duration_ns": stage.duration_ns,
                "nodes": stage.node_count,
                "summary": stage.summary,
            }


def _node_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for node in graph.nodes:
            yield {
                **key,
                "stage": node.stage,
                "part": node.part,
                "name": node.name,
                "op": node.op,
                "target": node.target,
                "phase": node.phase,
                "dtype": node.dtype,
                "shape": None if node.shape is None else sizes(node.shape),
                "nbytes": _number(node.nbytes),
                "device": node.device,
                "inputs": ", ".join(node.inputs),
                "users": node.users,
                "view": node.view,
                "module": node.module or None,
                **_line(node.line),
            }


def _signature_rows(report: Report) -> Iterator[Row]:
    plain = {"input": "user input", "output": "user output"}
    for _, graph, key in _graphs(report):
        nodes = {node.name: node for node in graph.nodes if node.stage == "trace"}
        inputs = [(each.name, each.kind, _program_name(each), None) for each in graph.placeholders]
        outputs = [(each.name, each.kind, each.target, each.in_graph) for each in graph.results]
        for direction, rows in (("input", inputs), ("output", outputs)):
            for index, (name, kind, target, in_graph) in enumerate(rows):
                node = nodes.get(name)
                yield {
                    **key,
                    "direction": direction,
                    "index": index,
                    "node": name or None,
                    "kind": plain.get(kind, kind) or None,
                    "target": target,
                    "dtype": None if node is None else node.dtype,
                    "shape": None if node is None or node.shape is None else sizes(node.shape),
                    "device": None if node is None else node.device,
                    "in_graph": in_graph if kind.startswith("mutated") else None,
                }


def _program_name(placeholder: Placeholder) -> str:
    """Return the name in the program of a placeholder's value; for a tangent, the name of the differentiated tensor."""
    if placeholder.kind != "tangent":
        return placeholder.user_name
    return re.sub(r"^base_(\d+)$", r"intermediate base \1", placeholder.user_name.removeprefix("grad_of_"))


def _autograd_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for node in graph.autograd:
            for target in node.goes_to or (None,):
                yield {**key, "node": node.number, "makes": ", ".join(node.makes), "goes_to": target}


def _saved_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for row in graph.saved:
            yield {
                **key,
                "name": row.name,
                **_tensor(row.tensor),
                "nbytes": _number(row.nbytes),
                "reason": row.reason,
                "is_input": row.is_input,
                "is_output": row.is_output,
                "shares": row.shares or None,
                "used_by": ", ".join(row.used_by),
                "module": row.module or None,
                **_line(row.line),
            }


def _memory_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        peak = graph.memory.peak if graph.memory is not None else 0
        for row in graph.memory.tensors() if graph.memory is not None else ():
            yield {
                **key,
                "name": row.name,
                "kind": row.kind,
                "nbytes": row.nbytes,
                "begin": row.begin,
                "end": row.end,
                "at_peak": row.begin <= peak <= row.end,
                "module": row.module or None,
                **_line(row.line),
            }


def _budget_rows(report: Report) -> Iterator[Row]:
    for frame, graph, key in _graphs(report):
        base = 0 if graph.memory is None else graph.memory.base_bytes
        applied = {
            (each.partitioner, each.budget, each.save, each.recompute): each
            for each in report.applied_rows
            if (each.frame, each.graph) == (frame.name, graph.index)
        }
        for row in () if graph.choices is None else graph.choices.rows:
            found = applied.pop((row.partitioner, row.budget, (), ()), None)
            modelled = {
                "current": row.current,
                "saved_values": len(row.saved),
                "saved_bytes": row.saved_bytes,
                "peak_bytes": row.peak_bytes,
                "recomputed_ops": row.recomputed,
                "recompute_cost": row.cost,
            }
            yield {**key, **_choice(row.partitioner, row.budget), **modelled, **_measured(found, base)}
        for each in applied.values():
            choice = _choice(each.partitioner, each.budget, each.save, each.recompute)
            missing = dict.fromkeys(COLUMNS["budgets"])
            yield {**missing, **key, "current": False, **choice, **_measured(each, base)}


def _choice(partitioner: str, budget: float | None, save: Iterable[str] = (), recompute: Iterable[str] = ()) -> Row:
    lists = {"save": ",".join(save) or None, "recompute": ",".join(recompute) or None}
    return {"partitioner": partitioner, "memory_budget": budget, **lists}


def _measured(choice: AppliedChoice | None, base: int) -> Row:
    peak = None if choice is None or choice.curve is None else base + choice.curve.peak_bytes
    names = ("forward_ns", "backward_ns", "equal")
    return {"measured_peak_bytes": peak, **{name: getattr(choice, name, None) for name in names}}


def _memory_curve_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        memory = graph.memory
        if memory is None:
            continue
        first = {row.begin: row for row in reversed(list(memory.tensors()))}
        for step, each in enumerate(zip(*memory.curves().values(), strict=True)):
            row = first.get(step) if step else None
            yield {
                **key,
                "source": "modelled",
                "part": "forward" if step < memory.forward_steps else "backward",
                "step": step,
                "node": None if row is None else row.name,
                "total_bytes": sum(each),
                **{f"{kind}_bytes": nbytes for kind, nbytes in zip(MEMORY_KINDS, each, strict=True)},
                "module": None if row is None else row.module or None,
                **_line(None if row is None else row.line),
            }
    missing = dict.fromkeys(COLUMNS["memory_curve"])
    for curve in report.memory_curves:
        key = {"frame": curve.frame, "graph": curve.graph, "engine": curve.engine, "source": "measured"}
        parts = [*[("forward", n) for n in curve.forward], *[("backward", n) for n in curve.backward]]
        for step, (part, nbytes) in enumerate(parts):
            yield {**missing, **key, "part": part, "step": step, "total_bytes": nbytes}


def _kernel_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for row in graph.kernels:
            yield {
                **key,
                "graph_name": row.graph_name,
                "kind": row.kind,
                "name": row.name,
                "language": row.language,
                "source": row.source,
                "from_cache": row.from_cache,
                "cache_miss": row.cache_miss,
                "registers": row.registers,
                "shared_bytes": row.shared_bytes,
                "spilled_bytes": row.spilled_bytes,
                "blocks": row.blocks,
                "bytes_read": row.bytes_read,
                "bytes_written": row.bytes_written,
            }


def _guard_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for row in graph.guards:
            yield {**key, "kind": row.kind, "subject": row.subject, "sentence": row.sentence, **_line(row.line)}


def _call_rows(report: Report) -> Iterator[Row]:
    for frame in report.frames:
        for call in frame.calls.recent:
            yield {
                "frame": frame.name,
                "graph": call.graph,
                "engine": frame.engine,
                "at_ns": call.at_ns,
                "duration_ns": call.duration_ns,
                "compiled": call.compiled,
                "cold": call.cold,
            }


def _recompile_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for miss in graph.misses:
            yield {
                **key,
                "earlier": miss.graph,
                "subject": miss.subject or None,
                "before": miss.before or None,
                "after": miss.after or None,
                "reason": miss.sentence,
                "suggestion": miss.suggestion or None,
                "status": graph.status,
                "at_ns": graph.at_ns,
                "duration_ns": graph.duration_ns,
                **_line(miss.line),
            }


def _refusal_rows(report: Report) -> Iterator[Row]:
    for frame in report.frames:
        for row in frame.refusals:
            yield {
                "frame": frame.name,
                "graph": row.graph,
                "engine": frame.engine,
                "reason": row.reason,
                "case": row.case,
                "error": row.error,
                "message": row.message,
                "argument": row.argument,
                "outcome": row.outcome,
                "at_ns": row.at_ns,
                **_line(row.line),
            }


def _graph_break_rows(report: Report) -> Iterator[Row]:
    for row in report.graph_break_rows:
        yield {
            "frame": row.frame,
            "reason": row.words,
            "where": row.where,
            "cell_line": row.cell_line,
            "library": row.library,
            "dynamo": row.reason,
            "at_ns": row.at_ns,
            **_line(row.line),
        }


def _timing_rows(report: Report) -> Iterator[Row]:
    for row in report.timing_rows:
        ratios: Row = {
            f"over_{ratio.over}{end}": value
            for ratio in row.ratios
            for end, value in (("", ratio.median), ("_p10", ratio.p10), ("_p90", ratio.p90))
        }
        fields = {name: getattr(row, name, None) for name in COLUMNS["timings"]}
        yield {**fields, **ratios, "again": row.again or None}


def _collective_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for each in graph.collectives:
            values = {name: getattr(each, name) for name in ("part", "name", "op", "input_bytes", "output_bytes")}
            yield {**key, **values, **_line(each.line)}


def _fields(name: str, field: str) -> Callable[[Report], Iterable[Row]]:
    """Return the function that makes the rows of the table ``name`` from the records in a field of the report."""

    def rows(report: Report) -> Iterator[Row]:
        for row in getattr(report, field):
            yield {column: getattr(row, column) for column in COLUMNS[name]}

    return rows


_ROWS: dict[str, Callable[[Report], Iterable[Row]]] = {
    "inputs": _input_rows,
    "outputs": _output_rows,
    "storages": _storage_rows,
    "steps": _step_rows,
    "stages": _stage_rows,
    "nodes": _node_rows,
    "signature": _signature_rows,
    "autograd": _autograd_rows,
    "saved": _saved_rows,
    "memory": _memory_rows,
    "budgets": _budget_rows,
    "memory_curve": _memory_curve_rows,
    "kernels": _kernel_rows,
    "guards": _guard_rows,
    "calls": _call_rows,
    "recompiles": _recompile_rows,
    "refusals": _refusal_rows,
    "graph_breaks": _graph_break_rows,
    "time": _fields("time", "time_rows"),
    "timeline": _fields("timeline", "timeline_rows"),
    "timings": _timing_rows,
    "verification": _fields("verification", "verification_rows"),
    "engines": _fields("engines", "engine_rows"),
    "runs": _fields("runs", "run_rows"),
    "ranks": _fields("ranks", "rank_rows"),
    "collectives": _collective_rows,
    "waits": _fields("waits", "wait_rows"),
}
