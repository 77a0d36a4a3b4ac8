"""When two Python values are the same for a trace, and what a value held at the time of one.

Plain values are compared by type and value, containers item by item, numpy arrays by their bytes, tensors by identity
and kind (their values cannot enter a trace), everything else by identity. A `Snapshot` keeps alive what it compares by
identity, except for tensors, whose memory it must not hold: one that gets the address of another is as good as that.
"""

from __future__ import annotations

import collections
import enum
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from aotlab._torch import is_wrapper

#: Values that are what they are: compared by type and value.
PLAIN = (
    int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size, enum.Enum, slice, range, type(Ellipsis),
)  # fmt: skip
CONTAINERS = (tuple, list, dict, set, frozenset, collections.deque)
#: What is read from a place where nothing is.
MISSING = type("Missing", (), {"__repr__": lambda self: "missing"})()
#: A container with more items, or nested deeper, is not compared: that would cost more than most calls.
MOST_ITEMS = 2_048
_DEPTH = 64
#: The containers whose tensors become inputs, and up to how many of them: a data set is no input.
WITH_SLOTS = (list, dict, collections.OrderedDict, collections.defaultdict)
_MOST_SLOTS = 256
_MOST_BYTES = 65_536  # of an array
#: The attributes of one tensor that count, as (name, value).
Attributes = tuple[tuple[str, Any], ...]
#: Python's own kinds of containers.
_KINDS = frozenset((*CONTAINERS, collections.OrderedDict))


def kind_of(container: Any) -> Any:
    """Return which of Python's own kinds a container is: its methods read one without running the code of its class."""
    return next(kind for kind in type(container).__mro__ if kind in _KINDS)


def is_of_its_own_kind(container: Any) -> bool:
    """Tell whether a container is of a class of somebody's, which may have methods and attributes."""
    return type(container) not in _KINDS


def items_in(container: Any) -> list[Any]:
    """Return what is in a container, of a dictionary its values, without running the code of its class."""
    kind = kind_of(container)
    return list(kind.values(container) if isinstance(container, dict) else kind.__iter__(container))


def keys_in(container: dict[Any, Any]) -> list[Any]:
    """Return the keys of a dictionary, without running the code of its class."""
    return list(kind_of(container).__iter__(container))


def is_plain(value: Any) -> bool:
    """Tell whether a value is what it is: of a plain type, and without attributes that could change."""
    if isinstance(value, PLAIN):
        return isinstance(value, enum.Enum) or not getattr(value, "__dict__", None)
    return is_scalar(value) or (type(value) is frozenset and all(map(is_plain, value)))


def is_scalar(value: Any) -> bool:
    """Tell whether ``value`` is a number of numpy's."""
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
    if isinstance(a, (tuple, list, frozenset)):  # a set's order shows, too
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same_value, a, b)) and all(map(same_value, a.values(), b.values()))
    if is_scalar(a):
        return bool(a.dtype == b.dtype) and bool(a.tobytes() == b.tobytes())
    return bool(a == b)


class Snapshot(Protocol):
    """What a value was."""

    def holds(self, now: Any) -> bool:
        """Tell whether ``now`` is still that."""

    def difference(self, now: Any, path: str) -> tuple[str, str]:
        """Say where ``now``, which is not, differs, as (path, what is there instead)."""


@dataclass(slots=True, eq=False)
class Value:
    """A plain value, to be equal; or an object, to be the same."""

    value: Any
    is_plain: bool

    def holds(self, now: Any) -> bool:
        """Compare by value or by identity."""
        return now is self.value or (self.is_plain and same_value(now, self.value))

    def difference(self, now: Any, path: str) -> tuple[str, str]:
        """Say what it is now."""
        if self.is_plain or self.value is MISSING:
            expected = "nothing" if self.value is MISSING else shown(self.value)
            return path, f"is {shown(now)} where the compiled entry expects {expected}"
        return path, "is missing" if now is MISSING else "is another object"


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    what = type(tensor), tensor.dtype, tensor.device, tensor.requires_grad, tensor.shape
    if tensor.layout != torch.strided:
        return *what, tensor.layout
    return *what, tensor.stride(), tensor.storage_offset(), tensor.is_leaf


@dataclass(slots=True, eq=False)
class Mentioned:
    """The names of attributes that the code mentions, and whether it may read others, by names that it computes."""

    names: set[str] = field(default_factory=set)
    by_string: bool = False

    def __bool__(self) -> bool:
        return self.by_string or bool(self.names)

    def counts(self, name: Any) -> bool:
        """Tell whether the code may read the attribute ``name``."""
        return name in self.names or (self.by_string and not str(name).startswith("__"))


#: For snapshots of what no code reads by name.
NOTHING_MENTIONED = Mentioned()


def attributes_that_count(tensor: Tensor, mentioned: Mentioned) -> dict[str, Any]:
    """Return what hangs on a tensor by the names that the code may read."""
    return {name: value for name, value in vars(tensor).items() if mentioned.counts(name)}


def attributes_differ(tensor: Tensor, expected: Attributes, mentioned: Mentioned) -> bool:
    """Tell whether the attributes of ``tensor`` that count are others than ``expected``."""
    now = attributes_that_count(tensor, mentioned)
    return len(now) != len(expected) or not all(same_value(now.get(key, MISSING), value) for key, value in expected)


