"""The containers and objects that a function is given: which of them its result holds, and whether it changed any.

    def f(options, x):
        options["w"].mul_(2)
        return options, [x * 2]

returns the very dictionary that it was given, and a fresh list. So the places of what it was given are noted; a part of
the result that is one of those is looked up there at each call. What the function reaches besides cannot be returned.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from aotlab._torch import is_symbolic
from aotlab.capture.call import Call
from aotlab.capture.nesting import Given, flatten, parts_of, paths
from aotlab.errors import LeakedTensorError
from aotlab.guards.code import line_that_changes
from aotlab.guards.reached import codes_in
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
    return isinstance(value, enum.Enum) or (type(value) in (tuple, frozenset) and not value)


def check_containers(call: Call, values: list[Any], args: Any, kwargs: Any) -> None:
    """Refuse a function that put something into a container of the caller's, or took something out."""
    if all(type(value) is Tensor for value in (*args, *kwargs.values())):
        return  # there is no container
    now, spec = flatten((args, kwargs))
    if spec == call.spec and all(a is b for a, b in zip(now, values[call.lifted_count :], strict=True)):
        return
    _, given, named = call.rebuild(values)
    heads = call.target.argument_names((0,) * len(args), dict.fromkeys(kwargs, 0))
    parts = zip(heads, [*given, *named.values()], [*args, *kwargs.values()], strict=True)
    codes = codes_in(call.state.reached)
    changes = ((head, _first_change(head, was, is_)) for head, was, is_ in parts)
    head, path = next((head, path) for head, path in changes if path is not None)
    raise LeakedTensorError(
        f"the function changes the argument `{head}`" + (f" at `{path}`" if path != head else ""),
        why="a compiled call would not",
        suggestion="return the new value",
        argument=head,
        line=line_that_changes(codes, path) or line_that_changes(codes, head),
    )


def _first_change(name: str, before: Any, after: Any) -> str | None:
    """Return the path of the first thing in a container that is not what it was, None if there is none."""
    (were, old), (are, new) = flatten([before]), flatten([after])
    then = dict(zip(paths([(name, before)]), were, strict=True))
    now = dict(zip(paths([(name, after)]), are, strict=True))
    changed = (path for path in {**now, **then} if path not in now or path not in then or now[path] is not then[path])
    return next(changed, name if old != new else None)


def is_constant(value: Any) -> bool:
    """Tell whether a part of a result is the same object in eager too, or cannot be told from it."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    if isinstance(value, types.FunctionType):  # one that its module has under its name; others are made at each call
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    return value is NotImplemented or is_symbolic(value) or isinstance(value, (*PLAIN, type, types.ModuleType))
