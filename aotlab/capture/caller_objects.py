"""Find which of the containers and objects that a function received are in its result, and whether it changed one.

    def f(options, x):
        options["w"].mul_(2)
        return options, [x * 2]

This function returns the same dictionary that it received, and a new list. A compiled call must return the dictionary
that it received itself, not the one of the traced call. So the trace notes the path of each received object in the
arguments. If a part of the result is one of these objects, each compiled call reads the object at this path in its own
arguments. Other objects that the function can reach (globals, for instance) cannot be returned.
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
from aotlab.capture.nesting import CallerObject, flatten, parts_of, paths
from aotlab.errors import LeakedTensorError
from aotlab.guards.code_names import line_that_changes
from aotlab.guards.guarded_values import PLAIN
from aotlab.guards.reached import codes_in


def caller_objects(
    args: tuple[Any, ...], kwargs: dict[str, Any], others: Iterable[Any]
) -> dict[int, CallerObject | None]:
    """Map the ``id`` of each object in the arguments or in ``others`` to the path of the object in the arguments.

    ``others`` are the objects that the function can reach besides its arguments. The value is None if no path leads to
    the object. This is the case for an object in ``others``, and for an object in a container whose items only its
    registered flattening function can reach.
    """
    objects_by_id: dict[int, CallerObject | None] = {id(value): None for value in others if not _is_nothing(value)}
    for part, steps in parts_of((args, kwargs)):
        is_plain = isinstance(part, (Tensor, *PLAIN)) and not isinstance(part, slice)
        # `args` and `kwargs` themselves have paths of one step. They are not the caller's, so they are left out.
        if not is_plain and not _is_nothing(part) and (steps is None or len(steps) > 1):
            objects_by_id[id(part)] = None if steps is None else CallerObject(steps)
    return objects_by_id


def _is_nothing(value: Any) -> bool:
    """Tell whether a value is a constant, so that nobody asks which call made it.

    This holds for the members of an enum, and for empty tuples and frozensets.
    """
    return isinstance(value, enum.Enum) or (type(value) in (tuple, frozenset) and not value)


def check_containers(call: Call, values: list[Any], args: Any, kwargs: Any) -> None:
    """Raise `LeakedTensorError` if the function added, removed or replaced an item of a container that it received.

    ``values`` are the flat values with which the function was run. ``args`` and ``kwargs`` are its arguments after the
    run.
    """
    if all(type(value) is Tensor for value in (*args, *kwargs.values())):
        return  # no argument is a container
    current_leaves, current_tree = flatten((args, kwargs))
    if current_tree == call.spec and [*map(id, current_leaves)] == [*map(id, call.leaves_among(values))]:
        return
    _, original_args, original_kwargs = call.rebuild(values)
    heads = call.target.argument_names((0,) * len(args), dict.fromkeys(kwargs, 0))
    arguments = zip(heads, [*original_args, *original_kwargs.values()], [*args, *kwargs.values()], strict=True)
    changes = ((head, _first_change(head, was, is_)) for head, was, is_ in arguments)
    head, path = next((head, path) for head, path in changes if path is not None)
    codes = codes_in(call.state.reached)
    raise LeakedTensorError(
        f"the function changes the argument `{head}`" + (f" at `{path}`" if path != head else ""),
        why="a compiled call would not repeat the change",
        suggestion="return the new value",
        argument=head,
        line=line_that_changes(codes, path) or line_that_changes(codes, head),
    )


def _first_change(name: str, old: Any, new: Any) -> str | None:
    """Return the path of the first changed item in a container, or None if nothing changed."""
    (values_before, tree_before), (values_after, tree_after) = flatten([old]), flatten([new])
    before = dict(zip(paths([(name, old)]), values_before, strict=True))
    after = dict(zip(paths([(name, new)]), values_after, strict=True))
    changed = (p for p in {**after, **before} if p not in after or p not in before or after[p] is not before[p])
    return next(changed, name if tree_before != tree_after else None)


def is_constant(value: Any) -> bool:
    """Tell whether each compiled call may return ``value``, a part of the traced result, because it never differs.

    This holds for plain values, classes, Python modules, and functions that are attributes of a module. (For a symbolic
    size, the compiled call computes the number.)
    """
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    if isinstance(value, types.FunctionType):  # an inner function or a lambda would be a new object at each call
        return getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    return value is NotImplemented or is_symbolic(value) or isinstance(value, (*PLAIN, type, types.ModuleType))
