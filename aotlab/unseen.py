"""What a function reaches that no guard can watch, and what lies behind objects that only pass something on.

    ids = itertools.count()
    def f(x):
        return x * next(ids)        # a trace would hold the number of its own call for ever

There is no looking at what an iterator gives next, so that such a function runs eagerly. Other objects have something
behind them that can be looked at: the dictionary of a mapping proxy, the maps of a `collections.ChainMap`, the list
whose ``append`` was captured.
"""

from __future__ import annotations

import collections
import functools
import gc
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

from aotlab.buffers import is_pointer

#: Builtins by which code reads names that do not stand in it.
READERS_OF_NAMES = frozenset(("eval", "exec", "globals"))
#: Classes of the standard library in Python, and the attribute in which each keeps what it holds.
_KEPT_IN = (
    (collections.ChainMap, "maps"), (collections.UserDict, "data"), (collections.UserList, "data"),
    (queue.Queue, "queue"), (weakref.WeakValueDictionary, "data"), (weakref.WeakSet, "data"),
)  # fmt: skip
#: The code of all functions that `functools.singledispatch` makes.
_DISPATCHER = cast(types.FunctionType, functools.singledispatch(lambda value: value)).__code__
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CHANGING = (*_VIEWS, memoryview, mmap.mmap, queue.SimpleQueue)


def is_unseen(value: Any) -> bool:
    """Tell whether ``value`` has a state that may change at each call and cannot be compared; run nothing for it."""
    kind = type(value)
    if issubclass(kind, _CHANGING) or is_random(value) or is_pointer(value):
        return True
    if issubclass(kind, io.IOBase):
        return _is_read(value)
    step = _static(kind, "__next__")  # written in Python, it is followed as code; a weak proxy has one for all
    return step is not None and not isinstance(step, types.FunctionType) and kind not in weakref.ProxyTypes


def is_random(value: Any) -> bool:
    """Tell whether ``value`` is a generator of random numbers of Python's or of numpy's."""
    if isinstance(value, random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.BitGenerator, numpy.RandomState))


def _is_read(file: Any) -> bool:
    """Tell whether a file is open to be read from; what is only written to, as where a log goes, gives no values."""
    try:
        return not file.closed and bool(file.readable())
    except (AttributeError, ValueError, OSError):
        return True


def parts_behind(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object passes on, with what is to be added to its name: what it is made of stays the same."""
    if isinstance(value, types.MappingProxyType):
        yield from (("", inner) for inner in gc.get_referents(value))
    elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        owner = value.__self__
        if owner is not None and not isinstance(owner, (type, types.ModuleType)) and not is_random(owner):
            yield ".__self__", owner
    elif isinstance(value, functools.singledispatchmethod):
        yield ".dispatcher", value.dispatcher
    elif isinstance(value, operator.methodcaller):
        yield from (("", part) for part in gc.get_referents(value) if isinstance(part, (tuple, dict)))


def kept_in(value: Any) -> str | None:
    """Return the name of the attribute in which an object of the standard library keeps what it holds."""
    if isinstance(value, types.FunctionType):
        return "registry" if is_dispatcher(value) else None
    return next((name for kind, name in _KEPT_IN if isinstance(value, kind) and name in vars(value)), None)


def is_dispatcher(function: types.FunctionType) -> bool:
    """Tell whether a function was made by `functools.singledispatch`."""
    return function.__code__ is _DISPATCHER and "registry" in vars(function)


def names_looked_up(value: Any) -> frozenset[str]:
    """Return the names of attributes that an object of `operator` looks up."""
    if not isinstance(value, (operator.attrgetter, operator.methodcaller)):
        return frozenset()
    made = value.__reduce__()
    names = [text for part in made for text in _texts(part)]
    return frozenset(each for name in names for each in name.split("."))


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, functools.partial):  # as a `methodcaller` with arguments by name is taken apart
        yield from (text for text in part.args if isinstance(text, str))
    elif isinstance(part, tuple):
        yield from (text for text in part if isinstance(text, str))


def _static(kind: type, name: str) -> Any:
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
