"""One fast check of everything that a traced function read besides its arguments.

The many places of one form, as the sizes of all dictionaries of a model's modules, are read by a few loops in C; for
the others one straight-line function is written. A model of 400 modules has 3,800 places: a line for each would take
twice as long to run as the loops, and a tenth of the time of the trace to compile.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import contains, getitem, is_
from typing import Any

from aotlab.guards.reached import Item, Reached, Size
from aotlab.guards.values import MISSING, same_value

#: What the quick readings raise where something is gone; the careful ones then decide.
_GONE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
#: From so many places of one form on they are read by a loop.
_MANY = 8


def fast_check(reached: Sequence[Reached]) -> Callable[[], bool] | None:
    """Make one function of many small checks; None if there are none."""
    items = [item for item in reached if not item.inline]
    if not items:
        return None
    forms: dict[str, list[Reached]] = {}
    for item in items:
        forms.setdefault(_form(item), []).append(item)
    loops = [_loop(form, group) for form, group in forms.items() if form and len(group) >= _MANY]
    alone = [item for form, group in forms.items() if not form or len(group) < _MANY for item in group]
    return _written(alone, loops, lambda: all(item.holds() for item in items))


# --- loops over places of one form ---------------------------------------------------------------------------------


def _form(item: Reached) -> str:
    """Say by which loop a place can be read; empty if by none."""
    if isinstance(item.place, Size) and item.how == "value":
        return "size"
    if not isinstance(item.place, Item):
        return ""
    if item.how == "optional":
        return "none" if item.expected else "there"
    if item.expected is MISSING:
        return "absent" if item.how == "identity" else ""
    return "same" if _is_one_of_a_kind(item) else ""


def _is_one_of_a_kind(item: Reached) -> bool:
    """Tell whether only one object will do."""
    single = item.expected is None or isinstance(item.expected, (bool, enum.Enum))
    return item.how == "identity" or (item.how == "value" and single)


#: By form, what makes a loop of the dictionaries, the keys and the expected values.
_LOOPS: dict[str, Callable[[list[Any], list[Any], list[Any]], Callable[[], bool]]] = {
    "size": lambda owners, _, sizes: lambda: list(map(len, owners)) == sizes,
    "same": lambda owners, keys, values: lambda: all(map(is_, map(getitem, owners, keys), values)),
    "absent": lambda owners, keys, _: lambda: not any(map(contains, owners, keys)),
    "there": lambda owners, keys, _: lambda: not any(map(is_, map(getitem, owners, keys), repeat(None))),
    "none": lambda owners, keys, _: lambda: all(map(is_, map(getitem, owners, keys), repeat(None))),
}


def _loop(form: str, group: Sequence[Reached]) -> Callable[[], bool]:
    places = [item.place for item in group]
    owners, keys = [place.owner for place in places], [place.key for place in places]
    return _LOOPS[form](owners, keys, [item.expected for item in group])


# --- a line for each of the others -----------------------------------------------------------------------------------


def _written(
    items: Sequence[Reached], loops: Sequence[Callable[[], bool]], carefully: Callable[[], bool]
) -> Callable[[], bool]:
    """Write the function that runs ``loops`` and checks each of ``items`` by a line."""
    names: dict[int, str] = {}
    namespace: dict[str, Any] = {"MISSING": MISSING, "same_value": same_value, "GONE": _GONE, "carefully": carefully}

    def constant(value: Any) -> str:
        name = names.get(id(value))
        if name is None:
            name = names[id(value)] = f"k{len(names)}"
            namespace[name] = value  # keeps it alive, so that the id stays its own
        return name

    lines = [f"if not {constant(loop)}(): return False" for loop in loops]
    for item in items:
        text = item.place.text(constant)
        if item.how == "absent":
            lines.append(f"if not {text}.isdisjoint({constant(item.place.key)}): return False")
        elif item.how == "optional":
            lines.append(f"if {text} is {'not ' if item.expected else ''}None: return False")
        elif item.how == "contents":
            lines.append(f"if not {constant(item.expected)}.holds({text}): return False")
        elif _is_one_of_a_kind(item):
            lines.append(f"if {text} is not {constant(item.expected)}: return False")
        else:
            expected = constant(item.expected)
            different = f"now is not {expected} and not same_value(now, {expected})"
            lines += [f"now = {text}", f"if {different}: return False"]
    body = ["    try:", *("        " + line for line in lines), "        return True"]
    source = "\n".join(["def check():", *body, "    except GONE:", "        return carefully()"])
    exec(compile(source, "<aotlab reached>", "exec"), namespace)
    check: Callable[[], bool] = namespace.pop("check")  # else a cycle would hold it, and all that it asks
    return check
