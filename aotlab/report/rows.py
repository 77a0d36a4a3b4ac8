"""Make the rows of a report that describe tensors: inputs, outputs, placeholders, results, storages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, TypeVar

from aotlab.errors import UserLine
from aotlab.ir.metadata import MutationType, OutputAliasInfo, OutputType, ViewAndMutationMeta, ViewStep
from aotlab.ir.specs import Size, SymExpr, TensorSpec
from aotlab.report.model import AutogradNode, Input, Output, Placeholder, Result, Span, Storage, TensorInfo, Written
from aotlab.report.text import known_size, known_sizes
from aotlab.report.writes import bytes_written, strided

if TYPE_CHECKING:
    from aotlab.capture.call import ArgumentRecord, CaptureRecord
    from aotlab.capture.dedupe import DedupeRecord
    from aotlab.capture.synthetic_bases import SyntheticBasesRecord
    from aotlab.trace.program_calls import Program
    from aotlab.trace.records import SizeOf


InputOrOutput = TypeVar("InputOrOutput", Input, Output)


_TO_THE_END = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """The facts about a trace that a report needs, without the graphs, which later stages rewrite.

    Attributes
    ----------
    training, metadata, random_ops, bases, sizes, static_since, program
        The fields of `aotlab.trace.records.TraceRecord` of these names.
    autograd
        The autograd nodes that a call adds to the caller's autograd graph.
    written
        For each kept input: the bytes of its storage that the function writes.
    written_at
        For each kept input: the user's lines that write it.
    placeholders, placeholder_specs
        The names of the graph's placeholders without the tangents, and the specs of all placeholders.
    results
        For each forward output of the traced graph, a label: the name of a user's output, ``"mutated input x"`` or
        ``"intermediate base 0"``.
    returned
        The names of the nodes that the traced graph returns: first the forward outputs, then the gradients. The name is
        empty if the graph returns None.
    copies
        The names of the ``copy_`` nodes with which the graph itself writes mutated inputs.
    gradients
        For each gradient that the traced graph returns: the name of the input, output or node that receives it.
    operation_nodes
        The nodes of the traced graph that were written for each recorded op, by the op's index on the tape.
    """

    training: bool
    metadata: ViewAndMutationMeta
    random_ops: tuple[str, ...]
    autograd: tuple[AutogradNode, ...] = ()
    bases: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[SizeOf, ...] = ()
    written: tuple[tuple[Written, ...], ...] = ()
    written_at: tuple[tuple[UserLine, ...], ...] = ()
    placeholders: tuple[str, ...] = ()
    placeholder_specs: tuple[TensorSpec | None, ...] = ()
    results: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    gradients: tuple[str | None, ...] = ()
    static_since: str = ""
    program: Program | None = None
    operation_nodes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def tensor_info(spec: TensorSpec) -> TensorInfo:
    """Convert a spec to the plain values that a report stores."""
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
        # In a trace, fake tensors replace plain tensors.
        type_name="torch.Tensor" if spec.type_name.endswith(".FakeTensor") else spec.type_name,
    )


def reach(tensor: TensorInfo) -> tuple[int, int] | None:
    """Return the position of the first byte of ``tensor`` in its storage, and the position after its last byte.

    Symbolic sizes have their values in the traced call. If one of these values is unknown, return None.
    """
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


def extent(tensor: TensorInfo) -> tuple[Written, ...]:
    """Return the bytes of a tensor in its storage. All sizes, strides and the offset must be known."""
    shape, stride = known_sizes(tensor.shape), known_sizes(tensor.stride)
    itemsize = known_size(tensor.nbytes) // max(prod(shape), 1)
    return strided(known_size(tensor.byte_offset), shape, stride, itemsize)


def chain(base: str, views: Sequence[ViewStep]) -> str:
    """Write a chain of view ops as code: ``"x[1:].transpose(0, 1)"``."""
    text = base
    for step in views:
        # "aten.transpose.int" is written as "transpose", because the arguments determine the overload.
        pieces = step.target.split(".")
        name = pieces[1] if len(pieces) > 1 else pieces[0]
        arguments = [_plain(arg) for arg in step.args] + [f"{key}={_plain(value)}" for key, value in step.kwargs]
        indices = _slice(step) if name == "slice" else None
        text += indices or f".{name}({', '.join(arguments)})"
        if step.item is not None:
            text += f"[{step.item}]"
    return text


def _slice(step: ViewStep) -> str | None:
    """Write a slice as an index: ``"[:, 1:]"``. Return None if the arguments of the op have another form.

    The other view ops are written as methods, but tensors have no method ``slice``.
    """
    values = dict(zip(("dim", "start", "end", "step"), step.args, strict=False)) | dict(step.kwargs)
    dim = values.pop("dim", 0)
    if not isinstance(dim, int) or not values.keys() <= {"start", "end", "step"}:
        return None
    start, end, stride = values.get("start"), values.get("end"), values.get("step", 1)
    first = "" if start is None or start == 0 else _plain(start)
    # A slice without an end has the largest integer as its end.
    last = "" if end is None or (isinstance(end, int) and end >= _TO_THE_END) else _plain(end)
    index = f"{first}:{last}" + ("" if stride == 1 else f":{_plain(stride)}")
    return f"[{':, ' * dim}{index}]" if dim >= 0 else f"[..., {index}{', :' * (-1 - dim)}]"


def _plain(value: object) -> str:
    """Write an argument of a view op as code. Records store lists as tuples, so a tuple is written as a list."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_plain, value))}]"
    return value.expression if isinstance(value, SymExpr) else str(value)


