"""Hide from the user the names that Dynamo adds to a namespace.

Dynamo stores the functions that it makes, and more names for the objects that its guards read, as globals of the
compiled code. In a notebook these globals are the user's variables. There is a second problem: Dynamo cannot read a
global that did not exist when the code began, even if the code itself has just bound it. A `Playground` solves both
problems. Dynamo's names are in the namespace only while compiled code runs. A variable that the code will bind has a
placeholder in the namespace, but only while Dynamo traces the code.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotlab import _torch as internals

#: A global name for torch. Dynamo captures code only if the code contains a name for torch, so each region contains
#: this name, whatever the user's name for torch is.
TORCH = "__aotlab_torch"


class _NotBoundYet:
    """A placeholder for a variable while Dynamo traces the code that will bind it.

    If the code reads the variable before the code has bound it, eager raises a `NameError`, so compiled code must raise
    it, too. Dynamo reads the class of every object before it uses the object. Reading the class of a placeholder raises
    an error. So Dynamo leaves the code to Python, which raises eager's error.
    """

    __slots__ = ()

    def _unreadable(self) -> type:
        raise NameError("not bound yet")

    __class__ = property(_unreadable)


class Playground:
    """A namespace in which the names that Dynamo adds exist only while compiled code runs.

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
        if self._depth:  # compiled code has called compiled code, so the names are already there
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
            # When compiled code is freed, hooks of Dynamo remove the code's names from the namespace. The names are now
            # in `_dynamo_names`, so the hooks must remove them from there.
            for hook in internals.dynamo_cleanups(self.namespace):
                self._dynamo_names.setdefault(hook.name, None)
                hook.scope = self._dynamo_names
                self.namespace.pop(hook.name, None)
            self._compiled = False
