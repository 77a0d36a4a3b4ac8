"""Traced tensors that a function leaves behind in the caller's objects.

    cache = {}
    def f(x):
        cache["y"] = x * 2          # at a compiled call, this line does not run
        return x + 1

A `Watch` remembers what the objects within reach held, finds traced tensors there, and puts them back as they were.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from aotlab._torch import is_functional
from aotlab.guards.objects import entries_of, slots_of
from aotlab.guards.values import CONTAINERS, is_of_its_own_kind, items_in, keys_in, kind_of

#: So many items are looked at; a watch is no walk through a data set.
_LIMIT = 20_000
_OPAQUE = (
    Tensor, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType,
    str, bytes, int, float, complex, type(None),
)  # fmt: skip


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds by name, in its dictionary or in slots."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return slots | (getattr(value, "__dict__", None) or {})


def _is_container(value: Any) -> bool:
    if isinstance(value, _OPAQUE):
        return False
    if str(type(value).__module__).startswith("aotlab.") and not isinstance(value, nn.Module):
        return False  # a compiled function, which changes by being called; what it was made from is a root, too
    if isinstance(value, (type, types.FunctionType)):
        return not str(value.__module__).startswith(("torch", "builtins", "aotlab"))
    return isinstance(value, CONTAINERS) or hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def items_of(container: Any) -> Iterator[tuple[str, Any]]:
    """Go through what an object holds, by index and by name; no code of its class is run for its indices."""
    if isinstance(container, CONTAINERS):
        yield from ((f"[{text}]", value) for text, value in entries_of(container))
        if not is_of_its_own_kind(container):
            return
    yield from ((f".{key}", value) for key, value in _attributes(container).items())


def _held(container: Any) -> list[Any]:
    """Return what a container holds, keys and all, in its order."""
    return [*keys_in(container), *items_in(container)] if isinstance(container, dict) else items_in(container)


class Watch:
    """Remembers what objects hold; ``roots`` are (name, object), ``objects`` all that they lead to, by id."""

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        # by index, and by name; each None where an object has none
        self._before: list[tuple[str, Any, list[Any] | None, dict[str, Any] | None]] = []
        self._caches: list[tuple[str, Any]] = []
        self.objects: dict[int, Any] = {}
        todo = [(name, value) for name, value in roots if _is_container(value)]
        budget = _LIMIT
        while todo and budget > 0:
            name, container = todo.pop()
            if id(container) in self.objects:
                continue
            self.objects[id(container)] = container
            if isinstance(container, functools._lru_cache_wrapper):
                self._caches.append((name, container))
                continue
            items = list(items_of(container))
            budget -= len(items) + 1
            by_index = isinstance(container, CONTAINERS)
            by_name = not by_index or is_of_its_own_kind(container)
            if by_name or not isinstance(container, (tuple, frozenset)):
                before = _held(container) if by_index else None
                self._before.append((name, container, before, _attributes(container) if by_name else None))
            todo += [(name + label, value) for label, value in items if _is_container(value)]

    def leaked(self) -> str | None:
        """Return the name of a place where a traced tensor lies now, None if there is none."""
        for name, container, before, attributes in self._before:
            known = {id(value) for value in (*(before or ()), *(attributes or {}).values())}
            for label, value in items_of(container):
                if id(value) not in known and _holds_traced(value, 4):
                    return name + label
        return next((f"the cache of {name}" for name, cache in self._caches if _caches_traced(cache)), None)

    def restore(self) -> None:
        """Let every object hold again what it held before; a cache cannot forget one thing alone, and forgets all."""
        for _, cache in self._caches:
            if _caches_traced(cache):
                cache.cache_clear()
        for _, container, before, attributes in self._before:
            # keys that are tensors cannot be compared by their values
            if before is not None and list(map(id, _held(container))) != list(map(id, before)):
                _refill(container, before)
            if attributes is None:
                continue
            for key, value in _attributes(container).items():
                if key not in attributes:
                    delattr(container, key)
                elif value is not attributes[key]:
                    setattr(container, key, attributes[key])


def _refill(container: Any, held: list[Any]) -> None:
    """Let a container hold what `_held` returned, by the methods of Python's own kinds alone."""
    kind = kind_of(container)
    if kind in (tuple, frozenset):
        return
    kind.clear(container)
    if isinstance(container, dict):
        half = len(held) // 2
        for key, value in zip(held[:half], held[half:], strict=True):
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, held)


def _holds_traced(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return is_functional(value)
    if depth == 0 or not _is_container(value):
        return False
    return any(_holds_traced(item, depth - 1) for _, item in list(items_of(value))[:_LIMIT])


def _caches_traced(cache: functools._lru_cache_wrapper[Any]) -> bool:
    """Tell whether ``functools.lru_cache`` keeps a traced tensor: only the garbage collector is told what is in it."""
    return any(_holds_traced(held, 4) for held in gc.get_referents(cache))
