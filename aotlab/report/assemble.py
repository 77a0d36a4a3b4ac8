"""Turn the records of the stages into the rows of a report.

This takes two steps, because later stages rewrite graphs in place. When a stage finishes, the engine waits while
`snapshot` of `aotlab.report.snapshots` turns the stage's graphs into text and rows, and stores the stage's frozen
records. When somebody reads the report, `assemble` joins the snapshots of one compiled entry: it adds the mutations of
each argument, the base of each output, and the storages of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aotlab.report.choices import graph_choices
from aotlab.report.groups import input_groups, storage_groups
from aotlab.report.memory import graph_memory
from aotlab.report.model import (
    Access,
    AutogradNode,
    Choices,
    Group,
    Input,
    Memory,
    Output,
    Placeholder,
    Result,
    Span,
    Step,
    Storage,
    Written,
)
from aotlab.report.rows import (
    InputOrOutput,
    TraceFacts,
    input_rows,
    output_rows,
    placeholder_rows,
    result_rows,
    storage_rows,
    tensor_info,
    with_written_bytes,
)
from aotlab.report.snapshots import Snapshot
from aotlab.report.steps import located, step_rows
from aotlab.report.wrappers import marked_inputs, names_of_results, outputs_of, with_wrappers

if TYPE_CHECKING:
    from aotlab.capture.call import CaptureRecord
    from aotlab.capture.dedupe import DedupeRecord
    from aotlab.capture.synthetic_bases import SyntheticBasesRecord
    from aotlab.ir.fx_graphs import NodeRecord
    from aotlab.ir.subclass_records import SubclassRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The rows that `assemble` makes from the snapshots of one entry.

    The storages are numbered within the entry. ``storage_ids`` maps these numbers to ids that are unique in the
    process. By these ids `aotlab.report.collect` recognizes a storage that several entries use.
    """

    placeholders: tuple[Placeholder, ...] = ()
    results: tuple[Result, ...] = ()
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    storages: tuple[Storage, ...] = ()
    steps: tuple[Step, ...] = ()
    autograd: tuple[AutogradNode, ...] = ()
    input_groups: tuple[Group, ...] = ()
    storage_groups: tuple[Group, ...] = ()
    memory: Memory | None = None
    storage_ids: Mapping[int, int] = field(default_factory=dict)


def assemble(snapshots: Sequence[Snapshot], results: Sequence[Sequence[int | None]] = ()) -> Joined:
    """Join the snapshots of one entry into inputs, outputs and storages; storages are numbered from 0.

    ``results`` describes the result of the entry's first call. It has one sequence per pytree leaf: the ids of the
    storages of the tensors that this leaf consists of (None for a tensor without a storage).
    """
    joined = _joined(snapshots)
    inputs, of_inputs = input_groups(joined.inputs)
    storages, of_storages = storage_groups(joined.storages)
    storage_pairs: list[tuple[int | None, int | None]] = []
    first = [i for i, row in enumerate(joined.outputs) if not row.part_of]
    # If the results do not match the outputs, `ends` is empty, and then no storage of an output gets an id.
    ends = [*first[1:], None] if len(first) == len(results) else []
    for start, stop, keys in zip(first, ends, results, strict=False):
        parts = [row.storage for row in joined.outputs[start:stop] if row.storage is not None]
        storage_pairs += zip(parts, keys, strict=True) if len(parts) == len(keys) else ()
    for capture in (each.capture for each in snapshots if each.capture is not None):
        storage_pairs += [(each.spec.storage, each.storage_id) for each in capture.arguments if each.spec is not None]
    return replace(
        joined,
        inputs=inputs,
        storages=storages,
        input_groups=of_inputs,
        storage_groups=of_storages,
        memory=_memory(snapshots, joined),
        storage_ids={number: key for number, key in storage_pairs if number is not None and key is not None},
    )


def _memory(snapshots: Sequence[Snapshot], joined: Joined) -> Memory | None:
    """Model the memory of a training step with the graphs of one entry."""
    pair = next((each.pair for each in snapshots if each.pair is not None), None)
    if pair is None:
        return None
    generated = dict(
        [each for snapshot in snapshots for each in snapshot.generated if snapshot.stage.name == "compile"]
    )
    return graph_memory(
        pair,
        joined.inputs,
        joined.results,
        generated=generated.get("forward") or generated.get("inference") or (),
        backwards=_backwards(snapshots, generated.get("backward", ()), len(joined.autograd)),
        receivers=[each.goes_to for each in reversed(joined.autograd)],
    )


