"""Which names a piece of Python code mentions: globals, attributes, imports; nested functions included."""

from __future__ import annotations

import dis
import types
from dataclasses import dataclass

from aotlab.guards.by_code import ByCode

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM")
#: Whoever calls these reads attributes whose names do not stand in the code.
_BY_STRING = frozenset(
    ("getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "attrgetter", "asdict", "astuple", "fields",
     "replace", "deepcopy")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeNames:
    """The names in a code object.

    ``by_string`` tells whether it may read attributes by names that do not stand in it.
    """

    globals: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[str, ...]
    by_string: bool


_known: ByCode[CodeNames] = ByCode()


def names_in(code: types.CodeType) -> CodeNames:
    """Read the names off ``code`` and the code of functions that are defined in it."""
    known = _known.get(code)
    return _known.put(code, _read(code)) if known is None else known


def _read(code: types.CodeType) -> CodeNames:
    found: dict[str, None] = {}
    attributes: set[str] = set()
    imports: dict[str, None] = {}
    todo = [code]
    while todo:
        current = todo.pop()
        for instruction in dis.get_instructions(current):
            if instruction.opname in _GLOBALS:
                found[str(instruction.argval)] = None
            elif instruction.opname in _ATTRIBUTES:
                attributes.add(str(instruction.argval))
            elif instruction.opname == "IMPORT_NAME":
                imports[str(instruction.argval)] = None
        todo += [constant for constant in current.co_consts if isinstance(constant, types.CodeType)]
    return CodeNames(
        globals=tuple(found),
        attributes=frozenset(attributes),
        imports=tuple(imports),
        by_string=not _BY_STRING.isdisjoint(found) or not _BY_STRING.isdisjoint(attributes),
    )
