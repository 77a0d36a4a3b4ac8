"""Records of the values that a traced function may read besides its arguments, and the check that they are unchanged.

`aotlab.guards.reach` finds these *reached* values: closures, globals, attributes and so on.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, contains, getitem, is_
from types import CellType, CodeType
from typing import Any, Literal, NamedTuple

from aotlab.guards.guarded_values import MISSING, WITH_SLOTS, Array, Function, Names, Value, same_value, shown

SlotKind = Literal["parameter", "buffer", "input"]
#: A function that takes a value and returns the name by which generated code refers to this value.
Constant = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reached value is stored. A place knows how to read the value, to assign it, and to generate code for it.

    ``owner`` is the object that stores the value, and ``key`` says where in the owner. The kinds are an *item* of a
    dictionary or a list; a value *held* in the ``__dict__`` of an object or a class; an *attribute* that C code
    provides, such as a function's ``__code__`` or a slot; the *size* of a dictionary; the value of a context
    *variable*; and several *attributes* of a library's module or class, for which ``key`` is a tuple of at least two
    names.

    The last two kinds store no value. Their ``key`` is a set of names that the code mentions and that do not exist. The
    names are *absent* from a dictionary, such as a function's globals, or *unheld* by the ``__dict__`` of an object or
    a class.
    """

    kind: Literal["item", "held", "attribute", "attributes", "size", "variable", "absent", "unheld"]
    owner: Any
    key: Any = None

    def _dictionary(self) -> Any:
        return self.owner if self.kind in ("item", "absent") else self.owner.__dict__

    def read(self) -> Any:
        """Return the value, or `MISSING`, without running code of the user.

        For a place of kind ``absent`` or ``unheld``, return the first of its names that exists now, or `MISSING`.
        """
        if self.kind == "size":
            return len(self.owner)
        if self.kind == "variable":
            return self.owner.get(MISSING)
        if self.kind == "attributes":
            return tuple(getattr(self.owner, name, MISSING) for name in self.key)
        if self.kind == "attribute":
            try:
                return getattr(self.owner, self.key)
            except (AttributeError, ValueError):  # an empty slot, an empty cell
                return MISSING
        container = self._dictionary()
        if type(container) is list:
            return container[self.key] if self.key < len(container) else MISSING
        if self.kind in ("item", "held"):
            return container.get(self.key, MISSING)
        return next((name for name in sorted(self.key) if name in container), MISSING)

    def write(self, value: Any) -> None:
        """Assign a value to this place, if possible. If the value is `MISSING`, delete the item or attribute."""
        names = self.key if self.kind in ("absent", "unheld") else (self.key,)
        # A size cannot be assigned. A context variable need not be restored, because a trace runs in its own context.
        for name in () if self.kind in ("size", "variable") else names:
            if self.kind == "attribute" or isinstance(self.owner, type):
                with contextlib.suppress(AttributeError):  # some C attributes cannot be assigned, and never change
                    delattr(self.owner, name) if value is MISSING else setattr(self.owner, name, value)
            elif type(container := self._dictionary()) is list:
                if value is not MISSING and name < len(container):  # if not, the user has removed the item
                    container[name] = value
            elif value is MISSING:
                container.pop(name, None)
            else:
                container[name] = value

    def is_writable(self) -> bool:
        """Tell whether a tensor in this place can be replaced without running code of the user."""
        return self.kind == "held" or type(self.owner) in ((CellType,) if self.kind == "attribute" else WITH_SLOTS)

    def text(self, constant: Constant) -> str:
        """Return a Python expression that reads this place, for generated code. It may raise if the place is empty.

        ``constant`` returns the names by which the generated code refers to the owner and the key.
        """
        owner = constant(self.owner)
        if self.kind == "attribute":
            return f"{owner}.{self.key}"
        if self.kind == "size":
            return f"len({owner})"
        if self.kind == "variable":
            return f"{owner}.get(MISSING)"
        if self.kind == "attributes":
            return f"{constant(attrgetter(*self.key))}({owner})"
        container = owner if self.kind in ("item", "absent") else f"{owner}.__dict__"
        if self.kind in ("absent", "unheld"):
            return f"{container}.keys()"
        key = repr(self.key) if type(self.key) is str else constant(self.key)
        return f"{container}.get({key}, MISSING)" if self.read() is MISSING else f"{container}[{key}]"

    def identity(self) -> tuple[Any, ...]:
        """Return a key that identifies this place as long as its owner is alive."""
        return self.kind, id(self.owner), self.key


class Slot(NamedTuple):
    """A place that stores a lifted input, with the tensor's name and kind. Each call reads the tensor again."""

    name: str
    kind: SlotKind
    place: Place


