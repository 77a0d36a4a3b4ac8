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
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from aotlab.capture.nesting import Given, parts_of
from aotlab.guards.values import PLAIN


def given_objects(args: tuple[Any, ...], kwargs: dict[str, Any], others: Iterable[Any]) -> dict[int, Given | None]:
    """Say by ``id`` where the objects are that a traced function can get hold of: in its arguments, or ``others``."""
    found: dict[int, Given | None] = {id(value): None for value in others if not _is_nothing(value)}
    for part, steps in parts_of((args, kwargs)):
        is_plain = isinstance(part, (Tensor, *PLAIN)) and not isinstance(part, slice)
        if not is_plain and not _is_nothing(part) and (steps is None or len(steps) > 1):  # a call makes others anew
            found[id(part)] = None if steps is None else Given(steps)
    return found


def _is_nothing(value: Any) -> bool:
    return type(value) in (tuple, frozenset) and not value


def is_constant(value: Any) -> bool:
    """Tell whether a part of a result is the same object in eager too, or cannot be told from it."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    if isinstance(value, types.FunctionType):  # one that its module has under its name; others are made at each call
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    return value is NotImplemented or isinstance(value, (*PLAIN, type, types.ModuleType))
