"""A notebook's namespace as plain text facts, so that two runs can be compared.

A portrait is a dict from a place (``"model.weight.grad: value"``) to a text. It holds no live objects, so the run that
it describes can be torn down before the other one begins. Every object is described where it is first reached; a
second way to the same object says only ``same as <first place>``, which makes the portrait tell identity as well.
Tensors and arrays also say with whom they share memory, and at which distance.

Not told: ids and addresses, the name of a ``grad_fn`` (a compiled region is one node of autograd), and the identity of
plain values such as numbers and strings, which Python is free to share.
"""

from __future__ import annotations

import collections
import enum
import hashlib
import inspect
import io
import logging
import re
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from IPython.utils.capture import CapturedIO

from aotlab.ir.extents import within_its_storage

REPORT_MIME = "application/vnd.aotlab.report.v1+json"

#: What IPython itself keeps in the namespace about inputs; the magic's own line makes them differ.
INPUT_HISTORY = re.compile(r"In|_ih|_i+|_i\d+")

_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented), range, slice)
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_GRAD_FN = re.compile(r"grad_fn=<[^>]*>")

#: Attributes of a function that are described separately.
_FUNCTION = ("__name__", "__qualname__", "__module__", "__doc__")
#: Attributes of a class that differ between any two classes.
_CLASS_NOISE = {"__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__firstlineno__"}


class Versions:
    """The version counters of all tensors that were reachable at one moment. Holds no tensor alive."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Remember one tensor's version counter. An inference tensor has no counter."""
        if not tensor.is_inference():
            self._seen[id(tensor)] = (weakref.ref(tensor), tensor._version)

    def moved(self, tensor: torch.Tensor) -> bool | None:
        """Return whether the counter has changed since then, or None for a tensor that did not exist."""
        reference, version = self._seen.get(id(tensor), (None, 0))
        if reference is None or reference() is not tensor or tensor.is_inference():
            return None
        return bool(tensor._version != version)


def portrait(
    namespace: Mapping[str, Any],
    *,
    leave_out: frozenset[str] = frozenset(),
    before: Versions | None = None,
    text: Callable[[str], str] = str,
) -> tuple[dict[str, str], Versions]:
    """Describe a namespace.

    Parameters
    ----------
    namespace
        The notebook's.
    leave_out
        Names that are not described: the names of a fresh shell, and the names that the test itself added.
    before
        The version counters of an earlier moment.
    text
        Applied to every text that may name a file or a line of a cell.

    Returns
    -------
    tuple
        The facts, and the version counters as they are now.
    """
    painter = _Painter(namespace, before, text)
    names = [name for name in namespace if name not in leave_out and not INPUT_HISTORY.fullmatch(name)]
    painter.facts["names"] = " ".join(sorted(names))
    painter.facts["names in order"] = " ".join(names)
    for name in sorted(names):
        if name != "__warningregistry__":
            painter.describe(namespace[name], name)
    painter.describe_memory()
    return painter.facts, painter.versions


def plain(text: str) -> str:
    """Remove from a text the parts that differ between any two runs: addresses, and the names of ``grad_fn`` nodes."""
    return _GRAD_FN.sub("grad_fn=<...>", _ADDRESS.sub("0x...", text))