def placeholder_rows(
    inputs: Sequence[Input], tensors: Sequence[int], dedupe: DedupeRecord | None, trace: TraceFacts
) -> Iterator[Placeholder]:
    """Yield the graph's inputs with their user names: arguments, synthetic bases, sizes, numbers, and tangents.

    ``inputs`` are the rows of the flat arguments, and ``tensors`` are the positions of the tensors among the arguments.
    """
    kept_at = tuple(dedupe.kept) if dedupe is not None else tuple(tensors)
    positions = tuple(dedupe.placeholders) if dedupe is not None else kept_at
    base_of = {kept_at[k]: members for members in trace.bases for k in members}
    seen: set[tuple[int, ...]] = set()
    names: list[tuple[str, str, str]] = []  # name, kind, value
    for position in positions:
        members = base_of.get(position)
        if members is None:
            names.append((inputs[position].name, inputs[position].kind, ""))
        elif members not in seen:
            seen.add(members)
            bases = [inputs[kept_at[k]].name for k in members if inputs[kept_at[k]].kind == "base"]
            names.append((bases[0] if bases else f"base_of_{inputs[kept_at[min(members)]].name}", "base", ""))
    for size in trace.sizes:
        argument = inputs[size.position]
        if size.dim is None:
            names.append((argument.name, "number", argument.value or ""))
        else:
            value = argument.value if argument.tensor is None else str(known_size(argument.tensor.shape[size.dim]))
            names.append((f"{argument.name}.size({size.dim})", "size", value or ""))
    if len(names) == len(trace.placeholders):  # otherwise the names cannot be assigned to the placeholders
        for placeholder, (name, kind, value) in zip(trace.placeholders, names, strict=True):
            yield Placeholder(name=placeholder, user_name=name, value=value, kind=kind)
    roots = {name for node in trace.autograd for name in node.makes}
    differentiated = [each for each in trace.results if each in roots]
    for number, result in enumerate(differentiated, 1):
        name = result.removeprefix("mutated input ").replace("intermediate base ", "base_")
        yield Placeholder(name=f"tangents_{number}", user_name=f"grad_of_{name}", kind="tangent")
    for number in range(len(differentiated) + 1, len(trace.metadata.tangents) + 1):  # the tangents of cut edges
        yield Placeholder(name=f"tangents_{number}", user_name="grad_between_nodes", kind="tangent")


def result_rows(inputs: Sequence[Input], trace: TraceFacts) -> Iterator[Result]:
    """Describe each value that the traced graph returns: first the forward outputs, then the gradients."""
    kinds = {row.name: row.kind for row in inputs}
    for node, label in zip(trace.returned, trace.results, strict=False):
        if label.startswith("mutated input "):
            name = label.removeprefix("mutated input ")
            yield Result(name=node, kind=f"mutated {kinds.get(name, 'input')}", target=name)
        else:
            kind = "base" if label.startswith("intermediate base ") else "output"
            yield Result(name=node, kind=kind, target=label)
    gradients = trace.returned[len(trace.results) :]
    if len(gradients) == len(trace.gradients):  # otherwise the gradients cannot be assigned to their targets
        for node, target in zip(gradients, trace.gradients, strict=True):
            if node and target is not None:
                yield Result(name=node, kind="gradient", target=target)
    written = [i.name for i in trace.metadata.input_info if i.mutation_type is MutationType.MUTATED_IN_GRAPH]
    for node, name in zip(trace.copies, written, strict=False):
        yield Result(name=node, kind=f"mutated {kinds.get(name, 'input')}", target=name, in_graph=True)


