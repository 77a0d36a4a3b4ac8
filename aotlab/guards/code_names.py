"""Which names a piece of Python code mentions: globals, attributes, imports; nested functions included."""

from __future__ import annotations

import dis
import types
import weakref
from dataclasses import dataclass
from typing import Generic, TypeVar

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM")
#: Whoever calls these reads attributes whose names do not stand in the code.
_BY_STRING = frozenset(
    ("getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "attrgetter", "asdict", "astuple", "fields",
     "replace", "deepcopy")
)  # fmt: skip
Known = TypeVar("Known")


class ByCode(Generic[Known]):
    """A dictionary from code objects, told apart as objects, that keeps none of them.

    One that did would keep what Dynamo puts into a module's globals until the code that it wrote dies.

    Examples
    --------
    >>> known = ByCode[int]()
    >>> code = compile("1 + 1", "example", "eval")
    >>> known.put(code, 2)
    2
    >>> known.get(code), len(known)
    (2, 1)
    >>> del code
    >>> len(known)
    0
    """

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._watched: dict[int, weakref.ref[types.CodeType]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, code: types.CodeType) -> Known | None:
        """Return what is known of ``code``, None if nothing is."""
        return self._known.get(id(code))

    def put(self, code: types.CodeType, value: Known) -> Known:
        """Note ``value``, and return it."""
        key, known, watched = id(code), self._known, self._watched

        def forget(_: object) -> None:  # called before another object can have the same id
            known.pop(key, None)
            watched.pop(key, None)

        watched[key] = weakref.ref(code, forget)
        known[key] = value
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeNames:
    """The names in a code object; ``by_string``: it may read attributes by names that do not stand in it."""

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
