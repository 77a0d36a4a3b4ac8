"""Make the rows of a report from the records of one compilation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from aotlab.backends.inductor_backend import kernels_in
from aotlab.errors import UserLine
from aotlab.ir.metadata import OutputType
from aotlab.report.collectives import collectives
from aotlab.report.model import (
    Code,
    CompiledGraph,
    Graph,
    Guard,
    Input,
    Kernel,
    Miss,
    Node,
    Output,
    Refusal,
    Saved,
    Stage,
)
from aotlab.upstream.arguments import arguments_of, user_name
from aotlab.upstream.descriptors import Comments
from aotlab.upstream.phases import REST, STAGES, Phase
from aotlab.upstream.printed_graphs import PrintedGraph, PrintedNode, read_graph, tensor_of
from aotlab.upstream.printed_metadata import read_metadata
from aotlab.upstream.storages import with_storages
from aotlab.upstream.tensors import input_rows, placeholder_rows
from aotlab.upstream.trace_log import CompileId, Record

#: The parts of the pipeline whose nodes the report lists: the record, the stage and the graph's name in the tables.
_GRAPHS = (
    ("aot_joint_graph", "trace", "joint"),
    ("aot_inference_graph", "trace", "inference"),
    ("aot_forward_graph", "partition", "forward"),
    ("aot_backward_graph", "partition", "backward"),
)
#: The stage with the records that belong to no other stage, and the time of phases with unknown names.
OTHERS = "other records"
#: A longer text among them is cut.
MOST_CHARACTERS = 200_000
_SUMMARY = "records of torch that belong to no stage"
_GUARD = re.compile(r"^[| ]*\+- (\w+): (.*)")
_SUBJECT = re.compile(r"[LG]\['[^']*'\](?:\.\w+|\['[^']*'\]|\[\d+\])*")
_USERS_LINE = re.compile(r"\s+# (.*?)  # (\S+):(\d+) in (\S+)")


@dataclass(slots=True)
class Compilation:
    """The records of one compilation, those of an earlier attempt left out, and the phases of all attempts."""

    compile_id: CompileId
    records: list[Record] = field(default_factory=list)
    attempt: int = 0
    phases: list[Phase] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Add a record. A later attempt replaces the records of the earlier ones, except the reasons for it."""
        if record.kind == "chromium_event":
            return
        if record.attempt > self.attempt:
            self.records = [each for each in self.records if each.kind in ("dynamo_start", "recompile_reasons")]
            self.attempt = record.attempt
        self.records.append(record)

    def last(self, kind: str) -> Record | None:
        """Return the last record of a kind."""
        return next((each for each in reversed(self.records) if each.kind == kind), None)

    def payload(self, kind: str) -> str:
        """Return the text of the last record of a kind, or an empty text."""
        record = self.last(kind)
        return "" if record is None else record.payload

    def time(self, stage: str | None = None) -> int:
        """Return the wall time of the compilation, or of one of its stages without the stages inside of it, in ns."""
        return sum(each.own_ns for each in self.phases if stage in (None, each.stage))


def graph_of(compilation: Compilation, index: int, entry: int) -> Graph:
    """Make the record of a compiled graph. ``index`` is its number in its function, ``entry`` in its process."""
    graphs = {name: read_graph(compilation.payload(kind)) for kind, _, name in _GRAPHS}
    joint, forward = graphs["joint"], graphs["forward"] or graphs["inference"]
    captured = read_graph(compilation.payload("dynamo_output_graph"))
    arguments = arguments_of(captured or forward, forward, compilation.records)
    comments = Comments(arguments)
    metadata = read_metadata(compilation.payload("aot_forward_graph_fw_metadata")) or {}
    has_backward = graphs["backward"] is not None
    inputs = input_rows(forward, metadata, arguments, comments)
    outputs = _returned_outputs(forward, inputs, len(metadata.get("output_info", [])))
    status = "compiled" if forward is not None or compilation.last("dynamo_cpp_guards_str") else "compiling"
    nodes = tuple(_nodes(graphs, forward))
    graph = Graph(
        index=index,
        entry=entry,
        status="refused" if refusal_of(compilation, index) is not None else status,
        frontend="dynamo",
        backend="inductor" if compilation.last("inductor_output_code") else "",
        training=None if forward is None else has_backward,
        misses=_misses(compilation),
        duration_ns=compilation.time() or None,
        stages=_stages(compilation),
        nodes=nodes,
        collectives=collectives(nodes),
        placeholders=tuple(placeholder_rows(joint or forward, arguments, comments)),
        inputs=inputs,
        outputs=tuple(_outputs(forward, metadata, [each.name for each in comments.wholes(forward).values()], outputs)),
        saved=tuple(_saved(forward, graphs["backward"], set(outputs.values()))) if has_backward else (),
        compiled=tuple(_compiled(compilation, graphs)),
        kernels=tuple(_kernels(compilation, has_backward=has_backward)),
        guards=tuple(_guards(compilation.payload("dynamo_cpp_guards_str"), _files(graphs))),
    )
    return with_storages(graph, forward, arguments, comments)


