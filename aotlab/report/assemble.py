"""From the records that the stages hand on to the rows that a report holds.

Two steps, because graphs are live objects that later stages rewrite in place. `snapshot` runs while the engine waits,
at the event: it turns what may change (graphs) into text and rows and keeps what is frozen. `assemble` runs when
somebody looks, and joins the snapshots of one entry: arguments with what happened to them, outputs with what they
alias, both with the memory that they live in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from aotlab.ir.graphs import NodeRecord, node_records, output_args, readable
from aotlab.ir.metadata import MutationType, OutputAliasInfo, OutputType, ViewAndMutationMeta, ViewStep
from aotlab.ir.specs import Size, SymExpr, TensorSpec
from aotlab.report.model import (
    AutogradNode,
    Code,
    CompiledGraph,
    Input,
    Kernel,
    Node,
    Output,
    Placeholder,
    Result,
    Saved,
    Span,
    Stage,
    Storage,
    TensorInfo,
    Written,
)
from aotlab.report.text import amount, data_size, in_cell, known_size, known_sizes, listed, new_memory
from aotlab.report.varying import apart
from aotlab.report.wrappers import marked_inputs, names_of_results, outputs_of, with_wrappers
from aotlab.report.writes import bytes_written, strided, written_windows

if TYPE_CHECKING:
    from aotlab.backends.stage import BackwardRecord, CompiledGraphRecord, CompileRecord
    from aotlab.capture.call import ArgumentRecord, CaptureRecord
    from aotlab.capture.dedupe import DedupeRecord
    from aotlab.capture.synthetic_bases import SyntheticBasesRecord
    from aotlab.ir.subclasses import SubclassRecord
    from aotlab.observe import BackwardCompiled, StageFinished
    from aotlab.partition.described import SavedValue
    from aotlab.partition.stage import PartitionRecord
    from aotlab.runtime.stage import RuntimeRecord
    from aotlab.trace.records import SizeOf, TraceRecord

InputOrOutput = TypeVar("InputOrOutput", Input, Output)

_TO_THE_END = 2**63 - 1
_COPY = torch.ops.aten.copy_.default

#: A comment of Inductor's that numbers a call of a kernel; kernels have their nodes by it.
_HANDLE = re.compile(r"^[ \t]*# \[Provenance debug handles\].*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one stage of one entry left, without live objects.

    ``stage`` and ``nodes`` are ready for the report; the rest is what `assemble` joins, each filled by the stage of
    that name.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """The frozen part of a trace's record."""

    tracer: str
    training: bool
    metadata: ViewAndMutationMeta
    random_ops: tuple[str, ...]
    autograd: tuple[AutogradNode, ...] = ()
    bases: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[SizeOf, ...] = ()
    written: tuple[tuple[Written, ...], ...] = ()
    placeholders: tuple[str, ...] = ()
    given: tuple[TensorSpec | None, ...] = ()
    results: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    gradients: tuple[str | None, ...] = ()
    static_since: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What `assemble` makes of the snapshots of one entry."""

    placeholders: tuple[Placeholder, ...] = ()
    results: tuple[Result, ...] = ()
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    storages: tuple[Storage, ...] = ()
    autograd: tuple[AutogradNode, ...] = ()


def snapshot(event: StageFinished) -> Snapshot:
    """Turn what a stage handed on into rows that nothing can change any more.

    A stage that this report does not know gets its time and size noted and nothing else.
    """
    stage = Stage(name=event.stage, duration_ns=event.duration_ns, node_count=event.nodes)
    match event.stage:
        case "capture":
            capture = cast("CaptureRecord", event.record)
            return Snapshot(stage=replace(stage, summary=_capture_summary(capture)), capture=capture)
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
    """Do for a backward that was derived later what `snapshot` does for a stage."""
    graph = cast("BackwardRecord", event.record).graph
    given = [str(i) for i, used in enumerate(event.pattern, 1) if used]
    count = len(event.pattern)
    which = f"results {listed(given)} of {count}" if len(given) < count else amount(count, "result")
    stage = Stage(name="backward", duration_ns=event.duration_ns, node_count=_ops(graph.nodes))
    made = _compile(stage, (graph,))
    return replace(
        made,
        stage=replace(made.stage, summary=f"for gradients of {which if given else 'no result'}"),
        nodes=tuple([replace(node, stage="backward") for node in made.nodes]),
        compiled=tuple([replace(each, pattern=tuple(event.pattern)) for each in made.compiled]),
    )


def assemble(snapshots: Iterable[Snapshot], first: int = 0) -> Joined:
    """Join the snapshots of one entry into inputs, outputs and storages; ``first`` is the first storage's number."""
    joined = _joined(snapshots)
    return joined if first == 0 else _numbered_from(first, joined)


