"""What a function reaches that no guard watches: such a function runs eagerly.

    ids = itertools.count()
    def f(x):
        return x * next(ids)        # a trace would hold the number of its own call for ever

There is no looking at what an iterator gives next; what lies behind a `collections.ChainMap` or in a `bytearray` could
be watched, which is more than such rare objects are worth.
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
from typing import Any, cast

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
    step = next((vars(each)["__next__"] for each in kind.__mro__ if "__next__" in vars(each)), None)
    return step is not None and not isinstance(step, types.FunctionType)  # one in Python is followed as code


def is_holding(value: Any) -> bool:
    """Tell whether ``value`` holds something that no guard looks at, though the code may read it."""
    if isinstance(value, types.FunctionType):
        return value.__code__ is _DISPATCHER and "registry" in vars(value)
    of_ctypes = any(each.__module__ == "_ctypes" for each in type(type(value)).__mro__)
    return of_ctypes or isinstance(value, _HOLDING)


def is_random(value: Any) -> bool:
    """Tell whether ``value`` is a generator of random numbers of Python's or of numpy's."""
    if isinstance(value, random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.BitGenerator, numpy.RandomState))
