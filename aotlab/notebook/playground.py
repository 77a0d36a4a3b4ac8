"""What Dynamo leaves in a namespace, kept out of the user's sight.

Dynamo stores the functions that it makes, and aliases of what its guards look at, as globals of the code that it
compiled; in a notebook these are the user's variables. And it cannot read a global that did not exist when the code
began, although the code itself has just bound it. A `Playground` arranges both: Dynamo's names are there while
compiled code runs and gone afterwards; names that are about to be bound are there while Dynamo traces, and only then.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotlab import _torch as internals

#: Dynamo looks only into code that names torch: regions name it so, whatever the user calls it.
TORCH = "__aotlab_torch"


class _NotBoundYet:
    """Stands for a variable while Dynamo traces the code that will bind it.

    Code that reads it first is an error in eager. Dynamo asks everything for its class before it does anything with
    it, cannot go on, and leaves the code to Python, which says so in its own words.
    """

    __slots__ = ()

    def _unreadable(self) -> type:
        raise NameError("not bound yet")

    __class__ = property(_unreadable)


class Playground:
    """One namespace, and what Dynamo keeps in it.

    Parameters
    ----------
    namespace
        The globals of the code to be compiled.

    Attributes
    ----------
    compiling
        Whether Dynamo is compiling at this moment.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._kept: dict[str, Any] = {}
        self._depth = 0
        self._owner: int | None = None
        self._bound: Collection[str] = ()
        self._lent: list[str] = []
        self._before: set[str] = set()
        self._compiled = False
        self.compiling = False

    @contextmanager
    def opened(self, bound: Collection[str] = ()) -> Iterator[None]:
        """Put Dynamo's names in place for the length of a block whose compiled code binds the names ``bound``."""
        if self._depth:  # compiled code that calls compiled code
            outer, self._bound = self._bound, bound
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                self._bound = outer
            return
        self.namespace.update(self._kept)
        self.namespace[TORCH] = torch
        self._depth, self._owner, self._bound = 1, threading.get_ident(), bound
        try:
            with internals.dynamo_compiles(self._compile_starts, self._compile_ends):
                yield
        finally:
            self._depth, self._owner, self._bound = 0, None, ()
            self._close()

    def _compile_starts(self, _event: Any) -> None:
        if threading.get_ident() != self._owner:
            return
        self._before, self.compiling = set(self.namespace), True
        self._lent = [name for name in self._bound if name not in self.namespace]
        for name in self._lent:
            self.namespace[name] = _NotBoundYet()

    def _compile_ends(self, _event: Any) -> None:
        if threading.get_ident() != self._owner:
            return
        for name in self._lent:
            self.namespace.pop(name, None)
        for name in self.namespace.keys() - self._before:
            self._kept[name] = self.namespace[name]
        self._lent, self._compiled, self.compiling = [], True, False

    def _close(self) -> None:
        for name in (*self._kept, TORCH):
            self.namespace.pop(name, None)
        if self._compiled:
            # When the compiled code goes, Dynamo takes its names away: from here, where they are.
            for hook in internals.dynamo_cleanups(self.namespace):
                self._kept.setdefault(hook.name, None)
                hook.scope = self._kept
                self.namespace.pop(hook.name, None)
            self._compiled = False
