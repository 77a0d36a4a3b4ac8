"""Compare Python values that a traced function read: take a snapshot of a value, and compare later values with it.

Plain values are compared by type and value, containers item by item, numpy arrays by their bytes, and tensors by
identity and metadata (a trace cannot depend on their elements). Everything else is compared by identity. A `Snapshot`
keeps alive the objects that it compares by identity, except tensors, whose memory it must not hold. So a new tensor at
the address of a freed one matches if it has the same metadata.
"""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from aotlab._torch import is_wrapper

#: The types of plain values, which are compared by type and value.
PLAIN = (
    int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size, enum.Enum, slice, range, type(Ellipsis),
)  # fmt: skip
CONTAINERS = (tuple, list, dict, set, frozenset, collections.deque)
#: The result of reading a name, key, attribute or cell that does not exist or is empty.
MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()
#: No guard compares a container with more items or a deeper nesting, because this would take longer than most calls.
MOST_ITEMS = 2_048
_DEPTH = 64
#: The types of containers whose tensors become inputs, and the largest number of such tensors in one container. A
#: container with more tensors is probably a data set.
WITH_SLOTS = (list, dict, collections.OrderedDict, collections.defaultdict)
_MOST_SLOTS = 256
_MOST_BYTES = 65_536  # a numpy array with more bytes is not compared
#: The attributes of one tensor that the user's code may read, as pairs (name, value).
Attributes = tuple[tuple[str, Any], ...]
#: Python's own container types.
_KINDS = frozenset((*CONTAINERS, collections.OrderedDict))


def kind_of(container: Any) -> Any:
    """Return the type of a container or, for an instance of a user's subclass, Python's own type from which it derives.

    The methods of this type read the container without running code of a user's class: ``dict.values(container)``.
    """
    return next(kind for kind in type(container).__mro__ if kind in _KINDS)


def has_users_class(container: Any) -> bool:
    """Tell whether a container is an instance of a user's subclass, which may have its own methods and attributes."""
    return type(container) not in _KINDS


def items_in(container: Any) -> list[Any]:
    """Return the items of a container, or the values of a dictionary, without running code of its class."""
    kind = kind_of(container)
    return list(kind.values(container) if isinstance(container, dict) else kind.__iter__(container))


def keys_in(container: Any) -> list[Any]:
    """Return the keys of a dictionary, or the items of a set, without running code of its class."""
    return list(kind_of(container).__iter__(container))


def has_tensors_for_keys(container: Any) -> bool:
    """Tell whether a dictionary or a set has keys that are tensors, or tuples that contain tensors.

    A look-up of such a key depends on the identity of the tensor, which a trace replaces by another object.
    """
    keys = keys_in(container) if isinstance(container, (dict, set, frozenset)) else ()
    return any(isinstance(part, Tensor) for key in keys for part in (key if isinstance(key, tuple) else (key,)))


def is_plain(value: Any) -> bool:
    """Tell whether a value is of a plain type, and has no attributes that could change."""
    if isinstance(value, PLAIN):
        return isinstance(value, enum.Enum) or not getattr(value, "__dict__", None)
    return is_scalar(value) or (type(value) is frozenset and all(map(is_plain, value)))


def is_scalar(value: Any) -> bool:
    """Tell whether ``value`` is a numpy scalar."""
    number: Any = getattr(sys.modules.get("numpy"), "generic", ())
    return isinstance(value, number) and not value.dtype.hasobject


