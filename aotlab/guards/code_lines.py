"""Which line of a piece of Python code does something, found by looking at the code: for messages only.

    def f(x):
        H.n += 1        # `line_that_changes(codes, "H.n")`
        return x * 2

What a function did to Python objects is seen when it is over. The line that did it is the one which stores that name.
"""

from __future__ import annotations

import dis
import linecache
import re
import types
from collections.abc import Iterable, Iterator, Sequence

from aotlab.errors import UserLine

_MOST_DECORATORS = 30  # lines
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF")
_OF_ITEMS = ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")
_METHODS = ("LOAD_ATTR", "LOAD_METHOD")
_CHANGING = frozenset(
    ("append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "clear", "sort",
     "reverse", "rotate", "add", "discard", "update", "setdefault", "difference_update", "intersection_update",
     "symmetric_difference_update")
)  # fmt: skip


def definition(code: types.CodeType) -> UserLine:
    """Return the line with the ``def`` of a function, behind its decorators."""
    first = code.co_firstlineno
    pattern = rf"\s*(async\s+)?def\s+{re.escape(code.co_name)}\b"
    lines = range(first, first + _MOST_DECORATORS)
    return _line(code, next((n for n in lines if re.match(pattern, linecache.getline(code.co_filename, n))), first))


def line_that_changes(codes: Sequence[types.CodeType], name: str) -> UserLine | None:
    """Return the first line that assigns to ``name``, or to a part of it, or calls a method that changes it.

    Examples
    --------
    >>> counts = []
    >>> def f(x):
    ...     counts.append(x)
    >>> line_that_changes([f.__code__], "counts[0]").line - f.__code__.co_firstlineno
    1
    """
    whole = re.sub(r"(\[[^\]]*\])+$", "", name)
    last = whole.rpartition(".")[2]
    key = re.search(r"\['(\w+)'\]$", name)  # `self._parameters['w']` was assigned to as `self.w`, perhaps
    items = None
    for code in _with_inner(codes):
        for number, instructions in _by_line(code):
            if any(i.opname in _STORES and i.argval == last for i in instructions):
                return _line(code, number)
            loaded = [i.argval for i in instructions if i.opname.startswith("LOAD_")]  # two variables at once, perhaps
            loads = any(last == value or (isinstance(value, tuple) and last in value) for value in loaded)
            by_method = any(i.opname in _METHODS and i.argval in _CHANGING for i in instructions)
            if items is None and loads and (by_method or any(i.opname in _OF_ITEMS for i in instructions)):
                items = _line(code, number)
    return items if items is not None or key is None else line_that_changes(codes, f".{key[1]}")


def line_like(codes: Iterable[types.CodeType], pattern: str) -> UserLine | None:
    """Return the first line whose text ``pattern`` is found in."""
    for code in _with_inner(codes):
        for number, _ in _by_line(code):
            if re.search(pattern, linecache.getline(code.co_filename, number)):
                return _line(code, number)
    return None


def _with_inner(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    for code in codes:
        yield code
        yield from _with_inner(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _by_line(code: types.CodeType) -> Iterator[tuple[int, list[dis.Instruction]]]:
    lines: dict[int, list[dis.Instruction]] = {}
    for instruction in dis.get_instructions(code):
        number = instruction.positions.lineno if instruction.positions is not None else None
        if number is not None:
            lines.setdefault(number, []).append(instruction)
    yield from sorted(lines.items())


def _line(code: types.CodeType, number: int) -> UserLine:
    text = linecache.getline(code.co_filename, number).strip()
    return UserLine(file=code.co_filename, line=number, function=code.co_name, code=text)