def with_indices(graph: Graph, numbers: Mapping[int | None, int]) -> Graph:
    """Refer to the graphs that did not accept a call by their indices in the frame. Dynamo refers to compilations."""
    return replace(graph, misses=tuple([replace(each, graph=numbers.get(each.graph)) for each in graph.misses]))


def is_empty(compilation: Compilation) -> bool:
    """Tell whether Dynamo has finished without a graph: the code has no ops on tensors, or only calls that it skips."""
    ended = compilation.last("compilation_metrics") is not None
    return ended and compilation.last("dynamo_output_graph") is None and refusal_of(compilation, 0) is None


def refusal_of(compilation: Compilation, graph: int) -> Refusal | None:
    """Return why a compilation failed, or None. Dynamo then runs the code eagerly, or raises the error."""
    kinds = ("compilation_metrics", "bwd_compilation_metrics")
    records = [each for kind in kinds if (each := compilation.last(kind)) is not None and each.data.get("fail_type")]
    if not records:
        return None
    data, of_backward = records[0].data, records[0].kind != kinds[0]
    message = str(data.get("fail_reason") or "").strip()
    file, line = data.get("fail_user_frame_filename"), data.get("fail_user_frame_lineno")
    # Dynamo gives a reason for a graph break only if it goes on.
    eager = data["fail_type"] == "Unsupported" and compilation.last("dynamo_graph_break_reason") is not None
    return Refusal(
        graph=graph,
        error=str(data["fail_type"]),
        reason=str(data["fail_type"]),
        message=f"the backward was not compiled: {message}" if of_backward else message,
        line=UserLine(file=str(file), line=int(line or 0)) if file else None,
        outcome="ran eagerly" if eager else "raised",
        at_ns=0,
    )


def _index(comment: str, kind: str) -> int | None:
    """Return the index in a comment of a printed graph: 0 for ``PlainAOTInput(idx=0)``."""
    found = re.fullmatch(rf"{kind}\(idx=(\d+)\)", comment)
    return int(found[1]) if found else None


# --- stages, nodes


def _stages(compilation: Compilation) -> tuple[Stage, ...]:
    stages = []
    for name, _, kinds in STAGES:
        codes = tuple(
            Code(title=each.kind.replace("_", " "), language="python", text=each.payload)
            for each in compilation.records
            if each.payload and re.fullmatch(kinds, each.kind)
        )
        duration = compilation.time(name)
        if codes or duration:
            graph = read_graph(codes[-1].text) if codes else None
            count = None if graph is None else sum(node.op != "placeholder" for node in graph.nodes)
            stages.append(Stage(name=name, duration_ns=duration, node_count=count, codes=codes))
    others = tuple(_other_records(compilation.records))
    rest = Stage(name=OTHERS, duration_ns=compilation.time(REST), codes=others, summary=_SUMMARY if others else "")
    return (*stages, rest) if others or rest.duration_ns else tuple(stages)


def _other_records(records: Sequence[Record]) -> Iterable[Code]:
    """Return the records that belong to no stage: each text, and one list of the records of a kind without a text."""
    lists: dict[str, list[str]] = {}
    for record in records:
        title = record.kind
        if any(re.fullmatch(kinds, record.kind) for _, _, kinds in STAGES):
            continue
        if record.payload:
            yield Code(title=title, language="python", text=_shortened(record.payload))
        else:
            lists.setdefault(title, []).append(json.dumps(record.data, default=str))
    for title, lines in lists.items():
        yield Code(title=title, language="python", text=_shortened("\n".join(lines)))


def _shortened(text: str) -> str:
    """Cut a very long text, and say so in its last line."""
    cut = len(text) - MOST_CHARACTERS
    return text if cut <= 0 else f"{text[:MOST_CHARACTERS]}\n… {cut:,} more characters are in the log"


