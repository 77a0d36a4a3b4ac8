"""Make the storages of a graph that stock `torch.compile` compiled: those of its arguments, with the views of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from aotlab.ir.metadata import OutputType
from aotlab.ir.specs import Size
from aotlab.report.groups import input_groups, storage_groups
from aotlab.report.model import Frame, Graph, Input, Output, Storage
from aotlab.report.rows import InputOrOutput, storage_rows
from aotlab.report.text import known_size, known_sizes
from aotlab.upstream.arguments import Argument, Described
from aotlab.upstream.descriptors import Comments
from aotlab.upstream.printed_graphs import PrintedGraph, PrintedNode, tensor_of

#: View ops whose result begins where their argument begins.
_SAME_START = frozenset((
    "_unsafe_view", "alias", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view",
))  # fmt: skip


def with_storages(
    graph: Graph, forward: PrintedGraph | None, arguments: Sequence[Argument], comments: Comments
) -> Graph:
    """Add the storages of the arguments to a graph, and the groups of its inputs and storages.

    An output has a range of bytes if it is an argument itself, or a view whose offset follows from the view ops in
    ``forward``, the forward graph of AOTAutograd. The sizes of the storages that the graph allocates are unknown.
    """
    rows = {row.name: row for row in graph.inputs}
    starts = _starts(rows, forward, arguments, comments) if forward is not None else {}
    nodes = {node.name: node for node in forward.nodes} if forward is not None else {}
    outputs = tuple([_placed(each, rows, nodes, starts) for each in graph.outputs])
    within = [each for each in outputs if each.storage is not None]
    storages = storage_rows(graph.inputs, within, _sizes(graph.inputs, arguments), {})
    storages = tuple([_below_wrappers(each, rows) for each in storages])
    inputs, of_inputs = input_groups(graph.inputs)
    storages, of_storages = storage_groups(storages)
    return replace(
        graph,
        inputs=inputs,
        outputs=outputs,
        storages=storages,
        input_groups=of_inputs,
        storage_groups=of_storages,
    )


def _below_wrappers(storage: Storage, rows: Mapping[str, Input]) -> Storage:
    """Set ``part_of`` of each tensor in a storage to the outermost argument that wraps the tensor."""
    spans = []
    for span in storage.spans:
        outermost = rows[span.name].part_of if span.role == "input" else ""
        while outermost and rows[outermost].part_of:
            outermost = rows[outermost].part_of
        spans.append(replace(span, part_of=outermost))
    return replace(storage, spans=tuple(spans))


def _sizes(inputs: Sequence[Input], arguments: Sequence[Argument]) -> dict[int, Size | None]:
    """Map the number of each storage to its size in bytes."""
    tensors: dict[str, Described] = {}

    def add(name: str, described: Described) -> None:
        tensors[name] = described
        for attribute, part in described.parts:
            add(f"{name}.{attribute}", part)

    for each in arguments:
        if each.described is not None:
            add(each.name, each.described)
    return {row.storage: tensors[row.name].storage_bytes for row in inputs if row.storage is not None}


def _starts(
    rows: Mapping[str, Input], forward: PrintedGraph, arguments: Sequence[Argument], comments: Comments
) -> dict[str, tuple[int, bool]]:
    """Map the nodes of a graph that have the value of an argument to the argument's offset, in elements.

    These are the inputs, and the new values of arguments. The truth value says whether an offset in the graph counts
    from the begin of the argument's storage.
    """
    described = comments.inputs(forward)
    inputs = {each.name: node for each, node in zip(described, forward.inputs, strict=True)}
    bases = {each.name: arguments[each.argument].described for each in described if each.argument is not None}
    starts: dict[str, tuple[int, bool]] = {}
    for name, node in inputs.items():
        row, base = rows.get(name), bases.get(name)
        if row is not None and row.tensor is not None:
            starts[node.name] = known_size(row.tensor.offset), True
        elif base is not None and node.comment.startswith("ViewBase"):
            starts[node.name] = base.base_offset, True
        elif node.comment.startswith("SyntheticBase"):
            starts[node.name] = 0, True
    nodes = {node.name: node for node in forward.nodes}
    new_values = [
        (node.inputs[1], node.inputs[0]) for node in forward.nodes if _op(node) == "copy_" and node.inputs[1:]
    ]
    for name, comment in forward.returned:
        of = comments.read(comment) if comment.startswith("InputMutation") else None
        if of is not None and of.name in inputs:
            new_values.append((name, inputs[of.name].name))
    for name, of_input in new_values:
        if name in nodes and of_input in starts and _same_layout(nodes[name], nodes[of_input]):
            start = starts[of_input][0]
            starts.setdefault(name, (start, start == 0))
    return starts


def _same_layout(one: PrintedNode, other: PrintedNode) -> bool:
    first, second = tensor_of(one.annotation), tensor_of(other.annotation)
    return first is not None and second is not None and (first.shape, first.stride) == (second.shape, second.stride)


def _op(node: PrintedNode) -> str:
    """Return the name of an op: ``t`` for ``aten.t.default``."""
    return node.target.split(".")[1] if node.target.startswith("aten.") else ""


def _placed(
    output: Output, rows: Mapping[str, Input], nodes: Mapping[str, PrintedNode], starts: Mapping[str, tuple[int, bool]]
) -> Output:
    """Return an output with its storage and its offset, if both are known."""
    name = (output.base or "").removeprefix("base_of_")
    row = rows.get(name)
    if output.base_kind != "input" or row is None or row.storage is None or row.tensor is None or output.tensor is None:
        return output
    if output.output_type == OutputType.IS_INPUT.value and not row.mutates_metadata and output.base == name:
        tensor = replace(row.tensor, requires_grad=output.requires_grad)
        return replace(output, tensor=tensor, storage=row.storage)
    offset = _offset(output.node, nodes, starts)
    if offset is None:
        return output
    itemsize = known_size(row.tensor.nbytes) // max(math.prod(known_sizes(row.tensor.shape)), 1)
    tensor = replace(output.tensor, offset=offset, byte_offset=offset * itemsize)
    return replace(output, tensor=tensor, storage=row.storage) if itemsize else output


def _offset(name: str, nodes: Mapping[str, PrintedNode], starts: Mapping[str, tuple[int, bool]]) -> int | None:
    """Follow view ops to an argument. Return the storage offset of the result; None if it is not known exactly."""
    offset = 0
    while name not in starts:
        node = nodes.get(name)
        source = nodes.get(node.inputs[0]) if node is not None and node.inputs else None
        if node is None or source is None:
            return None
        tensor, arguments = tensor_of(source.annotation), node.arguments
        if _op(node) == "as_strided":
            absolute = len(arguments) > 2
            if absolute:
                known = starts.get(source.name, (0, False))[1] and isinstance(arguments[2], int)
                return arguments[2] + offset if known else None
        elif _op(node) in ("slice", "select"):
            dim, begin = (*arguments, 0, 0, 0)[:2]
            if tensor is None or not isinstance(dim, int) or not isinstance(begin or 0, int):
                return None
            size, stride = tensor.shape[dim], tensor.stride[dim]
            if not isinstance(size, int) or not isinstance(stride, int):
                return None
            begin = begin or 0
            offset += min(begin + size if begin < 0 else begin, size) * stride
        elif _op(node) not in _SAME_START:
            return None
        name = source.name
    return starts[name][0] + offset


def numbered(frames: Iterable[Frame], first: int = 0) -> tuple[Frame, ...]:
    """Give each storage of a report another number, because no record says that two graphs have one in common.

    The numbers begin at ``first``.
    """
    result = []
    for frame in frames:
        graphs = []
        for graph in frame.graphs:
            graphs.append(
                replace(
                    graph,
                    inputs=tuple([_moved(each, first) for each in graph.inputs]),
                    outputs=tuple([_moved(each, first) for each in graph.outputs]),
                    storages=tuple([replace(each, number=each.number + first) for each in graph.storages]),
                )
            )
            first += len(graph.storages)
        result.append(replace(frame, graphs=tuple(graphs)))
    return tuple(result)


def _moved(row: InputOrOutput, by: int) -> InputOrOutput:
    return row if row.storage is None else replace(row, storage=row.storage + by)
