"""Which of the containers and objects in a result are the caller's own.

    def f(options, x):
        options["w"].mul_(2)
        return options, [x * 2]

returns the very dictionary that it was given, and a fresh list. While it is traced it gets another dictionary, so the
places of what it was given are noted; a part of the result that is one of those is looked up there at each call. What
the function reaches besides (a dictionary of its module, say) cannot be returned by a compiled call.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from typing import Any

from torch import Tensor

from aotlab.capture.nesting import Given, Tree, flatten_result, parts_of
from aotlab.guards.leaks import items_of
from aotlab.guards.values import PLAIN

#: So many objects that a function reaches are known, and so deep inside of one another.
_MOST, _DEEPEST = 2000, 4
_SINGLE = (*PLAIN, Tensor, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class Places:
    """Where the objects are that a traced function can get hold of: those in its arguments, and ``others``."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], others: list[Any]) -> None:
        self._alive = _within(others)
        self._given: dict[int, Given | None] = {id(value): None for value in self._alive}
        for part, steps in parts_of((args, kwargs)):
            is_plain = isinstance(part, (Tensor, *PLAIN)) and not isinstance(part, slice)
            is_plain |= isinstance(part, (tuple, frozenset)) and not part
            if not is_plain and (steps is None or len(steps) > 1):  # a call makes the outer ones anew
                self._given[id(part)] = None if steps is None else Given(steps)
                self._alive.append(part)

    def read_result(self, result: Any) -> tuple[list[Any], list[str], Tree]:
        """Take a result apart: return its leaves, their names, and its nesting."""
        return flatten_result(result, self._given)


def _within(roots: list[Any]) -> list[Any]:
    """List the objects that can be reached from ``roots``, but for those that are the same wherever they stand."""
    found: dict[int, Any] = {}
    todo = deque((root, 0) for root in roots)
    while todo and len(found) < _MOST:
        value, depth = todo.popleft()
        empty = type(value) in (tuple, frozenset) and not value
        if id(value) in found or empty or isinstance(value, _SINGLE):
            continue
        found[id(value)] = value
        if depth < _DEEPEST:
            todo += [(each, depth + 1) for _, each in items_of(value)]
    return list(found.values())


def is_constant(value: Any) -> bool:
    """Tell whether a part of a result is the same object in eager too, or cannot be told from it."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    if isinstance(value, types.FunctionType):  # one that its module has under its name; others are made at each call
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    return value is NotImplemented or isinstance(value, (*PLAIN, type, types.ModuleType))
