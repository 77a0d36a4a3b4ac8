"""What a function reaches that is a library's, and what no guard watches: a function that reads that runs eagerly.

    ids = itertools.count()
    def f(x):
        return x * next(ids)        # a trace would hold the number of its own call for ever

What lies behind a `collections.ChainMap` or in a `bytearray` could be watched, but is too rare.
"""

from __future__ import annotations

import array
import collections
import functools
import io
import mmap
import operator
import queue
import random
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from aotlab.guards.values import is_plain, items_in, keys_in

_LIBRARIES = frozenset(("torch", "aotlab", "numpy", "builtins")) | sys.stdlib_module_names - {"__main__"}
#: Builtins by which code reads names that do not stand in it.
READERS_OF_NAMES = frozenset(("eval", "exec", "globals"))
#: The code of all functions that `functools.singledispatch` makes.
_DISPATCHER = cast(types.FunctionType, functools.singledispatch(lambda value: value)).__code__
#: Objects that change by being used: what only an installed package reads of them is its own affair.
_CHANGING: tuple[type, ...] = (
    type({}.keys()), type({}.values()), type({}.items()), memoryview, mmap.mmap, queue.SimpleQueue, random.Random,
    weakref.ref, *weakref.ProxyTypes, weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet,
)  # fmt: skip
#: Objects that hold something where no guard looks.
_HOLDING: tuple[type, ...] = (
    array.array, bytearray, collections.ChainMap, collections.UserDict, collections.UserList, collections.UserString,
    functools.singledispatchmethod, operator.attrgetter, operator.methodcaller, queue.Queue,
)  # fmt: skip


def root_of(name: Any) -> str:
    """Return the first part of a dotted name."""
    return str(name).split(".", 1)[0]


def is_library(thing: Any) -> bool:
    """Tell whether a function or class was written in torch, numpy, the standard library or aotlab itself."""
    if root_of(getattr(thing, "__module__", None)) not in _LIBRARIES:
        return False
    written_in = thing.__globals__.get("__name__") if isinstance(thing, types.FunctionType) else None
    return written_in is None or root_of(written_in) in _LIBRARIES


def slots_of(kind: type) -> frozenset[str]:
    """Return the attributes that objects of a class keep in slots."""
    if not any("__slots__" in vars(each) for each in kind.__mro__):
        return frozenset()
    names = {name for each in kind.__mro__ for name in vars(each)}
    return frozenset(name for name in names if isinstance(static_member(kind, name), types.MemberDescriptorType))


def entries_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Go through a container's items, each with what stands in brackets for it."""
    items = items_in(value)
    if isinstance(value, dict):
        texts = (repr(key) if is_plain(key) else "…" for key in keys_in(value))
        yield from zip(texts, items, strict=True)
    elif isinstance(value, (set, frozenset)):
        yield from (("…", item) for item in items)
    else:
        yield from ((str(i), item) for i, item in enumerate(items))


def static_member(kind: type, name: str) -> Any:
    """Look a name up in a class as Python does, without running anything."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def compiled_from(value: Any) -> Any:
    """Return the function or module that a compiled one of ours runs in a trace; None for anything else."""
    if root_of(type(value).__module__) != "aotlab" or not hasattr(value, "__dict__"):
        return None
    return vars(value).get("orig_module" if isinstance(value, nn.Module) else "__wrapped__")


def is_library_module(module: types.ModuleType) -> bool:
    """Tell whether a module is not the user's own: of the standard library, or installed."""
    return root_of(module.__name__) in _LIBRARIES or is_installed(str(getattr(module, "__file__", None) or ""))


def is_of_others(kind: type) -> bool:
    """Tell whether a class is a library's or a package's, and does not just hold what its user puts there."""
    if kind.__name__ in ("Namespace", "SimpleNamespace"):
        return False
    return is_library(kind) or is_installed(str(getattr(sys.modules.get(kind.__module__), "__file__", None) or ""))


def is_installed(file: str) -> bool:
    """Tell whether a file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


def is_changing(value: Any) -> bool:
    """Tell whether ``value`` may be another at each call by being used; run nothing for it."""
    kind = type(value)
    if issubclass(kind, _CHANGING) or is_random(value):
        return True
    if issubclass(kind, io.IOBase):  # what is only written to, as where a log goes, gives no values
        try:
            return not value.closed and bool(value.readable())
        except (AttributeError, ValueError, OSError):
            return True
    step = static_member(kind, "__next__")
    return step is not None and not isinstance(step, types.FunctionType)  # one in Python is followed as code


def is_holding(value: Any) -> bool:
    """Tell whether ``value`` holds something that no guard looks at, though the code may read it."""
    if isinstance(value, types.FunctionType):
        return value.__code__ is _DISPATCHER and "registry" in vars(value)
    return any(each.__module__ == "_ctypes" for each in type(type(value)).__mro__) or isinstance(value, _HOLDING)


def is_random(value: Any) -> bool:
    """Tell whether ``value`` is a generator of random numbers of Python's or of numpy's."""
    if isinstance(value, random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.BitGenerator, numpy.RandomState))