def same_value(a: Any, b: Any) -> bool:
    """Tell whether two plain values are the same for a trace: 0.0 is not -0.0, 1 is not True, and nan is nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, enum.Enum):
        return a is b
    if isinstance(a, float):
        return a.hex() == str(b.hex())
    if isinstance(a, complex):
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if isinstance(a, (slice, range)):
        return all(same_value(x, y) for x, y in ((a.start, b.start), (a.stop, b.stop), (a.step, b.step)))
    if isinstance(a, (tuple, list, frozenset)):  # the order of a set matters, too, because code can iterate over it
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same_value, a, b)) and all(map(same_value, a.values(), b.values()))
    if is_scalar(a):
        return bool(a.dtype == b.dtype) and bool(a.tobytes() == b.tobytes())
    return bool(a == b)


class Snapshot(Protocol):
    """The state of a value at the time of a trace. A guard compares the value with it at each call."""

    def holds(self, current: Any) -> bool:
        """Tell whether ``current`` has the same state."""

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        """Return the first difference of ``current`` as (path, text about the value at this path).

        ``path`` is the path of ``current`` itself, for example the name of a variable.
        """


@dataclass(slots=True, eq=False)
class Value:
    """The snapshot of a plain value, to which later values must be equal, or of an object that must be the same one."""

    value: Any
    is_plain: bool

    def holds(self, current: Any) -> bool:
        """Compare by value or by identity."""
        return current is self.value or (self.is_plain and same_value(current, self.value))

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        """Return ``path``, and a text about the present value and the expected one."""
        if self.is_plain or self.value is MISSING:
            expected = "nothing" if self.value is MISSING else shown(self.value)
            return path, f"is {shown(current)} where the compiled entry expects {expected}"
        return path, "is missing" if current is MISSING else "is another object"


@dataclass(slots=True, eq=False)
class Function:
    """The snapshot of a function without state (see `is_stateless`). Another function with the same code is accepted.

    A notebook's cell that defines a function makes a new object at each run.
    """

    value: types.FunctionType

    def holds(self, current: Any) -> bool:
        """Compare the code and the globals."""
        return current is self.value or (
            is_stateless(current)
            and current.__code__ is self.value.__code__
            and current.__globals__ is self.value.__globals__
        )

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        """Return ``path``, and a text about the present value."""
        return path, "is missing" if current is MISSING else "is not the same function"


def is_stateless(value: Any) -> TypeGuard[types.FunctionType]:
    """Tell whether a value is a function that holds nothing but its code: no closure, defaults or attributes."""
    is_function = type(value) is types.FunctionType
    return is_function and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value))


@dataclass(slots=True, eq=False)
class Names:
    """The snapshot of several attributes of a library's module or class, for example ``gelu`` and ``relu`` of ``F``.

    Each attribute must be the same object later, or an equal plain value.
    """

    names: tuple[str, ...]
    value: tuple[Any, ...]

    def holds(self, current: Any) -> bool:
        """Compare all attributes at once: Python's ``==`` of tuples compares their items by identity, then by value."""
        return bool(current == self.value)

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        """Return the path of the first attribute that was replaced, and a text about it."""
        name, value = next((n, a) for n, a, b in zip(self.names, current, self.value, strict=True) if a != b)
        return f"{path}.{name}", "is missing" if value is MISSING else "is another object"


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    metadata = type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape
    if tensor.layout != torch.strided:
        return *metadata, tensor.layout
    return *metadata, tensor.stride(), tensor.storage_offset(), tensor.is_leaf


@dataclass(slots=True, eq=False)
class Mentioned:
    """The attribute names that the user's code mentions.

    With ``by_string``, the code may also read other attributes, whose names it computes (by `getattr`, for example).
    """

    names: set[str] = field(default_factory=set)
    by_string: bool = False

    def __bool__(self) -> bool:
        return self.by_string or bool(self.names)

    def counts(self, name: Any) -> bool:
        """Tell whether the user's code may read the attribute ``name``."""
        return name in self.names or (self.by_string and not str(name).startswith("__"))


#: For snapshots of values whose attributes no code reads.
NOTHING_MENTIONED = Mentioned()


def mentioned_attributes(tensor: Tensor, mentioned: Mentioned) -> dict[str, Any]:
    """Return the attributes of a tensor that the code may read."""
    return {name: value for name, value in vars(tensor).items() if mentioned.counts(name)}


def attributes_differ(tensor: Tensor, expected: Attributes, mentioned: Mentioned) -> bool:
    """Tell whether the attributes of ``tensor`` that the code may read differ from ``expected``."""
    current = mentioned_attributes(tensor, mentioned)
    return len(current) != len(expected) or not all(
        same_value(current.get(key, MISSING), value) for key, value in expected
    )


