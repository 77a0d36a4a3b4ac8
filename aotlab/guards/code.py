"""What a piece of Python code shows without being run: the names that it mentions, and for messages a line."""

from __future__ import annotations

import dis
import linecache
import re
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aotlab.errors import UserLine

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM")
_KINDS_OF_NAMES = dict.fromkeys(_GLOBALS, "globals") | dict.fromkeys(_ATTRIBUTES, "attributes")
_KINDS_OF_NAMES["IMPORT_NAME"] = "imports"
#: Whoever calls these reads attributes whose names do not stand in the code.
_BY_STRING = frozenset(
    ("getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "attrgetter", "asdict", "astuple", "fields",
     "replace", "deepcopy")
)  # fmt: skip
Known = TypeVar("Known")
_MOST_DECORATORS = 30  # lines
#: A call of a method that changes a container.
_CHANGED = (
    r"\.(append|extend|insert|pop|popitem|popleft|appendleft|extendleft|remove|clear|sort|reverse|rotate|add|discard|"
    r"update|setdefault|difference_update|intersection_update|symmetric_difference_update)\("
)


class ByCode(Generic[Known]):
    """A dictionary from code objects, by identity, that keeps none of them alive, nor what Dynamo wrote for them."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def get(self, code: types.CodeType) -> Known | None:
        """Return what is known of ``code``, None if nothing is."""
        return self._known.get(id(code))

    def put(self, code: types.CodeType, value: Known) -> Known:
        """Note ``value``, and return it."""
        self._known[id(code)] = value
        # called before another object can have the same id
        weakref.finalize(code, self._known.pop, id(code), None).atexit = False
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
    found: dict[str, dict[str, None]] = {"globals": {}, "attributes": {}, "imports": {}}
    for current in _with_inner([code]):
        for instruction in dis.get_instructions(current):
            kind = _KINDS_OF_NAMES.get(instruction.opname)
            if kind is not None:
                found[kind][str(instruction.argval)] = None
    names, attributes = found["globals"], found["attributes"]
    return CodeNames(
        globals=tuple(names),
        attributes=frozenset(attributes),
        imports=tuple(found["imports"]),
        by_string=not _BY_STRING.isdisjoint(names) or not _BY_STRING.isdisjoint(attributes),
    )


# --- lines, for messages -------------------------------------------------------------------------------------------


def definition(code: types.CodeType) -> UserLine:
    """Return the line with the ``def`` of a function, behind its decorators."""
    first = code.co_firstlineno
    pattern = rf"\s*(async\s+)?def\s+{re.escape(code.co_name)}\b"
    lines = range(first, first + _MOST_DECORATORS)
    return line_of(code, next((n for n in lines if re.match(pattern, linecache.getline(code.co_filename, n))), first))


def line_that_changes(codes: Sequence[types.CodeType], name: str) -> UserLine | None:
    """Return the first line that assigns to ``name``, or to a part of it, or calls a method that changes it."""
    last = re.sub(r"(\[[^\]]*\])+$", "", name).rpartition(".")[2]
    word = rf"\b{re.escape(last)}\b"
    assigned = rf"^[^=(#]*{word}[^=(]*(?<![!<>])=(?!=)"
    found = line_like(codes, rf"{assigned}|\bdel\b.*{word}|{word}.*{_CHANGED}")
    key = re.search(r"\['(\w+)'\]$", name)  # `self._parameters['w']` was assigned to as `self.w`, perhaps
    return found if found is not None or key is None else line_that_changes(codes, f".{key[1]}")


def line_like(codes: Iterable[types.CodeType], pattern: str) -> UserLine | None:
    """Return the first line whose text ``pattern`` is found in."""
    for code in _with_inner(codes):
        for number in sorted({line for _, _, line in code.co_lines() if line is not None}):
            if re.search(pattern, linecache.getline(code.co_filename, number)):
                return line_of(code, number)
    return None


def _with_inner(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    for code in codes:
        yield code
        yield from _with_inner(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def line_of(code: types.CodeType, number: int) -> UserLine:
    """Return a line of a file by its number, and the function that ``code`` is of."""
    text = linecache.getline(code.co_filename, number).strip()
    return UserLine(file=code.co_filename, line=number, function=code.co_name, code=text)
