"""Make the rows of the inputs, placeholders and storages of a graph that stock `torch.compile` compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aotlab.ir.specs import Size, SymExpr
from aotlab.report.model import InnerTensor, Input, Placeholder, TensorInfo
from aotlab.report.rows import extent, reach
from aotlab.report.writes import bytes_written
from aotlab.upstream.arguments import Argument, Described
from aotlab.upstream.descriptors import Comments
from aotlab.upstream.printed_graphs import PrintedGraph

Layout = tuple[tuple[Size, ...], tuple[Size, ...], Size]


def placeholder_rows(
    graph: PrintedGraph | None, arguments: Sequence[Argument], comments: Comments
) -> Iterator[Placeholder]:
    """Yield the inputs of a graph with the user's names for them."""
    for node, each in zip(graph.inputs if graph is not None else (), comments.inputs(graph), strict=True):
        argument = arguments[each.argument] if each.kind == "input" and each.argument is not None else None
        kind, value = (argument.kind, argument.value) if argument is not None else (each.kind, "")
        yield Placeholder(name=node.name, user_name=each.name, kind="" if kind == "other" else kind, value=value)


# --- inputs


def input_rows(
    graph: PrintedGraph | None, metadata: Mapping[str, Any], arguments: Sequence[Argument], comments: Comments
) -> tuple[Input, ...]:
    """Make the rows of the arguments. A wrapper subclass has a row above the rows of its parts.

    ``graph`` is AOTAutograd's forward graph; without it, the mutations are unknown.
    """
    wholes = comments.wholes(graph)
    inputs = zip(comments.inputs(graph), graph.inputs if graph is not None else (), strict=True)
    nodes = {each.name: node.name for each, node in inputs}
    infos = dict(zip(wholes, metadata.get("input_info", ()), strict=False))
    bases = [(text, each) for text, each in wholes.items() if each.kind == "base"]
    numbers: dict[object, int] = {}
    rows: list[Input] = []
    for n, argument in enumerate(arguments):
        if argument.kind == "size":
            continue
        row = Input(name=argument.name, kind=argument.kind, placeholder=nodes.get(argument.name, ""))
        described = argument.described
        if described is None:
            rows.append(replace(row, kind="python", value=argument.value, varies=True))
            continue
        row = replace(row, **_mutations(infos.get(argument.comment)))
        base = next((k for k, (_, each) in enumerate(bases) if _share(arguments, n, each.argument)), None)
        if argument.comment not in wholes and base is not None:
            text, each = bases[base]
            row = replace(row, **_mutations(infos.get(text)), synthetic_base=base, placeholder=nodes.get(each.name, ""))
        rows += _with_parts(row, described, nodes, numbers)
    return _with_overlaps(_apart_in_bases(rows, graph))


def _share(arguments: Sequence[Argument], first: int, second: int | None) -> bool:
    if second is None or second >= len(arguments):
        return False
    one, other = arguments[first].described, arguments[second].described
    return first == second or (one is not None and other is not None and one.storage == other.storage is not None)


def _mutations(info: Any) -> dict[str, Any]:
    """Return the fields of an input's row that AOTAutograd's metadata has."""
    if not isinstance(info, dict):
        return {}
    data, metadata, storage = info["mutates_data"], info["mutates_metadata"], info["mutates_storage_metadata"]
    mutated = bool(data or metadata or storage)
    hidden = bool(info["mutations_hidden_from_autograd"] or info["mutations_under_no_grad_or_inference_mode"])
    plain = not metadata and not info["requires_grad"]
    in_graph = info["keep_input_mutations"] and (data or storage) and (plain or hidden)
    return {
        "mutates_data": bool(data),
        "mutates_metadata": bool(metadata),
        "mutates_storage": bool(storage),
        # For an input that is not mutated, upstream says that all of its mutations are hidden.
        "mutation_hidden_from_autograd": bool(mutated and info["mutations_hidden_from_autograd"]),
        "mutation_under_no_grad": bool(mutated and info["mutations_under_no_grad_or_inference_mode"]),
        "mutation_type": f"mutated {'in' if in_graph else 'out of'} graph" if mutated else "not mutated",
        "requires_grad_after": bool(info["requires_grad"]),  # read from the argument after the function has run
    }


def _with_parts(
    row: Input, described: Described, nodes: Mapping[str, str], numbers: dict[object, int]
) -> Iterator[Input]:
    """Yield the row of an argument, and the rows of the parts of a wrapper. ``numbers`` numbers the storages."""
    number = None if described.storage is None else numbers.setdefault(described.storage, len(numbers))
    varies = any(isinstance(size, SymExpr) for size in described.tensor.shape)
    inner = tuple([InnerTensor(name=name, tensor=part.tensor) for name, part in described.parts])
    yield replace(row, tensor=replace(described.tensor, inner=inner), storage=number, varies=varies)
    for name, part in described.parts:
        path = f"{row.name}.{name}"
        mutated = None if row.mutated else row.mutates_data
        below = Input(
            name=path,
            kind=row.kind,
            part_of=row.name,
            placeholder=nodes.get(path, ""),
            mutates_data=mutated,
            mutates_metadata=mutated,
            mutates_storage=mutated,
            mutation_type=None if row.mutated else row.mutation_type,
        )
        yield from _with_parts(below, part, nodes, numbers)


def _apart_in_bases(rows: Sequence[Input], graph: PrintedGraph | None) -> list[Input]:
    """Set the mutations of the arguments that a base replaces: the metadata says only whether the base is mutated.

    The graph writes each of these arguments as a view of the base, with the argument's sizes, strides and offset. If
    several arguments have the same, or if some are symbolic, the written arguments are unknown.
    """
    writes = [n.arguments for n in graph.nodes if ".as_strided_scatter." in n.target] if graph is not None else []
    written = [tuple(tuple(each) if isinstance(each, list) else each for each in of[1:4]) for of in writes]
    known = bool(written) and all(None not in each for each in written)
    layouts = [
        _layout(row.tensor) if row.synthetic_base is not None and row.tensor is not None else None for row in rows
    ]
    found = []
    for row, layout in zip(rows, layouts, strict=True):
        if layout is not None and row.mutates_data:
            mutated = layout in written if known and layouts.count(layout) == 1 else None
            row = replace(
                row,
                mutates_data=mutated,
                mutation_type=row.mutation_type if mutated else None if mutated is None else "not mutated",
            )
        found.append(row)
    return found


def _layout(tensor: TensorInfo) -> Layout:
    return tensor.shape, tensor.stride, tensor.offset


def _with_overlaps(rows: Sequence[Input]) -> tuple[Input, ...]:
    """Set the names of the other arguments with which each argument has bytes in common."""
    partners: dict[str, list[str]] = {}
    groups: dict[int, list[tuple[int, int, Input, TensorInfo]]] = {}
    for row in rows:
        place = None if row.tensor is None else reach(row.tensor)
        if row.storage is not None and row.tensor is not None and place is not None:
            groups.setdefault(row.storage, []).append((*place, row, row.tensor))
    for group in groups.values():
        group.sort(key=lambda each: each[:2])
        for n, (_, stop, row, tensor) in enumerate(group):
            for start, _, other, second in group[n + 1 :]:
                if start >= stop:
                    break
                shared, _ = bytes_written(extent(tensor), extent(second))
                if shared != 0:
                    partners.setdefault(row.name, []).append(other.name)
                    partners.setdefault(other.name, []).append(row.name)
    order = {row.name: n for n, row in enumerate(rows)}
    return tuple([replace(r, overlaps=tuple(sorted(partners.get(r.name, ()), key=order.__getitem__))) for r in rows])