def _numbered_from(first: int, joined: Joined) -> Joined:
    """Count the storages from ``first`` on instead of from 0."""

    def moved(row: InputOrOutput) -> InputOrOutput:
        return row if row.storage is None else replace(row, storage=first + row.storage)

    return replace(
        joined,
        inputs=tuple(map(moved, joined.inputs)),
        outputs=tuple(map(moved, joined.outputs)),
        storages=tuple([replace(each, number=first + each.number) for each in joined.storages]),
    )


def _joined(snapshots: Iterable[Snapshot]) -> Joined:
    capture: CaptureRecord | None = None
    dedupe: DedupeRecord | None = None
    overlaps: SyntheticBasesRecord | None = None
    facts: TraceFacts | None = None
    wrapped: SubclassRecord | None = None
    for each in snapshots:
        capture = each.capture or capture
        dedupe = each.dedupe or dedupe
        overlaps = each.overlaps or overlaps
        facts = each.trace or facts
        wrapped = each.subclasses or wrapped
    if capture is None:
        return Joined()
    inputs = _inputs(capture, dedupe, overlaps, facts)
    if facts is not None and wrapped is not None:
        inputs = marked_inputs(inputs, wrapped)
        facts = _renamed(facts, names_of_results(wrapped))
    if facts is None:
        return Joined(inputs=inputs, storages=_storages(inputs, (), capture, {}))
    # Positions in the metadata count the tensors that dedupe kept.
    tensors = [i for i, argument in enumerate(capture.arguments) if argument.spec is not None]
    kept = [inputs[i] for i in (dedupe.kept if dedupe is not None else tensors)]
    outputs, owners = _outputs(
        facts.metadata, kept, first=1 + max((i.storage for i in inputs if i.storage is not None), default=-1)
    )
    storages = _storages(inputs, outputs, capture, owners)
    written: dict[int | None, list[Written]] = {}
    for row, windows in zip(kept, facts.written, strict=False):
        written.setdefault(row.storage, []).extend(windows)
    tensors_of = {row.name: row.tensor for row in inputs}
    storages = tuple([_marked(each, written.get(each.number, ()), tensors_of) for each in storages])
    placeholders = tuple(_placeholders(inputs, tensors, dedupe, facts))
    results = tuple(_results(inputs, facts))
    inputs, outputs = _in_graph(inputs, outputs, placeholders, results)
    if wrapped is not None:
        inputs = with_wrappers(inputs, wrapped)
        looks = [None if spec is None else tensor_info(spec) for _, spec in wrapped.results]
        outputs = outputs_of({row.name: row for row in inputs}, outputs, wrapped, looks)
        storages = _below_wrappers(storages, inputs, outputs)
    return Joined(
        placeholders=placeholders,
        results=results,
        inputs=inputs,
        outputs=outputs,
        storages=storages,
        autograd=facts.autograd,
    )


def _renamed(facts: TraceFacts, names: Mapping[int, str]) -> TraceFacts:
    """Call what the compiled function returns as the caller does."""
    infos = facts.metadata.output_info
    known = {info.name: names.get(n, info.name) for n, info in enumerate(infos)}
    metadata = replace(facts.metadata, output_info=tuple([replace(info, name=known[info.name]) for info in infos]))

    def rename(labels: Sequence[str]) -> tuple[str, ...]:
        return tuple([known.get(each, each) for each in labels])

    nodes = tuple([replace(n, makes=rename(n.makes), goes_to=rename(n.goes_to)) for n in facts.autograd])
    gradients = tuple([each and known.get(each, each) for each in facts.gradients])
    return replace(facts, metadata=metadata, results=rename(facts.results), autograd=nodes, gradients=gradients)


