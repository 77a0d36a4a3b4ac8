"""The report as pandas tables.

`COLUMNS` is the promise: for every table its columns in order, each with its dtype and its meaning. A table has these
columns with these dtypes also when it has no rows, so that code which reads a table need not ask whether there was
anything to read. All dtypes admit missing values (``pd.NA``). Tables are keyed by ``frame`` and ``graph``.

`describe` shows it as a table, and each table carries its columns' meanings in ``attrs["columns"]``. The page shows the
same meanings: ``extension/src/model/meanings.json`` holds a copy, which a test compares.

A size that is symbolic stands in a numeric column with the value that it had in the traced call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from aotlab.errors import UserLine
from aotlab.ir.specs import Size, SymExpr
from aotlab.report.model import Frame, Graph, Input, Placeholder, Report, TensorInfo
from aotlab.report.text import sizes

if TYPE_CHECKING:
    import pandas as pd

Column = tuple[str, str]
Row = Mapping[str, object]

_TEXT, _COUNT, _TRUTH, _NUMBER = "string", "Int64", "boolean", "Float64"

_KEY: dict[str, Column] = {
    "frame": (_TEXT, "the function; unique in the report: `f (2)` is another `f`, or what follows a graph break in it"),
    "graph": (_COUNT, "the compiled entry's number within its frame, from 0"),
}
_TENSOR: dict[str, Column] = {
    "dtype": (_TEXT, "element type, for example float32"),
    "shape": (_TEXT, "sizes, for example [2, 3]; [x.size(0)=2, 3] if the first varies, and was 2"),
    "stride": (_TEXT, "strides in elements"),
    "offset": (_COUNT, "where it begins in its storage, in elements"),
    "byte_offset": (_COUNT, "the same in bytes"),
    "nbytes": (_COUNT, "what its elements take, in bytes"),
    "device": (_TEXT, "device, for example cuda:0"),
}
_LINE: dict[str, Column] = {
    "file": (_TEXT, "the user's file"),
    "line": (_COUNT, "the user's line in it, from 1"),
    "function": (_TEXT, "the function around that line"),
    "code": (_TEXT, "the code on that line"),
}

#: The frame of the rows about tensors that a notebook's cell wrote, but no graph of it under that name.
OUTSIDE = "outside of the graphs"

#: Table → column → (dtype, meaning, with its unit).
COLUMNS: dict[str, dict[str, Column]] = {
    "inputs": {
        **_KEY,
        "index": (_COUNT, "position among the flat arguments, with wrappers and their parts"),
        "name": (_TEXT, "the caller's name for it"),
        "kind": (
            _TEXT,
            "parameter, buffer, input or python, or gradient for what stands for one; in the frame `outside of the "
            "graphs`: outside, alias for what was written through another name, or new for a gradient that there was "
            "not before",
        ),
        **_TENSOR,
        "requires_grad": (_TRUTH, "whether it required grad at the call"),
        "requires_grad_after": (_TRUTH, "whether it required grad when the function returned"),
        "is_leaf": (_TRUTH, "whether it was an autograd leaf at the call"),
        "storage": (_COUNT, "its storage in the table storages; equal numbers share memory"),
        "duplicate_of": (_TEXT, "the earlier argument that is the very same tensor"),
        "overlaps": (_TEXT, "other arguments whose bytes it shares, separated by commas"),
        "mutated": (_TRUTH, "whether anything about it changed"),
        "mutates_data": (_TRUTH, "its values changed"),
        "mutates_metadata": (_TRUTH, "its sizes, strides or offset changed"),
        "mutates_storage": (_TRUTH, "it was given other memory"),
        "mutation_hidden_from_autograd": (_TRUTH, "every write went through detach() or the like"),
        "mutation_under_no_grad": (_TRUTH, "every write happened under no_grad or inference_mode"),
        "mutation_type": (_TEXT, "who writes the new value: not mutated, mutated in graph, mutated out of graph"),
        "value": (_TEXT, "the repr of an argument that is no tensor; what a wrapper says of itself besides its parts"),
        "steps": (_TEXT, "what was done in place to its sizes, strides or history, as code"),
        "synthetic_base": (_COUNT, "inputs with equal numbers are one input of the graph"),
        "varies": (_TRUTH, "whether the graph serves other sizes, or other values of a number, too"),
        "part_of": (_TEXT, "the wrapper (a tensor subclass) that it is an attribute of; it has a row above"),
        "placeholder": (_TEXT, "the graph's input that stands for it, for example primals_1; a wrapper has none"),
        "gradient": (_TEXT, "the node of the traced graph that is its gradient"),
    },
    "outputs": {
        **_KEY,
        "index": (_COUNT, "position among the flat outputs, with wrappers and their parts"),
        "name": (_TEXT, "for example out[0]"),
        "output_type": (_TEXT, "one of the seven output types"),
        "relation": (_TEXT, "what it shares memory with, in words"),
        "base_kind": (_TEXT, "what it is made from: input, intermediate or output"),
        "base": (_TEXT, "that one's name"),
        "views": (_TEXT, "the views that lead from the base to it, as code"),
        **_TENSOR,
        "requires_grad": (_TRUTH, "whether it requires grad"),
        "storage": (_COUNT, "its storage in the table storages; equal numbers share memory"),
        "raw_type": (_TEXT, "the qualified name of its Python type"),
        "part_of": (
            _TEXT,
            "the wrapper (a tensor subclass) that it is an attribute of, or the view of it",
        ),
        "node": (_TEXT, "the node of the traced graph that returns it"),
        "tangent": (_TEXT, "the graph's input that is its gradient, for example tangents_1"),
    },
    "storages": {
        **_KEY,
        "storage": (_COUNT, "the storage's number; one that two graphs know has one in each"),
        "owner": (_TEXT, "input (the caller's), intermediate or output (made by the graph)"),
        "nbytes": (_COUNT, "the storage's size in bytes"),
        "device": (_TEXT, "where it is"),
        "tensor": (_TEXT, "a tensor that lives in it"),
        "role": (_TEXT, "input or output"),
        "start": (_COUNT, "the first byte that the tensor reaches"),
        "stop": (_COUNT, "the byte after the last that it reaches"),
        "mutated": (_TRUTH, "whether the function writes the tensor"),
        "writes": (_COUNT, "how many of its bytes are written, where that is known"),
        "may_write": (_COUNT, "how many more may be written, as values say"),
        "part_of": (_TEXT, "the argument or output that is a wrapper around the tensor"),
    },
    "stages": {
        **_KEY,
        "index": (_COUNT, "position in the pipeline"),
        "stage": (_TEXT, "its name"),
        "duration_ns": (_COUNT, "wall time in ns"),
        "nodes": (_COUNT, "ops in the graph that it handed on"),
        "summary": (_TEXT, "what it did"),
    },
    "nodes": {
        **_KEY,
        "stage": (_TEXT, "the stage that handed the node on"),
        "part": (_TEXT, "which of its graphs: joint, forward, backward, inference"),
        "name": (_TEXT, "the node's name"),
        "op": (_TEXT, "as fx has it: placeholder, call_function, output and so on"),
        "target": (_TEXT, "the op's full name"),
        "phase": (_TEXT, "forward or backward: when it was recorded"),
        "dtype": (_TEXT, "element type of its value"),
        "shape": (_TEXT, "sizes of its value"),
        "nbytes": (_COUNT, "what its value takes, in bytes"),
        "device": (_TEXT, "where its value is"),
        "inputs": (_TEXT, "the nodes that it reads, separated by commas"),
        "users": (_COUNT, "how many nodes read it"),
        **_LINE,
    },
    "signature": {
        **_KEY,
        "direction": (_TEXT, "input or output of the traced graph"),
        "index": (_COUNT, "position among these"),
        "node": (_TEXT, "its name in the graph"),
        "kind": (
            _TEXT,
            "parameter, buffer, user input, gradient (what stands for one), base, size, number, tangent; mutated "
            "parameter, mutated buffer, mutated input, user output, base, gradient",
        ),
        "target": (
            _TEXT,
            "what it is in the program: an argument, an output; what a tangent or gradient is the gradient of",
        ),
        "dtype": (_TEXT, "element type"),
        "shape": (_TEXT, "sizes"),
        "device": (_TEXT, "where it is"),
        "in_graph": (_TRUTH, "of a mutated one, whether the graph writes it itself and does not return the new value"),
    },
    "autograd": {
        **_KEY,
        "node": (_COUNT, "the node's number within the graph; 0 runs first in the forward"),
        "makes": (_TEXT, "what comes out of it, separated by commas"),
        "goes_to": (_TEXT, "what its gradients go to, one per row: an input, an output, another node"),
    },
    "saved": {
        **_KEY,
        "name": (_TEXT, "the node whose value is kept"),
        "dtype": (_TEXT, "element type"),
        "shape": (_TEXT, "sizes"),
        "nbytes": (_COUNT, "what it takes, in bytes"),
        "device": (_TEXT, "where it is"),
        "reason": (_TEXT, "why it is kept"),
        "is_input": (_TRUTH, "it is an input: keeping it takes no new memory"),
        "is_output": (_TRUTH, "it is an output: likewise"),
        "shares": (_TEXT, "the saved value whose memory it lies in, so that it takes none of its own"),
        "used_by": (_TEXT, "the nodes of the backward that read it, separated by commas"),
        **_LINE,
    },
    "kernels": {
        **_KEY,
        "graph_name": (_TEXT, "the compiled graph, for example model__0_forward_1"),
        "kind": (_TEXT, "which graph that is: forward, backward or inference"),
        "name": (_TEXT, "the kernel's name"),
        "language": (_TEXT, "triton, c++, python or extern"),
        "source": (_TEXT, "its source"),
        "registers": (_COUNT, "registers of a thread; this and what follows only of rehearsed kernels"),
        "shared_bytes": (_COUNT, "shared memory of a block, in bytes"),
        "spilled_bytes": (_COUNT, "bytes that a thread spills, stores and loads together"),
        "blocks": (_COUNT, "how many blocks a call launches"),
        "bytes_read": (_COUNT, "bytes of the tensors that a call is given to read"),
        "bytes_written": (_COUNT, "bytes of the tensors that a call is given to write"),
    },
    "guards": {
        **_KEY,
        "kind": (_TEXT, "what is compared"),
        "subject": (_TEXT, "of what"),
        "sentence": (_TEXT, "the assumption in words"),
        **_LINE,
    },
    "calls": {
        **_KEY,
        "at_ns": (_COUNT, "when it ended, in ns since the recording began"),
        "duration_ns": (_COUNT, "how long it took, in ns, compilation included"),
        "compiled": (_TRUTH, "whether it ran compiled code"),
        "cold": (_TRUTH, "whether it waited for a compilation"),
    },
    "recompiles": {
        **_KEY,
        "earlier": (_COUNT, "an earlier graph of the function that did not serve; the nearest comes first"),
        "subject": (_TEXT, "what its guard is about: t.dtype, scale"),
        "before": (_TEXT, "what that graph expects"),
        "after": (_TEXT, "what the call had"),
        "reason": (_TEXT, "the same as a sentence"),
        "suggestion": (_TEXT, "what would avoid it"),
        "status": (_TEXT, "compiled, refused or compiling"),
        "at_ns": (_COUNT, "when it began, in ns since the recording began"),
        "duration_ns": (_COUNT, "how long it took, in ns"),
        **_LINE,
    },
    "refusals": {
        **_KEY,
        "reason": (_TEXT, "the key under which refusals are counted"),
        "error": (_TEXT, "the exception's class"),
        "message": (_TEXT, "what it says"),
        "argument": (_TEXT, "the argument concerned"),
        "outcome": (_TEXT, "raised, or ran eagerly"),
        "at_ns": (_COUNT, "when, in ns since the recording began"),
        **_LINE,
    },
    "graph_breaks": {
        "frame": (_TEXT, "the line, as Dynamo names it"),
        "reason": (_TEXT, "why, in a clause"),
        "where": (_TEXT, "the line, as a reader knows it"),
        "cell_line": (_COUNT, "the line of the cell that led there"),
        "dynamo": (_TEXT, "why, as Dynamo words it"),
        "at_ns": (_COUNT, "when, in ns since the recording began"),
        **_LINE,
    },
    "time": {
        "kind": (_TEXT, "what the time went into: a stage, dynamo, verification, calls, the rest"),
        "count": (_COUNT, "how often"),
        "duration_ns": (_COUNT, "how long, in ns, without what lies within it and has a row of its own"),
    },
    "timings": {
        **_KEY,
        "engine": (_TEXT, "eager, upstream (stock torch.compile) or aotlab"),
        "phase": (_TEXT, "forward, backward or total, which is the sum of both within each call"),
        "device": (_TEXT, "where it ran"),
        "noise": (_TEXT, "why the ratios may be noise; empty if nothing says so"),
        "median_ns": (_COUNT, "median of the repeats, in ns"),
        "min_ns": (_COUNT, "fastest of the repeats, in ns"),
        "p10_ns": (_COUNT, "a tenth of the repeats are faster, in ns"),
        "p90_ns": (_COUNT, "a tenth of the repeats are slower, in ns"),
        "repeats": (_COUNT, "how many repeats there were"),
        "over_eager": (_NUMBER, "how many times eager's time it takes: the median over the rounds"),
        "over_eager_p10": (_NUMBER, "the same; a tenth of the rounds are below"),
        "over_eager_p90": (_NUMBER, "the same; a tenth of the rounds are above"),
        "over_upstream": (_NUMBER, "how many times as long as stock torch.compile it takes"),
        "over_upstream_p10": (_NUMBER, "the same; a tenth of the rounds are below"),
        "over_upstream_p90": (_NUMBER, "the same; a tenth of the rounds are above"),
        "again": (_NUMBER, "the A/A ratio: how many times as long the same code took when it was timed again"),
    },
    "verification": {
        **_KEY,
        "engine": (_TEXT, "aotlab or upstream"),
        "call": (_COUNT, "which call of the verification, from 1"),
        "against": (_TEXT, "python (the user's code, run eagerly) or graph (what Dynamo captured of it)"),
        "kind": (_TEXT, "what was compared"),
        "subject": (_TEXT, "of what"),
        "equal": (_TRUTH, "whether both agree, within the tolerance rule"),
        "expected": (_TEXT, "what eager had"),
        "actual": (_TEXT, "what the engine had"),
        "sentence": (_TEXT, "the difference in words"),
    },
}

#: The units of columns, by name; those that end in ``_ns`` are times, those with "bytes" in it bytes.
_UNITS = {
    **dict.fromkeys(("byte_offset", "start", "stop"), "bytes"),
    **dict.fromkeys(("offset", "stride"), "elements"),
    **{f"over_{other}{end}": "×" for other in ("eager", "upstream") for end in ("", "_p10", "_p90")},
    "again": "×",
}


def table(report: Report, name: str) -> pd.DataFrame:
    """Make the table ``name`` of ``report``: one of `COLUMNS`, with the columns and dtypes written there."""
    import pandas as pd

    columns = COLUMNS[name]
    rows = [[row[column] for column in columns] for row in _ROWS[name](report)]
    # By way of objects: left alone, pandas would read a column of integers with gaps as floats.
    made = pd.DataFrame(rows, columns=list(columns), dtype=object)
    made = made.astype({column: dtype for column, (dtype, _) in columns.items()})
    made.attrs["columns"] = meanings()[name]
    return made


def meanings() -> dict[str, dict[str, str]]:
    """Return table → column → meaning."""
    return {name: {column: meaning for column, (_, meaning) in columns.items()} for name, columns in COLUMNS.items()}


def describe() -> pd.DataFrame:
    """Make the table of all columns of all tables."""
    import pandas as pd

    rows = [
        (name, column, dtype, meaning, _unit(column))
        for name, columns in COLUMNS.items()
        for column, (dtype, meaning) in columns.items()
    ]
    return pd.DataFrame(rows, columns=["table", "column", "dtype", "meaning", "unit"], dtype="string")


def _unit(column: str) -> str:
    return "ns" if column.endswith("_ns") else "bytes" if "bytes" in column else _UNITS.get(column, "")


def _graphs(report: Report) -> Iterator[tuple[Frame, Graph, dict[str, object]]]:
    for frame in report.frames:
        for graph in frame.graphs:
            yield frame, graph, {"frame": frame.name, "graph": graph.index}


def _number(size: Size | None) -> int | None:
    return size.hint if isinstance(size, SymExpr) else size


def _tensor(tensor: TensorInfo | None) -> dict[str, object]:
    if tensor is None:
        return dict.fromkeys((*_TENSOR, "requires_grad", "is_leaf"))
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
        return dict.fromkeys(_LINE)
    return {"file": line.file, "line": line.line, "function": line.function or None, "code": line.code or None}


def _input_rows(report: Report) -> Iterator[Row]:
    for _, graph, key in _graphs(report):
        for index, row in enumerate(graph.inputs):
            yield {**key, **_input(index, row)}
    for index, row in enumerate(report.cell.mutated_outside if report.cell is not None else ()):
        yield {"frame": OUTSIDE, "graph": None, **_input(index, row)}


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
                **_line(node.line),
            }


def _signature_rows(report: Report) -> Iterator[Row]:
    plain = {"input": "user input", "output": "user output"}
    for _, graph, key in _graphs(report):
        nodes = {node.name: node for node in graph.nodes if node.stage == "trace"}
        given = [(each.name, each.kind, _program_name(each), None) for each in graph.placeholders]
        made = [(each.name, each.kind, each.target, each.in_graph) for each in graph.results]
        for direction, rows in (("input", given), ("output", made)):
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


def _program_name(given: Placeholder) -> str:
    """Return what a placeholder is called elsewhere: of a tangent, what it is the gradient of."""
    if given.kind != "tangent":
        return given.user_name
    return re.sub(r"^base_(\d+)$", r"intermediate base \1", given.user_name.removeprefix("grad_of_"))


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
                **_line(row.line),
            }


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
                "reason": row.reason,
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
            "dynamo": row.reason,
            "at_ns": row.at_ns,
            **_line(row.line),
        }


def _time_rows(report: Report) -> Iterator[Row]:
    for row in report.time_rows:
        yield {name: getattr(row, name) for name in COLUMNS["time"]}


def _timing_rows(report: Report) -> Iterator[Row]:
    for row in report.timing_rows:
        ratios: Row = {
            f"over_{ratio.over}{end}": value
            for ratio in row.ratios
            for end, value in (("", ratio.median), ("_p10", ratio.p10), ("_p90", ratio.p90))
        }
        known = {name: getattr(row, name, None) for name in COLUMNS["timings"]}
        yield {**known, **ratios, "again": row.again or None}


def _verification_rows(report: Report) -> Iterator[Row]:
    for row in report.verification_rows:
        yield {name: getattr(row, name) for name in COLUMNS["verification"]}


_ROWS: dict[str, Callable[[Report], Iterable[Row]]] = {
    "inputs": _input_rows,
    "outputs": _output_rows,
    "storages": _storage_rows,
    "stages": _stage_rows,
    "nodes": _node_rows,
    "signature": _signature_rows,
    "autograd": _autograd_rows,
    "saved": _saved_rows,
    "kernels": _kernel_rows,
    "guards": _guard_rows,
    "calls": _call_rows,
    "recompiles": _recompile_rows,
    "refusals": _refusal_rows,
    "graph_breaks": _graph_break_rows,
    "time": _time_rows,
    "timings": _timing_rows,
    "verification": _verification_rows,
}
