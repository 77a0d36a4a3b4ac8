"""Read the inputs of Dynamo's graph: their names in the user's program, and the tensors in the call that was captured.

Dynamo describes each tensor that it captures, with the tensor's place in the program (its *source*), its storage and
its offset. Its graph has an input for each of these tensors that the captured code uses, and one for each number and
size that varies. AOTAutograd receives the same inputs, replaces those that share memory by a base, and unwraps
subclasses. Comments in its graphs name the inputs of Dynamo: ``PlainAOTInput(idx=0)``. Some tensors, for example those
of an optimizer, are attributes of Dynamo's graph instead: ``ParamAOTInput(target='self_w')``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aotlab import _torch as internals
from aotlab.ir.specs import Size, SymExpr
from aotlab.report.model import TensorInfo
from aotlab.report.text import known_size
from aotlab.upstream.printed_graphs import PrintedGraph, tensor_of
from aotlab.upstream.trace_log import Record

_KINDS = (("_parameters", "parameter"), ("_buffers", "buffer"))
_ITEM_SIZES = {str(dtype): dtype.itemsize for dtype in internals.DTYPES_BY_ABBREVIATION.values()}
_SIZE = re.compile(r"(.*)\.(size|stride|storage_offset)\(\)(?:\[(\d+)\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A tensor that Dynamo described.

    ``storage`` identifies its storage among those of one compilation (None if it has no storage), ``storage_bytes`` is
    the size of the storage. ``base_offset`` is the storage offset of the tensor that it is a view of, in elements.
    ``parts`` are the inner tensors of a wrapper subclass.
    """

    tensor: TensorInfo
    storage: tuple[int, int] | None = None
    storage_bytes: int | None = None
    base_offset: int = 0
    is_parameter: bool = False
    parts: tuple[tuple[str, Described], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An input or an attribute of Dynamo's graph.

    ``comment`` is the comment behind it in AOTAutograd's graphs. ``name`` is the user's expression. ``kind`` is
    ``"parameter"``, ``"buffer"``, ``"input"``, ``"number"`` or ``"size"``. ``value`` is the value of a number or size
    in the captured call; ``described`` is None for them.
    """

    name: str
    kind: str
    comment: str
    value: str = ""
    described: Described | None = None


def user_name(source: str) -> str:
    """Return the user's expression for a source of Dynamo: ``self.fc.weight``."""
    source = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source)
    source = re.sub(r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)", source)
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source)


def arguments_of(graph: PrintedGraph | None, forward: PrintedGraph | None, records: Sequence[Record]) -> list[Argument]:
    """Return the inputs of Dynamo's graph, and then the attributes that are inputs of ``forward``, AOTAutograd's graph.

    ``records`` are the records of one compilation.
    """
    tensors = described_tensors(records)
    symbols = {str(each.data.get("symbol")): each.data for each in records if each.kind == "create_symbol"}
    left, arguments = list(tensors), []
    for n, node in enumerate(graph.inputs if graph is not None else ()):
        comment = f"PlainAOTInput(idx={n})"
        symbol = re.fullmatch(r"Sym\((.*)\)", node.annotation)
        source = next((each for each in left if _is_name_of(node.name, each)), "")
        if source and not source.startswith("___as_tensor"):
            left.remove(source)
            arguments.append(_tensor_argument(source, comment, tensors[source], tensor_of(node.annotation)))
        elif source or symbol is not None:
            data = symbols.get(symbol[1], {}) if symbol is not None else {}
            source = _unwrapped(source) or str(data.get("source") or node.name)
            values = [str(each["val"]) for each in symbols.values() if each.get("source") == source and "val" in each]
            kind = "size" if _SIZE.fullmatch(source) else "number"
            value = values[0] if values else node.annotation
            arguments.append(Argument(name=user_name(source), kind=kind, comment=comment, value=value))
        else:
            printed = tensor_of(node.annotation)
            described = None if printed is None else Described(tensor=printed)
            arguments.append(Argument(name=node.name, kind="input", comment=comment, described=described))
    by_letters = {_letters(re.sub(r"^[LG](?=\[)", "", source)): source for source in left}
    for node in forward.inputs if forward is not None else ():
        target = re.fullmatch(r"(?:Param|Buffer)AOTInput\(target='(.*)'\)", node.comment)
        if target is not None and (source := by_letters.get(_letters(target[1]), "")):
            arguments.append(_tensor_argument(source, node.comment, tensors[source], tensor_of(node.annotation)))
    return arguments


def _tensor_argument(source: str, comment: str, described: Described, printed: TensorInfo | None) -> Argument:
    """Make an argument from a description, and from the printed tensor, which has the symbolic sizes."""
    kind = next((kind for part, kind in _KINDS if f".{part}[" in source), "input")
    kind = "parameter" if described.is_parameter else kind
    if printed is not None and len(printed.shape) == len(described.tensor.shape):
        tensor = described.tensor
        shape, stride = _symbolic(printed.shape, tensor.shape), _symbolic(printed.stride, tensor.stride)
        (nbytes,) = _symbolic((printed.nbytes,), (tensor.nbytes,))
        described = replace(described, tensor=replace(tensor, shape=shape, stride=stride, nbytes=nbytes))
    return Argument(name=user_name(source), kind=kind, comment=comment, described=described)


