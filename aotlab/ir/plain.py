"""Metadata as JSON: everything that a compiled function has to know at run time, in a form that can go to a file.

What is neither a record of ours nor a plain value is written with a tag: ``{"dtype": "float32"}``. Reading looks tags
up in a fixed table and builds records by their constructors; nothing that is read is ever executed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from aotlab.errors import AotlabError
from aotlab.ir import metadata as records
from aotlab.ir.metadata import ViewAndMutationMeta
from aotlab.ir.specs import SymExpr

_KIND, _VERSION = "aotlab metadata", 1
_KINDS: list[type[Any]] = [kind for kind in vars(records).values() if isinstance(kind, type)]
_RECORDS: tuple[type[Any], ...] = (SymExpr, *(kind for kind in _KINDS if is_dataclass(kind)))
_ENUMS = [kind for kind in _KINDS if issubclass(kind, Enum) and kind is not Enum]
_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class MetadataFormatError(AotlabError, ValueError):
    """Text that is no metadata, is damaged, or has a version that this aotlab does not read."""


def metadata_to_json(metadata: ViewAndMutationMeta) -> str:
    """Write metadata down.

    Examples
    --------
    >>> metadata = records.ViewAndMutationMeta(input_info=(), output_info=(), deterministic=True)
    >>> metadata_from_json(metadata_to_json(metadata)) == metadata
    True
    """
    return json.dumps({"format": _KIND, "version": _VERSION, "metadata": _encode(metadata)})


def metadata_from_json(text: str) -> ViewAndMutationMeta:
    """Read what `metadata_to_json` wrote; the result equals what was written.

    Raises `MetadataFormatError`: the text is something else, damaged, or of another version.
    """
    try:
        read = json.loads(text)
        if (read["format"], read["version"]) != (_KIND, _VERSION):
            raise ValueError(f"{read['format']!r:.40}, version {read['version']!r:.40}")
        found = _decode(read["metadata"])
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise MetadataFormatError(f"this is not what this aotlab writes of metadata: {error!r:.200}") from error
    if not isinstance(found, ViewAndMutationMeta):
        raise MetadataFormatError(f"this is a {type(found).__name__}, no ViewAndMutationMeta")
    return found


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return {type(value).__name__: value.name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, (list, frozenset)):
        return {type(value).__name__: [_encode(item) for item in value]}
    if isinstance(value, (complex, torch.device, *_TORCH)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, _RECORDS):
        return {type(value).__name__: {field.name: _encode(getattr(value, field.name)) for field in fields(value)}}
    raise TypeError(f"metadata with a {type(value).__qualname__} cannot be written: {value!r:.80}")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple([_decode(item) for item in value])
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return _READERS[tag](content)


def _of_torch(kind: type[Any], name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, kind):
        raise TypeError(f"{name!r:.40} is no {kind.__name__}")
    return found


def _record(kind: type[Any], content: dict[str, Any]) -> Any:
    return kind(**{name: _decode(each) for name, each in content.items()})


_READERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: functools.partial(_record, kind) for kind in _RECORDS},
    **{kind.__name__: kind.__getitem__ for kind in _ENUMS},
    **{kind.__name__: functools.partial(_of_torch, kind) for kind in _TORCH},
    "list": lambda items: list(_decode(items)),
    "frozenset": lambda items: frozenset(_decode(items)),
    "complex": complex,
    "device": torch.device,
}
