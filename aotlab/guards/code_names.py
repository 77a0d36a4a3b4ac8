"""Facts about code objects: the names that the code mentions, for guards, and its lines, for messages."""

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
#: The middle part of the names of the methods that a binary operator calls: ``+`` calls ``__add__``, ``__radd__`` or
#: ``__iadd__``.
_OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "@": "matmul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow",
    "<<": "lshift", ">>": "rshift", "&": "and", "|": "or", "^": "xor",
}  # fmt: skip
#: The methods that other operators call, by the operator or by the name of the bytecode instruction.
_OTHER_OPERATORS = {
    "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__", "==": "__eq__", "!=": "__ne__",
    "UNARY_NEGATIVE": "__neg__", "UNARY_INVERT": "__invert__", "BINARY_SUBSCR": "__getitem__", "[]": "__getitem__",
    "BINARY_SLICE": "__getitem__", "STORE_SUBSCR": "__setitem__", "STORE_SLICE": "__setitem__",
}  # fmt: skip
#: Functions and attributes through which code can read attributes whose names it computes.
_BY_STRING = frozenset(
    ("getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "attrgetter", "asdict", "astuple", "fields",
     "replace", "deepcopy")
)  # fmt: skip
Cached = TypeVar("Cached")
_MOST_DECORATORS = 30  # the most lines in which `definition` searches the ``def`` below a function's decorators
#: A regular expression for calls of methods that change a container.
_CHANGED = (
    r"\.(append|extend|insert|pop|popitem|popleft|appendleft|extendleft|remove|clear|sort|reverse|rotate|add|discard|"
    r"update|setdefault|difference_update|intersection_update|symmetric_difference_update)\("
)


class ByCode(Generic[Cached]):
    """A dictionary from code objects to values. It compares code objects by identity, and does not keep them alive.

    Otherwise the code that Dynamo has generated for these code objects would stay alive, too.
    """

    def __init__(self) -> None:
        self._values: dict[int, Cached] = {}

    def get(self, code: types.CodeType) -> Cached | None:
        """Return the value that is stored for ``code``, or None."""
        return self._values.get(id(code))

    def put(self, code: types.CodeType, value: Cached) -> Cached:
        """Store ``value`` for ``code``, and return ``value``."""
        self._values[id(code)] = value
        # the entry is removed when the code object dies, before another object can get the same id
        weakref.finalize(code, self._values.pop, id(code), None).atexit = False
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeNames:
    """The names in a code object, and in the functions that are defined in it.

    ``globals``, ``attributes`` and ``imports`` are the names of global variables, attributes and imported modules.
    ``by_string`` is true if the code may read attributes by computed names, as `getattr` does. ``strings`` are the
    string constants in the code that could be names of attributes. ``operators`` are the special methods that the
    operators in the code call, for example ``__add__``. ``chains`` are dotted names that begin with a global or free
    variable: ``("torch", "nn", "functional", "gelu")``.
    """

    globals: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[str, ...]
    by_string: bool
    strings: frozenset[str]
    operators: frozenset[str]
    chains: frozenset[tuple[str, ...]]


_names_by_code: ByCode[CodeNames] = ByCode()


def names_in(code: types.CodeType) -> CodeNames:
    """Return the names in ``code``, and in the functions that are defined in it."""
    names = _names_by_code.get(code)
    return _names_by_code.put(code, _read(code)) if names is None else names


def _read(code: types.CodeType) -> CodeNames:
    names_by_kind: dict[str, dict[str, None]] = {"globals": {}, "attributes": {}, "imports": {}}
    strings: set[str] = set()
    operators: set[str] = set()
    chains: set[tuple[str, ...]] = set()
    for current in _with_inner([code]):
        chain: tuple[str, ...] = ()
        strings |= {each for each in current.co_consts if type(each) is str and each.isidentifier()}
        for instruction in dis.get_instructions(current):
            kind = _KINDS_OF_NAMES.get(instruction.opname)
            name = str(instruction.argval)
            is_first = kind == "globals" or instruction.opname == "LOAD_DEREF"
            chain = (name,) if is_first else (*chain, name) if kind == "attributes" and chain else ()
            chains |= {chain} if len(chain) > 1 else set()
            if kind is not None:
                names_by_kind[kind][name] = None
            elif instruction.opname == "BINARY_OP" and (operator := _OPERATORS.get(instruction.argrepr.rstrip("="))):
                operators |= {f"__{prefix}{operator}__" for prefix in ("", "r", "i")}
            else:  # Python 3.13 shows some comparisons as ``bool(<)``
                text = instruction.argrepr.removeprefix("bool(").removesuffix(")") or instruction.opname
                operators |= {_OTHER_OPERATORS[text]} if text in _OTHER_OPERATORS else set()
    names, attributes = names_by_kind["globals"], names_by_kind["attributes"]
    return CodeNames(
        globals=tuple(names),
        attributes=frozenset(attributes),
        imports=tuple(names_by_kind["imports"]),
        by_string=not _BY_STRING.isdisjoint(names) or not _BY_STRING.isdisjoint(attributes),
        strings=frozenset(strings),
        operators=frozenset(operators),
        chains=frozenset(chains),
    )


# --- lines, for messages -------------------------------------------------------------------------------------------


def definition(code: types.CodeType) -> UserLine:
    """Return the line with the ``def`` of a function, below its decorators."""
    first_line = code.co_firstlineno
    pattern = rf"\s*(async\s+)?def\s+{re.escape(code.co_name)}\b"
    lines = range(first_line, first_line + _MOST_DECORATORS)
    return line_of(
        code, next((n for n in lines if re.match(pattern, linecache.getline(code.co_filename, n))), first_line)
    )


def line_that_changes(codes: Sequence[types.CodeType], name: str) -> UserLine | None:
    """Return the first line in the code objects ``codes`` that seems to change the object called ``name``, or None.

    Such a line assigns to the name or to an item or attribute of the object, or calls a method that changes containers.
    """
    last_part = re.sub(r"(\[[^\]]*\])+$", "", name).rpartition(".")[2]
    word = rf"\b{re.escape(last_part)}\b"
    assigned = rf"^[^=(#]*{word}[^=(]*(?<![!<>])=(?!=)"
    line = line_like(codes, rf"{assigned}|\bdel\b.*{word}|{word}.*{_CHANGED}")
    key = re.search(r"\['(\w+)'\]$", name)  # the code may write `self.w` and so assign to `self._parameters['w']`
    return line if line is not None or key is None else line_that_changes(codes, f".{key[1]}")


def line_like(codes: Iterable[types.CodeType], pattern: str) -> UserLine | None:
    """Return the first line of code objects, and of functions defined in them, whose text matches ``pattern``."""
    for code in _with_inner(codes):
        for number in sorted({line for _, _, line in code.co_lines() if line is not None}):
            if re.search(pattern, linecache.getline(code.co_filename, number)):
                return line_of(code, number)
    return None


def _with_inner(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    """Yield each code object, followed by the code objects of the functions and classes that are defined in it."""
    for code in codes:
        yield code
        yield from _with_inner(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def line_of(code: types.CodeType, number: int) -> UserLine:
    """Return a line of a file by its number, with the name of the function that ``code`` belongs to."""
    text = linecache.getline(code.co_filename, number).strip()
    return UserLine(file=code.co_filename, line=number, function=code.co_name, code=text)