class _Tensor:
    """The snapshot of a tensor that is no input. It must be the same object, with the same metadata.

    If the code reads attributes by computed names, the tensor must not have attributes that the code may read.
    """

    __slots__ = ("id", "kind", "mentioned")

    def __init__(self, value: Tensor, mentioned: Mentioned) -> None:
        self.id = id(value)
        self.kind = _metadata(value)
        self.mentioned = mentioned

    def holds(self, current: Any) -> bool:
        if id(current) != self.id or not isinstance(current, Tensor) or _metadata(current) != self.kind:
            return False
        # Without computed names, a new attribute does not matter: the code does not read it, or the trace would have
        # raised.
        return not (self.mentioned.by_string and mentioned_attributes(current, self.mentioned))

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        if not isinstance(current, Tensor) or id(current) != self.id:
            return path, "is missing" if current is MISSING else "is another object"
        return path, "is the same tensor, but its metadata has changed, or it has a new attribute"


class _Input:
    """The snapshot of a tensor that is an input. Any tensor is accepted here, because inputs have their own guards."""

    def holds(self, current: Any) -> bool:
        return isinstance(current, Tensor)

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        return (
            path,
            "is missing" if current is MISSING else f"is {shown(current)} where the compiled entry expects a tensor",
        )


class _Number:
    """The snapshot of a number in a container that is an input of the graph. Any number is accepted here."""

    def holds(self, current: Any) -> bool:
        return type(current) in (int, float)

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        return path, f"is {shown(current)} where the compiled entry expects a number"


class Array:
    """The snapshot of a numpy array. It must be the same object, with the same dtype and layout and the same bytes."""

    def __init__(self, value: Any) -> None:
        self.value, self.state = value, (value.dtype, value.shape, value.strides, value.tobytes())

    def holds(self, current: Any) -> bool:
        """Compare identity, dtype, layout and bytes."""
        return current is self.value and Array(current).state == self.state

    def restore(self) -> None:
        """Give the array the bytes that it had."""
        dtype, shape, _, data = self.state
        self.value[...] = sys.modules["numpy"].frombuffer(data, dtype).reshape(shape)

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        """Return ``path``, and a text that says whether the array was replaced or its contents changed."""
        return path, "is another array" if current is not self.value else "is the same array with other contents"


@dataclass(slots=True, eq=False)
class Items:
    """The snapshot of a container. It must later have the same type, and equal keys and items in the same order.

    ``kind`` is Python's own type of the container, and ``children`` are the snapshots of its items. If some items are
    tensors or numbers that became inputs, then an entry reads them from this container, so it must be the same object,
    ``owner``.
    """

    type: type[Any]
    kind: Any
    keys: list[Snapshot] | None
    children: list[Snapshot]
    owner: Any
    _objects: tuple[list[Any], list[Any]] | None = field(init=False)

    def __post_init__(self) -> None:
        """Store the keys and the items themselves, if all of them are values. They are compared by identity first."""
        values = [[each.value for each in some if type(each) is Value] for some in (self.keys or (), self.children)]
        self._objects = None
        if len(values[0]) == len(self.keys or ()) and len(values[1]) == len(self.children):
            self._objects = values[0], values[1]

    def holds(self, current: Any) -> bool:
        """Compare the type, the keys and the items."""
        is_same_owner = self.owner is None or current is self.owner
        if type(current) is not self.type or not is_same_owner or self.kind.__len__(current) != len(self.children):
            return False
        if self._objects is not None:
            keys, items = self._objects
            if self.keys is None:
                if all(map(is_, self.kind.__iter__(current), items)):
                    return True
            elif all(map(is_, self.kind.__iter__(current), keys)) and all(map(is_, self.kind.values(current), items)):
                return True
        if self.keys is None:
            items = self.kind.__iter__(current)
        else:
            items = self.kind.values(current)
            if not all(
                snapshot.holds(key) for snapshot, key in zip(self.keys, self.kind.__iter__(current), strict=True)
            ):
                return False
        return all(snapshot.holds(item) for snapshot, item in zip(self.children, items, strict=True))

    def difference(self, current: Any, path: str) -> tuple[str, str]:
        """Return the path of the first item that differs, and a text about it."""
        if type(current) is not self.type:
            actual = "is missing" if current is MISSING else f"is a {type(current).__name__}"
            return path, f"{actual} where the compiled entry expects a {self.type.__name__}"
        items = items_in(current)
        if len(items) != len(self.children):
            return path, f"has {len(items)} items where the compiled entry expects {len(self.children)}"
        labels: Sequence[Any] = range(len(items)) if self.keys is None else keys_in(current)
        for snapshot, key in zip(self.keys or (), labels, strict=self.keys is not None):
            if not snapshot.holds(key):
                return path, f"has the key {shown(key)} ({type(key).__name__}) where the compiled entry expects another"
        for snapshot, key, item in zip(self.children, labels, items, strict=True):
            if not snapshot.holds(item):
                is_set = isinstance(current, (set, frozenset))
                return snapshot.difference(item, f"an item of {path}" if is_set else f"{path}[{shown(key)}]")
        return path, "is another object"


