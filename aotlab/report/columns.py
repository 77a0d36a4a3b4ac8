"""The columns of the report's pandas tables.

`COLUMNS` defines, for every table, its columns in order, each with its dtype and its meaning. A table has these columns
and dtypes even if it has no rows, so code that reads a table needs no special case. All dtypes allow missing values
(``pd.NA``). Tables are keyed by ``frame`` and ``graph``.

`describe` returns the columns as a table, and each table has the meanings of its columns in ``attrs["columns"]``. The
page shows the same meanings. It reads them from a copy, ``extension/src/model/meanings.json``, and a test checks that
the copy is up to date.

In a gathered report, all tables begin with one more column, `RANK`.

In a numeric column, a symbolic size has the value that it had in the traced call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


Column = tuple[str, str]


_TEXT, _COUNT, _TRUTH, _NUMBER = "string", "Int64", "boolean", "Float64"


_KEY: dict[str, Column] = {
    "frame": (
        _TEXT,
        "the function's name, unique in the report: `f (2)` or `f #2` is another function `f`, or the code of `f` "
        "after a graph break",
    ),
    "graph": (_COUNT, "the compiled entry's number within its frame, from 0"),
    "engine": (_TEXT, "aotlab, or upstream: stock torch.compile"),
}


TENSOR: dict[str, Column] = {
    "dtype": (_TEXT, "element type, for example float32"),
    "shape": (
        _TEXT,
        "sizes, for example [2, 3]; [x.size(0)=2, 3] if the first size is dynamic and was 2 in the traced call",
    ),
    "stride": (_TEXT, "strides in elements"),
    "offset": (_COUNT, "storage offset in elements"),
    "byte_offset": (_COUNT, "storage offset in bytes"),
    "nbytes": (_COUNT, "total size of the tensor's elements in bytes"),
    "device": (_TEXT, "device, for example cuda:0"),
}


#: The first column of every table of a gathered report, except of the table ``ranks``, which has it always.
RANK: Column = (_COUNT, "the number of the process in its distributed job")


LINE: dict[str, Column] = {
    "file": (_TEXT, "the user's file"),
    "line": (_COUNT, "the line in this file, counted from 1"),
    "function": (_TEXT, "the function that contains the line"),
    "code": (_TEXT, "the text of the line"),
}


_MEMORY = {
    "parameters": "parameters and buffers",
    "inputs": "other inputs",
    "outputs": "outputs that the forward allocated",
    "saved": "values that the forward saved for the backward",
    "temporary": "temporary values",
    "gradients": "gradients, including the incoming ones",
}


#: For each table and column: the pandas dtype, and the meaning with its unit.
COLUMNS: dict[str, dict[str, Column]] = {
    "inputs": {
        **_KEY,
        "index": (_COUNT, "position among the flat arguments; a wrapper and each of its parts have a position"),
        "name": (_TEXT, "the caller's name for the argument"),
        "kind": (
            _TEXT,
            "parameter, buffer, input (another tensor), python (no tensor), or gradient; in the frame `outside of the "
            "graphs`: outside, alias (the tensor was written through another name), or new (a gradient that did not "
            "exist before)",
        ),
        **TENSOR,
        "requires_grad": (_TRUTH, "whether the tensor required grad when the function was called"),
        "requires_grad_after": (_TRUTH, "whether the tensor required grad when the function returned"),
        "is_leaf": (_TRUTH, "whether the tensor was an autograd leaf when the function was called"),
        "storage": (_COUNT, "the tensor's storage in the table storages; tensors with equal numbers share memory"),
        "duplicate_of": (_TEXT, "the earlier argument that is the same tensor"),
        "overlaps": (_TEXT, "other arguments that share bytes with this argument, separated by commas"),
        "mutated": (_TRUTH, "whether the tensor's values, sizes, strides, offset or storage changed"),
        "mutates_data": (_TRUTH, "whether the tensor's values changed"),
        "mutates_metadata": (_TRUTH, "whether the tensor's sizes, strides or offset changed"),
        "mutates_storage": (_TRUTH, "whether the tensor got another storage"),
        "mutation_hidden_from_autograd": (_TRUTH, "whether every write was hidden from autograd, as by detach()"),
        "mutation_under_no_grad": (_TRUTH, "whether every write was made under no_grad or inference_mode"),
        "mutation_type": (
            _TEXT,
            "not mutated, mutated in graph (the graph writes the value), or mutated out of graph (the epilogue writes "
            "the value)",
        ),
        "value": (
            _TEXT,
            "the repr of an argument that is not a tensor; for a wrapper, the repr of the data that it holds besides "
            "its parts",
        ),
        "steps": (_TEXT, "the in-place calls that changed the tensor's sizes, strides or autograd history, as code"),
        "written_at": (_TEXT, "the lines of the program that wrote the tensor's values, the last one first"),
        "synthetic_base": (
            _COUNT,
            "the number of the input's synthetic base: inputs with equal numbers became one input of the graph",
        ),
        "varies": (_TRUTH, "whether the graph also accepts other sizes of the tensor, or other values of the number"),
        "part_of": (
            _TEXT,
            "the wrapper (a tensor subclass) that holds this tensor; the wrapper has a row above the rows of its parts",
        ),
        "placeholder": (_TEXT, "the argument's placeholder in the graph, for example primals_1; a wrapper has none"),
        "gradient": (_TEXT, "the node of the traced graph that computes the tensor's gradient"),
    },
    "outputs": {
        **_KEY,
        "index": (_COUNT, "position among the flat outputs; a wrapper and each of its parts have a position"),
        "name": (_TEXT, "the output's place in the result, for example out[0]"),
        "output_type": (
            _TEXT,
            "one of the seven output types, which say whether the output is an alias, and of which tensor",
        ),
        "relation": (_TEXT, "a sentence about the tensor that the output shares memory with"),
        "base_kind": (_TEXT, "the kind of the output's base: input, intermediate or output"),
        "base": (_TEXT, "the name of the output's base"),
        "views": (_TEXT, "the view ops that make the output from the base, as code"),
        **TENSOR,
        "requires_grad": (_TRUTH, "whether the output requires grad"),
        "storage": (_COUNT, "the output's storage in the table storages; tensors with equal numbers share memory"),
        "raw_type": (_TEXT, "the qualified name of the output's Python type"),
        "part_of": (
            _TEXT,
            "the wrapper (a tensor subclass) that holds this tensor; for a base that the graph returns, the output "
            "that is a view of the base; for the new value of a mutated input, this input",
        ),
        "node": (_TEXT, "the node that the traced graph returns for the output"),
        "tangent": (_TEXT, "the graph's placeholder for the gradient of the output, for example tangents_1"),
    },
    "storages": {
        **_KEY,
        "storage": (_COUNT, "the storage's number, equal in all graphs that use it"),
        "owner": (
            _TEXT,
            "input (the caller allocated the storage), or intermediate or output (the graph allocated it for an "
            "intermediate base or for an output)",
        ),
        "nbytes": (_COUNT, "the storage's size in bytes"),
        "device": (_TEXT, "device, for example cuda:0"),
        "tensor": (_TEXT, "a tensor with this storage"),
        "role": (_TEXT, "input or output"),
        "start": (_COUNT, "the position of the tensor's first byte in the storage"),
        "stop": (_COUNT, "the position after the tensor's last byte"),
        "mutated": (_TRUTH, "whether the function writes the tensor"),
        "writes": (_COUNT, "the number of the tensor's bytes that are certainly written; missing if unknown"),
        "may_write": (
            _COUNT,
            "the number of the tensor's other bytes that are written or not, depending on the values of an index or a "
            "mask",
        ),
        "part_of": (_TEXT, "the outermost argument or output that wraps the tensor"),
    },
    "steps": {
        **_KEY,
        "index": (_COUNT, "position of the step in the program"),
        "kind": (
            _TEXT,
            "call (the program called a torch function), graph (the graph copies a new value into an input), or "
            "epilogue (the epilogue copies a value into an input, changes its sizes, or makes a view again)",
        ),
        "step": (_TEXT, "the call or the statement of the epilogue, as code"),
        "nodes": (_TEXT, "the nodes of the traced graph for this step, separated by commas"),
        "reads": (_TEXT, "the bytes that the step reads: the storage and the positions; t1 is a temporary storage"),
        "writes": (_TEXT, "the bytes that the step writes"),
        "makes": (_TEXT, "the bytes of the tensors that the step makes"),
        **LINE,
    },
    "stages": {
        **_KEY,
        "index": (_COUNT, "position of the stage in the pipeline"),
        "stage": (_TEXT, "the stage's name"),
        "duration_ns": (_COUNT, "wall time in ns"),
        "nodes": (_COUNT, "number of ops in the graph that the stage returned"),
        "summary": (_TEXT, "a summary of the stage's result"),
    },
    "nodes": {
        **_KEY,
        "stage": (_TEXT, "the stage that returned the graph"),
        "part": (_TEXT, "the graph of the stage: captured, joint, forward, backward or inference"),
        "name": (_TEXT, "the node's name"),
        "op": (_TEXT, "the op of the fx node: placeholder, call_function, output, …"),
        "target": (_TEXT, "the op's full name"),
        "phase": (_TEXT, "the phase in which the node was recorded: forward or backward"),
        "dtype": (_TEXT, "element type of the node's result"),
        "shape": (_TEXT, "sizes of the node's result"),
        "nbytes": (_COUNT, "size of the node's result in bytes"),
        "device": (_TEXT, "device of the node's result"),
        "inputs": (_TEXT, "the nodes that this node reads, separated by commas"),
        "users": (_COUNT, "number of nodes that read this node"),
        "view": (_TRUTH, "whether the node allocates no memory, because its result is a view"),
        "module": (_TEXT, "the path of the module that called the op"),
        **LINE,
    },
    "signature": {
        **_KEY,
        "direction": (_TEXT, "input or output of the traced graph"),
        "index": (_COUNT, "position among the graph's inputs, or among its outputs"),
        "node": (_TEXT, "the name of the placeholder, or of the returned node"),
        "kind": (
            _TEXT,
            "of an input: parameter, buffer, user input, gradient, base, size, number or tangent; of an output: "
            "mutated parameter, mutated buffer, mutated input, user output, base or gradient",
        ),
        "target": (
            _TEXT,
            "the name in the program: an argument or an output; for a tangent or a gradient, the tensor that it is the "
            "gradient of",
        ),
        "dtype": (_TEXT, "element type"),
        "shape": (_TEXT, "sizes"),
        "device": (_TEXT, "device"),
        "in_graph": (
            _TRUTH,
            "for a mutated input: whether the graph itself writes the input and does not return the new value",
        ),
    },
    "autograd": {
        **_KEY,
        "node": (_COUNT, "the autograd node's number within the graph; node 0 runs first in the forward"),
        "makes": (_TEXT, "the tensors that have this node as their grad_fn, separated by commas"),
        "goes_to": (_TEXT, "a receiver of the node's gradients: an input, an output or another node"),
    },
    "saved": {
        **_KEY,
        "name": (_TEXT, "the node whose value is saved"),
        "dtype": (_TEXT, "element type"),
        "shape": (_TEXT, "sizes"),
        "nbytes": (_COUNT, "size in bytes"),
        "device": (_TEXT, "device"),
        "reason": (_TEXT, "the reason why the value is saved and not computed again"),
        "is_input": (_TRUTH, "whether the value is an input; then saving it takes no new memory"),
        "is_output": (_TRUTH, "whether the value is an output; then saving it takes no new memory"),
        "shares": (_TEXT, "a larger saved value whose memory this value shares; then saving it takes no new memory"),
        "used_by": (_TEXT, "the nodes of the backward that read the value, separated by commas"),
        "module": (_TEXT, "the path of the module that computed the value"),
        **LINE,
    },
    "memory": {
        **_KEY,
        "name": (_TEXT, "the node that allocates the storage"),
        "kind": (_TEXT, "parameters (with buffers), inputs, outputs, saved, temporary or gradients"),
        "nbytes": (_COUNT, "size of the storage in bytes"),
        "begin": (_COUNT, "the first step at which the storage is alive"),
        "end": (_COUNT, "the last step at which the storage is alive"),
        "at_peak": (_TRUTH, "whether the storage is alive at the step with the most bytes"),
        "module": (_TEXT, "the path of the module that allocated the storage"),
        **LINE,
    },
    "budgets": {
        **_KEY,
        "partitioner": (
            _TEXT,
            "the partitioner that chooses the saved values: default (eager's values) or min-cut",
        ),
        "memory_budget": (
            _NUMBER,
            "the memory budget from 0 (least memory) to 1; missing for the default partitioner",
        ),
        "save": (_TEXT, "values that are saved in any case, separated by commas"),
        "recompute": (_TEXT, "values that the backward computes again in any case, separated by commas"),
        "current": (_TRUTH, "whether the graph was compiled with this choice"),
        "saved_values": (_COUNT, "number of saved values"),
        "saved_bytes": (_COUNT, "memory in bytes that is held only for the backward, by the model"),
        "peak_bytes": (_COUNT, "peak in bytes of the memory of a training step, by the model"),
        "recomputed_ops": (_COUNT, "number of ops that the backward computes again, without views"),
        "recompute_cost": (_NUMBER, "estimated time of these ops, as a fraction of forward and backward"),
        "measured_peak_bytes": (_COUNT, "measured peak in bytes, with parameters and inputs; missing if not measured"),
        "forward_ns": (_COUNT, "measured median time of the forward, in ns"),
        "backward_ns": (_COUNT, "measured median time of the backward, in ns"),
        "equal": (_TRUTH, "whether the measured results equal eager's; missing if not compared"),
    },
    "memory_curve": {
        **_KEY,
        "source": (_TEXT, "modelled (from the ops of aotlab's graphs), or measured (from the allocator)"),
        "part": (_TEXT, "forward or backward"),
        "step": (
            _COUNT,
            "modelled: the number of the op among the ops that allocate memory; measured: among the ops that ran",
        ),
        "node": (_TEXT, "the op that allocates memory at this step; missing if the curve is measured"),
        "total_bytes": (
            _COUNT,
            "the bytes in use; for a measured curve without parameters and inputs, which were in use before",
        ),
        **{f"{kind}_bytes": (_COUNT, f"the bytes in use for {words}") for kind, words in _MEMORY.items()},
        "module": (_TEXT, "the path of the module that ran the op"),
        **LINE,
    },
    "kernels": {
        **_KEY,
        "graph_name": (_TEXT, "the compiled graph, for example model__0_forward_1"),
        "kind": (_TEXT, "the graph's kind: forward, backward or inference"),
        "name": (_TEXT, "the kernel's name"),
        "language": (_TEXT, "triton, c++, python or extern"),
        "source": (_TEXT, "the kernel's source"),
        "from_cache": (_TRUTH, "whether Inductor took the compiled graph with this kernel from its cache on disk"),
        "cache_miss": (_TEXT, "why the graph was not in that cache: what differs from the nearest recorded graph"),
        "registers": (
            _COUNT,
            "GPU registers of a thread; this column and the following ones have values only for kernels that were "
            "compiled for a GPU that is not present (rehearsed)",
        ),
        "shared_bytes": (_COUNT, "shared memory of a thread block, in bytes"),
        "spilled_bytes": (_COUNT, "bytes that a thread spills: stores plus loads"),
        "blocks": (_COUNT, "number of thread blocks that a call launches"),
        "bytes_read": (_COUNT, "bytes of the tensors that a call reads"),
        "bytes_written": (_COUNT, "bytes of the tensors that a call writes"),
    },
    "guards": {
        **_KEY,
        "kind": (_TEXT, "the property that is checked, for example dtype"),
        "subject": (_TEXT, "the argument or value that is checked"),
        "sentence": (_TEXT, "the guard as a sentence"),
        **LINE,
    },
    "engines": {
        "frame": (_TEXT, "the function's name"),
        "graph": (_COUNT, "the number of aotlab's graph within its frame; missing if the row is about the function"),
        "fact": (_TEXT, "graph, graphs, mutation, output, saved, size, guards, recompile or time"),
        "subject": (_TEXT, "the input, output, value or number that the fact is about"),
        "aotlab": (_TEXT, "the fact for aotlab"),
        "upstream": (_TEXT, "the fact for stock torch.compile"),
        "same": (_TRUTH, "whether the engines agree; missing if the facts cannot be compared, such as times"),
    },
    "runs": {
        "frame": (_TEXT, "the function's name; missing if the row is about the whole run"),
        "graph": (_COUNT, "the number of the graph within its frame; missing if the row is about no graph"),
        "fact": (_TEXT, "run, code, graph, node, mutation, output, saved, kernel, guard or time"),
        "part": (_TEXT, "for a node, the graph that contains it; for a time, the phase"),
        "subject": (_TEXT, "the thing that the fact is about"),
        "before": (_TEXT, "the fact for the earlier run; empty if this run does not have the thing"),
        "after": (_TEXT, "the fact for the later run; empty if this run does not have the thing"),
        "same": (_TRUTH, "whether the runs agree; missing if the facts cannot be compared"),
        "change": (_TEXT, "the difference in a few words, or the reason why times cannot be compared"),
    },
    "ranks": {
        "rank": (_COUNT, "the rank that differs: the number of its process"),
        "reference": (_COUNT, "the rank that it is compared with, which did as most ranks did"),
        "fact": (_TEXT, "missing, ended, recompile, refusal, graph break, waiting, or a fact of the table `runs`"),
        "frame": (_TEXT, "the function's name; missing if the row is about the whole process"),
        "graph": (_COUNT, "the number of the graph within its frame; missing if the row is about no graph"),
        "part": (_TEXT, "for a node, the graph that contains it; for a time, the phase"),
        "subject": (_TEXT, "the thing that the fact is about"),
        "value": (_TEXT, "the fact for the rank; empty if it does not have the thing"),
        "expected": (_TEXT, "the fact for the reference; empty if it does not have the thing"),
        "change": (_TEXT, "the difference in a few words"),
        "sentence": (_TEXT, "the difference as a sentence, if it can stop the whole job"),
        "suggestion": (_TEXT, "for a recompile: a change that would avoid it"),
    },
    "collectives": {
        **_KEY,
        "part": (_TEXT, "the graph that contains it: inference graph, forward graph or backward graph"),
        "name": (_TEXT, "the node's name"),
        "op": (_TEXT, "the collective, for example all_reduce"),
        "input_bytes": (_COUNT, "the bytes that the process passes to it"),
        "output_bytes": (_COUNT, "the bytes of its result"),
        **LINE,
    },
    "waits": {
        "op": (_TEXT, "the collective, for example all_reduce"),
        "count": (_COUNT, "how often the process called it, in graphs and outside of them"),
        "duration_ns": (_COUNT, "the total duration in ns; time in which several collectives run counts once"),
    },
    "calls": {
        **_KEY,
        "at_ns": (_COUNT, "the end of the call, in ns since the recording began"),
        "duration_ns": (_COUNT, "duration in ns, including a compilation for which the call waited"),
        "compiled": (_TRUTH, "whether the call ran compiled code"),
        "cold": (_TRUTH, "whether the call waited for a compilation"),
    },
    "recompiles": {
        **_KEY,
        "earlier": (_COUNT, "an earlier graph of the function whose guards failed; the most similar graph comes first"),
        "subject": (_TEXT, "the name of the value that the failed guard checks, for example t.dtype"),
        "before": (_TEXT, "the value that the earlier graph expects"),
        "after": (_TEXT, "the value in the call"),
        "reason": (_TEXT, "the failed guard as a sentence"),
        "suggestion": (_TEXT, "a way to avoid the recompile"),
        "status": (_TEXT, "compiled, refused or compiling"),
        "at_ns": (_COUNT, "the start of the recompile, in ns since the recording began"),
        "duration_ns": (_COUNT, "duration of the recompile in ns"),
        **LINE,
    },
    "refusals": {
        **_KEY,
        "reason": (_TEXT, "the key under which refusals are counted"),
        "case": (_TEXT, "the id in the catalogue of eager fallbacks, for `aotlab.explain`"),
        "error": (_TEXT, "the exception's class"),
        "message": (_TEXT, "the exception's message"),
        "argument": (_TEXT, "the argument that caused the refusal"),
        "outcome": (_TEXT, "raised, or ran eagerly"),
        "at_ns": (_COUNT, "the time of the refusal, in ns since the recording began"),
        **LINE,
    },
    "graph_breaks": {
        "frame": (_TEXT, "the place of the graph break, as file:line"),
        "reason": (_TEXT, "the reason in a few words"),
        "where": (_TEXT, "the place as the page shows it, for example In [3], line 2"),
        "cell_line": (_COUNT, "the line of the cell that ran the code with the graph break"),
        "library": (
            _TEXT,
            "the library without tensors whose code the line calls, or torch.optim; such a graph break is not a fault",
        ),
        "dynamo": (_TEXT, "the reason in Dynamo's words"),
        "at_ns": (_COUNT, "the time of the graph break, in ns since the recording began"),
        **LINE,
    },
    "time": {
        "kind": (_TEXT, "the work that took the time: a stage, dynamo, verification, calls, the rest"),
        "count": (_COUNT, "how often this work was done"),
        "duration_ns": (_COUNT, "duration in ns, without the work inside of it that has a separate row"),
        "engine": (_TEXT, "the engine that did the work: aotlab, or upstream (stock torch.compile)"),
    },
    "timeline": {
        **_KEY,
        "process": (
            _TEXT,
            "the rank of the process, or the name of its log; empty if there is one process; in the report of a cell, "
            "stock torch.compile for the phases that torch logged",
        ),
        "phase": (_TEXT, "the activity, or torch's name for the phase of the compilation"),
        "stage": (_TEXT, "the kind in the table time to which the phase's own time belongs; kernel for a kernel"),
        "start_ns": (_COUNT, "the begin of the phase, in ns since the recording (in logs: the first phase) began"),
        "duration_ns": (_COUNT, "wall time in ns"),
        "own_ns": (_COUNT, "wall time in ns without the phases inside of it; 0 for the work of other threads"),
        "thread": (_COUNT, "0 for the thread that compiles, a higher number for work at the same time"),
        "depth": (_COUNT, "number of phases around this phase in its thread"),
    },
    "timings": {
        **_KEY,
        "engine": (_TEXT, "eager, upstream (stock torch.compile) or aotlab"),
        "phase": (_TEXT, "forward, backward, or total (the sum of both in each call)"),
        "device": (_TEXT, "the device that ran the calls"),
        "noise": (_TEXT, "the reason why the ratios may be noise, or empty"),
        "incomparable": (_TEXT, "the reason why there are no ratios, or empty"),
        "ended": (_TEXT, "the number of rounds, and why there were no more"),
        "median_ns": (_COUNT, "time of one call in ns: median over the rounds"),
        "min_ns": (_COUNT, "time of one call in ns: the fastest round"),
        "p10_ns": (_COUNT, "time of one call in ns: a tenth of the rounds are faster"),
        "p90_ns": (_COUNT, "time of one call in ns: a tenth of the rounds are slower"),
        "repeats": (_COUNT, "number of timed calls in all rounds"),
        "over_eager": (_NUMBER, "the engine's time divided by eager's time: median over the rounds"),
        "over_eager_p10": (_NUMBER, "the same ratio: a tenth of the rounds have a smaller ratio"),
        "over_eager_p90": (_NUMBER, "the same ratio: a tenth of the rounds have a larger ratio"),
        "over_upstream": (_NUMBER, "the engine's time divided by stock torch.compile's time: median over the rounds"),
        "over_upstream_p10": (_NUMBER, "the same ratio: a tenth of the rounds have a smaller ratio"),
        "over_upstream_p90": (_NUMBER, "the same ratio: a tenth of the rounds have a larger ratio"),
        "again": (_NUMBER, "the A/A ratio: the time of a second timing of the same code, divided by the first time"),
    },
    "verification": {
        **_KEY,
        "engine": (_TEXT, "aotlab or upstream"),
        "call": (_COUNT, "the number of the call in the verification, from 1"),
        "against": (_TEXT, "python (the user's code, run eagerly) or graph (the graph that Dynamo captured)"),
        "kind": (_TEXT, "the kind of observable that was compared"),
        "subject": (_TEXT, "the tensor or value that was compared"),
        "equal": (_TRUTH, "whether the engine agrees with eager, within the tolerance"),
        "expected": (_TEXT, "eager's value"),
        "actual": (_TEXT, "the engine's value"),
        "sentence": (_TEXT, "the difference as a sentence"),
        "tolerance": (_TEXT, "for tensor values: the tolerance rule"),
        "absolute": (_NUMBER, "for tensor values: the largest difference from eager"),
        "relative": (_NUMBER, "for tensor values: this difference, divided by the largest element of eager's value"),
    },
}


#: The units of some columns, by the column's name. `_unit` adds that columns that end in ``_ns`` are in ns, and columns
#: with "bytes" in the name are in bytes.
_UNITS = {
    **dict.fromkeys(("byte_offset", "start", "stop"), "bytes"),
    **dict.fromkeys(("offset", "stride"), "elements"),
    **{f"over_{other}{end}": "×" for other in ("eager", "upstream") for end in ("", "_p10", "_p90")},
    "again": "×",
}


def meanings() -> dict[str, dict[str, str]]:
    """Return the meaning of each column: ``{table: {column: meaning}}``."""
    return {name: {column: meaning for column, (_, meaning) in columns.items()} for name, columns in COLUMNS.items()}


def describe() -> pd.DataFrame:
    """Return a table of all columns of all tables."""
    import pandas as pd

    rows = [
        (name, column, dtype, meaning, _unit(column))
        for name, columns in COLUMNS.items()
        for column, (dtype, meaning) in columns.items()
    ]
    return pd.DataFrame(rows, columns=["table", "column", "dtype", "meaning", "unit"], dtype="string")


def _unit(column: str) -> str:
    return "ns" if column.endswith("_ns") else "bytes" if "bytes" in column else _UNITS.get(column, "")
