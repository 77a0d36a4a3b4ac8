"""Keep the names that Dynamo adds to a namespace out of the user's sight.

Dynamo stores the functions that it makes, and aliases of the objects that its guards read, as globals of the compiled
code. In a notebook these globals are the user's variables. Also, Dynamo cannot read a global that did not exist when
the code began, even if the code itself has just bound it. A `Playground` solves both problems. Dynamo's names are
present only while compiled code runs. Names that are about to be bound are present only while Dynamo traces.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotlab import _torch as internals

#: Dynamo only captures code that names torch. Regions use this name, whatever the user's name for torch is.
TORCH = "__aotlab_torch"


class _NotBoundYet:
    """A placeholder for a variable while Dynamo traces the code that will bind it.

    If the code reads the variable before it binds it, eager raises a `NameError`. Dynamo reads the class of every
    object before it uses the object. For this object, that raises an error. So Dynamo leaves the code to Python, which
    raises eager's error.
    """

    __slots__ = ()

    def _unreadable(self) -> type:
        raise NameError("not bound yet")

    __class__ = property(_unreadable)


class Playground:
    """A namespace in which Dynamo's names exist only while compiled code runs.

    Parameters
    ----------
    namespace
        The globals of the code to be compiled.

    Attributes
    ----------
    compiling
        Whether Dynamo is compiling now.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self._dynamo_names: dict[str, Any] = {}
        self._depth = 0
        self._owner: int | None = None
        self._bound: Collection[str] = ()
        self._lent: list[str] = []
        self._before: set[str] = set()
        self._compiled = False
        self.compiling = False

    @contextmanager
    def opened(self, bound: Collection[str] = ()) -> Iterator[None]:
        """Add Dynamo's names to the namespace during a block.

        ``bound`` are the variables that the compiled code in the block binds.
        """
        if self._depth:  # compiled code that calls compiled code
            outer, self._bound = self._bound, bound
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                self._bound = outer
            return
        self.namespace.update(self._dynamo_names)
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
            self._dynamo_names[name] = self.namespace[name]
        self._lent, self._compiled, self.compiling = [], True, False

    def _close(self) -> None:
        for name in (*self._dynamo_names, TORCH):
            self.namespace.pop(name, None)
        if self._compiled:
            # When compiled code is freed, hooks of Dynamo remove its names from the namespace. The names are now in
            # `_dynamo_names`, so the hooks must remove them from there.
            for hook in internals.dynamo_cleanups(self.namespace):
                self._dynamo_names.setdefault(hook.name, None)
                hook.scope = self._dynamo_names
                self.namespace.pop(hook.name, None)
            self._compiled = False
