"""What a traced function read besides its arguments: one record per place.

`aotlab.reach` finds the places; this file says how a place is read again and how what it holds is compared;
`aotlab.fast_check` makes one function of the comparisons of an entry.
"""

from __future__ import annotations

import builtins
import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aotlab.buffers import BufferSnapshot
from aotlab.values import MISSING, PLAIN, ArraySnapshot, same_value, shown

__all__ = [
    "PLAIN",
    "Absent",
    "Attribute",
    "Constant",
    "Default",
    "Held",
    "Item",
    "KeywordDefault",
    "Place",
    "Reached",
    "Size",
    "Variable",
    "same_value",
]

#: Gives a value a name in generated source.
Constant = Callable[[Any], str]


class Place:
    """Where a value hangs: how to read it, to assign it, and to write the reading as an expression."""

    __slots__ = ()

    def read(self) -> Any:
        """Return what is there, `MISSING` if nothing is; never run the user's code."""
        raise NotImplementedError

    def write(self, value: Any) -> bool:
        """Put a value back; False where that cannot be done."""
        return False

    def text(self, constant: Constant) -> str:
        """Write an expression that reads; it may raise where nothing is."""
        raise NotImplementedError

    def identity(self) -> tuple[Any, ...]:
        """Return what tells this place from others, as long as its owner lives."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Item(Place):
    """An item of a dictionary, or of a class's ``__dict__``; ``owner_class`` is that class."""

    owner: Mapping[Any, Any]
    key: Any
    owner_class: type | None = None

    def identity(self) -> tuple[Any, ...]:
        """Tell it from others."""
        return ("item", id(self.owner if self.owner_class is None else self.owner_class), self.key)

    def read(self) -> Any:
        """Look it up."""
        return self.owner.get(self.key, MISSING)

    def write(self, value: Any) -> bool:
        """Assign or delete it."""
        if self.owner_class is not None:
            if value is MISSING:
                delattr(self.owner_class, self.key)
            else:
                setattr(self.owner_class, self.key, value)
        elif isinstance(self.owner, dict):
            if value is MISSING:
                self.owner.pop(self.key, None)
            else:
                self.owner[self.key] = value
        else:
            return False
        return True

    def text(self, constant: Constant) -> str:
        """Write the lookup."""
        key = repr(self.key) if type(self.key) is str else constant(self.key)
        owner = constant(self.owner)
        return f"{owner}.get({key}, MISSING)" if self.read() is MISSING else f"{owner}[{key}]"


@dataclass(frozen=True, slots=True)
class Held(Place):
    """What an object holds by name in its ``__dict__``, whichever that is."""

    owner: Any
    name: str

    def identity(self) -> tuple[Any, ...]:
        """Tell it from others."""
        return ("held", id(self.owner), self.name)

    def read(self) -> Any:
        """Look it up without asking the class."""
        return self.owner.__dict__.get(self.name, MISSING)

    def write(self, value: Any) -> bool:
        """Assign or delete it."""
        if value is MISSING:
            self.owner.__dict__.pop(self.name, None)
        else:
            self.owner.__dict__[self.name] = value
        return True

    def text(self, constant: Constant) -> str:
        """Write the lookup."""
        held = f"{constant(self.owner)}.__dict__"
        return f"{held}.get({self.name!r}, MISSING)" if self.read() is MISSING else f"{held}[{self.name!r}]"


@dataclass(frozen=True, slots=True)
class Attribute(Place):
    """An attribute that C code provides: of a cell, a function, or a slot."""

    owner: Any
    name: str

    def identity(self) -> tuple[Any, ...]:
        """Tell it from others."""
        return ("attribute", id(self.owner), self.name)

    def read(self) -> Any:
        """Read it."""
        try:
            return getattr(self.owner, self.name)
        except (AttributeError, ValueError):  # an empty slot, an empty cell
            return MISSING

    def write(self, value: Any) -> bool:
        """Assign or delete it."""
        if value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)
        return True

    def text(self, constant: Constant) -> str:
        """Write the reading."""
        return f"{constant(self.owner)}.{self.name}"


@dataclass(frozen=True, slots=True)
class Default(Place):
    """A default of a function's positional parameters; with index None, how many there are."""

    function: Any
    index: int | None

    def identity(self) -> tuple[Any, ...]:
        """Tell it from others."""
        return ("default", id(self.function), self.index)

    def read(self) -> Any:
        """Read it."""
        defaults = self.function.__defaults__ or ()
        if self.index is None:
            return len(defaults)
        return defaults[self.index] if self.index < len(defaults) else MISSING

    def text(self, constant: Constant) -> str:
        """Write the reading."""
        defaults = f"{constant(self.function)}.__defaults__"
        return f"len({defaults})" if self.index is None else f"{defaults}[{self.index}]"


@dataclass(frozen=True, slots=True)
class KeywordDefault(Place):
    """A default of one of a function's keyword-only parameters."""

    function: Any
    name: str

    def identity(self) -> tuple[Any, ...]:
        """Tell it from others."""
        return ("keyword default", id(self.function), self.name)

    def read(self) -> Any:
        """Read it."""
        return (self.function.__kwdefaults__ or {}).get(self.name, MISSING)

    def text(self, constant: Constant) -> str:
        """Write the reading."""
        return f"{constant(self.function)}.__kwdefaults__[{self.name!r}]"


@dataclass(frozen=True, slots=True)
class Variable(Place):
    """The value of a context variable in the present context."""

    owner: contextvars.ContextVar[Any]

    def identity(self) -> tuple[Any, ...]:
        """Tell it from others."""
        return ("variable", id(self.owner))

    def read(self) -> Any:
        """Get it."""
        return self.owner.get(MISSING)

    def write(self, value: Any) -> bool:
        """Set it, where there was a value."""
        if value is not MISSING:
            self.owner.set(value)
        return value is not MISSING

    def text(self, constant: Constant) -> str:
        """Write the call."""
        return f"{constant(self.owner)}.get(MISSING)"


