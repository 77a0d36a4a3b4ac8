"""Take snapshots of the stages: copy from each record the data that a report needs, without tensors and graphs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import fx

from aotlab.ir.fx_graphs import NodeRecord, node_records, output_args, readable, shares_memory
from aotlab.ir.metadata import MutationType
from aotlab.partition.joint_values import JointValues, joint_values
from aotlab.report.inductor_nodes import inductor_nodes
from aotlab.report.memory import GraphPair
from aotlab.report.model import AutogradNode, Code, CompiledGraph, Kernel, Node, Saved, Stage
from aotlab.report.rows import TraceFacts, tensor_info
from aotlab.report.text import amount, data_size, in_cell, known_size, listed, new_memory
from aotlab.report.varying import apart
from aotlab.report.writes import writing_lines, written_windows

if TYPE_CHECKING:
    from aotlab.backends.compile_stage import BackwardRecord, CompiledGraphRecord, CompileRecord
    from aotlab.capture.call import CaptureRecord
    from aotlab.capture.dedupe import DedupeRecord
    from aotlab.capture.synthetic_bases import SyntheticBasesRecord
    from aotlab.events import BackwardCompiled, StageFinished
    from aotlab.ir.subclass_records import SubclassRecord
    from aotlab.partition.partition_stage import PartitionRecord
    from aotlab.partition.saved_descriptions import SavedValue
    from aotlab.runtime.runtime_stage import RuntimeRecord
    from aotlab.trace.records import TraceRecord


_COPY = torch.ops.aten.copy_.default


#: The comment with which Inductor numbers a call of a kernel in its output code. The page does not show it.
_HANDLE = re.compile(r"^[ \t]*# \[Provenance debug handles\].*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The result of one stage of one entry, without live objects.

    ``stage``, ``nodes``, ``saved``, ``compiled`` and ``kernels`` are finished rows of the report. The other fields are
    frozen records, from which `assemble` makes the rows of inputs, outputs and storages. Each field except ``stage``
    and ``nodes`` belongs to one stage, and has its default in the snapshots of other stages.
    """

    stage: Stage
    nodes: tuple[Node, ...] = ()
    capture: CaptureRecord | None = None
    dedupe: DedupeRecord | None = None
    overlaps: SyntheticBasesRecord | None = None
    trace: TraceFacts | None = None
    subclasses: SubclassRecord | None = None
    saved: tuple[Saved, ...] = ()
    compiled: tuple[CompiledGraph, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    pair: GraphPair | None = None
    values: JointValues | None = None
    generated: tuple[tuple[str, tuple[NodeRecord, ...]], ...] = ()
    partitioner: str = ""


def snapshot(event: StageFinished) -> Snapshot:
    """Turn the record of a stage into rows and frozen records that later stages cannot change.

    For a stage without a case here, the snapshot has only the stage's name, time and size.
    """
    stage = Stage(name=event.stage, duration_ns=event.duration_ns, node_count=event.nodes)
    match event.stage:
        case "capture":
            capture = cast("CaptureRecord", event.record)
            nodes = _nodes("capture", "captured", capture.nodes)
            return Snapshot(stage=replace(stage, summary=_capture_summary(capture)), nodes=nodes, capture=capture)
        case "dedupe":
            dedupe = cast("DedupeRecord", event.record)
            return Snapshot(stage=replace(stage, summary=_dedupe_summary(dedupe)), dedupe=dedupe)
        case "synthetic_bases":
            overlaps = cast("SyntheticBasesRecord", event.record)
            return Snapshot(stage=replace(stage, summary=_overlap_summary(overlaps)), overlaps=overlaps)
        case "trace":
            return _trace(stage, cast("TraceRecord", event.record))
        case "partition":
            return _partition(stage, cast("PartitionRecord", event.record))
        case "compile":
            return _compile(stage, cast("CompileRecord", event.record).graphs)
        case "runtime":
            runtime = cast("RuntimeRecord", event.record)
            lines = len(runtime.source.splitlines())
            code = Code(title="generated runtime wrapper", language="python", text=runtime.source)
            return Snapshot(stage=replace(stage, summary=f"{amount(lines, 'line')} generated", codes=(code,)))
        case "subclasses":
            wrapped = cast("SubclassRecord", event.record)
            code = Code(title="taking apart and putting together", language="python", text=wrapped.source)
            return Snapshot(stage=replace(stage, summary=_wrapped_summary(wrapped), codes=(code,)), subclasses=wrapped)
    return Snapshot(stage=stage)


def backward_snapshot(event: BackwardCompiled) -> Snapshot:
    """Make the snapshot of a backward that was compiled after the forward, for one pattern of defined tangents."""
    graph = cast("BackwardRecord", event.record).graph
    defined = [str(i) for i, used in enumerate(event.pattern, 1) if used]
    count = len(event.pattern)
    which = f"results {listed(defined)} of {count}" if len(defined) < count else amount(count, "result")
    stage = Stage(name="backward", duration_ns=event.duration_ns, node_count=_ops(graph.nodes))
    compiled = _compile(stage, (graph,))
    return replace(
        compiled,
        generated=tuple([(kind, nodes or graph.nodes) for kind, nodes in compiled.generated]),
        stage=replace(compiled.stage, summary=f"for gradients of {which if defined else 'no result'}"),
        nodes=tuple([replace(node, stage="backward") for node in compiled.nodes if node.stage == "compile"]),
        compiled=tuple([replace(each, pattern=tuple(event.pattern)) for each in compiled.compiled]),
    )


def _capture_summary(record: CaptureRecord) -> str:
    counts: dict[str, int] = {}
    for argument in record.arguments:
        kind = "python value" if argument.kind == "python" else argument.kind
        counts[kind] = counts.get(kind, 0) + 1
    arguments = listed([amount(count, kind) for kind, count in counts.items()]) or "no arguments"
    return f"{arguments}; frontend {record.frontend}"


def _dedupe_summary(record: DedupeRecord) -> str:
    dropped = len(record.source) - len(record.kept)
    return f"{amount(dropped, 'duplicate')} dropped" if dropped else "no duplicates"


def _overlap_summary(record: SyntheticBasesRecord) -> str:
    if not record.overlaps:
        return "no overlaps"
    shared = ", ".join(data_size(overlap.bytes) for overlap in record.overlaps)
    return f"{amount(len(record.overlaps), 'overlap')} ({shared}); {amount(len(record.bases), 'synthetic base')}"


def _wrapped_summary(record: SubclassRecord) -> str:
    wrapped_inputs = sum(each.spec is not None for each in record.inputs)
    wrapped_outputs = sum(each.spec is not None for each in record.outputs)
    return f"{amount(wrapped_inputs, 'argument')} taken apart, {amount(wrapped_outputs, 'output')} put together"


def _trace(stage: Stage, record: TraceRecord) -> Snapshot:
    part = "joint" if record.training else "forward"
    metadata = record.metadata
    mutated = sum(info.mutation_type is not MutationType.NOT_MUTATED for info in metadata.input_info)
    summary = f"{'forward and backward' if record.training else 'forward only'}; {amount(mutated, 'mutated input')}"
    if record.static_since:
        summary += f"; for these sizes and numbers alone: {apart(record.static_since)[0]}"
    records = node_records(record.module.graph)
    return Snapshot(
        stage=replace(
            stage,
            summary=summary,
            codes=(Code(title=f"{part} graph", language="python", text=readable(record.module, part)),),
        ),
        nodes=_nodes("trace", part, records),
        trace=TraceFacts(
            training=record.training,
            metadata=metadata,
            random_ops=tuple(record.random_ops),
            autograd=tuple(
                [AutogradNode(number=n.number, makes=n.makes, goes_to=n.goes_to) for n in record.autograd_nodes]
            ),
            bases=record.bases,
            sizes=record.sizes,
            written=written_windows(record),
            written_at=writing_lines(record),
            placeholders=record.inputs,
            placeholder_specs=tuple([each.spec for each in records if each.op == "placeholder"]),
            static_since=record.static_since,
            results=record.outputs,
            gradients=tuple([each for node in record.autograd_nodes for each in node.gradients]),
            returned=tuple(["" if node is None else node.name for node in output_args(record.module.graph)]),
            program=record.program,
            operation_nodes=_operation_nodes(record.module.graph),
            copies=tuple([node.name for node in record.module.graph.nodes if node.target is _COPY]),
        ),
    )


def _operation_nodes(graph: fx.Graph) -> dict[int, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for node in graph.nodes:
        if "operation" in node.meta:
            names.setdefault(node.meta["operation"], []).append(node.name)
    return {index: tuple(each) for index, each in names.items()}


def _partition(stage: Stage, record: PartitionRecord) -> Snapshot:
    parts = [("forward", record.forward)]
    if record.backward is not None:
        parts.append(("backward", record.backward))
    shares = _shares(record.saved)
    saved = tuple(
        [
            Saved(
                name=value.name,
                tensor=tensor_info(value.spec),
                nbytes=value.nbytes,
                reason=value.reason,
                is_input=value.is_input,
                is_output=value.is_output,
                shares=shares.get(value.name, ""),
                used_by=tuple(value.used_by),
                line=None if value.line is None else in_cell(value.line),
                module=value.module,
            )
            for value in sorted(record.saved, key=lambda value: -value.nbytes)
        ]
    )
    summary = f"partitioner {record.partitioner}"
    if record.backward is not None:
        summary += f"; {amount(len(saved), 'value')} saved, {new_memory(sum(value.new_bytes for value in saved))}"
    codes = [Code(title=f"{part} graph", language="python", text=readable(module, part)) for part, module in parts]
    records = {part: node_records(module.graph) for part, module in parts}
    nodes = [node for part, each in records.items() for node in _nodes("partition", part, each)]
    return Snapshot(
        stage=replace(stage, summary=summary, codes=tuple(codes)),
        nodes=tuple(nodes),
        saved=saved,
        pair=GraphPair(
            forward=records["forward"],
            backward=records.get("backward", ()),
            returned=tuple(["" if node is None else node.name for node in output_args(record.forward.graph)]),
            output_count=record.num_forward_outputs,
            saved_names=tuple([node.name for node in records.get("backward", ())][: len(saved)]),
        ),
        values=None if record.joint is None else joint_values(record.joint, record.num_forward_outputs, record.static),
        partitioner=record.partitioner,
    )


def _shares(values: Sequence[SavedValue]) -> dict[str, str]:
    """Map each saved value that counts as no new memory to the largest saved value in the same storage.

    The saved values of one storage must not count as more memory than the storage has. So they are counted from the
    largest to the smallest until the next value does not fit into the rest of the storage. This value and all smaller
    values count as no new memory.
    """
    alike: dict[int, list[SavedValue]] = {}
    for value in values:
        if value.spec.storage is not None:
            alike.setdefault(value.spec.storage, []).append(value)
    shared_with: dict[str, str] = {}
    for group in alike.values():
        first, *others = sorted(group, key=lambda value: -value.nbytes)
        left = known_size(first.spec.storage_bytes or 0) - first.nbytes
        for each in others:
            left -= each.nbytes
            if left < 0:
                shared_with[each.name] = first.name
    return shared_with


def _compile(stage: Stage, graphs: Sequence[CompiledGraphRecord]) -> Snapshot:
    codes: list[Code] = []
    for graph in graphs:
        codes.append(Code(title=f"{graph.kind} graph {graph.name}", language="python", text=graph.code))
        if graph.wrapper is not None:
            title = f"{graph.backend}'s output code for {graph.name}"
            codes.append(Code(title=title, language="python", text=_HANDLE.sub("", graph.wrapper)))
    kernels = [
        Kernel(
            name=kernel.name,
            language=kernel.language,
            graph_name=graph.name,
            kind=graph.kind,
            source=kernel.source,
            # Inductor moves nodes that must run in a fixed order to a separate graph, and gives them this prefix.
            nodes=tuple(dict.fromkeys(name.removeprefix("subgraph_") for name in kernel.nodes)),
            from_cache=kernel.from_cache,
            cache_miss=kernel.cache_miss,
            **dict(kernel.measures),
        )
        for graph in graphs
        for kernel in graph.kernels
    ]
    backends = listed(sorted({graph.backend for graph in graphs}))
    # In a report, "graph" means a compiled entry. So the summary names the compiled graphs by their kind only.
    kinds = listed(list(dict.fromkeys(graph.kind for graph in graphs))) or "nothing"
    summary = f"{kinds} by {backends}, {amount(len(kernels), 'kernel')}"
    return Snapshot(
        generated=tuple([(graph.kind, inductor_nodes(graph)) for graph in graphs]),
        stage=replace(stage, summary=summary, codes=tuple(codes)),
        nodes=(
            *[node for graph in graphs for node in _nodes("compile", graph.kind, graph.nodes)],
            *[node for graph in graphs for node in _nodes("passes", graph.kind, graph.passed)],
        ),
        compiled=tuple(
            [
                CompiledGraph(
                    kind=graph.kind,
                    name=graph.name,
                    backend=graph.backend,
                    compile_ns=graph.compile_ns,
                    node_count=_ops(graph.nodes),
                )
                for graph in graphs
            ]
        ),
        kernels=tuple(kernels),
    )


def _ops(nodes: Sequence[NodeRecord]) -> int:
    return sum(node.op == "call_function" for node in nodes)


def _nodes(stage: str, part: str, records: Sequence[NodeRecord]) -> tuple[Node, ...]:
    nodes = []
    by_name = {record.name: record for record in records}
    for record in records:
        spec = record.spec
        nodes.append(
            Node(
                stage=stage,
                part=part,
                name=record.name,
                op=record.op,
                target=record.target,
                phase=record.phase,
                dtype=None if spec is None else str(spec.dtype).removeprefix("torch."),
                shape=None if spec is None else spec.shape,
                device=None if spec is None else str(spec.device),
                nbytes=None if spec is None else spec.nbytes,
                inputs=tuple(record.inputs),
                users=record.users,
                line=None if record.line is None else in_cell(record.line),
                module=record.module,
                view=shares_memory(record, [by_name[name] for name in record.inputs if name in by_name]),
            )
        )
    return tuple(nodes)