def _in_graph(
    inputs: Sequence[Input], outputs: Sequence[Output], placeholders: Sequence[Placeholder], results: Sequence[Result]
) -> tuple[tuple[Input, ...], tuple[Output, ...]]:
    """Say which input of the graph each argument is, which node each output, and what is the gradient of either."""
    given = {each.user_name: each.name for each in reversed(placeholders)}
    base = {row.synthetic_base: each.name for row in inputs for each in placeholders if _is_base_of(each, row)}
    nodes = {each.target: each.name for each in results if each.kind == "output"}
    gradients: dict[str, str] = {}
    for each in results:
        if each.kind == "gradient":  # of one that several autograd nodes reach there are several
            gradients[each.target] = ", ".join(filter(None, (gradients.get(each.target), each.name)))

    def of_input(row: Input) -> Input:
        first = row.duplicate_of or row.name
        placeholder = given.get(first) or base.get(row.synthetic_base, "")
        return replace(row, placeholder=placeholder, gradient=gradients.get(first, ""))

    def of_output(row: Output) -> Output:
        return replace(row, node=nodes.get(row.name, ""), tangent=given.get(f"grad_of_{row.name}", ""))

    return tuple(map(of_input, inputs)), tuple(map(of_output, outputs))


def _is_base_of(placeholder: Placeholder, row: Input) -> bool:
    return row.synthetic_base is not None and placeholder.user_name == f"base_of_{row.name}"


def _below_wrappers(
    storages: Sequence[Storage], inputs: Sequence[Input], outputs: Sequence[Output]
) -> tuple[Storage, ...]:
    """Say of the tensors in storages in which argument or output they are wrapped."""
    above = {(role, row.name): row.part_of for role, rows in (("input", inputs), ("output", outputs)) for row in rows}

    def outermost(span: Span) -> Span:
        name, left = span.name, dict(above)
        while part_of := left.pop((span.role, name), ""):
            name = part_of
        return span if name == span.name else replace(span, part_of=name)

    return tuple([replace(each, spans=tuple(map(outermost, each.spans))) for each in storages])


def tensor_info(spec: TensorSpec) -> TensorInfo:
    """Turn a spec into the plain values that a report keeps."""
    return TensorInfo(
        dtype=str(spec.dtype).removeprefix("torch."),
        device=str(spec.device),
        layout=str(spec.layout).removeprefix("torch."),
        shape=spec.shape,
        stride=spec.stride,
        offset=spec.offset,
        byte_offset=spec.byte_offset,
        nbytes=spec.nbytes,
        requires_grad=spec.requires_grad,
        is_leaf=spec.is_leaf,
        # While tracing, fake tensors stand for plain ones.
        type_name="torch.Tensor" if spec.type_name.endswith(".FakeTensor") else spec.type_name,
    )


def reach(tensor: TensorInfo) -> tuple[int, int] | None:
    """Return the first byte that ``tensor`` reaches in its storage and the one after its last, in the traced call."""
    values = (*tensor.shape, *tensor.stride, tensor.byte_offset, tensor.nbytes)
    if any(isinstance(value, SymExpr) and value.hint is None for value in values):
        return None
    shape, stride = known_sizes(tensor.shape), known_sizes(tensor.stride)
    start, nbytes = known_size(tensor.byte_offset), known_size(tensor.nbytes)
    if 0 in shape:
        return start, start
    itemsize = nbytes // prod(shape)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=False))
    return start, start + (last + 1) * itemsize


def chain(base: str, views: Sequence[ViewStep]) -> str:
    """Write a chain of view ops as code: ``"x[1:].transpose(0, 1)"``."""
    text = base
    for step in views:
        # "aten.transpose.int" is called transpose; the overload says nothing that the arguments do not.
        pieces = step.target.split(".")
        name = pieces[1] if len(pieces) > 1 else pieces[0]
        arguments = [_plain(arg) for arg in step.args] + [f"{key}={_plain(value)}" for key, value in step.kwargs]
        indices = _slice(step) if name == "slice" else None
        text += indices or f".{name}({', '.join(arguments)})"
        if step.item is not None:
            text += f"[{step.item}]"
    return text


def _slice(step: ViewStep) -> str | None:
    """Write a slice as people do, since tensors have no method of that name: ``"[:, 1:]"``; None if it is not plain."""
    values = dict(zip(("dim", "start", "end", "step"), step.args, strict=False)) | dict(step.kwargs)
    dim = values.pop("dim", 0)
    if not isinstance(dim, int) or not values.keys() <= {"start", "end", "step"}:
        return None
    start, end, stride = values.get("start"), values.get("end"), values.get("step", 1)
    first = "" if start is None or start == 0 else _plain(start)
    # To the end is written as the largest integer.
    last = "" if end is None or (isinstance(end, int) and end >= _TO_THE_END) else _plain(end)
    index = f"{first}:{last}" + ("" if stride == 1 else f":{_plain(stride)}")
    return f"[{':, ' * dim}{index}]" if dim >= 0 else f"[..., {index}{', :' * (-1 - dim)}]"


