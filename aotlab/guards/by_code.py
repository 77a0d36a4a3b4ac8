"""What is known of code objects, for as long as they live.

A dictionary with code objects as its keys would keep each of them for ever; and Dynamo, which writes code anew at each
compilation, takes what it compiled for a function out of a module's globals when that code dies.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Generic, TypeVar

Known = TypeVar("Known")


class ByCode(Generic[Known]):
    """A dictionary from code objects, told apart as objects, that keeps none of them.

    Examples
    --------
    >>> known = ByCode[int]()
    >>> code = compile("1 + 1", "example", "eval")
    >>> known.put(code, 2)
    2
    >>> known.get(code), len(known)
    (2, 1)
    >>> del code
    >>> len(known)
    0
    """

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._watched: dict[int, weakref.ref[CodeType]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, code: CodeType) -> Known | None:
        """Return what is known of ``code``, None if nothing is."""
        return self._known.get(id(code))

    def put(self, code: CodeType, value: Known) -> Known:
        """Note ``value``, and return it."""
        key, known, watched = id(code), self._known, self._watched

        def forget(_: object) -> None:  # called before another object can have the same id
            known.pop(key, None)
            watched.pop(key, None)

        watched[key] = weakref.ref(code, forget)
        known[key] = value
        return value