class CannotBeWatched(Exception):  # noqa: N818  # a signal: the function runs eagerly
    """Raised for a value that no guard could compare at each call. The message names the value."""


def snapshot(
    value: Any,
    name: str = "a value",
    mentioned: Mentioned = NOTHING_MENTIONED,
    enclosing: tuple[int, ...] = (),
    *,
    is_slot: bool = False,
    numbers: Collection[Any] = (),
) -> Snapshot:
    """Take a snapshot of a value; raise `CannotBeWatched` if a guard could not compare the value at each call.

    ``name`` is the name of the value in messages. ``mentioned`` has the attribute names that the user's code mentions.
    ``enclosing`` are the ids of the containers around the value. If ``is_slot`` is true and the value is a tensor that
    can be an input, it is an input, so the guard accepts any tensor instead. ``numbers`` are the identities of the
    places of numbers that are inputs (see `aotlab.guards.numbers_in_state`).
    """
    if isinstance(value, Tensor):
        return _Input() if is_slot and is_ordinary(value) else _Tensor(value, mentioned)
    array: Any = getattr(sys.modules.get("numpy"), "ndarray", ())
    if isinstance(value, array):
        if value.nbytes > _MOST_BYTES or value.dtype.hasobject:
            raise CannotBeWatched(f"`{name}`, a numpy array of {value.nbytes} bytes and {value.dtype}")
        return Array(value)
    plain = is_plain(value)
    if plain or not isinstance(value, CONTAINERS):
        return Value(value, plain)
    items = items_in(value)
    if len(items) > MOST_ITEMS:
        raise CannotBeWatched(f"`{name}`, a `{type(value).__qualname__}` of {len(items)} items")
    if id(value) in enclosing or len(enclosing) > _DEPTH:
        defect = "contains itself" if id(value) in enclosing else f"is nested more than {_DEPTH} levels deep"
        raise CannotBeWatched(f"`{name}`, which {defect}")
    enclosing = (*enclosing, id(value))
    has_slots = len(slots_in(value)) > 0
    names = keys_in(value) if isinstance(value, dict) else range(len(items))
    children = [
        _Number()
        if numbers and type(item) in (int, float) and ("item", id(value), key) in numbers
        else snapshot(item, name, mentioned, enclosing, is_slot=has_slots, numbers=numbers)
        for key, item in zip(names, items, strict=True)
    ]
    keys = [snapshot(key, name, mentioned, enclosing) for key in keys_in(value)] if isinstance(value, dict) else None
    has_inputs = has_slots or any(isinstance(child, _Number) for child in children)
    return Items(type(value), kind_of(value), keys, children, value if has_inputs else None)


def is_ordinary(tensor: Tensor) -> bool:
    """Tell whether a tensor can be an input of a graph: a plain strided tensor with memory, or a wrapper subclass."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided
    strange = tensor.is_quantized or tensor.is_nested or tensor.is_neg() or tensor.is_meta
    return is_wrapper(tensor) or (plain and not strange)


def slots_in(container: Any) -> list[tuple[Any, Tensor]]:
    """Return the tensors in a container that become inputs, each with its key or index.

    The list is empty if the container's type is not in `WITH_SLOTS`, if it has too many items or tensors, or if the
    keys of the tensors are not integers or strings.
    """
    if type(container) not in WITH_SLOTS or len(container) > MOST_ITEMS:
        return []
    items = enumerate(container) if type(container) is list else list(container.items())
    slots = [(key, item) for key, item in items if isinstance(item, Tensor) and is_ordinary(item)]
    return slots if len(slots) <= _MOST_SLOTS and all(type(key) in (int, str) for key, _ in slots) else []


def shown(value: Any) -> str:
    """Return the repr of a value, for a message, or the shape of a tensor as text. A long repr is truncated."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a message must not fail because a user's __repr__ raises
        text = object.__repr__(value)
    return text if len(text) <= 200 else text[:197] + "..."
