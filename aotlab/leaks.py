"""Traced tensors that a function leaves behind in the caller's objects.

    cache = {}
    def f(x):
        cache["y"] = x * 2          # at a compiled call, this line does not run
        return x + 1

After the trace ``cache["y"]`` would be a traced tensor. A `Watch` remembers what the objects that a function can reach
held before; afterwards it finds such tensors, and puts the objects back as they were.
"""

from __future__ import annotations

import collections
import functools
import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from aotlab.torch_internals import is_functional

#: So many items are looked at; a watch is no walk through a data set.
_LIMIT = 20_000
_PLAIN = (str, bytes, int, float, complex, type(None))
_OPAQUE = (
    Tensor, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType,
    *_PLAIN,
)  # fmt: skip
_COLLECTIONS = (dict, list, tuple, set, frozenset, collections.deque)


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds by name, in its dictionary or in slots."""
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                found[name] = getattr(value, name)
    return found


def _is_container(value: Any) -> bool:
    if isinstance(value, _OPAQUE):
        return False
    if str(type(value).__module__).startswith("aotlab.") and not isinstance(value, nn.Module):
        return False  # a compiled function, which changes by being called; what it was made from is a root, too
    if isinstance(value, (type, types.FunctionType)):
        return not str(value.__module__).startswith(("torch", "builtins", "aotlab"))
    return isinstance(value, _COLLECTIONS) or hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def _of_key(key: Any) -> str:
    """Name a key; a tensor, as in an optimizer's state, or any other object is not asked for its text."""
    return repr(key) if isinstance(key, _PLAIN) else f"a {type(key).__name__}"


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        yield from ((f"[{_of_key(key)}]", value) for key, value in list(container.items()))
    elif isinstance(container, (list, tuple, collections.deque)):
        yield from ((f"[{i}]", value) for i, value in enumerate(container))
    elif isinstance(container, (set, frozenset)):
        yield from (("[…]", value) for value in container)
    else:
        yield from ((f".{key}", value) for key, value in _attributes(container).items())


class Watch:
    """Remembers what objects hold; ``roots`` are (name, object)."""

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        self._before: list[tuple[str, Any, dict[str, Any] | list[Any]]] = []
        self._caches: list[tuple[str, Any]] = []
        seen: set[int] = set()
        todo = [(name, value) for name, value in roots if _is_container(value)]
        budget = _LIMIT
        while todo and budget > 0:
            name, container = todo.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            if isinstance(container, functools._lru_cache_wrapper):
                self._caches.append((name, container))
                continue
            items = list(_items(container))
            budget -= len(items) + 1
            if isinstance(container, dict):
                self._before.append((name, container, dict(container)))
            elif isinstance(container, (list, set, collections.deque)):
                self._before.append((name, container, list(container)))
            elif not isinstance(container, (tuple, frozenset)):
                self._before.append((name, container, _attributes(container)))
            todo += [(name + label, value) for label, value in items if _is_container(value)]

    def leaked(self) -> str | None:
        """Return the name of a place where a traced tensor lies now, None if there is none."""
        for name, container, before in self._before:
            known = {id(value) for value in (before.values() if isinstance(before, dict) else before)}
            for label, value in _items(container):
                if id(value) not in known and _holds_traced(value, 4):
                    return name + label
        return next((f"the cache of {name}" for name, cache in self._caches if _caches_traced(cache)), None)

    def restore(self) -> None:
        """Let every object hold again what it held before; a cache cannot forget one thing alone, and forgets all."""
        for _, cache in self._caches:
            if _caches_traced(cache):
                cache.cache_clear()
        for _, container, before in self._before:
            if isinstance(before, list):
                if [id(value) for value in container] != [id(value) for value in before]:
                    container.clear()
                    (container.update if isinstance(container, set) else container.extend)(before)
            elif isinstance(container, dict):
                if _identities(container) != _identities(before):
                    container.clear()
                    container.update(before)
            else:
                for key, value in _attributes(container).items():
                    if key not in before:
                        delattr(container, key)
                    elif value is not before[key]:
                        setattr(container, key, before[key])


def _identities(items: dict[Any, Any]) -> list[tuple[int, int]]:
    """Say which objects a dictionary holds; keys that are tensors cannot be compared by their values."""
    return [(id(key), id(value)) for key, value in items.items()]


def _holds_traced(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return is_functional(value)
    if depth == 0 or not _is_container(value):
        return False
    return any(_holds_traced(item, depth - 1) for _, item in list(_items(value))[:_LIMIT])


def _caches_traced(cache: functools._lru_cache_wrapper[Any]) -> bool:
    """Tell whether ``functools.lru_cache`` keeps a traced tensor: only the garbage collector is told what is in it."""
    return any(_holds_traced(held, 4) for held in gc.get_referents(cache))