@dataclass(frozen=True, slots=True)
class Size(Place):
    """How many items a dictionary has."""

    owner: Mapping[Any, Any]

    def identity(self) -> tuple[Any, ...]:
        """Tell it from others."""
        return ("size", id(self.owner))

    def read(self) -> Any:
        """Count."""
        return len(self.owner)

    def text(self, constant: Constant) -> str:
        """Write the count."""
        return f"len({constant(self.owner)})"


@dataclass(frozen=True, slots=True)
class Absent(Place):
    """Names that a namespace does not have, though the code mentions them; reads as the first that it has by now.

    The namespace is ``owner`` itself, as globals are, or what ``owner`` holds ``by_name``, whatever else it is.
    """

    owner: Any
    names: frozenset[str]
    by_name: bool

    def _namespace(self) -> Mapping[str, Any]:
        namespace: Mapping[str, Any] = vars(self.owner) if self.by_name else self.owner
        return namespace

    def identity(self) -> tuple[Any, ...]:
        """Tell it from others."""
        return ("absent", id(self.owner), self.by_name, self.names)

    def read(self) -> Any:
        """Return the first of the names that is there by now, `MISSING` as long as none is."""
        namespace = self._namespace()
        return next((name for name in sorted(self.names) if name in namespace), MISSING)

    def write(self, value: Any) -> bool:
        """Take away what has appeared."""
        namespace = self._namespace()
        for name in self.names:
            if name in namespace:
                if isinstance(namespace, dict):
                    del namespace[name]
                else:
                    delattr(self.owner, name)
        return True

    def text(self, constant: Constant) -> str:
        """Write the test."""
        owner = constant(self.owner)
        return f"{owner + '.__dict__' if self.by_name else owner}.keys()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One value outside the arguments that the traced code may read.

    Attributes
    ----------
    name
        How a sentence calls it.
    place
        Where it hangs.
    expected
        What was there: the value itself, or its `Snapshot`.
    how
        ``"value"``: of the same type and value; ``"contents"``: as in the snapshot; ``"identity"``: the same object;
        ``"absent"``: nothing is there; ``"optional"``: there is something, or nothing, as there was.
    value
        The object itself, kept alive, so that no other one gets its identity (tensors are not kept).
    inline
        Whether the generated function checks it itself, so that `fast_check` need not.
    """

    name: str
    place: Place
    expected: Any
    how: Literal["value", "contents", "identity", "absent", "optional"]
    value: Any = field(default=None, repr=False)
    inline: bool = False

    def read(self) -> Any:
        """Fetch the value again."""
        return self.place.read()

    def put_back(self) -> None:
        """Undo an assignment that a trace made, where that is possible."""
        if self.how in ("value", "identity"):
            self.place.write(self.expected)
        elif self.how == "absent":
            self.place.write(MISSING)
        elif isinstance(self.expected, (ArraySnapshot, BufferSnapshot)):
            self.place.write(self.value)
            self.expected.restore()
        elif self.value is not None:
            self.place.write(self.value)

    def holds(self) -> bool:
        """Tell whether the value is still what the trace saw."""
        now = self.read()
        if self.how == "value":
            return now is self.expected or same_value(now, self.expected)
        if self.how == "contents":
            return bool(self.expected.holds(now))
        if self.how == "optional":
            return now is not MISSING and (now is None) is self.expected
        return now is self.expected

    def is_outside(self, function: Any) -> bool:
        """Tell whether this is anything else than the function's own code, or a builtin."""
        if self.how == "absent":
            return False
        if isinstance(self.place, Item) and self.place.owner is vars(builtins):
            return False
        return self.place != Attribute(function, "__code__")

    def present_name(self) -> str:
        """Return the name; of what was absent, the name of what is there now."""
        return self.name.replace("…", str(self.read())) if self.how == "absent" else self.name

    def change(self) -> str:
        """Say what is otherwise now: a clause about what the function reads."""
        now = self.read()
        if self.how == "absent":
            name = self.present_name()
            return f"`{name}`, which the function mentions, is there; the compiled entry expects it to be missing"
        if self.expected is MISSING:
            text = f"is {shown(now)} where the compiled entry expects nothing"
            return f"{_quoted(self.name)}, which the function reads, {text}"
        where, text = self.name, "is another object"
        if self.how == "value":
            text = f"is {shown(now)} where the compiled entry expects {shown(self.expected)}"
        elif self.how == "optional":
            words = "is None", "is there"
            text = f"{words[now is not None]} where the compiled entry expects that it {words[not self.expected]}"
        elif self.how == "contents":
            found: tuple[str, str] = next(self.expected.differences(now, self.name), (self.name, "has changed"))
            where, text = found
        elif now is MISSING:
            text = "is missing"
        return f"{_quoted(where)}, which the function reads, {text}"

    def sentence(self) -> str:
        """Say what the entry assumes."""
        if self.how == "value":
            return f"{_quoted(self.name)} is {shown(self.expected)}"
        if self.how == "absent":
            assert isinstance(self.place, Absent)
            return f"`{self.name.replace('…', ', '.join(sorted(self.place.names)))}` is missing"
        if self.how == "optional":
            return f"`{self.name}` is {'None' if self.expected else 'there'}"
        return f"{_quoted(self.name)} is the same object" + (
            " with the same contents" if self.how == "contents" else ""
        )


def _quoted(name: str) -> str:
    return name if name.startswith(("the ", "default ", "one of ", "an item ")) else f"`{name}`"