def reader(slots: Sequence[Slot]) -> Callable[[], list[Any]]:
    """Make a function that returns the tensors in the slots.

    If one of the slots does not exist any more, the function returns None for each slot.
    """
    namespace: dict[str, Any] = {"MISSING": None, "GONE": _READ_ERRORS, "nothing": [None] * len(slots)}
    constant = _constants(namespace)
    texts = ", ".join(slot.place.text(constant) for slot in slots)
    exec(f"def read():\n try:\n  return [{texts}]\n except GONE:\n  return nothing", namespace)
    read: Callable[[], list[Any]] = namespace.pop("read")
    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A value that the traced function may read, although it is not passed as an argument.

    ``name`` is the name of the value in sentences, and ``place`` says where it is stored. ``expected`` is a snapshot of
    the value from the time of the trace. Each call compares the present value with this snapshot. ``value`` is the
    object itself. This reference keeps the object alive, because the snapshot may compare it by identity. For a tensor,
    ``value`` is None. With ``inline``, the generated run-time function has a line that compares the value, so
    `fast_check` leaves the value out.
    """

    name: str
    place: Place
    expected: Any
    value: Any = field(default=None, repr=False)
    inline: bool = False

    @property
    def is_absence(self) -> bool:
        """Whether this record has no value, but says that the entry expects some names not to exist."""
        return self.place.kind in ("absent", "unheld")

    def put_back(self) -> None:
        """Assign the expected value to its place again, where that is possible, after a traced function changed it."""
        if isinstance(self.expected, Value):
            self.place.write(self.expected.value)
        elif self.value is not None:
            self.place.write(self.value)
            if isinstance(self.expected, Array):
                self.expected.restore()

    def holds(self) -> bool:
        """Tell whether the value is unchanged since the trace."""
        return bool(self.expected.holds(self.place.read()))

    def is_outside(self, function: Any) -> bool:
        """Tell whether the value comes from outside of ``function``, for example from its globals or its closure.

        The function's own code, builtins and attributes of libraries do not count as values from outside.
        """
        of_builtins = self.place.kind == "item" and self.place.owner is vars(builtins)
        is_own_code = self.place.identity() == Place("attribute", function, "__code__").identity()
        return not (self.is_absence or of_builtins or is_own_code or self.place.kind == "attributes")

    def present_name(self) -> str:
        """Return the name of the value, for a sentence about its change.

        If the entry expects that some names do not exist (`is_absence`), return the first of them that exists now.
        """
        return self.name.replace("…", str(self.place.read())) if self.is_absence else self.name

    def change(self) -> str:
        """Return a sentence that says how the present value differs from the expected one."""
        if self.is_absence:
            name = self.present_name()
            return f"`{name}`, which the function mentions, is there; the compiled entry expects it to be missing"
        path, text = self.expected.difference(self.place.read(), self.name)
        return f"{_quoted(path)}, which the function reads, {text}"

    def sentence(self) -> str:
        """Return a sentence that states the expected value, for the table of guards."""
        if self.is_absence:
            names = sorted(self.place.key)
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            verb = "are" if len(names) > 1 else "is"
            return f"`{self.name.replace('…', ', '.join(names[:_NAMED]))}`{more} {verb} missing"
        if isinstance(self.expected, Names):
            names = [f"`{self.name}.{name}`" for name in dict.fromkeys(self.place.key)]
            more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
            verb = "are the same objects" if len(names) > 1 else "is the same object"
            return f"{', '.join(names[:_NAMED])}{more} {verb}"
        if isinstance(self.expected, Value) and self.expected.is_plain:
            return f"{_quoted(self.name)} is {shown(self.expected.value)}"
        if isinstance(self.expected, Function):
            return f"{_quoted(self.name)} has the same code"
        contents = "" if isinstance(self.expected, Value) else " with the same contents"
        return f"{_quoted(self.name)} is the same object{contents}"


#: A sentence about a guard contains at most so many names.
_NAMED = 8


def codes_in(reached: Sequence[Reached]) -> list[CodeType]:
    """Return the code objects among the reached values. The code of the traced function comes first."""
    values = [item.expected.value for item in reached if isinstance(item.expected, Value)]
    return [value for value in values if isinstance(value, CodeType)]


def _quoted(name: str) -> str:
    """Return a name for a sentence: in backquotes if it is code, or unchanged if it is a description."""
    return name if name.startswith(("the ", "one of ", "an item ")) else f"`{name}`"


def _constants(namespace: dict[str, Any]) -> Constant:
    """Return a function that stores a value in ``namespace`` and returns its name there.

    ``namespace`` holds the globals of generated code. It keeps the values alive, so that their ids stay valid.
    """
    names: dict[int, str] = {}

    def constant(value: Any) -> str:
        name = names.setdefault(id(value), f"k{len(names)}")
        namespace[name] = value
        return name

    return constant


# --- one check for all places ---------------------------------------------------------------------------------------
# A model of 400 modules has 3,800 places. Places of the same form, for example the sizes of all dictionaries of
# modules, are read by a loop in C (`map` and `all`), which is twice as fast as generated lines. Generated lines check
# the rest.

#: The errors that generated code raises if a value no longer exists. A slower check, which never raises, then decides.
_READ_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)
#: The smallest number of places of the same form that are read by a loop in C.
_MANY = 8


def fast_check(reached: Sequence[Reached]) -> Callable[[], bool] | None:
    """Make one function that checks that all values in ``reached`` are unchanged, except the values with ``inline``.

    Return None if there is no value to check.
    """
    items = [item for item in reached if not item.inline]
    if not items:
        return None
    forms: dict[str, list[Reached]] = {}
    for item in items:
        forms.setdefault(_form(item), []).append(item)
    loops = [_loop(form, group) for form, group in forms.items() if form and len(group) >= _MANY]
    alone = [item for form, group in forms.items() if not form or len(group) < _MANY for item in group]
    return _generated_check(alone, loops, lambda: all(item.holds() for item in items))


def _form(item: Reached) -> str:
    """Return the form of a place: the key in `_LOOPS` of the loop that can check it, or an empty string."""
    if item.place.kind == "size":
        return "size"
    if item.place.kind == "attribute" and item.place.key == "__class__":
        return "class"
    if item.place.kind != "item":
        return ""
    if isinstance(item.expected, Value) and item.expected.value is MISSING:
        return "absent"
    return "same" if _is_one_of_a_kind(item.expected) else ""


def _is_one_of_a_kind(expected: Any) -> bool:
    """Tell whether a value can be compared by identity alone.

    This is true for None, a bool, an enum member, and any object that is not a plain value.
    """
    if not isinstance(expected, Value):
        return False
    return not expected.is_plain or expected.value is None or isinstance(expected.value, (bool, enum.Enum))


#: For each form, a function that makes the loop from the owners, keys and expected values of several places.
_LOOPS: dict[str, Callable[[list[Any], list[Any], list[Any]], Callable[[], bool]]] = {
    "class": lambda owners, _, kinds: lambda: all(map(is_, map(type, owners), kinds)),
    "size": lambda owners, _, sizes: lambda: list(map(len, owners)) == sizes,
    "same": lambda owners, keys, values: lambda: all(map(is_, map(getitem, owners, keys), values)),
    "absent": lambda owners, keys, _: lambda: not any(map(contains, owners, keys)),
}


def _loop(form: str, group: Sequence[Reached]) -> Callable[[], bool]:
    places = [item.place for item in group]
    owners, keys = [place.owner for place in places], [place.key for place in places]
    return _LOOPS[form](owners, keys, [item.expected.value for item in group])


def _generated_check(
    items: Sequence[Reached], loops: Sequence[Callable[[], bool]], carefully: Callable[[], bool]
) -> Callable[[], bool]:
    """Generate a function that calls ``loops`` and has lines that check ``items``.

    If a line raises because a value no longer exists, the function returns the result of ``carefully``, a slower check
    that never raises.
    """
    namespace: dict[str, Any] = {
        "MISSING": MISSING,
        "same_value": same_value,
        "GONE": _READ_ERRORS,
        "carefully": carefully,
    }
    constant = _constants(namespace)
    lines = [f"if not {constant(loop)}(): return False" for loop in loops]
    for item in items:
        text, expected = item.place.text(constant), item.expected
        if item.is_absence:
            lines.append(f"if not {text}.isdisjoint({constant(item.place.key)}): return False")
        elif isinstance(expected, Names):
            lines.append(f"if {text} != {constant(expected.value)}: return False")
        elif not isinstance(expected, Value):
            lines.append(f"if not {constant(expected)}.holds({text}): return False")
        elif _is_one_of_a_kind(expected):
            lines.append(f"if {text} is not {constant(expected.value)}: return False")
        else:
            different = "now is not {0} and not same_value(now, {0})".format(constant(expected.value))
            lines += [f"now = {text}", f"if {different}: return False"]
    body = ["    try:", *("        " + line for line in lines), "        return True"]
    source = "\n".join(["def check():", *body, "    except GONE:", "        return carefully()"])
    exec(compile(source, "<aotlab reached>", "exec"), namespace)
    # `pop`, because a function in its own globals is a reference cycle, which would keep all its values alive
    check: Callable[[], bool] = namespace.pop("check")
    return check