def choices_of(snapshots: Sequence[Snapshot], joined: Joined) -> Choices | None:
    """Model the choices of saved values of an entry; None if it saves nothing."""
    split = next((each for each in snapshots if each.values is not None), None)
    compiled = [graph for each in snapshots for graph in each.compiled]
    if split is None or split.values is None:
        return None
    fuses = any(graph.backend == "inductor" for graph in compiled)
    names = {row.name for row in split.saved}
    return graph_choices(split.values, names, split.partitioner, joined.inputs, joined.results, fuses=fuses)


def _backwards(
    snapshots: Sequence[Snapshot], whole: tuple[NodeRecord, ...], count: int
) -> list[tuple[NodeRecord, ...]]:
    """Return the backwards in the order in which they run; empty if the backward of the stage ``partition`` runs.

    ``whole`` is the code of the backward that the stage ``compile`` compiled, and ``count`` is the number of autograd
    nodes. If there are several, each has a backward. These are compiled before the stage ``runtime``, in the order of
    the forward. A backward that is compiled later, for other gradients, replaces the one that has the same tangents.
    """
    names = [each.stage.name for each in snapshots]
    border = names.index("runtime") if "runtime" in names else len(names)
    first, later = [
        [nodes for each in part if each.stage.name == "backward" for _, nodes in each.generated]
        for part in (snapshots[:border], snapshots[border:])
    ]
    if count < 2:
        return [*([whole] if whole else []), *first, *later][-1:]
    by_tangents = {_tangents(nodes): nodes for nodes in (*first, *later)}
    return [by_tangents[_tangents(nodes)] for nodes in reversed(first)] if len(first) == count else []


