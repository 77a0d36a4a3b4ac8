"""Show wrapper subclasses as trees: a row for the wrapper, and below it the rows of its parts, which the graph takes.

    x            TwoTensor
      x.a        primals_1
      x.b        primals_2

The engine compiles a function that takes and returns parts. The metadata of this function numbers its results. This
module replaces these numbers by the names that the caller's program has for the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from aotlab.ir.metadata import MutationType, OutputType
from aotlab.ir.specs import Size
from aotlab.ir.subclass_records import AnchoredGradient, Opaque, SizeOfPart, SubclassSpec
from aotlab.report.model import PLAIN_TYPES, Graph, InnerTensor, Input, Output, TensorInfo
from aotlab.report.text import known_size

if TYPE_CHECKING:
    from aotlab.ir.subclass_records import SubclassInput, SubclassOutput, SubclassRecord

Row = TypeVar("Row", Input, Output)


def names_of_results(record: SubclassRecord) -> dict[int, str]:
    """Map the index of each result of the compiled function to the caller's name for it, such as ``out.a``."""
    names_by_result: dict[int, str] = {}
    for name, output in _returned(record):
        names = [name] if output.spec is None else output.spec.paths(name)
        if output.kind in ("plain", "new"):
            names_by_result |= dict(enumerate(names, output.first))
    return names_by_result


def _returned(record: SubclassRecord) -> Iterator[tuple[str, SubclassOutput]]:
    """Yield the caller's outputs and all other values that the compiled function returns, with their names.

    First come the user's outputs, then the bases that are returned only because an output is a view of them, then the
    new values of inputs that are written.
    """
    yield from zip([name for name, _ in record.results], record.outputs, strict=True)
    for number, output in enumerate(record.extra_bases, len(record.outputs)):
        yield f"base of {record.results[_view_of(record, number)][0]}", output
    for write in record.writes:
        if write.value is not None:
            yield f"new {record.inputs[write.input].name}", write.value


def _view_of(record: SubclassRecord, number: int) -> int:
    """Return the index of the first output that is a view of the value with the index ``number`` in `_returned`."""
    return next(n for n, each in enumerate(record.outputs) if each.kind == "view of output" and each.of == number)


def _places(inputs: Sequence[Input], record: SubclassRecord) -> dict[int, SubclassInput]:
    """Map the index of the first row of an argument to the argument, if the argument or its gradient is a wrapper.

    ``inputs`` are the rows of the compiled function's arguments. A wrapper has a row for each part, a row for each
    anchor (a part of its gradient, if the gradient has other parts than the argument), and a row for the guard on its
    type.
    """
    names, places, at = [row.name for row in inputs], {}, 0
    for item in record.inputs:
        own_names = [*item.paths, *item.anchors, f"type({item.name})"]
        while at < len(names) and names[at : at + len(own_names)] != own_names:
            at += 1
        places[at] = item
    return places


def marked_inputs(inputs: Sequence[Input], record: SubclassRecord) -> tuple[Input, ...]:
    """Add facts about each wrapper to the rows of its parts: its kind, its name, and whether the epilogue writes it."""
    rows = list(inputs)
    written = {write.input: write for write in record.writes if write.value is not None}
    for start, item in _places(inputs, record).items():
        parts = range(start, start + len(item.paths))
        for n in parts:
            row = replace(rows[n], kind=item.kind, part_of="" if item.spec is None else _above(rows[n].name))
            if item.spec is None:
                row = _requiring(row, item, record)
            elif row.tensor is not None:  # in the graph, a part is a leaf if its wrapper is a leaf
                row = replace(row, tensor=replace(row.tensor, is_leaf=item.is_leaf))
            if row.mutates_data is False and item.same_as in written:
                row = replace(row, mutates_data=True, mutation_type=MutationType.MUTATED_OUT_GRAPH.value)
            rows[n] = row
        for n in range(parts.stop, parts.stop + len(item.anchors)):
            row = replace(
                rows[n], kind="gradient", storage=None, part_of=_above(rows[n].name), requires_grad_after=None
            )
            rows[n] = replace(row, tensor=row.tensor and replace(row.tensor, requires_grad=False, is_leaf=True))
    return tuple(rows)


def _requiring(row: Input, item: SubclassInput, record: SubclassRecord) -> Input:
    """Set the fields of an argument's row that say whether it required grad before and after the call.

    The trace recorded these facts only for the argument's parts, because the graph takes the parts.
    """
    tensor = row.tensor and replace(row.tensor, requires_grad=item.requires_grad, is_leaf=item.is_leaf)
    after = item.requires_grad or any(w.history for w in record.writes if w.input == item.same_as)
    return replace(row, tensor=tensor, requires_grad_after=None if row.requires_grad_after is None else after)


