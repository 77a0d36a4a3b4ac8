"""What a function reads besides its arguments, as far as the direct frontend can see it.

Closures, defaults, globals, the functions and classes of the user's that those lead to, and the ``training`` flags of
modules. Plain values are compared by value, built-in containers by their contents, tensors by identity and kind (their
values cannot enter a trace), everything else by identity. What other objects hold in their attributes is a documented
exclusion.
"""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

#: Values that are what they are: compared by type and value.
PLAIN = (
    int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size, enum.Enum, slice, range, type(Ellipsis),
)  # fmt: skip
_MISSING = object()
_CONTAINERS = (tuple, list, dict, set, frozenset, collections.deque)
_DEPTH = 6
_ITEMS = 256


def same_value(a: Any, b: Any) -> bool:
    """Tell whether two plain values are the same for a trace: 0.0 is not -0.0, and nan is nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == str(b.hex())
    if isinstance(a, complex):
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if isinstance(a, slice):
        return all(same_value(x, y) for x, y in ((a.start, b.start), (a.stop, b.stop), (a.step, b.step)))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_value(v, b[k]) for k, v in a.items())
    return bool(a == b)


@dataclass(frozen=True, slots=True)
class Reached:
    """One value outside the arguments that the traced code may read.

    ``read`` fetches it again; ``expected`` is what it was, or its `contents`; ``how`` says how the two are compared;
    ``write`` assigns it, where the function itself could; ``value`` keeps the object alive, so that no other one gets
    its identity (tensors are not kept).
    """

    name: str
    read: Callable[[], Any]
    expected: Any
    how: Literal["value", "contents", "identity"]
    write: Callable[[Any], None] | None = None
    value: Any = None

    def put_back(self) -> None:
        """Undo an assignment that a trace made."""
        if self.write is not None:
            self.write(self.expected if self.how == "value" else self.value)

    def holds(self) -> bool:
        """Tell whether the value is still what the trace saw."""
        now = self.read()
        if self.how == "identity":
            return now is self.expected
        if self.how == "value":
            return now is self.expected or same_value(now, self.expected)
        return same_value(contents(now), self.expected)


def contents(value: Any, depth: int = _DEPTH) -> Any:
    """Describe a value in plain values: containers item by item, down to identities."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        kind = (tuple(value.shape), value.dtype, value.device, value.requires_grad)
        return ("tensor", id(value), *kind)
    if isinstance(value, _CONTAINERS) and depth and len(value) <= _ITEMS:
        items = list(value.items()) if isinstance(value, dict) else list(value)
        return (type(value).__name__, [contents(item, depth - 1) for item in items])
    if isinstance(value, _CONTAINERS):
        return (type(value).__name__, id(value), len(value))
    return ("object", id(value))


def _is_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", None)).split(".")[0] in ("torch", "aotlab", "builtins", "numpy")


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)


def reached_state(function: Any) -> tuple[Reached, ...]:
    """Collect what ``function`` may read besides its arguments."""
    return _reach(function)[0]


def reached_objects(function: Any) -> tuple[tuple[str, Any], ...]:
    """Collect the objects, by name, in which ``function`` could leave something behind."""
    return _reach(function)[1]


def _reach(function: Any) -> tuple[tuple[Reached, ...], tuple[tuple[str, Any], ...]]:
    found: list[Reached] = []
    objects: list[tuple[str, Any]] = []
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", function)]

    def visit(name: str, value: Any, read: Callable[[], Any], write: Callable[[Any], None] | None = None) -> None:
        if isinstance(value, types.ModuleType):
            return  # modules are not rebound
        if isinstance(value, Tensor):
            found.append(Reached(name, read, contents(value), "contents", write))
            return
        objects.append((name, value))
        if isinstance(value, PLAIN):
            found.append(Reached(name, read, value, "value", write))
        elif isinstance(value, _CONTAINERS):
            found.append(Reached(name, read, contents(value), "contents", write, value))
            inner = value.values() if isinstance(value, dict) else value
            todo.extend((name, item) for item in list(inner)[:_ITEMS] if callable(item))
        else:
            found.append(Reached(name, read, value, "identity", write, value))
            todo.append((name, value))

    while todo:
        prefix, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.MethodType):
            objects.append((prefix or "self", value.__self__))
            todo += [(prefix, value.__self__), (prefix, value.__func__)]
        elif isinstance(value, (staticmethod, classmethod)):
            todo.append((prefix, value.__func__))
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules():
                label = ".".join(part for part in (prefix, path, "training") if part)
                found.append(Reached(label, _attribute(module, "training"), module.training, "value"))
                todo += [(prefix, vars(module).get("forward")), (prefix, type(module))]
        elif isinstance(value, type):
            if not _is_library(value):
                todo += [(prefix, member) for member in vars(value).values() if callable(member)]
        elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
            todo.append((prefix, value.func))
            for i, item in enumerate(value.args):
                visit(f"{prefix}.args[{i}]", item, _item(value.args, i))
            for key, item in value.keywords.items():
                visit(f"{prefix}.{key}", item, _item(value.keywords, key))
        elif isinstance(_call_method(value), types.FunctionType):
            objects.append((prefix or "self", value))
            todo.append((prefix, _call_method(value)))
        elif isinstance(value, types.FunctionType) and not _is_library(value):
            for label, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    held = cell.cell_contents
                except ValueError:
                    continue
                visit(label, held, _attribute(cell, "cell_contents"), partial(setattr, cell, "cell_contents"))
            for i, default in enumerate(value.__defaults__ or ()):
                visit(f"default {i} of {value.__name__}", default, _default(value, i))
            for key, default in (value.__kwdefaults__ or {}).items():
                visit(f"default {key} of {value.__name__}", default, _keyword_default(value, key))
            for label in dict.fromkeys(_code_names(value.__code__)):
                if label in value.__globals__:
                    owner = value.__globals__
                    visit(label, owner[label], _item(owner, label), partial(owner.__setitem__, label))
    return tuple(found), tuple(objects)


def _call_method(value: Any) -> Any:
    """Return the function that runs when an object of a user's class is called."""
    return getattr(type(value), "__call__", None)  # noqa: B004  # the method is wanted, not whether there is one


def _attribute(owner: Any, name: str) -> Callable[[], Any]:
    return lambda: getattr(owner, name, _MISSING)


def _item(owner: Any, key: Any) -> Callable[[], Any]:
    if isinstance(owner, Mapping):
        return lambda: owner.get(key, _MISSING)
    return lambda: owner[key]


def _keyword_default(function: types.FunctionType, key: str) -> Callable[[], Any]:
    return lambda: (function.__kwdefaults__ or {}).get(key, _MISSING)


def _default(function: types.FunctionType, index: int) -> Callable[[], Any]:
    return lambda: (function.__defaults__ or ())[index] if index < len(function.__defaults__ or ()) else _MISSING


def fast_check(reached: Sequence[Reached]) -> Callable[[], bool] | None:
    """Make one function of many small checks; None if there are none."""
    if not reached:
        return None
    by_identity = [(item.read, item.expected) for item in reached if item.how == "identity"]
    by_value = [(item.read, item.expected) for item in reached if item.how == "value"]
    others = [item.holds for item in reached if item.how == "contents"]

    def check() -> bool:
        for read, expected in by_identity:
            if read() is not expected:
                return False
        for read, expected in by_value:
            now = read()
            if now is not expected and not same_value(now, expected):
                return False
        return all(holds() for holds in others)

    return check