def input_rows(
    capture: CaptureRecord,
    dedupe: DedupeRecord | None,
    overlaps: SyntheticBasesRecord | None,
    facts: TraceFacts | None,
) -> tuple[Input, ...]:
    """Make the row of each flat argument.

    ``capture`` has the descriptions of the arguments, ``dedupe`` has the duplicates, ``overlaps`` has the pairs of
    arguments that overlap, and ``facts`` has the mutations. ``facts`` is None if the function was not traced.
    """
    arguments = capture.arguments
    tensors = [i for i, argument in enumerate(arguments) if argument.spec is not None]
    kept_at = tuple(dedupe.kept) if dedupe is not None else tuple(tensors)
    source = tuple(dedupe.source) if dedupe is not None else tuple(range(len(tensors)))
    partners: dict[int, list[int]] = {}
    for overlap in overlaps.overlaps if overlaps is not None else ():
        partners.setdefault(overlap.first, []).append(overlap.second)
        partners.setdefault(overlap.second, []).append(overlap.first)

    numbers = {size.position for size in facts.sizes if size.dim is None} if facts is not None else ()
    rows = {i: Input(name=a.name, kind=a.kind, value=a.value, varies=i in numbers) for i, a in enumerate(arguments)}
    specs = _specs(dedupe, kept_at, facts) if facts is not None and facts.sizes else {}
    for argument, position in zip(tensors, source, strict=True):
        first = kept_at[position]
        row = replace(
            _varying(_tensor_input(arguments[argument]), specs.get(kept_at[position])),
            duplicate_of=None if first == argument else arguments[first].name,
            overlaps=tuple([arguments[kept_at[other]].name for other in partners.get(position, ())]),
        )
        if facts is not None:
            info = facts.metadata.input_info[position]
            row = replace(
                row,
                mutates_data=info.mutates_data,
                mutates_metadata=info.mutates_metadata,
                mutates_storage=info.mutates_storage,
                mutation_hidden_from_autograd=info.mutations_hidden_from_autograd,
                mutation_under_no_grad=info.mutations_under_no_grad_or_inference_mode,
                mutation_type=info.mutation_type.value,
                requires_grad_after=info.requires_grad_after,
                steps=info.metadata_steps,
                written_at=facts.written_at[position] if facts.written_at else (),
                synthetic_base=next((n for n, members in enumerate(facts.bases) if position in members), None),
            )
        rows[argument] = row
    return tuple(rows.values())


def _specs(dedupe: DedupeRecord | None, kept_at: Sequence[int], facts: TraceFacts) -> Mapping[int, TensorSpec | None]:
    """Map the position of each argument in the graph to the spec of its placeholder, which has symbolic sizes.

    This is used only for graphs with dynamic sizes. Such graphs have no synthetic bases, so each placeholder belongs to
    one argument.
    """
    return dict(zip(kept_at if dedupe is None else dedupe.placeholders, facts.placeholder_specs, strict=False))


def _varying(row: Input, spec: TensorSpec | None) -> Input:
    """Replace the sizes of an input by the symbolic sizes of its placeholder, if at least one size is symbolic."""
    if row.tensor is None or spec is None or not any(isinstance(size, SymExpr) for size in spec.shape):
        return row
    tensor = replace(row.tensor, shape=spec.shape, stride=spec.stride, nbytes=spec.nbytes)
    return replace(row, tensor=tensor, varies=True)


def _tensor_input(argument: ArgumentRecord) -> Input:
    assert argument.spec is not None
    return Input(
        name=argument.name, kind=argument.kind, tensor=tensor_info(argument.spec), storage=argument.spec.storage
    )


def output_rows(
    metadata: ViewAndMutationMeta, kept_inputs: Sequence[Input], first: int
) -> tuple[tuple[Output, ...], dict[int, tuple[str, Size | None]]]:
    """Make the rows of the outputs, and number the storages that the graph allocates, beginning with ``first``.

    The second result maps the number of each of these storages to its owner and its size. ``kept_inputs`` are the rows
    of the inputs that remain after deduplication; the metadata refers to an input by its index in this list.
    """
    numbers: dict[object, int] = {}
    owners: dict[int, tuple[str, Size | None]] = {}
    infos = {info.index: info for info in metadata.output_info}

    def made(info: OutputAliasInfo) -> int | None:
        """Return the number of the storage of an output that shares no memory with an input."""
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
            base_input = kept_inputs[info.base_idx]
            row = replace(row, base_kind="input", base=base_input.name, storage=base_input.storage)
        elif info.output_type is OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT:
            assert info.base_idx is not None
            row = replace(row, base_kind="output", base=infos[info.base_idx].name, storage=made(info))
        elif info.aliases_intermediate:
            row = replace(row, base_kind="intermediate", base=f"intermediate {info.base_idx}", storage=made(info))
        else:
            row = replace(row, storage=made(info))
        if row.base is not None and info.views != ():
            # "intermediate 0" is not a valid name in code.
            row = replace(row, views=chain(row.base.replace(" ", "_"), info.views))
        rows.append(replace(row, relation=_relation(info, row)))
    return tuple(rows), owners