def _nodes(graphs: Mapping[str, PrintedGraph | None], forward: PrintedGraph | None) -> Iterable[Node]:
    in_forward = {node.name for node in forward.nodes} if forward is not None else set()
    for _, stage, part in _GRAPHS:
        graph = graphs[part]
        users: dict[str, int] = {}
        for node in graph.nodes if graph is not None else ():
            for read in node.inputs:
                users[read] = users.get(read, 0) + 1
        for node in graph.nodes if graph is not None else ():
            tensor = tensor_of(node.annotation)
            backward = part == "backward" or (part == "joint" and _is_of_backward(node, in_forward))
            yield Node(
                stage=stage,
                part=part,
                name=node.name,
                op=node.op,
                target=node.target,
                phase="backward" if backward else "forward",
                dtype=tensor.dtype if tensor else None,
                shape=tensor.shape if tensor else None,
                device=tensor.device if tensor else None,
                nbytes=tensor.nbytes if tensor else None,
                inputs=node.inputs,
                users=users.get(node.name, 0),
                line=node.line,
            )


def _is_of_backward(node: PrintedNode, in_forward: set[str]) -> bool:
    """Tell whether a node of the joint graph is computed in the backward: the forward graph does not contain it."""
    return node.name.startswith("tangents") or node.name not in in_forward


# --- outputs, saved values


_RELATIONS = {
    "non_alias": "memory of its own",
    "alias_of_input": "view of input {base}",
    "is_input": "input {base}",
    "alias_of_intermediate": "view of an intermediate base",
    "alias_of_intermediate_save_as_output": "view of an intermediate base",
    "alias_of_intermediate_base_is_user_output": "view of output out[{index}]",
    "unsafe_view_alias": "memory of its own",
    "custom_function_view": "view that a custom Function made",
}


def _returned_outputs(graph: PrintedGraph | None, inputs: Sequence[Input], count: int) -> dict[int, str]:
    """Map the index of each of ``count`` outputs to the node that the forward graph returns for it.

    The code of a short graph says it in comments. Without comments, the outputs follow the new values of the inputs
    that are mutated out of the graph.
    """
    returned = graph.returned if graph is not None else []
    if any(comment for _, comment in returned):
        indices = [(_index(comment, "PlainAOTOutput"), name) for name, comment in returned]
        return {index: name for index, name in indices if index is not None}
    first = sum(row.mutation_type == "mutated out of graph" for row in inputs)
    return dict(enumerate(name for name, _ in returned[first : first + count]))


def _outputs(
    graph: PrintedGraph | None, metadata: Mapping[str, Any], names: Sequence[str], returned: Mapping[int, str]
) -> Iterable[Output]:
    nodes = {node.name: node for node in graph.nodes} if graph is not None else {}
    for n, info in enumerate(each for each in metadata.get("output_info", []) if isinstance(each, dict)):
        kind = str(info.get("output_type", "")).rpartition(".")[2]
        index, node = info.get("base_idx"), nodes.get(returned.get(n, ""))
        of_input = kind in ("alias_of_input", "is_input")
        base = f"out[{index}]" if kind.endswith("user_output") else None
        if of_input:
            base = names[index] if index is not None and index < len(names) else ""
        yield Output(
            name=f"out[{n}]",
            output_type=OutputType[kind.upper()].value if kind.upper() in OutputType.__members__ else kind,
            raw_type=str(info.get("raw_type", "")).rpartition(".")[2],
            tensor=None if node is None else tensor_of(node.annotation, requires_grad=bool(info.get("requires_grad"))),
            base_kind="input" if of_input else "output" if base else "intermediate" if "intermediate" in kind else None,
            base=base,
            views=None if info.get("view_meta_sequence") is None else str(info["view_meta_sequence"]),
            relation=_RELATIONS.get(kind, kind).format(base=base, index=index),
            requires_grad=bool(info.get("requires_grad")),
            node=node.name if node is not None else "",
        )