def _plain(value: object) -> str:
    """Write an argument of a view op; records keep lists as tuples, which read better as lists."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_plain, value))}]"
    return value.expression if isinstance(value, SymExpr) else str(value)


def _capture_summary(record: CaptureRecord) -> str:
    counts: dict[str, int] = {}
    for argument in record.arguments:
        kind = "python value" if argument.kind == "python" else argument.kind
        counts[kind] = counts.get(kind, 0) + 1
    found = listed([amount(count, kind) for kind, count in counts.items()]) or "no arguments"
    return f"{found}; frontend {record.frontend}"


def _dedupe_summary(record: DedupeRecord) -> str:
    dropped = len(record.source) - len(record.kept)
    return f"{amount(dropped, 'duplicate')} dropped" if dropped else "no duplicates"


def _overlap_summary(record: SyntheticBasesRecord) -> str:
    if not record.overlaps:
        return "no overlaps"
    shared = ", ".join(data_size(overlap.bytes) for overlap in record.overlaps)
    return f"{amount(len(record.overlaps), 'overlap')} ({shared}); {amount(len(record.bases), 'synthetic base')}"


def _wrapped_summary(record: SubclassRecord) -> str:
    given = sum(each.spec is not None for each in record.inputs)
    made = sum(each.spec is not None for each in record.outputs)
    return f"{amount(given, 'argument')} taken apart, {amount(made, 'output')} put together"


def _trace(stage: Stage, record: TraceRecord) -> Snapshot:
    part = "joint" if record.training else "forward"
    metadata = record.metadata
    mutated = sum(info.mutation_type is not MutationType.NOT_MUTATED for info in metadata.input_info)
    summary = (
        f"tracer {record.tracer}; {'forward and backward' if record.training else 'forward only'}; "
        f"{amount(mutated, 'mutated input')}"
    )
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
            tracer=record.tracer,
            training=record.training,
            metadata=metadata,
            random_ops=tuple(record.random_ops),
            autograd=tuple(
                [AutogradNode(number=n.number, makes=n.makes, goes_to=n.goes_to) for n in record.autograd_nodes]
            ),
            bases=record.bases,
            sizes=record.sizes,
            written=written_windows(record),
            placeholders=record.inputs,
            given=tuple([each.spec for each in records if each.op == "placeholder"]),
            static_since=record.static_since,
            results=record.outputs,
            gradients=tuple([each for node in record.autograd_nodes for each in node.gradients]),
            returned=tuple(["" if node is None else node.name for node in output_args(record.module.graph)]),
            copies=tuple([node.name for node in record.module.graph.nodes if node.target is _COPY]),
        ),
    )


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
            )
            for value in record.saved
        ]
    )
    summary = f"partitioner {record.partitioner}"
    if record.backward is not None:
        summary += f"; {amount(len(saved), 'value')} saved, {new_memory(sum(value.new_bytes for value in saved))}"
    codes = [Code(title=f"{part} graph", language="python", text=readable(module, part)) for part, module in parts]
    nodes = [node for part, module in parts for node in _nodes("partition", part, node_records(module.graph))]
    return Snapshot(
        stage=replace(stage, summary=summary, codes=tuple(codes)),
        nodes=tuple(nodes),
        saved=saved,
    )


def _shares(values: Sequence[SavedValue]) -> dict[str, str]:
    """Say in whose memory saved values lie: of those in one storage as many take memory as it has room for."""
    alike: dict[int, list[SavedValue]] = {}
    for value in values:
        if value.spec.storage is not None:
            alike.setdefault(value.spec.storage, []).append(value)
    found: dict[str, str] = {}
    for group in alike.values():
        first, *others = sorted(group, key=lambda value: -value.nbytes)
        left = known_size(first.spec.storage_bytes or 0) - first.nbytes
        for each in others:
            left -= each.nbytes
            if left < 0:
                found[each.name] = first.name
    return found


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
            # what has to keep its order stands in a graph of its own, under such a name
            nodes=tuple(dict.fromkeys(name.removeprefix("subgraph_") for name in kernel.nodes)),
            **dict(kernel.measures),
        )
        for graph in graphs
        for kernel in graph.kernels
    ]
    backends = listed(sorted({graph.backend for graph in graphs}))
    # The report counts compiled entries as graphs; what one entry consists of goes by its own names.
    kinds = listed(list(dict.fromkeys(graph.kind for graph in graphs))) or "nothing"
    summary = f"{kinds} by {backends}, {amount(len(kernels), 'kernel')}"
    return Snapshot(
        stage=replace(stage, summary=summary, codes=tuple(codes)),
        nodes=tuple([node for graph in graphs for node in _nodes("compile", graph.kind, graph.nodes)]),
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
    found = []
    for record in records:
        spec = record.spec
        found.append(
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
            )
        )
    return tuple(found)


def _placeholders(
    inputs: Sequence[Input], tensors: Sequence[int], dedupe: DedupeRecord | None, trace: TraceFacts
) -> Iterator[Placeholder]:
    """Name what the graphs take: arguments, for those that share written memory their base, gradients of results."""
    kept = tuple(dedupe.kept) if dedupe is not None else tuple(tensors)
    positions = tuple(dedupe.placeholders) if dedupe is not None else kept
    base_of = {kept[k]: members for members in trace.bases for k in members}
    seen: set[tuple[int, ...]] = set()
    names: list[tuple[str, str, str]] = []  # with the kind, and the value
    for position in positions:
        members = base_of.get(position)
        if members is None:
            names.append((inputs[position].name, inputs[position].kind, ""))
        elif members not in seen:
            seen.add(members)
            names.append((f"base_of_{inputs[kept[min(members)]].name}", "base", ""))
    for size in trace.sizes:
        given = inputs[size.position]
        if size.dim is None:
            names.append((given.name, "number", given.value or ""))
        else:
            value = given.value if given.tensor is None else str(known_size(given.tensor.shape[size.dim]))
            names.append((f"{given.name}.size({size.dim})", "size", value or ""))
    if len(names) == len(trace.placeholders):  # another tracer may take something else
        for placeholder, (name, kind, value) in zip(trace.placeholders, names, strict=True):
            yield Placeholder(name=placeholder, user_name=name, value=value, kind=kind)
    roots = {name for node in trace.autograd for name in node.makes}
    differentiated = [each for each in trace.results if each in roots]
    for number, result in enumerate(differentiated, 1):
        name = result.removeprefix("mutated input ").replace("intermediate base ", "base_")
        yield Placeholder(name=f"tangents_{number}", user_name=f"grad_of_{name}", kind="tangent")
    for number in range(len(differentiated) + 1, len(trace.metadata.tangents) + 1):  # between two autograd nodes
        yield Placeholder(name=f"tangents_{number}", user_name="grad_between_nodes", kind="tangent")


def _results(inputs: Sequence[Input], trace: TraceFacts) -> Iterator[Result]:
    """Say what each value is that the traced graph returns: forward outputs, then the gradients of its inputs."""
    kinds = {row.name: row.kind for row in inputs}
    for node, label in zip(trace.returned, trace.results, strict=False):
        if label.startswith("mutated input "):
            name = label.removeprefix("mutated input ")
            yield Result(name=node, kind=f"mutated {kinds.get(name, 'input')}", target=name)
        else:
            kind = "base" if label.startswith("intermediate base ") else "output"
            yield Result(name=node, kind=kind, target=label)
    gradients = trace.returned[len(trace.results) :]
    if len(gradients) == len(trace.gradients):  # another tracer may return something else
        for node, target in zip(gradients, trace.gradients, strict=True):
            if node and target is not None:
                yield Result(name=node, kind="gradient", target=target)
    written = [i.name for i in trace.metadata.input_info if i.mutation_type is MutationType.MUTATED_IN_GRAPH]
    for node, name in zip(trace.copies, written, strict=False):
        yield Result(name=node, kind=f"mutated {kinds.get(name, 'input')}", target=name, in_graph=True)


def _inputs(
    capture: CaptureRecord,
    dedupe: DedupeRecord | None,
    overlaps: SyntheticBasesRecord | None,
    facts: TraceFacts | None,
) -> tuple[Input, ...]:
    """Join each argument with the position that serves it, and that with what happened to it."""
    arguments = capture.arguments
    tensors = [i for i, argument in enumerate(arguments) if argument.spec is not None]
    kept = tuple(dedupe.kept) if dedupe is not None else tuple(tensors)
    source = tuple(dedupe.source) if dedupe is not None else tuple(range(len(tensors)))
    partners: dict[int, list[int]] = {}
    for overlap in overlaps.overlaps if overlaps is not None else ():
        partners.setdefault(overlap.first, []).append(overlap.second)
        partners.setdefault(overlap.second, []).append(overlap.first)

    numbers = {size.position for size in facts.sizes if size.dim is None} if facts is not None else ()
    rows = {i: Input(name=a.name, kind=a.kind, value=a.value, varies=i in numbers) for i, a in enumerate(arguments)}
    given = _given(dedupe, kept, facts) if facts is not None and facts.sizes else {}
    for argument, position in zip(tensors, source, strict=True):
        first = kept[position]
        row = replace(
            _varying(_tensor_input(arguments[argument]), given.get(kept[position])),
            duplicate_of=None if first == argument else arguments[first].name,
            overlaps=tuple([arguments[kept[other]].name for other in partners.get(position, ())]),
        )
        if facts is not None:
            info = facts.metadata.input_info[position]
            row = replace(
                row,
                mutates_data=info.mutates_data,
                mutates_metadata=info.mutates_metadata,
                mutates_storage=False,  # such functions run eagerly
                mutation_hidden_from_autograd=info.mutations_hidden_from_autograd,
                mutation_under_no_grad=info.mutations_under_no_grad_or_inference_mode,
                mutation_type=info.mutation_type.value,
                requires_grad_after=info.requires_grad_after,
                steps=info.metadata_steps,
                synthetic_base=next((n for n, members in enumerate(facts.bases) if position in members), None),
            )
        rows[argument] = row
    return tuple(rows.values())


def _given(dedupe: DedupeRecord | None, kept: Sequence[int], facts: TraceFacts) -> Mapping[int, TensorSpec | None]:
    """Return what the graph was given for each argument, of which sizes vary; then it takes no synthetic bases."""
    return dict(zip(kept if dedupe is None else dedupe.placeholders, facts.given, strict=False))


def _varying(row: Input, given: TensorSpec | None) -> Input:
    """Write the sizes of an input as the trace has them, if they vary."""
    if row.tensor is None or given is None or not any(isinstance(size, SymExpr) for size in given.shape):
        return row
    tensor = replace(row.tensor, shape=given.shape, stride=given.stride, nbytes=given.nbytes)
    return replace(row, tensor=tensor, varies=True)


def _tensor_input(argument: ArgumentRecord) -> Input:
    assert argument.spec is not None
    return Input(
        name=argument.name, kind=argument.kind, tensor=tensor_info(argument.spec), storage=argument.spec.storage
    )


def _outputs(
    metadata: ViewAndMutationMeta, kept: Sequence[Input], first: int
) -> tuple[tuple[Output, ...], dict[int, tuple[str, Size | None]]]:
    """Describe the outputs, and number the storages that the graph makes, from ``first`` on.

    Also returns, for each of those storages, its owner and its size.
    """
    numbers: dict[object, int] = {}
    owners: dict[int, tuple[str, Size | None]] = {}
    infos = {info.index: info for info in metadata.output_info}

    def made(info: OutputAliasInfo) -> int | None:
        """Return the number of the storage of an output that does not live in an input's."""
        if info.output_type is OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT:
            assert info.base_idx is not None
            return made(infos[info.base_idx])
        if info.spec is None:
            return None
        key: object = ("output", info.index)
        owner, nbytes = "output", info.spec.storage_bytes
        if info.aliases_intermediate:
            assert info.base_idx is not None
            base = metadata.intermediate_bases[info.base_idx]
            key = ("intermediate", info.base_idx)
            owner, nbytes = "intermediate", base.storage_bytes if base.storage_bytes is not None else base.nbytes
        if key not in numbers:
            numbers[key] = first + len(numbers)
            owners[numbers[key]] = (owner, nbytes)
        return numbers[key]

    rows = []
    for info in metadata.output_info:
        row = Output(
            name=info.name,
            output_type=info.output_type.value,
            raw_type=info.raw_type,
            tensor=None if info.spec is None else tensor_info(info.spec),
            requires_grad=info.requires_grad,
        )
        if info.output_type in (OutputType.IS_INPUT, OutputType.ALIAS_OF_INPUT):
            assert info.base_idx is not None
            base_input = kept[info.base_idx]
            row = replace(row, base_kind="input", base=base_input.name, storage=base_input.storage)
        elif info.output_type is OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT:
            assert info.base_idx is not None
            row = replace(row, base_kind="output", base=infos[info.base_idx].name, storage=made(info))
        elif info.aliases_intermediate:
            row = replace(row, base_kind="intermediate", base=f"intermediate {info.base_idx}", storage=made(info))
        else:
            row = replace(row, storage=made(info))
        if row.base is not None and info.views != ():
            # "intermediate 0" is no name that code could have.
            row = replace(row, views=chain(row.base.replace(" ", "_"), info.views))
        rows.append(replace(row, relation=_relation(info, row)))
    return tuple(rows), owners


