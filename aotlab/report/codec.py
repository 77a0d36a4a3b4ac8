"""Convert frozen records to JSON and back, and describe them as a JSON Schema.

A record is a frozen dataclass. Its fields are ``bool``, ``int``, ``float``, ``str``, other records, tuples of these, or
unions of these with ``None``. `encode`, `decode` and `schema` read the same type hints, so the written form, the
accepted form and the schema always agree. `decode` skips unknown fields and uses the default of a missing field. Every
other value that does not match its type hint is an error, and the error names the place of the value. `decode` never
executes anything from the file.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TypeVar, Union

from aotlab.errors import AotlabError

R = TypeVar("R")

_PRIMITIVES: dict[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    types.NoneType: "null",
}


class ReportFormatError(AotlabError, ValueError):
    """A report file that is not a report, is damaged, or has a version that this aotlab does not read."""


def encode(value: object, *, sparse: bool = False) -> object:
    """Convert a record, and everything in it, to dicts, lists and plain values that `json` can write.

    If ``sparse`` is true, fields that have their default value are left out; `decode` sets them to the default again.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # Plain values are tested here too, because a call for each of them would take most of the time.
    if isinstance(value, tuple):
        return [item if type(item) in _PRIMITIVES else encode(item, sparse=sparse) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        shape = _shape(type(value))
        values = {name: getattr(value, name) for name in shape.hints}
        if sparse:
            defaults = shape.defaults
            values = {name: each for name, each in values.items() if name not in defaults or each != defaults[name]}
        return {k: each if type(each) in _PRIMITIVES else encode(each, sparse=sparse) for k, each in values.items()}
    raise TypeError(f"a report cannot hold a {type(value).__qualname__}: {value!r:.80}")


def decode(kind: type[R], value: object, path: str = "$") -> R:
    """Build the record ``kind`` from a value that `json` has read.

    Parameters
    ----------
    kind
        The class of the record.
    value
        The value that `json.loads` returned.
    path
        The place of ``value`` in the file, for error messages: ``"$.frames[0].name"``.

    Raises
    ------
    ReportFormatError
        A value has the wrong type, or a field without a default is missing; the message names the place.
    """
    if not isinstance(value, dict):
        raise _mismatch(path, f"an object ({kind.__name__})", value)
    values: dict[str, object] = {}
    shape = _shape(kind)
    for name, hint in shape.hints.items():
        if name in value:
            values[name] = _decode(hint, value[name], f"{path}.{name}")
        elif name in shape.required:
            raise ReportFormatError(f"the report is damaged: {path} has no field {name!r}")
    return kind(**values)


def schema(kind: type, *, title: str, identifier: str) -> dict[str, object]:
    """Describe the record class ``kind`` as a JSON Schema (draft 2020-12), which allows additional properties.

    ``title`` and ``identifier`` are the title and the id of the schema.

    The descriptions are the docstrings: the first paragraph of a record's docstring, and its ``Attributes`` section.
    """
    definitions: dict[str, object] = {}
    _define(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": identifier,
        "title": title,
        "$ref": f"#/$defs/{kind.__name__}",
        "$defs": dict(sorted(definitions.items())),
    }


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fields of a record class, which `encode`, `decode` and `schema` read.

    ``hints`` maps each field's name to its type, in order. ``required`` has the names of the fields without a default.
    ``defaults`` has the defaults of the other fields.
    """

    hints: Mapping[str, object]
    required: frozenset[str]
    defaults: Mapping[str, object]


_shapes: dict[type[object], _Shape] = {}


def _shape(kind: type[object]) -> _Shape:
    """Read the fields of a record class. The result is cached, so each class is read only once."""
    if kind not in _shapes:
        assert is_dataclass(kind)
        hints = typing.get_type_hints(kind)
        _shapes[kind] = _Shape(
            {field.name: hints[field.name] for field in fields(kind)},
            frozenset(f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING),
            {field.name: field.default for field in fields(kind) if field.default is not MISSING},
        )
    return _shapes[kind]


def _decode(hint: object, value: object, path: str) -> object:
    if hint in _PRIMITIVES:
        # Compare the exact type, because isinstance would accept True as an int. For a float field an int is accepted,
        # but for an int field 1.0 is not accepted.
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is not hint:
            raise _mismatch(path, _PRIMITIVES[hint], value)
        return value
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise _mismatch(path, "array", value)
        item = typing.get_args(hint)[0]
        return tuple([_decode(item, each, f"{path}[{i}]") for i, each in enumerate(value)])
    if origin in (Union, types.UnionType):
        choices = typing.get_args(hint)
        if type(value) in choices:
            return value
        # At most one choice is an object and at most one an array, so the value's JSON type selects the choice.
        meant = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else ""
        for choice in choices:
            if _json_type(choice) == meant:
                return _decode(choice, value, path)
        raise _mismatch(path, " or ".join(_json_type(choice) for choice in choices), value)
    assert isinstance(hint, type), f"{path}: records cannot have fields of type {hint}"
    return decode(hint, value, path)


def _json_type(hint: object) -> str:
    if hint in _PRIMITIVES:
        return _PRIMITIVES[hint]
    return "array" if typing.get_origin(hint) is tuple else "object"


def _mismatch(path: str, expected: str, value: object) -> ReportFormatError:
    seen = {**_PRIMITIVES, dict: "object", list: "array"}[type(value)]
    return ReportFormatError(f"the report is damaged: {path} should be {expected}, but is {seen}")


def _define(kind: type, definitions: dict[str, object]) -> None:
    if kind.__name__ in definitions:
        return
    definitions[kind.__name__] = {}  # stops the recursion if a record contains records of the same class
    assert is_dataclass(kind)
    shape = _shape(kind)
    summary, notes = _documentation(kind)
    properties: dict[str, object] = {}
    for field in fields(kind):
        described = _type_schema(shape.hints[field.name], definitions)
        if field.name in notes:
            described["description"] = notes[field.name]
        if field.default is not MISSING:
            described["default"] = encode(field.default)
        properties[field.name] = described
    definitions[kind.__name__] = {
        "type": "object",
        "description": summary,
        "properties": properties,
        "required": [name for name in shape.hints if name in shape.required],
        "additionalProperties": True,
    }


def _type_schema(hint: object, definitions: dict[str, object]) -> dict[str, object]:
    if hint in _PRIMITIVES:
        return {"type": _PRIMITIVES[hint]}
    origin = typing.get_origin(hint)
    if origin is tuple:
        return {"type": "array", "items": _type_schema(typing.get_args(hint)[0], definitions)}
    if origin in (Union, types.UnionType):
        choices = typing.get_args(hint)
        if all(choice in _PRIMITIVES for choice in choices):
            return {"type": [_PRIMITIVES[choice] for choice in choices]}
        return {"anyOf": [_type_schema(choice, definitions) for choice in choices]}
    assert isinstance(hint, type)
    _define(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _documentation(kind: type) -> tuple[str, dict[str, str]]:
    """Read the first paragraph and the ``Attributes`` section of a record's docstring."""
    text = inspect.cleandoc(kind.__doc__ or "")
    summary = " ".join(text.split("\n\n")[0].split())
    _, _, section = text.partition("Attributes\n----------\n")
    notes: dict[str, str] = {}
    names: tuple[str, ...] = ()
    for line in section.splitlines():
        if line.startswith(" "):
            for name in names:
                notes[name] = f"{notes[name]} {line.strip()}".strip()
        elif line:
            names = tuple(line.split(", "))
            notes.update(dict.fromkeys(names, ""))
    return summary, notes