def _above(path: str) -> str:
    return path.rpartition(".")[0]


def with_wrappers(inputs: Sequence[Input], record: SubclassRecord) -> tuple[Input, ...]:
    """Insert a row for each wrapper above the rows of its parts, and remove the row for the guard on its type."""
    rows: list[Input] = []
    places = _places(inputs, record)
    writes = {write.input for write in record.writes if write.versions or write.value is not None}
    at = 0
    while at < len(inputs):
        item = places.get(at)
        if item is None:
            rows.append(inputs[at])
            at += 1
            continue
        middle = at + len(item.paths)
        end = middle + len(item.anchors)
        parts, anchors = inputs[at:middle], inputs[middle:end]
        if item.spec is None:
            rows += parts
        else:
            first = record.inputs[item.same_as].name
            tree = _tree(item.name, item.spec, parts, "", _around_inputs)
            about = "" if item.spec.context is None else f"{item.spec.context!r:.200}"
            top = replace(tree[0], value=about or None, duplicate_of=None if first == item.name else first)
            top = _requiring(top, item, record)
            if item.same_as in writes:
                top = replace(top, mutates_data=True, mutation_type=MutationType.MUTATED_OUT_GRAPH.value)
            rows += [top, *tree[1:]]
        if isinstance(item.gradient, AnchoredGradient) and item.gradient.spec is not None:
            rows += _tree(f"{item.name}.grad", item.gradient.spec, anchors, item.name, _around_inputs)
        else:
            rows += anchors
        at = end + 1
    return tuple(rows)


def _tree(
    name: str, spec: SubclassSpec, parts: Sequence[Row], above: str, around: Callable[[Row, Sequence[Row]], Row]
) -> list[Row]:
    """Return the row of a wrapper and, below it, the rows of its parts.

    ``name`` and ``spec`` describe the wrapper. ``parts`` are the rows of all plain parts of the outermost wrapper;
    ``spec`` refers to a part by its index in this sequence. ``above`` is the name of the wrapper or argument that holds
    this wrapper. ``around`` is a function that makes the wrapper's row from the row of its first part and the rows of
    all its direct parts.
    """
    below: list[Row] = []
    own_rows: list[Row] = []
    for attribute, part in spec.parts:
        if not isinstance(part, Opaque):
            path = f"{name}.{attribute}"
            tree = _tree(path, part, parts, name, around) if isinstance(part, SubclassSpec) else [parts[part]]
            own_rows.append(tree[0])
            below += tree
    inner = [(row.name.removeprefix(f"{name}."), row.tensor) for row in own_rows]
    tensor = _look(spec, inner, [row.tensor for row in parts])
    row: Row = replace(around(own_rows[0], own_rows), name=name, tensor=tensor, part_of=above, storage=None)
    below.insert(0, row)
    return below


def _around_inputs(first: Input, parts: Sequence[Input]) -> Input:
    written = next((row for row in parts if row.mutated), first)
    varies = any(row.varies for row in parts)
    row = replace(written, duplicate_of=None, overlaps=(), value=None, synthetic_base=None, varies=varies)
    return replace(row, placeholder="", gradient="")


def _around_outputs(first: Output, parts: Sequence[Output]) -> Output:
    relation = "parts of its own" if all(row.base is None for row in parts) else "see its parts"
    row = replace(first, base=None, base_kind=None, views=None, relation=relation, node="", tangent="")
    return replace(row, output_type=OutputType.NON_ALIAS.value)


def _look(
    spec: SubclassSpec, own_parts: Sequence[tuple[str, TensorInfo | None]], parts: Sequence[TensorInfo | None]
) -> TensorInfo | None:
    """Describe a wrapper as a tensor; return None if the description of one of its parts is missing.

    ``own_parts`` has the name and the description of each direct part. ``parts`` are the descriptions of all plain
    parts of the outermost wrapper; the sizes in ``spec`` refer to a part by its index in this sequence.
    """
    inner = [InnerTensor(name=name, tensor=tensor) for name, tensor in own_parts if tensor is not None]
    if len(inner) < len(own_parts):
        return None

    def size(value: int | SizeOfPart, *, strides: bool = False) -> Size:
        if isinstance(value, int):
            return value
        tensor = parts[value.part]
        return 0 if tensor is None else (tensor.stride if strides else tensor.shape)[value.dim]

    first = inner[0].tensor
    return TensorInfo(
        dtype=str(spec.dtype).removeprefix("torch."),
        device=first.device,
        shape=tuple(map(size, spec.layout.size)),
        stride=tuple([size(value, strides=True) for value in spec.layout.stride]),
        nbytes=sum(known_size(each.tensor.nbytes) for each in inner),
        requires_grad=first.requires_grad,
        is_leaf=first.is_leaf,
        type_name=f"{spec.type.__module__}.{spec.type.__qualname__}",
        inner=tuple(inner),
    )