def _relation(info: OutputAliasInfo, row: Output) -> str:
    """Say in words how an output is related to inputs and intermediate bases."""
    if info.spec is None:
        return "no tensor"
    view_ops = "" if row.views is None else f": {row.views}"
    match info.output_type:
        case OutputType.IS_INPUT:
            return f"is input {row.base} itself"
        case OutputType.ALIAS_OF_INPUT:
            return f"view of input {row.base}{view_ops}"
        case OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT:
            return f"view of {row.base}, which the graph returns too{view_ops}"
        case OutputType.ALIAS_OF_INTERMEDIATE:
            return f"one more view of {row.base}{view_ops}"
        case OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT:
            return f"view of output {row.base}{view_ops}" if info.views != () else f"is output {row.base} itself"
        case OutputType.UNSAFE_VIEW_ALIAS:
            return "memory of its own (an unsafe view whose base nobody else sees)"
        case OutputType.NON_ALIAS:
            return "memory of its own"


def storage_rows(
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    nbytes_of: Mapping[int, Size | None],
    owners: Mapping[int, tuple[str, Size | None]],
) -> tuple[Storage, ...]:
    """Collect the storages with their tensors: first the caller's storages, then the storages that the graph allocates.

    ``nbytes_of`` maps the number of each of the caller's storages to its size. ``owners`` maps the number of each
    storage that the graph allocates to its owner and its size; see `output_rows`.
    """
    storages: dict[int, Storage] = {}
    for row in inputs:
        if row.storage is None or row.tensor is None:
            continue
        before = storages.setdefault(
            row.storage,
            Storage(number=row.storage, owner="input", nbytes=nbytes_of.get(row.storage), device=row.tensor.device),
        )
        span = _span(row.name, "input", row.tensor, None if row.mutates_data is None else row.mutated)
        storages[row.storage] = replace(before, spans=(*before.spans, span))
    for output in outputs:
        if output.storage is None or output.tensor is None:
            continue
        owner, nbytes = owners.get(output.storage, ("input", None))
        before = storages.setdefault(
            output.storage,
            Storage(number=output.storage, owner=owner, nbytes=nbytes, device=output.tensor.device),
        )
        span = _span(output.name, "output", output.tensor, False)
        storages[output.storage] = replace(before, spans=(*before.spans, span))
    return tuple([_sized(storage) for _, storage in sorted(storages.items())])


def _sized(storage: Storage) -> Storage:
    """Set a storage's size, if it is unknown, to the size that the storage's tensors need."""
    stops = [span.stop for span in storage.spans if span.stop is not None]
    if storage.nbytes is None and stops and len(stops) == len(storage.spans):
        return replace(storage, nbytes=max(stops))
    return storage


def _span(name: str, role: str, tensor: TensorInfo, mutated: bool | None) -> Span:
    reached = reach(tensor)
    start, stop = reached if reached is not None else (None, None)
    return Span(name=name, role=role, start=start, stop=stop, mutated=mutated)


def with_written_bytes(
    storage: Storage, windows: Sequence[Written], tensors: Mapping[str, TensorInfo | None]
) -> Storage:
    """Set the written bytes of a storage, and the number of written bytes of each input with this storage.

    ``windows`` are the bytes that the function writes through the storage's tensors. ``tensors`` maps the name of each
    argument to its description.
    """
    if not any(span.mutated for span in storage.spans):
        return storage
    windows = tuple(dict.fromkeys(windows))  # several inputs with this storage may have the same windows

    def marked(span: Span) -> Span:
        tensor = tensors.get(span.name)
        if span.role == "output" or tensor is None or span.start is None or span.stop is None:
            return span
        sure, perhaps = bytes_written(extent(tensor), windows)
        return replace(span, writes=sure, may_write=perhaps)

    return replace(storage, written=windows, spans=tuple([marked(span) for span in storage.spans]))
