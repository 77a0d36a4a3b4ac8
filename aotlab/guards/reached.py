"""What a traced function read besides its arguments: one record per place that `aotlab.guards.reach` finds."""

from __future__ import annotations

import builtins
import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import contains, getitem, is_
from types import CellType, CodeType
from typing import Any, Literal, NamedTuple

from aotlab.guards.values import MISSING, WITH_SLOTS, Array, Value, same_value, shown

SlotKind = Literal["parameter", "buffer", "input"]
#: Gives a value a name in generated source.
Constant = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value hangs: how to read it, to assign it, and to write the reading as an expression.

    An *item* of a dictionary or a list; what an object or a class *held* in its ``__dict__``; an *attribute* that C
    code provides; the *size* of a dictionary; the value of a context *variable*. Or nothing: ``key`` are names that the
    code mentions, and that are *absent* from a dictionary or *unheld* by an object or a class.
    """

    kind: Literal["item", "held", "attribute", "size", "variable", "absent", "unheld"]
    owner: Any
    key: Any = None

    def _dictionary(self) -> Any:
        return self.owner if self.kind in ("item", "absent") else self.owner.__dict__

    def read(self) -> Any:
        """Return what is there, of absent names the first that is, or `MISSING`; runs no code of the user's."""
        if self.kind == "size":
            return len(self.owner)
        if self.kind == "variable":
            return self.owner.get(MISSING)
        if self.kind == "attribute":
            try:
                return getattr(self.owner, self.key)
            except (AttributeError, ValueError):  # an empty slot, an empty cell
                return MISSING
        held = self._dictionary()
        if type(held) is list:
            return held[self.key] if self.key < len(held) else MISSING
        if self.kind in ("item", "held"):
            return held.get(self.key, MISSING)
        return next((name for name in sorted(self.key) if name in held), MISSING)

    def write(self, value: Any) -> None:
        """Put a value back, where that can be done; delete what is to be `MISSING`."""
        names = self.key if self.kind in ("absent", "unheld") else (self.key,)
        # a trace runs in a context of its own, so that variables stay as they are
        for name in () if self.kind in ("size", "variable") else names:
            if self.kind == "attribute" or isinstance(self.owner, type):
                with contextlib.suppress(AttributeError):  # what a function of C belongs to never changes
                    delattr(self.owner, name) if value is MISSING else setattr(self.owner, name, value)
            elif value is MISSING:
                self._dictionary().pop(name, None)
            else:
                self._dictionary()[name] = value

    def is_writable(self) -> bool:
        """Tell whether a tensor that is here can be replaced by another without running code of the user's."""
        return self.kind == "held" or type(self.owner) in ((CellType,) if self.kind == "attribute" else WITH_SLOTS)

    def text(self, constant: Constant) -> str:
        """Write an expression that reads; it may raise where nothing is."""
        owner = constant(self.owner)
        if self.kind == "attribute":
            return f"{owner}.{self.key}"
        if self.kind == "size":
            return f"len({owner})"
        if self.kind == "variable":
            return f"{owner}.get(MISSING)"
        held = owner if self.kind in ("item", "absent") else f"{owner}.__dict__"
        if self.kind in ("absent", "unheld"):
            return f"{held}.keys()"
        key = repr(self.key) if type(self.key) is str else constant(self.key)
        return f"{held}.get({key}, MISSING)" if self.read() is MISSING else f"{held}[{key}]"

    def identity(self) -> tuple[Any, ...]:
        """Return what tells this place from others, as long as its owner lives."""
        return self.kind, id(self.owner), self.key


class Slot(NamedTuple):
    """A place that holds a tensor, which each call reads anew, and what it is called."""

    name: str
    kind: SlotKind
    place: Place