def _saved(forward: PrintedGraph | None, backward: PrintedGraph | None, outputs: set[str]) -> Iterable[Saved]:
    """Make the rows of the saved values: the inputs of the backward that the forward returns under the same name."""
    if forward is None or backward is None:
        return
    nodes = {node.name: node for node in forward.nodes}
    for node in backward.inputs:
        source, tensor = nodes.get(node.name), tensor_of(node.annotation)
        if source is not None and tensor is not None and node.name in {name for name, _ in forward.returned}:
            used_by = tuple(each.name for each in backward.nodes if node.name in each.inputs)
            yield Saved(
                name=node.name,
                tensor=tensor,
                nbytes=tensor.nbytes,
                reason=f"derived: the backward reads it ({', '.join(used_by)})" if used_by else "",
                is_input=source.op == "placeholder",
                is_output=node.name in outputs,
                used_by=used_by,
                line=source.line,
            )


# --- compiled graphs, kernels, guards, recompiles


def _compiled(compilation: Compilation, graphs: Mapping[str, PrintedGraph | None]) -> Iterable[CompiledGraph]:
    codes = [each for each in compilation.records if each.kind == "inductor_output_code"]
    spans = [each for each in compilation.phases if each.name == "inductor_compile"]
    for n, (code, kind) in enumerate(zip(codes, _kinds(codes, graphs["backward"] is not None), strict=True)):
        graph = graphs.get(kind)
        count = sum(node.op != "placeholder" for node in graph.nodes) if graph is not None else 0
        took = spans[n].end_ns - spans[n].start_ns if n < len(spans) else 0
        name = str(code.data.get("filename", "")).rpartition("/")[2]
        yield CompiledGraph(kind=kind, name=name, backend="inductor", compile_ns=took, node_count=count)


def _kinds(codes: Sequence[Record], has_backward: bool) -> list[str]:
    """Return the kinds of the graphs for which Inductor generated code, which it names in the first line."""
    kinds = []
    for code in codes:
        found = re.search(r"AOT ID: \['\d+_(\w+)'\]", code.payload)
        kind = found[1] if found else ""
        kinds.append(kind if kind in ("forward", "backward") else "forward" if has_backward else "inference")
    return kinds


def _kernels(compilation: Compilation, *, has_backward: bool) -> Iterable[Kernel]:
    codes = [each for each in compilation.records if each.kind == "inductor_output_code"]
    for code, kind in zip(codes, _kinds(codes, has_backward), strict=True):
        graph_name = str(code.data.get("filename", "")).rpartition("/")[2]
        with suppress(SyntaxError, ValueError):  # a log may be cut off
            for each in kernels_in(code.payload, {}):
                yield Kernel(
                    name=each.name, language=each.language, graph_name=graph_name, kind=kind, source=each.source
                )


def _files(graphs: Mapping[str, PrintedGraph | None]) -> list[str]:
    """Return the files of the lines in the graphs, each once."""
    nodes = [node for graph in graphs.values() if graph is not None for node in graph.nodes]
    return list(dict.fromkeys(node.line.file for node in nodes if node.line is not None))


def _guards(text: str, files: Sequence[str]) -> Iterable[Guard]:
    """Read the tree of guards. It prints only the end of a file's path, so the path is looked up in ``files``."""
    for line in text.splitlines():
        found = _GUARD.match(line)
        if found and found[1] not in ("RootGuardManager", "GuardManager", "DictGuardManager"):
            place = _USERS_LINE.search(found[2])
            sentence = (found[2][: place.start()] if place else found[2].partition("  #")[0]).strip()
            subject = _SUBJECT.search(sentence)
            file = next((each for each in files if place and each.endswith(place[2])), place[2] if place else "")
            yield Guard(
                kind=found[1].lower().replace("_", " "),
                subject=user_name(subject[0]) if subject else "global",
                sentence=user_name(sentence),
                line=UserLine(file=file, line=int(place[3]), function=place[4], code=place[1]) if place else None,
            )


def _misses(compilation: Compilation) -> tuple[Miss, ...]:
    """Read the reasons of a recompile: lines such as ``0/0: tensor 'x' size mismatch at index 0. expected 4, …``."""
    misses = []
    for line in compilation.payload("recompile_reasons").splitlines():
        found = re.match(r"(\d+)/(\d+): (.*)", line.strip())
        if found:
            subject = re.search(r"'([^']+)'", found[3])
            values = re.search(r"expected (.*?), actual (.*)", found[3])
            misses.append(
                Miss(
                    graph=int(found[2]),
                    subject=user_name(subject[1]) if subject else "",
                    before=values[1] if values else "",
                    after=values[2] if values else "",
                    sentence=user_name(found[3]),
                )
            )
    return tuple(misses)
