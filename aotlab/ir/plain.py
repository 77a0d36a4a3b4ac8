"""Metadata as JSON: all that a compiled function has to know at run time, in a form that can go to a file.

What JSON does not know is written with a tag: ``{"torch": "float32"}``. Reading looks tags up in a fixed table and
builds records by their constructors; nothing that is read is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from aotlab.errors import AotlabError
from aotlab.ir import metadata as records
from aotlab.ir.metadata import ViewAndMutationMeta
from aotlab.ir.specs import SymExpr, TensorSpec

_HEAD = ["aotlab metadata", 1]
_PLAIN = (type(None), bool, int, float, str)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class MetadataFormatError(AotlabError, ValueError):
    """Text that is no metadata, is damaged, or has a version that this aotlab does not read."""


def metadata_to_json(metadata: ViewAndMutationMeta) -> str:
    """Write metadata down."""
    return json.dumps([*_HEAD, _encode(metadata)])


def metadata_from_json(text: str) -> ViewAndMutationMeta:
    """Read what `metadata_to_json` wrote; raise `MetadataFormatError` if the text is anything else."""
    try:
        *head, found = json.loads(text, object_hook=_decode)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise MetadataFormatError(f"this is not what this aotlab writes of metadata: {error!r:.200}") from error
    if head != _HEAD or not isinstance(found, ViewAndMutationMeta):
        raise MetadataFormatError(f"this is {head!r:.80} and a {type(found).__name__}, not {_HEAD}")
    return found


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, _OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if kind.__name__ not in _READERS:
        raise TypeError(f"metadata with a {kind.__qualname__} cannot be written: {value!r:.80}")
    if isinstance(value, Enum):
        return {kind.__name__: value.name}
    if is_dataclass(value):
        return {kind.__name__: [_encode(getattr(value, field.name)) for field in fields(value)]}
    items = list(map(_encode, value)) if isinstance(value, (tuple, list, frozenset)) else str(value)
    return {kind.__name__: items}


def _decode(tagged: dict[str, Any]) -> Any:
    ((tag, content),) = tagged.items()
    return _READERS[tag](content)


def _reader(kind: type[Any]) -> Callable[[Any], Any]:
    if issubclass(kind, Enum):
        return kind.__getitem__
    names = [field.name for field in fields(kind)]
    return lambda values: kind(**dict(zip(names, values, strict=True)))


_RECORDS = [kind for kind in vars(records).values() if isinstance(kind, type) and kind.__module__ == records.__name__]
_READERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in (tuple, list, frozenset, complex, torch.device)},
    **{kind.__name__: _reader(kind) for kind in (*_RECORDS, TensorSpec, SymExpr)},
    "torch": {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, _OF_TORCH)}.__getitem__,
}