def _tangents(nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
    return tuple([node.name for node in nodes if node.op == "placeholder" and node.target.startswith("tangents")])


def temporaries(joined: Joined) -> int:
    """Return the number of storages that exist only while the program of an entry runs."""
    return -min([each.storage for step in joined.steps for each in step.makes], default=0)


def numbered(joined: Joined, numbers: Mapping[int, int], before: int = 0) -> Joined:
    """Renumber the storages; ``numbers`` maps a storage's number within the entry to its number in the report.

    ``before`` is the number of temporary storages in earlier entries.
    """

    def moved(row: InputOrOutput) -> InputOrOutput:
        return row if row.storage is None else replace(row, storage=numbers[row.storage])

    def moved_access(access: Access) -> Access:
        number = access.storage
        return replace(access, storage=number - before if number < 0 else numbers[number])

    def moved_step(step: Step) -> Step:
        reads, writes, makes = (tuple(map(moved_access, each)) for each in (step.reads, step.writes, step.makes))
        return replace(step, reads=reads, writes=writes, makes=makes)

    return replace(
        joined,
        steps=tuple(map(moved_step, joined.steps)),
        inputs=tuple(map(moved, joined.inputs)),
        outputs=tuple(map(moved, joined.outputs)),
        storages=tuple([replace(each, number=numbers[each.number]) for each in joined.storages]),
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
    inputs = input_rows(capture, dedupe, overlaps, facts)
    if facts is not None and wrapped is not None:
        inputs = marked_inputs(inputs, wrapped)
        facts = _renamed(facts, names_of_results(wrapped))
    specs = [each.spec for each in capture.arguments if each.spec is not None]
    sizes = {spec.storage: spec.storage_bytes for spec in specs if spec.storage is not None}
    if facts is None:
        return Joined(inputs=inputs, storages=storage_rows(inputs, (), sizes, {}))
    # The metadata refers to inputs by their index in `kept_inputs`: the tensors that remain after deduplication.
    tensors = [i for i, argument in enumerate(capture.arguments) if argument.spec is not None]
    kept_inputs = [inputs[i] for i in (dedupe.kept if dedupe is not None else tensors)]
    outputs, owners = output_rows(
        facts.metadata, kept_inputs, first=1 + max((i.storage for i in inputs if i.storage is not None), default=-1)
    )
    outputs = located(facts, kept_inputs, outputs)
    storages = storage_rows(inputs, outputs, sizes, owners)
    written: dict[int | None, list[Written]] = {}
    for row, windows in zip(kept_inputs, facts.written, strict=False):
        written.setdefault(row.storage, []).extend(windows)
    tensors_of = {row.name: row.tensor for row in inputs}
    storages = tuple([with_written_bytes(each, written.get(each.number, ()), tensors_of) for each in storages])
    placeholders = tuple(placeholder_rows(inputs, tensors, dedupe, facts))
    results = tuple(result_rows(inputs, facts))
    steps = step_rows(facts, kept_inputs, outputs, results, storages)
    inputs, outputs = _in_graph(inputs, outputs, placeholders, results)
    if wrapped is not None:
        inputs = with_wrappers(inputs, wrapped)
        user_outputs = [None if spec is None else tensor_info(spec) for _, spec in wrapped.results]
        outputs = outputs_of({row.name: row for row in inputs}, outputs, wrapped, user_outputs)
        storages = _below_wrappers(storages, inputs, outputs)
    return Joined(
        placeholders=placeholders,
        results=results,
        inputs=inputs,
        outputs=outputs,
        storages=storages,
        steps=steps,
        autograd=facts.autograd,
    )


def _renamed(facts: TraceFacts, names: Mapping[int, str]) -> TraceFacts:
    """Rename the compiled function's results to the names that the caller has for them.

    If an output is a wrapper subclass, the compiled function returns its parts. ``names`` maps the index of a result to
    the caller's name, for example to ``out.a`` for a part of the output ``out``.
    """
    infos = facts.metadata.output_info
    renamed = {info.name: names.get(n, info.name) for n, info in enumerate(infos)}
    metadata = replace(facts.metadata, output_info=tuple([replace(info, name=renamed[info.name]) for info in infos]))

    def rename(labels: Sequence[str]) -> tuple[str, ...]:
        return tuple([renamed.get(each, each) for each in labels])

    nodes = tuple([replace(n, makes=rename(n.makes), goes_to=rename(n.goes_to)) for n in facts.autograd])
    gradients = tuple([each and renamed.get(each, each) for each in facts.gradients])
    return replace(facts, metadata=metadata, results=rename(facts.results), autograd=nodes, gradients=gradients)


def _in_graph(
    inputs: Sequence[Input], outputs: Sequence[Output], placeholders: Sequence[Placeholder], results: Sequence[Result]
) -> tuple[tuple[Input, ...], tuple[Output, ...]]:
    """Add node names to the rows: each argument's placeholder, each output's node, and the nodes of their gradients."""
    placeholder_names = {each.user_name: each.name for each in reversed(placeholders)}
    base = {row.synthetic_base: each.name for row in inputs for each in placeholders if _is_base_of(each, row)}
    nodes = {each.target: each.name for each in results if each.kind == "output"}
    gradients: dict[str, str] = {}
    for each in results:
        if each.kind == "gradient":  # a tensor that several autograd nodes reach has several gradients
            gradients[each.target] = ", ".join(filter(None, (gradients.get(each.target), each.name)))

    def of_input(row: Input) -> Input:
        first = row.duplicate_of or row.name
        placeholder = placeholder_names.get(first) or base.get(row.synthetic_base, "")
        return replace(row, placeholder=placeholder, gradient=gradients.get(first, ""))

    def of_output(row: Output) -> Output:
        return replace(row, node=nodes.get(row.name, ""), tangent=placeholder_names.get(f"grad_of_{row.name}", ""))

    return tuple(map(of_input, inputs)), tuple(map(of_output, outputs))


def _is_base_of(placeholder: Placeholder, row: Input) -> bool:
    return row.synthetic_base is not None and placeholder.user_name in (row.name, f"base_of_{row.name}")


def _below_wrappers(
    storages: Sequence[Storage], inputs: Sequence[Input], outputs: Sequence[Output]
) -> tuple[Storage, ...]:
    """Set ``part_of`` of each tensor in a storage to the outermost argument or output that wraps the tensor."""
    above = {(role, row.name): row.part_of for role, rows in (("input", inputs), ("output", outputs)) for row in rows}

    def outermost(span: Span) -> Span:
        name, left = span.name, dict(above)
        while part_of := left.pop((span.role, name), ""):
            name = part_of
        return span if name == span.name else replace(span, part_of=name)

    return tuple([replace(each, spans=tuple(map(outermost, each.spans))) for each in storages])