def _relation(info: OutputAliasInfo, row: Output) -> str:
    """Say in words how an output is related to inputs and intermediates."""
    if info.spec is None:
        return "no tensor"
    way = "" if row.views is None else f": {row.views}"
    match info.output_type:
        case OutputType.IS_INPUT:
            return f"is input {row.base} itself"
        case OutputType.ALIAS_OF_INPUT:
            return f"view of input {row.base}{way}"
        case OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT:
            return f"view of {row.base}, which the graph returns too{way}"
        case OutputType.ALIAS_OF_INTERMEDIATE:
            return f"one more view of {row.base}{way}"
        case OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT:
            return f"view of output {row.base}{way}" if info.views != () else f"is output {row.base} itself"
        case OutputType.UNSAFE_VIEW_ALIAS:
            return "memory of its own (an unsafe view whose base nobody else sees)"
        case OutputType.NON_ALIAS:
            return "memory of its own"


def _storages(
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    capture: CaptureRecord,
    owners: dict[int, tuple[str, Size | None]],
) -> tuple[Storage, ...]:
    """Collect who lives where: the caller's storages first, then those that the graph makes."""
    found: dict[int, Storage] = {}
    for argument, row in zip(capture.arguments, inputs, strict=True):
        if row.storage is None or row.tensor is None or argument.spec is None:
            continue
        before = found.setdefault(
            row.storage,
            Storage(number=row.storage, owner="input", nbytes=argument.spec.storage_bytes, device=row.tensor.device),
        )
        span = _span(row.name, "input", row.tensor, None if row.mutates_data is None else row.mutated)
        found[row.storage] = replace(before, spans=(*before.spans, span))
    for output in outputs:
        if output.storage is None or output.tensor is None:
            continue
        owner, nbytes = owners.get(output.storage, ("input", None))
        before = found.setdefault(
            output.storage,
            Storage(number=output.storage, owner=owner, nbytes=nbytes, device=output.tensor.device),
        )
        span = _span(output.name, "output", output.tensor, False)
        found[output.storage] = replace(before, spans=(*before.spans, span))
    return tuple([_sized(storage) for _, storage in sorted(found.items())])


