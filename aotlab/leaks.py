"""Traced tensors that a function leaves behind in the caller's objects.

    cache = {}
    def f(x):
        cache["y"] = x * 2          # at a compiled call, this line does not run
        return x + 1

After the trace ``cache["y"]`` would be a traced tensor. A `Watch` remembers what the objects that a function can reach
held before; afterwards it finds such tensors, and puts the objects back as they were.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from aotlab.torch_internals import is_functional

_LIMIT = 20_000
_OPAQUE = (
    Tensor, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType,
    str, bytes, int, float, complex, type(None),
)  # fmt: skip


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        yield from ((f"[{key!r}]", value) for key, value in container.items())
    elif isinstance(container, (list, tuple)):
        yield from ((f"[{i}]", value) for i, value in enumerate(container))
    elif isinstance(container, (set, frozenset)):
        yield from (("", value) for value in container)
    elif isinstance(getattr(container, "__dict__", None), dict):
        yield from ((f".{key}", value) for key, value in vars(container).items())


def _is_container(value: Any) -> bool:
    return not isinstance(value, _OPAQUE) and (
        isinstance(value, (dict, list, tuple, set, frozenset)) or isinstance(getattr(value, "__dict__", None), dict)
    )


class Watch:
    """Remembers what objects hold; ``roots`` are (name, object)."""

    def __init__(self, roots: Sequence[tuple[str, Any]]) -> None:
        self._before: list[tuple[str, Any, Any]] = []
        seen: set[int] = set()
        todo = [(name, value) for name, value in roots if _is_container(value)]
        budget = _LIMIT
        while todo and budget > 0:
            name, container = todo.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            items = list(_items(container))
            budget -= len(items) + 1
            if isinstance(container, (dict, list, set)):
                self._before.append((name, container, container.copy()))
            elif not isinstance(container, (tuple, frozenset)):
                self._before.append((name, vars(container), dict(vars(container))))
            todo += [(name + label, value) for label, value in items if _is_container(value)]

    def leaked(self) -> str | None:
        """Return the name of a place where a traced tensor lies now, None if there is none."""
        for name, container, before in self._before:
            if isinstance(container, dict):
                changed = [(f"{name}.{k}", v) for k, v in container.items() if v is not before.get(k)]
            elif isinstance(container, list):
                known = {id(v) for v in before}
                changed = [(f"{name}[{i}]", v) for i, v in enumerate(container) if id(v) not in known]
            else:
                changed = [(name, v) for v in container if v not in before]
            for label, value in changed:
                if _holds_traced(value, 4):
                    return label
        return None

    def restore(self) -> None:
        """Let every object hold again what it held before."""
        for _, container, before in self._before:
            if isinstance(container, list):
                if len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
                    container[:] = before
            elif (
                isinstance(container, set)
                or list(container) != list(before)
                or any(v is not before[k] for k, v in container.items())
            ):
                container.clear()
                container.update(before)


def _holds_traced(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return is_functional(value)
    if depth == 0 or not _is_container(value):
        return False
    return any(_holds_traced(item, depth - 1) for _, item in list(_items(value))[:_LIMIT])