def outputs_of(
    inputs: Mapping[str, Input],
    outputs: Sequence[Output],
    record: SubclassRecord,
    user_outputs: Sequence[TensorInfo | None],
) -> tuple[Output, ...]:
    """Return the rows of the outputs in the caller's order; a wrapper's row precedes the rows of its parts.

    ``outputs`` are the rows of the compiled function's results. ``user_outputs`` has the description of each output of
    the user's function (None if the output is not a tensor).
    """
    rows: list[Output] = []
    count = len(record.outputs)
    for number, (name, output) in enumerate(_returned(record)):
        above = ""
        if number >= count:  # the base of a view, or the new value of an input
            of = number - count
            above = (
                name.removeprefix("new ")
                if of >= len(record.extra_bases)
                else record.results[_view_of(record, number)][0]
            )
        if output.kind not in ("plain", "new"):
            tensor = user_outputs[number] if number < count else None
            rows.append(_old(name, output, record, inputs, tensor))
        elif output.spec is None:
            rows.append(replace(outputs[output.first], part_of=above))
        else:
            parts = outputs[output.first : output.first + output.spec.count]
            marked = [replace(row, part_of=_above(row.name), requires_grad=output.requires_grad) for row in parts]
            rows += _tree(name, output.spec, marked, above, _around_outputs)
    return tuple(rows)


def _old(
    name: str, output: SubclassOutput, record: SubclassRecord, inputs: Mapping[str, Input], tensor: TensorInfo | None
) -> Output:
    """Make the row of an output that is not a new tensor: an input, another output, or a view of one of them.

    ``tensor`` is the description of the output.
    """
    of_output = output.kind in ("view of output", "same")
    base = [name for name, _ in _returned(record)][output.of] if of_output else record.inputs[output.of].name
    relation, kind = {
        "input": (f"is input {base} itself", OutputType.IS_INPUT),
        "view of input": (f"view of input {base}", OutputType.ALIAS_OF_INPUT),
        "detached input": (f"input {base}, detached", OutputType.ALIAS_OF_INPUT),
        "same": (f"is output {base} itself", OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT),
    }.get(output.kind, (f"view of the {base}", OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT))
    if output.kind == "view of output" and output.of < len(record.outputs):
        relation, kind = f"view of output {base}", OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT
    grad = output.requires_grad
    base_row = inputs.get(base)
    if output.kind in ("input", "detached input") and base_row is not None and base_row.tensor is not None:
        grad = grad or (output.kind == "input" and base_row.tensor.requires_grad)
        tensor = replace(base_row.tensor, requires_grad=grad)
    return Output(
        name=name,
        output_type=kind.value,
        raw_type="" if tensor is None else tensor.type_name,
        tensor=tensor,
        base_kind=("intermediate" if base.startswith("base of ") else "output") if of_output else "input",
        base=base,
        relation=relation,
        requires_grad=grad,
    )


#: `trees` shows at most this many wrappers among the arguments of a graph, and this many among its outputs.
_MOST_TREES = 10


def trees(graph: Graph) -> list[str]:
    """Write one line for each wrapper among a graph's arguments and outputs, and for each part of these wrappers.

    The line of a part names its placeholder or its node.
    """
    lines: list[str] = []
    for rows in (graph.inputs, graph.outputs):
        depths: dict[str, int] = {}
        above = {row.part_of for row in rows}
        drawn = 0
        for row in rows:
            depths[row.name] = depth = depths.get(row.part_of, -1) + 1
            drawn += not depth and (row.name in above or bool(_wrapper(row)))
            if drawn <= _MOST_TREES and (depth or row.name in above or _wrapper(row)):
                lines.append(f"{'  ' * depth}{row.name}: {_described(row)}")
        if drawn > _MOST_TREES:
            lines.append(f"and {drawn - _MOST_TREES} more")
    return lines


def _wrapper(row: Input | Output) -> str:
    """Return the name of the tensor subclass of a row; empty if the row is an ordinary tensor or no tensor."""
    name = "torch.Tensor" if row.tensor is None else row.tensor.type_name
    return "" if name in PLAIN_TYPES else name.rpartition(".")[2]


def _described(row: Input | Output) -> str:
    words = [f"{_wrapper(row)} {row.tensor}".strip()]
    if isinstance(row, Input):
        words[0] += f" → {row.placeholder}" if row.placeholder else ""
        words += [f"gradient {row.gradient}"] if row.gradient else []
        words += [f"same tensor as {row.duplicate_of}"] if row.duplicate_of else []
    else:
        words[0] += f" ← {row.node}" if row.node else ""
        words += [f"gradient {row.tangent}"] if row.tangent else []
        words += [row.relation] if row.base is not None else []
    return ", ".join(words)
