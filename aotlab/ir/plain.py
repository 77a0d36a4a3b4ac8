"""Metadata as JSON: everything that a compiled function has to know at run time, in a form that can go to a file.

`aotlab.ir.metadata.ViewAndMutationMeta` holds no tensors, so it is as safe to keep as to write down. What is neither a
record of ours nor a plain value is written with a tag: ``{"dtype": "float32"}``. Reading looks tags up in a fixed list
and builds records by their constructors; nothing that is read is ever executed.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from aotlab.errors import AotlabError
from aotlab.ir import metadata as records
from aotlab.ir.specs import SymExpr, TensorSpec

VERSION = 1

_RECORDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        SymExpr,
        TensorSpec,
        records.InputAliasInfo,
        records.OutputAliasInfo,
        records.TangentInfo,
        records.ViewAndMutationMeta,
        records.ViewStep,
    )
}
_HINTS = {name: typing.get_type_hints(kind) for name, kind in _RECORDS.items()}
_ENUMS: dict[str, type[Enum]] = {
    kind.__name__: kind for kind in (records.MutationType, records.OutputType, records.TangentSource)
}
_TORCH: dict[str, type[Any]] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class MetadataFormatError(AotlabError, ValueError):
    """Text that is no metadata, is damaged, or has a version that this aotlab does not read."""


def metadata_to_json(metadata: records.ViewAndMutationMeta) -> str:
    """Write metadata down.

    Examples
    --------
    >>> metadata = records.ViewAndMutationMeta(input_info=(), output_info=(), deterministic=True)
    >>> metadata_from_json(metadata_to_json(metadata)) == metadata
    True
    """
    return json.dumps({"format": "aotlab metadata", "version": VERSION, "metadata": _encode(metadata)})


def metadata_from_json(text: str) -> records.ViewAndMutationMeta:
    """Read what `metadata_to_json` wrote; the result equals what was written.

    Raises
    ------
    MetadataFormatError
        The text is something else, damaged, or of another version; the message says where.
    """
    try:
        read = json.loads(text)
    except ValueError as error:
        raise MetadataFormatError(f"this is no JSON: {error}") from error
    if not isinstance(read, dict) or read.get("format") != "aotlab metadata":
        raise MetadataFormatError("this JSON is not what `metadata_to_json` writes")
    if read.get("version") != VERSION:
        raise MetadataFormatError(f"version {read.get('version')!r} of the metadata; this aotlab reads {VERSION}")
    found = _decode(read.get("metadata"), "$")
    if not isinstance(found, records.ViewAndMutationMeta):
        raise MetadataFormatError("$ is no ViewAndMutationMeta")
    return found


def _encode(value: Any) -> Any:
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_encode(value.real), _encode(value.imag)]}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, list):
        return {"list": [_encode(item) for item in value]}
    if isinstance(value, frozenset):
        return {"set": [_encode(item) for item in sorted(value)]}
    if isinstance(value, Enum):
        return {type(value).__name__: value.name}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for tag, kind in _TORCH.items():
        if isinstance(value, kind):
            return {tag: str(value).removeprefix("torch.")}
    if is_dataclass(value) and type(value).__name__ in _RECORDS:
        return {type(value).__name__: {field.name: _encode(getattr(value, field.name)) for field in fields(value)}}
    raise TypeError(f"metadata with a {type(value).__qualname__} cannot be written: {value!r:.80}")


def _decode(value: Any, path: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return tuple(_decode(item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(value) != 1:
        raise MetadataFormatError(f"{path} should have one tag, but has {len(value)}")
    ((tag, content),) = value.items()
    if tag in _RECORDS:
        return _record(_RECORDS[tag], content, f"{path}.{tag}")
    try:
        return _tagged(tag, content, path)
    except MetadataFormatError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise MetadataFormatError(f"{path} is no {tag}: {content!r:.80}") from error


def _record(kind: type[Any], content: Any, path: str) -> Any:
    names = {field.name for field in fields(kind)}
    if not isinstance(content, dict) or not content.keys() <= names:
        raise MetadataFormatError(f"{path} should be an object with fields of {kind.__name__}")
    values = {name: _decode(each, f"{path}.{name}") for name, each in content.items()}
    hints = _HINTS[kind.__name__]
    for name, each in values.items():
        if not _fits(each, hints[name]):
            raise MetadataFormatError(f"{path}.{name} should be {hints[name]}, but is {each!r:.80}")
    try:
        return kind(**values)
    except TypeError as error:
        raise MetadataFormatError(f"{path} is damaged: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a value is what a field's type hint says."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
        return len(kinds) == len(value) and all(map(_fits, value, kinds))
    if origin is frozenset:
        return isinstance(value, frozenset) and all(_fits(item, inner[0]) for item in value)
    # `type(...) is`, since True is an int to isinstance
    return type(value) is hint if hint in (bool, int) else isinstance(value, hint)


def _tagged(tag: str, content: Any, path: str) -> Any:
    if tag in _ENUMS:
        return _ENUMS[tag][content]
    if tag in _TORCH:
        found = getattr(torch, content)
        if not isinstance(found, _TORCH[tag]):
            raise TypeError(tag)
        return found
    readers: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "complex": lambda parts: complex(*(_decode(part, path) for part in parts)),
        "list": lambda items: [_decode(item, path) for item in items],
        "set": lambda items: frozenset(_decode(item, path) for item in items),
        "device": torch.device,
    }
    if tag not in readers:
        raise MetadataFormatError(f"{path} has the tag {tag!r:.40}, which nothing here writes")
    return readers[tag](content)