class _Tensor:
    """A tensor: the same object, of the same kind, without attributes that the code may read."""

    __slots__ = ("id", "kind", "mentioned")

    def __init__(self, value: Tensor, mentioned: Mentioned) -> None:
        self.id = id(value)
        self.kind = _kind(value)
        self.mentioned = mentioned

    def holds(self, now: Any) -> bool:
        if id(now) != self.id or not isinstance(now, Tensor) or _kind(now) != self.kind:
            return False
        # without `getattr` and its like, code that reads an attribute that comes later would have raised
        return not (self.mentioned.by_string and attributes_that_count(now, self.mentioned))

    def difference(self, now: Any, path: str) -> tuple[str, str]:
        if not isinstance(now, Tensor) or id(now) != self.id:
            return path, "is missing" if now is MISSING else "is another object"
        return path, "is the same tensor with another shape, dtype, place, or requires_grad, or an attribute"


class _Input:
    """A tensor that is an input, whichever it is: what it is like is guarded as that of other inputs."""

    def holds(self, now: Any) -> bool:
        return isinstance(now, Tensor)

    def difference(self, now: Any, path: str) -> tuple[str, str]:
        return path, "is missing" if now is MISSING else f"is {shown(now)} where the compiled entry expects a tensor"


class Array:
    """A numpy array: the same object, of the same kind, with the same bytes."""

    def __init__(self, value: Any) -> None:
        self.value, self.then = value, (value.dtype, value.shape, value.strides, value.tobytes())

    def holds(self, now: Any) -> bool:
        """Compare object, kind and bytes."""
        return now is self.value and Array(now).then == self.then

    def restore(self) -> None:
        """Give the array the bytes back that it had."""
        dtype, shape, _, data = self.then
        self.value[...] = sys.modules["numpy"].frombuffer(data, dtype).reshape(shape)

    def difference(self, now: Any, path: str) -> tuple[str, str]:
        """Say whether it is the array or its contents."""
        return path, "is another array" if now is not self.value else "is the same array with other contents"


@dataclass(slots=True, eq=False)
class _Items:
    """A container of the same type, of Python's ``kind``, and the same items in order; the same ``owner`` of inputs."""

    type: type[Any]
    kind: Any
    keys: list[Snapshot] | None
    children: list[Snapshot]
    owner: Any

    def holds(self, now: Any) -> bool:
        is_it = self.owner is None or now is self.owner
        if type(now) is not self.type or not is_it or self.kind.__len__(now) != len(self.children):
            return False
        if self.keys is None:
            items = self.kind.__iter__(now)
        else:
            items = self.kind.values(now)
            if not all(known.holds(key) for known, key in zip(self.keys, self.kind.__iter__(now), strict=True)):
                return False
        return all(snapshot.holds(item) for snapshot, item in zip(self.children, items, strict=True))

    def difference(self, now: Any, path: str) -> tuple[str, str]:
        if type(now) is not self.type:
            what = "is missing" if now is MISSING else f"is a {type(now).__name__}"
            return path, f"{what} where the compiled entry expects a {self.type.__name__}"
        items = items_in(now)
        if len(items) != len(self.children):
            return path, f"has {len(items)} items where the compiled entry expects {len(self.children)}"
        labels: Sequence[Any] = range(len(items)) if self.keys is None else keys_in(now)
        for known, key in zip(self.keys or (), labels, strict=self.keys is not None):
            if not known.holds(key):
                return path, f"has other keys: {shown(key)}, {type(key).__name__}, stands in another's place"
        for known, key, item in zip(self.children, labels, items, strict=True):
            if not known.holds(item):
                is_set = isinstance(now, (set, frozenset))
                return known.difference(item, f"an item of {path}" if is_set else f"{path}[{shown(key)}]")
        return path, "is another object"


class CannotBeWatched(Exception):  # noqa: N818  # a signal: the function runs eagerly
    """Raised for a value that no guard could compare at every call; the text says what it is."""


def snapshot(
    value: Any,
    name: str = "a value",
    mentioned: Mentioned = NOTHING_MENTIONED,
    around: tuple[int, ...] = (),
    *,
    is_slot: bool = False,
) -> Snapshot:
    """Remember what a value, called ``name``, is; raises `CannotBeWatched`.

    ``around`` are ids of containers; a tensor in a place that ``is_slot`` may be another one at another call.
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
    if id(value) in around or len(around) > _DEPTH:
        what = "contains itself" if id(value) in around else f"is nested more than {_DEPTH} levels deep"
        raise CannotBeWatched(f"`{name}`, which {what}")
    around = (*around, id(value))
    has_slots = len(slots_in(value)) > 0
    children = [snapshot(item, name, mentioned, around, is_slot=has_slots) for item in items]
    keys = [snapshot(key, name, mentioned, around) for key in keys_in(value)] if isinstance(value, dict) else None
    return _Items(type(value), kind_of(value), keys, children, value if has_slots else None)


def is_ordinary(tensor: Tensor) -> bool:
    """Tell whether a tensor can be an input of a graph."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided
    strange = tensor.is_quantized or tensor.is_nested or tensor.is_neg() or tensor.is_meta
    return is_wrapper(tensor) or (plain and not strange)


def slots_in(container: Any) -> list[tuple[Any, Tensor]]:
    """Return the keys and tensors of a container that an entry reads anew at each call: few, by plain keys."""
    if type(container) not in WITH_SLOTS or len(container) > MOST_ITEMS:
        return []
    items = enumerate(container) if type(container) is list else list(container.items())
    slots = [(key, item) for key, item in items if isinstance(item, Tensor) and is_ordinary(item)]
    return slots if len(slots) <= _MOST_SLOTS and all(type(key) in (int, str) for key, _ in slots) else []


def shown(value: Any) -> str:
    """Show a value in a sentence; a tensor or a long text is only named."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # whatever a user's __repr__ raises, the sentence matters more
        text = object.__repr__(value)
    return text if len(text) <= 200 else text[:197] + "..."