def _sized(storage: Storage) -> Storage:
    """Give a storage whose size the trace did not tell the size that its tensors need."""
    stops = [span.stop for span in storage.spans if span.stop is not None]
    if storage.nbytes is None and stops and len(stops) == len(storage.spans):
        return replace(storage, nbytes=max(stops))
    return storage


def _span(name: str, role: str, tensor: TensorInfo, mutated: bool | None) -> Span:
    reached = reach(tensor)
    start, stop = reached if reached is not None else (None, None)
    return Span(name=name, role=role, start=start, stop=stop, mutated=mutated)


def _marked(storage: Storage, windows: Sequence[Written], tensors: Mapping[str, TensorInfo | None]) -> Storage:
    """Say what of a storage is written, and how many bytes of each tensor that is."""
    if not any(span.mutated for span in storage.spans):
        return storage
    windows = tuple(dict.fromkeys(windows))  # of inputs that share memory each tells of all of it

    def marked(span: Span) -> Span:
        tensor = tensors.get(span.name)
        if span.role == "output" or tensor is None or span.start is None or span.stop is None:
            return span
        shape, stride = known_sizes(tensor.shape), known_sizes(tensor.stride)
        itemsize = known_size(tensor.nbytes) // max(prod(shape), 1)
        sure, perhaps = bytes_written(strided(span.start, shape, stride, itemsize), windows)
        return replace(span, writes=sure, may_write=perhaps)

    return replace(storage, written=windows, spans=tuple([marked(span) for span in storage.spans]))
