"""Traced tensors that a function leaves behind in the caller's objects.

    cache = {}
    def f(x):
        cache["y"] = x * 2          # at a compiled call, this line does not run
        return x + 1

A `Watch` records the contents of the objects that the function can reach. After the run of the function, it finds
traced tensors in these objects, and restores the contents if the call is refused.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from aotlab._torch import is_functional
from aotlab.guards.guarded_values import CONTAINERS, has_users_class, items_in, keys_in, kind_of
from aotlab.guards.objects import labelled_items, slots_of

#: The largest number of items that a `Watch` records, because it must not walk through a data set.
_LIMIT = 20_000
_OPAQUE = (
    Tensor, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType,
    str, bytes, int, float, complex, type(None),
)  # fmt: skip


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its dictionary and its slots."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return slots | (getattr(value, "__dict__", None) or {})


def _is_container(value: Any) -> bool:
    if isinstance(value, _OPAQUE):
        return False
    if str(type(value).__module__).startswith("aotlab.") and not isinstance(value, nn.Module):
        # a compiled function of aotlab changes at each call; the original function is visited separately
        return False
    if isinstance(value, (type, types.FunctionType)):
        return not str(value.__module__).startswith(("torch", "builtins", "aotlab"))
    return isinstance(value, CONTAINERS) or hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def items_of(container: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items and the attributes of an object, each with its label (``[0]`` or ``.name``).

    Reading the items of a container runs no code of a user's class.
    """
    if isinstance(container, CONTAINERS):
        yield from ((f"[{text}]", value) for text, value in labelled_items(container))
        if not has_users_class(container):
            return
    yield from ((f".{key}", value) for key, value in _attributes(container).items())


def _contents(container: Any) -> list[Any]:
    """Return the contents of a container in order: for a dictionary the keys, then the values."""
    return [*keys_in(container), *items_in(container)] if isinstance(container, dict) else items_in(container)


class Watch:
    """A record of the contents of the objects that a function can reach, taken before it is traced.

    ``roots`` are pairs of a name and an object. ``objects`` maps the ids of the roots, and of all objects inside of
    them, to the objects.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        # for each object: its name, the object, its items (None if it is no container), and its attributes (None if it
        # is a plain container)
        self._before: list[tuple[str, Any, list[Any] | None, dict[str, Any] | None]] = []
        self._caches: list[tuple[str, Any]] = []  # functions with a `functools.lru_cache`, and their names
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
            by_name = not by_index or has_users_class(container)
            if by_name or not isinstance(container, (tuple, frozenset)):
                before = _contents(container) if by_index else None
                self._before.append((name, container, before, _attributes(container) if by_name else None))
            todo += [(name + label, value) for label, value in items if _is_container(value)]

    def leaked(self) -> str | None:
        """Return the name of an item or attribute that holds a traced tensor now and did not before, or None."""
        for name, container, before, attributes in self._before:
            ids_before = {id(value) for value in (*(before or ()), *(attributes or {}).values())}
            for label, value in items_of(container):
                if id(value) not in ids_before and _holds_traced(value, 4):
                    return name + label
        return next((f"the cache of {name}" for name, cache in self._caches if _caches_traced(cache)), None)

    def restore(self) -> None:
        """Restore the contents of each object.

        The cache of a `functools.lru_cache` function is cleared if it contains a traced tensor, because single items
        cannot be removed from it.
        """
        for _, cache in self._caches:
            if _caches_traced(cache):
                cache.cache_clear()
        for _, container, before, attributes in self._before:
            # compare ids, because the contents may be tensors, whose `==` returns a tensor
            if before is not None and list(map(id, _contents(container))) != list(map(id, before)):
                _refill(container, before)
            if attributes is None:
                continue
            for key, value in _attributes(container).items():
                if key not in attributes:
                    delattr(container, key)
                elif value is not attributes[key]:
                    setattr(container, key, attributes[key])


def _refill(container: Any, contents: list[Any]) -> None:
    """Give a container the contents that `_contents` returned, without running code of a user's class."""
    kind = kind_of(container)
    if kind in (tuple, frozenset):
        return
    kind.clear(container)
    if isinstance(container, dict):
        half = len(contents) // 2
        for key, value in zip(contents[:half], contents[half:], strict=True):
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, contents)


def _holds_traced(value: Any, depth: int) -> bool:
    """Tell whether a value is a traced tensor, or contains one at most ``depth`` levels deep."""
    if isinstance(value, Tensor):
        return is_functional(value)
    if depth == 0 or not _is_container(value):
        return False
    return any(_holds_traced(item, depth - 1) for _, item in list(items_of(value))[:_LIMIT])


def _caches_traced(cache: functools._lru_cache_wrapper[Any]) -> bool:
    """Tell whether the cache of a `functools.lru_cache` function contains a traced tensor.

    Python has no other access to the contents of this cache than ``gc.get_referents``.
    """
    return any(_holds_traced(referent, 4) for referent in gc.get_referents(cache))
