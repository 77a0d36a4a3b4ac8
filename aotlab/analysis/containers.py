"""Which of the containers and objects in a result are the caller's own.

    def f(options, x):
        options["w"].mul_(2)
        return options, [x * 2]

returns the very dictionary that it was given, and a fresh list. While it is traced it gets another dictionary, so the
places of what it was given, and of what it can reach besides, are noted; a part of the result that is one of those
is found again at each call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from aotlab.nesting import Given, Result, Step, flatten_result, follow, givens, known_objects
from aotlab.reach import reach
from aotlab.values import PLAIN

#: Roots 0 and 1 are the arguments.
_FIRST = 2


class Places:
    """Where the objects are that a traced function can get hold of."""

    def __init__(self, target: Any) -> None:
        roots: dict[int, Any] = {}
        self._reads: dict[int, Callable[[], Any]] = {}
        if target.frontend != "dynamo":  # whose graphs hold nothing of the user's
            owner = getattr(target, "module", target.function)
            found = reach(owner)
            self._reads = {id(item.read()): item.read for item in found.state}
            tensors = [item.read() for item in found.state]
            for value in [
                owner,
                *(v for _, v in found.objects),
                *(t for t in tensors if isinstance(t, Tensor)),
            ]:
                roots.setdefault(id(value), value)
        self._roots = list(roots.values())
        self._given, self._alive = known_objects(self._roots, first=_FIRST)

    def made(self, part: Any, place: tuple[Step, ...] | None) -> None:
        """Note a part of the arguments as the traced function gets them."""
        plain = isinstance(part, (Tensor, *PLAIN)) and not isinstance(part, slice)
        if plain or (isinstance(part, (tuple, frozenset)) and not part):
            return
        if place is None:
            self._given[id(part)] = Given(0, None)
        elif len(place) > 1:  # the outer tuple and dictionary are made anew by each call
            self._given[id(part)] = Given(place[0][1], place[1:])
        self._alive.append(part)

    def read_result(self, result: Any) -> tuple[list[Any], list[str], Result]:
        """Take a result apart: return its leaves, their names, and how to put it together."""
        leaves, names, tree = flatten_result(result, self._given)
        used = sorted({given.root for given in givens(tree) if given.root >= _FIRST})
        roots = {root: self._roots[root - _FIRST] for root in used}
        reads = {root: self._reads[id(value)] for root, value in roots.items() if id(value) in self._reads}
        return leaves, names, Result(tree=tree, roots=roots, reads=reads)


def still_there(root: Any, given: Given) -> Any:
    """Return the object that a `Given` leads to now, None if the way is blocked."""
    try:
        return follow(root, given.steps or ())
    except (AttributeError, LookupError, TypeError):
        return None


def is_constant(value: Any) -> bool:
    """Tell whether a part of a result is the same object in eager too, or cannot be told from it."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    if isinstance(value, types.FunctionType):  # one that its module has under its name; others are made at each call
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    return value is NotImplemented or isinstance(value, (*PLAIN, type, types.ModuleType))
