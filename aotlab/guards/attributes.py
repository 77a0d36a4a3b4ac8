"""What hangs on the tensors of a call by name, as far as the function's code mentions it.

    x.scale = 2.0
    f = aotlab.compile(lambda x: x * x.scale)     # `x.scale` is guarded

Only plain values are taken: what else hangs there could change without a check seeing it. An object or a tensor on a
tensor that the function reaches otherwise (a closure, a global) is followed by `aotlab.guards.reach`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from aotlab.errors import PythonValueError
from aotlab.guards.values import MISSING, Mentioned, attributes_that_count, is_plain, same_value, shown

#: The attributes of one tensor that count, as (name, value).
Attributes = tuple[tuple[str, Any], ...]


def attributes_of(tensor: Tensor, mentioned: Mentioned, name: str) -> Attributes:
    """Return the attributes of ``tensor`` that the code may read.

    Raises
    ------
    PythonValueError
        One of them is no plain value; ``name`` says whose.
    """
    if not mentioned:
        return ()
    found = tuple(attributes_that_count(tensor, mentioned).items())
    for key, value in found:
        if not is_plain(value):
            raise PythonValueError(
                f"`{name}.{key}`, which the function may read, is a `{type(value).__qualname__}`",
                why="a compiled entry could not tell when its contents change",
                suggestion="pass it as an argument of its own",
                argument=name,
            )
    return found


def attributes_differ(tensor: Tensor, expected: Attributes, mentioned: Mentioned) -> bool:
    """Tell whether the attributes of ``tensor`` that count are others than ``expected``."""
    now = attributes_that_count(tensor, mentioned)
    return len(now) != len(expected) or not all(same_value(now.get(key, MISSING), value) for key, value in expected)


def what_differs(then: Attributes, now: Attributes, name: str) -> str | None:
    """Say in a sentence which attribute of the tensor called ``name`` is another; None if none is."""
    before, after = dict(then), dict(now)
    for key in {**before, **after}:
        was, is_now = before.get(key, MISSING), after.get(key, MISSING)
        if not same_value(was, is_now):
            return f"`{name}.{key}` is {shown(is_now)} where the compiled entry expects {shown(was)}"
    return None