def reader(slots: Sequence[Slot]) -> Callable[[], list[Any]]:
    """Write the function that reads slots; where one is not there any more, it returns None for each."""
    namespace: dict[str, Any] = {"MISSING": None, "GONE": _GONE, "nothing": [None] * len(slots)}
    constant = _constants(namespace)
    texts = ", ".join(slot.place.text(constant) for slot in slots)
    exec(f"def read():\n try:\n  return [{texts}]\n except GONE:\n  return nothing", namespace)
    read: Callable[[], list[Any]] = namespace.pop("read")
    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One value outside the arguments that the traced code may read, where it hangs, and how a sentence calls it.

    ``expected`` is a snapshot of it; ``value`` is the object, kept alive for its identity (tensors are not).
    ``inline``: the generated function checks it itself.
    """

    name: str
    place: Place
    expected: Any
    value: Any = field(default=None, repr=False)
    inline: bool = False

    @property
    def is_absence(self) -> bool:
        """Whether names are to be missing."""
        return self.place.kind in ("absent", "unheld")

    def put_back(self) -> None:
        """Undo an assignment that a trace made, where that is possible."""
        if isinstance(self.expected, Value):
            self.place.write(self.expected.value)
        elif self.value is not None:
            self.place.write(self.value)
            if isinstance(self.expected, Array):
                self.expected.restore()

    def holds(self) -> bool:
        """Tell whether the value is still what the trace saw."""
        return bool(self.expected.holds(self.place.read()))

    def is_outside(self, function: Any) -> bool:
        """Tell whether this is anything else than the function's own code, or a builtin."""
        of_builtins = self.place.kind == "item" and self.place.owner is vars(builtins)
        own = self.place.identity() == Place("attribute", function, "__code__").identity()
        return not (self.is_absence or of_builtins or own)

    def present_name(self) -> str:
        """Return the name; of what was absent, the name of what is there now."""
        return self.name.replace("…", str(self.place.read())) if self.is_absence else self.name

    def change(self) -> str:
        """Say what is otherwise now: a clause about what the function reads."""
        if self.is_absence:
            name = self.present_name()
            return f"`{name}`, which the function mentions, is there; the compiled entry expects it to be missing"
        where, text = self.expected.difference(self.place.read(), self.name)
        return f"{_quoted(where)}, which the function reads, {text}"

    def sentence(self) -> str:
        """Say what the entry assumes."""
        if self.is_absence:
            return f"`{self.name.replace('…', ', '.join(sorted(self.place.key)))}` is missing"
        if isinstance(self.expected, Value) and self.expected.is_plain:
            return f"{_quoted(self.name)} is {shown(self.expected.value)}"
        contents = "" if isinstance(self.expected, Value) else " with the same contents"
        return f"{_quoted(self.name)} is the same object{contents}"


def codes_in(reached: Sequence[Reached]) -> list[CodeType]:
    """Return the code that was found, the function's own first."""
    values = [item.expected.value for item in reached if isinstance(item.expected, Value)]
    return [value for value in values if isinstance(value, CodeType)]


def _quoted(name: str) -> str:
    return name if name.startswith(("the ", "one of ", "an item ")) else f"`{name}`"


def _constants(namespace: dict[str, Any]) -> Constant:
    """Return what gives values names in ``namespace``, which keeps them alive, so that their ids stay their own."""
    names: dict[int, str] = {}

    def constant(value: Any) -> str:
        name = names.setdefault(id(value), f"k{len(names)}")
        namespace[name] = value
        return name

    return constant


# --- one check of all of them ---------------------------------------------------------------------------------------
# The many places of one form, as the sizes of all dictionaries of modules, are read by a few loops in C, twice as fast
# as by the straight-line function that is written for the others. A model of 400 modules has 3,800 places.

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


def _form(item: Reached) -> str:
    """Say by which loop a place can be read; empty if by none."""
    if item.place.kind == "size":
        return "size"
    if item.place.kind != "item":
        return ""
    if isinstance(item.expected, Value) and item.expected.value is MISSING:
        return "absent"
    return "same" if _is_one_of_a_kind(item.expected) else ""


def _is_one_of_a_kind(expected: Any) -> bool:
    """Tell whether only one object will do."""
    if not isinstance(expected, Value):
        return False
    return not expected.is_plain or expected.value is None or isinstance(expected.value, (bool, enum.Enum))


#: By form, what makes a loop of the dictionaries, the keys and the expected values.
_LOOPS: dict[str, Callable[[list[Any], list[Any], list[Any]], Callable[[], bool]]] = {
    "size": lambda owners, _, sizes: lambda: list(map(len, owners)) == sizes,
    "same": lambda owners, keys, values: lambda: all(map(is_, map(getitem, owners, keys), values)),
    "absent": lambda owners, keys, _: lambda: not any(map(contains, owners, keys)),
}


def _loop(form: str, group: Sequence[Reached]) -> Callable[[], bool]:
    places = [item.place for item in group]
    owners, keys = [place.owner for place in places], [place.key for place in places]
    return _LOOPS[form](owners, keys, [item.expected.value for item in group])


def _written(
    items: Sequence[Reached], loops: Sequence[Callable[[], bool]], carefully: Callable[[], bool]
) -> Callable[[], bool]:
    """Write the function that runs ``loops`` and checks each of ``items`` by a line."""
    namespace: dict[str, Any] = {"MISSING": MISSING, "same_value": same_value, "GONE": _GONE, "carefully": carefully}
    constant = _constants(namespace)
    lines = [f"if not {constant(loop)}(): return False" for loop in loops]
    for item in items:
        text, known = item.place.text(constant), item.expected
        if item.is_absence:
            lines.append(f"if not {text}.isdisjoint({constant(item.place.key)}): return False")
        elif not isinstance(known, Value):
            lines.append(f"if not {constant(known)}.holds({text}): return False")
        elif _is_one_of_a_kind(known):
            lines.append(f"if {text} is not {constant(known.value)}: return False")
        else:
            different = "now is not {0} and not same_value(now, {0})".format(constant(known.value))
            lines += [f"now = {text}", f"if {different}: return False"]
    body = ["    try:", *("        " + line for line in lines), "        return True"]
    source = "\n".join(["def check():", *body, "    except GONE:", "        return carefully()"])
    exec(compile(source, "<aotlab reached>", "exec"), namespace)
    check: Callable[[], bool] = namespace.pop("check")  # else a cycle would hold it, and all that it asks
    return check