def _symbolic(printed: Sequence[Size], actual: Sequence[Size]) -> tuple[Size, ...]:
    """Return the sizes that Dynamo's graph has. A symbolic size gets its value in the captured call."""
    pairs = zip(printed, actual, strict=False)
    return tuple([replace(size, hint=known_size(at)) if isinstance(size, SymExpr) else size for size, at in pairs])


def _is_name_of(name: str, source: str) -> bool:
    """Tell whether Dynamo names the input with this source so. It may append a number, so that names are unique."""
    plain = re.sub(r"[^a-zA-Z0-9]+", "_", _unwrapped(source))
    return name == plain or re.fullmatch(rf"{re.escape(plain)}_?\d+", name) is not None


def _unwrapped(source: str) -> str:
    """Return the source of a number that Dynamo replaces by a tensor; other sources are returned as they are."""
    return source.removeprefix("___as_tensor(").removesuffix(")") if source.startswith("___as_tensor(") else source


def _letters(text: str) -> str:
    return re.sub(r"\W|_", "", text)


# --- the tensors


def described_tensors(records: Sequence[Record]) -> dict[str, Described]:
    """Map each source to its tensor as Dynamo described it first: before the captured code changed it."""
    found: dict[str, dict[tuple[int, int], Mapping[str, Any]]] = {"describe_storage": {}, "describe_tensor": {}}
    sources: dict[str, tuple[int, int]] = {}
    for each in records:
        if each.kind in found or each.kind == "describe_source":
            key = _number(each.data.get("describer_id")), _number(each.data.get("id"))
            if each.kind in found:
                found[each.kind].setdefault(key, each.data)
            else:
                sources.setdefault(str(each.data.get("source")), key)
    tensors = found["describe_tensor"]
    for source, key in list(sources.items()):  # a gradient is described together with its tensor, and has no source
        if (gradient := tensors.get(key, {}).get("grad")) is not None:
            sources.setdefault(f"{source}.grad", (key[0], gradient))
    return {
        source: _described(tensors[key], tensors, found["describe_storage"])
        for source, key in sources.items()
        if key in tensors
    }


def _described(
    data: Mapping[str, Any],
    tensors: Mapping[tuple[int, int], Mapping[str, Any]],
    storages: Mapping[tuple[int, int], Mapping[str, Any]],
) -> Described:
    describer = data["describer_id"]
    storage = (describer, data["storage"]) if data.get("storage") is not None else None
    size = storages.get(storage, {}).get("size") if storage is not None else None
    attributes = data.get("attrs") or {}
    parts = tuple(
        [
            (name, _described(tensors[describer, key], tensors, storages))
            for name, key in attributes.items()
            if (describer, key) in tensors
        ]
    )
    return Described(
        tensor=_tensor(data, parts),
        storage=None if parts else storage,
        storage_bytes=size if isinstance(size, int) else None,
        base_offset=_number(tensors.get((describer, data.get("base", -1)), {}).get("storage_offset")),
        is_parameter=bool(data.get("is_parameter")),
        parts=parts,
    )


def _tensor(data: Mapping[str, Any], parts: Sequence[tuple[str, Described]]) -> TensorInfo:
    """Make the description of a tensor. The fields that a record leaves out are False or 0."""
    dtype = str(data.get("dtype"))
    shape, offset = tuple(map(_number, data.get("size") or ())), _number(data.get("storage_offset"))
    itemsize = _ITEM_SIZES.get(dtype, 0)
    kind = re.search(r"<class '([\w.]+)'>", str(data.get("type")))
    default = "torch.nn.parameter.Parameter" if data.get("is_parameter") else "torch.Tensor"
    inner = sum(known_size(each.tensor.nbytes) for _, each in parts)
    device = re.fullmatch(r"device\(type='(\w+)'(?:, index=(\d+))?\)", str(data.get("device")))
    return TensorInfo(
        dtype=dtype.removeprefix("torch."),
        device="" if device is None else ":".join(filter(None, device.groups())),
        layout=str(data.get("layout", "strided")).removeprefix("torch."),
        shape=shape,
        stride=tuple(map(_number, data.get("stride") or ())),
        offset=offset,
        byte_offset=offset * itemsize,
        nbytes=inner if parts else math.prod(shape) * itemsize,
        requires_grad=bool(data.get("requires_grad")),
        is_leaf=bool(data.get("is_leaf")),
        type_name=kind[1] if kind else default,
    )


def _number(value: object) -> int:
    """Return a number of a record; 0 for a field that the record leaves out, or that is symbolic."""
    return value if isinstance(value, int) else 0