class _Painter:
    def __init__(self, namespace: Mapping[str, Any], before: Versions | None, text: Callable[[str], str]) -> None:
        self.namespace = namespace
        self.before = before
        self.text = text
        self.facts: dict[str, str] = {}
        self.versions = Versions()
        self.seen: dict[int, str] = {}
        self.alive: list[Any] = []  # ids stay unique as long as the objects live
        self.memory: list[tuple[str, int, int, int, int | None]] = []  # place, address, from, to, storage object

    def describe(self, value: Any, place: str) -> None:
        """Write down ``value``, and all that can be reached from it for the first time."""
        kind = type(value)
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            self.facts[place] = f"{_name(kind)} {plain(self.text(repr(value)))}"
            return
        if isinstance(value, types.ModuleType):
            self.facts[place] = f"module {value.__name__}"
            return
        # Each access creates a new bound method.
        if id(value) in self.seen and not isinstance(value, types.MethodType):
            self.facts[place] = f"same as {self.seen[id(value)]}"
            return
        self.seen[id(value)] = place
        self.alive.append(value)
        self.facts[place] = _name(kind)
        for part, label in self.parts(value, place):
            self.describe(part, label)

    def fact(self, place: str, label: str, value: object) -> None:
        """Record one property of the object at ``place``."""
        self.facts[f"{place}: {label}"] = plain(self.text(str(value)))

    def parts(self, value: Any, place: str) -> Iterator[tuple[Any, str]]:
        """Record the kind of ``value``, and return the objects below it with their places."""
        if isinstance(value, torch.Tensor):
            yield from self.tensor(value, place)
        elif isinstance(value, np.ndarray | np.generic):
            yield from self.array(value, place)
        elif isinstance(value, pd.DataFrame | pd.Series | pd.Index):
            self.fact(place, "table", value.to_csv() if hasattr(value, "to_csv") else list(value))
            self.fact(place, "dtypes", getattr(value, "dtypes", ""))
        elif isinstance(value, torch.Generator):
            self.fact(place, "state", digest(value.get_state().numpy().tobytes()))
        elif isinstance(value, CapturedIO):
            self.fact(place, "stdout", value.stdout)
            self.fact(place, "stderr", value.stderr)
            outputs = [output.data for output in value.outputs if REPORT_MIME not in output.data]
            self.fact(place, "outputs", outputs)
        elif isinstance(value, io.StringIO | io.BytesIO):
            self.fact(place, "contents", value.getvalue())
            self.fact(place, "position", value.tell())
        elif isinstance(value, Mapping | types.MappingProxyType):
            yield from self.mapping(value, place)
        elif isinstance(value, list | tuple | collections.deque):
            self.fact(place, "length", len(value))
            yield from ((part, f"{place}[{index}]") for index, part in enumerate(list(value)))
            yield from self.attributes(value, place)
        elif isinstance(value, set | frozenset):
            self.fact(place, "members", sorted(self.seen.get(id(part)) or plain(repr(part)) for part in value))
        elif isinstance(value, type):
            yield from self.class_(value, place)
        elif isinstance(value, types.FunctionType):
            yield from self.function(value, place)
        elif isinstance(value, types.MethodType):
            self.fact(place, "method", value.__func__.__qualname__)
            yield value.__self__, f"{place}.__self__"
        elif isinstance(value, types.GeneratorType | types.CoroutineType | types.AsyncGeneratorType):
            self.fact(place, "name", value.__qualname__)
            if isinstance(value, types.GeneratorType):
                self.fact(place, "state", inspect.getgeneratorstate(value))
            frame = getattr(value, "gi_frame", None)
            if frame is not None:
                yield from ((part, f"{place}.<{name}>") for name, part in sorted(frame.f_locals.items()))
        elif isinstance(value, property):
            yield value.fget, f"{place}.fget"
            yield value.fset, f"{place}.fset"
        elif isinstance(value, BaseException):
            self.fact(place, "message", value)
            yield value.args, f"{place}.args"
            yield from self.attributes(value, place)
        elif isinstance(value, weakref.ref):
            self.fact(place, "dead", value() is None)
        elif isinstance(
            value,
            logging.Logger
            | logging.Handler
            | re.Pattern
            | torch.dtype
            | torch.device
            | torch.Size
            | torch.layout
            | enum.Enum,
        ):
            self.fact(place, "is", repr(value))
        elif isinstance(value, torch.utils.hooks.RemovableHandle):
            pass  # its number counts all hooks of the process
        else:
            state = list(self.attributes(value, place))
            if not state:
                self.fact(place, "repr", _repr(value))
            yield from state

    def attributes(self, value: Any, place: str) -> Iterator[tuple[Any, str]]:
        """Return the contents of an object's ``__dict__`` and of its slots."""
        held: dict[str, Any] = dict(getattr(value, "__dict__", None) or {})
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else tuple(slots):
                if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                    held[slot] = getattr(value, slot)
        for name in sorted(held, key=str):
            yield held[name], f"{place}.{name}"

    def mapping(self, value: Mapping[Any, Any], place: str) -> Iterator[tuple[Any, str]]:
        self.fact(place, "length", len(value))
        # The keys of hooks count all hooks of the process.
        hooks = place.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        for index, (key, part) in enumerate(list(value.items())):
            if isinstance(key, _PLAIN) and not hooks:
                yield part, f"{place}[{key!r}]"
            else:
                if not hooks:
                    yield key, f"{place}.key{index}"
                yield part, f"{place}.value{index}"
        if not isinstance(value, types.MappingProxyType):
            yield from self.attributes(value, place)

    def tensor(self, tensor: torch.Tensor, place: str) -> Iterator[tuple[Any, str]]:
        self.versions.add(tensor)
        moved = self.before.moved(tensor) if self.before is not None else None
        if moved is not None:
            self.fact(place, "version moved", moved)
        for label in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "retains_grad"):
            try:
                self.fact(place, label, getattr(tensor, label))
            except RuntimeError as error:  # of a view whose history an in-place write made invalid
                self.fact(place, label, f"raises {error}")
                return
        self.fact(place, "inference", tensor.is_inference())
        if tensor.layout is not torch.strided:
            with torch.no_grad():
                self.fact(place, "coalesced", tensor.is_coalesced())
                yield tensor._indices(), f"{place}.indices"
                yield tensor._values(), f"{place}.values"
        else:
            for label in ("stride", "storage_offset", "is_conj", "is_neg"):
                self.fact(place, label, getattr(tensor, label)())
            self.fact(place, "value", _value(tensor))
            storage = tensor.untyped_storage()
            self.fact(place, "storage bytes", storage.nbytes())
            start = storage.data_ptr()
            address = start + tensor.storage_offset() * tensor.element_size()
            self.memory.append((place, address, start, start + storage.nbytes(), storage._cdata))
        # Reading `grad` of a non-leaf that does not retain it warns.
        if tensor.is_leaf or tensor.retains_grad:
            yield tensor.grad, f"{place}.grad"
        yield from self.attributes(tensor, place)

    def array(self, array: Any, place: str) -> Iterator[tuple[Any, str]]:
        for label in ("shape", "dtype", "strides"):
            self.fact(place, label, getattr(array, label))
        self.fact(place, "value", f"{digest(array.tobytes())} {_short(array.ravel()[:8].tolist())}")
        if isinstance(array, np.ndarray):
            self.fact(place, "writeable", array.flags.writeable)
            address = array.__array_interface__["data"][0]
            low, high = np.lib.array_utils.byte_bounds(array)
            self.memory.append((place, address, low, high, None))
        yield from ()

    def class_(self, value: type, place: str) -> Iterator[tuple[Any, str]]:
        self.fact(place, "class", f"{value.__module__}.{value.__qualname__}")
        if value.__module__ != "__main__":
            return
        self.fact(place, "doc", value.__doc__)
        self.fact(place, "bases", " ".join(_name(base) for base in value.__mro__))
        self.fact(place, "source", _source(value))
        for name in sorted(value.__dict__):
            if name not in _CLASS_NOISE and not name.startswith(("__abstractmethods__", "_abc_impl")):
                part = value.__dict__[name]
                yield getattr(part, "__func__", part), f"{place}.{name}"

    def function(self, value: types.FunctionType, place: str) -> Iterator[tuple[Any, str]]:
        for label in _FUNCTION:
            self.fact(place, label, getattr(value, label))
        if value.__module__ != "__main__":
            return
        self.fact(place, "signature", inspect.signature(value))
        self.fact(place, "source", _source(value))
        yield value.__defaults__, f"{place}.__defaults__"
        yield value.__kwdefaults__, f"{place}.__kwdefaults__"
        yield value.__annotations__, f"{place}.__annotations__"
        held = dict(vars(value))
        if _is_ours(value):
            # The magic's documentation says that a cell of definitions leaves compiled functions: wrappers.
            del held["__wrapped__"], held["_torchdynamo_inline"]
            value = value.__wrapped__
            held |= {name: part for name, part in vars(value).items() if name == "__wrapped__"}
        self.fact(place, "globals", value.__globals__ is self.namespace)
        self.fact(place, "variables", value.__code__.co_varnames)
        self.fact(place, "code", f"{value.__code__.co_filename}:{value.__code__.co_firstlineno}")
        self.fact(place, "free", value.__code__.co_freevars)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield cell.cell_contents, f"{place}.<{name}>"
            except ValueError:
                self.fact(place, f"<{name}>", "empty")
        yield from ((part, f"{place}.{name}") for name, part in sorted(held.items()))

    def describe_memory(self) -> None:
        """Write down who shares memory with whom: the first place in the same memory, and the distance from it."""
        groups: list[tuple[int, int, str, int]] = []  # from, to, first place, its address
        storages: dict[int, str] = {}
        for place, address, low, high, storage in self.memory:
            if storage is not None:
                self.fact(place, "storage of", storages.setdefault(storage, place))
            if low >= high:
                continue
            for index, (other_low, other_high, first, first_address) in enumerate(groups):
                if low < other_high and other_low < high:
                    groups[index] = (min(low, other_low), max(high, other_high), first, first_address)
                    self.fact(place, "memory of", f"{first}, {address - first_address:+d} bytes")
                    break
            else:
                groups.append((low, high, place, address))
                self.fact(place, "memory of", place)


def _value(tensor: torch.Tensor) -> str:
    """Tell the values bit for bit: a digest of their bytes, and the first few to be read."""
    if not within_its_storage(tensor):
        return "no memory"
    with torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        # As bytes, since numpy knows no bfloat16.
        contents = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return f"{digest(contents)} {_short(flat[:8].tolist())}"


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  # a user's class may do anything
        return f"raises {error!r}"


def _is_ours(function: types.FunctionType) -> bool:
    return function.__globals__.get("__name__", "").partition(".")[0] == "aotlab"


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError) as error:
        return f"no source: {type(error).__name__}"


def _short(values: list[Any]) -> str:
    return "[" + ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values) + "]"


def digest(contents: bytes) -> str:
    """Return a short text that differs for different contents."""
    return hashlib.sha256(contents).hexdigest()[:12]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__
