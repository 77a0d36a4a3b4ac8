"""Classify the objects that a function can reach: objects of libraries, and objects whose changes no guard can notice.

    ids = itertools.count()
    def f(x):
        return x * next(ids)        # an entry would use the number of the traced call in each call

A function that reads an object whose changes no guard can notice runs eagerly. The contents of a `collections.ChainMap`
or of a `bytearray` could be guarded, but functions that read them are too rare.
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
from typing import Any, TypeGuard, cast

from torch import nn

from aotlab.guards.guarded_values import is_plain, items_in, keys_in

_LIBRARIES = frozenset(("torch", "aotlab", "numpy", "builtins")) | sys.stdlib_module_names - {"__main__"}
#: Special methods that Python calls although no code mentions them, and that `object` or `nn.Module` defines. If a
#: class gets its own version later, the function may behave differently.
_IMPLICIT_METHODS = frozenset(
    ("__bool__", "__call__", "__contains__", "__eq__", "__getattr__", "__getattribute__", "__hash__", "__len__",
     "__ne__", "__setattr__")
)  # fmt: skip
#: Special methods that are not called while a trace runs the function.
_NOT_CALLED = frozenset(
    ("__init__", "__new__", "__del__", "__init_subclass__", "__set_name__", "__getstate__", "__setstate__",
     "__reduce__", "__reduce_ex__", "__class_getitem__", "__sizeof__", "__dir__")
)  # fmt: skip
#: Methods that convert an object to text. A guard checks that they are not replaced. The values that they read are not
#: guarded.
DISPLAY_METHODS = frozenset(("__repr__", "__str__", "__format__"))
#: Builtins through which code can read global variables whose names do not appear in the code.
READERS_OF_NAMES = frozenset(("eval", "exec", "globals"))
#: The code object that all functions made by `functools.singledispatch` share.
_DISPATCHER = cast(types.FunctionType, functools.singledispatch(lambda value: value)).__code__
#: Types of objects that change when they are used, or without the code doing anything. A function that reads such an
#: object runs eagerly, unless only the code of an installed package reads it.
_TYPES_THAT_CHANGE: tuple[type, ...] = (
    type({}.keys()), type({}.values()), type({}.items()), memoryview, mmap.mmap, queue.SimpleQueue, random.Random,
    weakref.ref, *weakref.ProxyTypes, weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet,
)  # fmt: skip
#: Types of objects with contents that no guard compares. A function that reads such an object runs eagerly.
_TYPES_WITH_CONTENTS: tuple[type, ...] = (
    array.array, bytearray, collections.ChainMap, collections.UserDict, collections.UserList, collections.UserString,
    functools.singledispatchmethod, operator.attrgetter, operator.methodcaller, queue.Queue,
)  # fmt: skip


def root_of(name: Any) -> str:
    """Return the first part of a dotted name."""
    return str(name).split(".", 1)[0]


def is_library(value: Any) -> bool:
    """Tell whether a function or class belongs to torch, numpy, the standard library or aotlab itself."""
    if root_of(getattr(value, "__module__", None)) not in _LIBRARIES:
        return False
    globals_module = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else None
    return globals_module is None or root_of(globals_module) in _LIBRARIES


def slots_of(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the objects of a class store in ``__slots__``."""
    if not any("__slots__" in vars(each) for each in kind.__mro__):
        return frozenset()
    names = {name for each in kind.__mro__ for name in vars(each)}
    return frozenset(name for name in names if isinstance(static_member(kind, name), types.MemberDescriptorType))


def labelled_items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a container's items, each with the text of its index or key."""
    items = items_in(value)
    if isinstance(value, dict):
        texts = (repr(key) if is_plain(key) else "…" for key in keys_in(value))
        yield from zip(texts, items, strict=True)
    elif isinstance(value, (set, frozenset)):
        yield from (("…", item) for item in items)
    else:
        yield from ((str(i), item) for i, item in enumerate(items))


def static_member(kind: type, name: str) -> Any:
    """Look a name up in a class and its bases, without running any code."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def special_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods of a class that Python may call although no code mentions their names."""
    for name, member in list(vars(kind).items()):
        if not (name.startswith("__") and name.endswith("__")) or name in _NOT_CALLED | DISPLAY_METHODS:
            continue
        # leave out methods that `dataclasses` generates: their file is "<string>"
        is_handwritten = isinstance(member, types.FunctionType) and member.__code__.co_filename != "<string>"
        if is_handwritten or isinstance(member, (staticmethod, classmethod)):
            yield name, member


def undefined_special_methods(kind: type) -> set[str]:
    """Return the names of special methods that a class inherits and does not define itself.

    If the class gets such a method later, Python uses it although no code mentions it. So a guard checks that the class
    does not have these methods.
    """
    inherited = [item for each in kind.__mro__[1:-1] for item in vars(each).items()]
    special = {name for name, member in inherited if name.startswith("__") and callable(member)}
    return (special | _IMPLICIT_METHODS) - vars(kind).keys()


def compiled_from(value: Any) -> Any:
    """Return the original of a compiled function or module of aotlab, or None for other objects.

    If the traced function calls the compiled function, the trace runs the original. The compiled form of a function of
    a notebook cell is a function of aotlab that has the name and the module of its original.
    """
    made_by = value.__globals__.get("__name__") if type(value) is types.FunctionType else type(value).__module__
    if root_of(made_by) != "aotlab" or not hasattr(value, "__dict__"):
        return None
    return vars(value).get("orig_module" if isinstance(value, nn.Module) else "__wrapped__")


def is_users_addition(value: Any) -> bool:
    """Tell whether an attribute of a library's class or module may come from the user.

    This is true for a function, a property or a callable whose code is not a library's, for an object of a class that
    is not a library's, and for a plain value.
    """
    functions = [getattr(value, name, None) for name in ("fget", "__func__", "func")]
    function = next((each for each in (value, *functions) if isinstance(each, types.FunctionType)), None)
    if function is not None:
        return not is_library(function)
    return is_plain(value) or not is_library(type(value))


def is_setting(value: Any) -> bool:
    """Tell whether an attribute of a library's module is a setting: a plain value, a function, or a user's object.

    A list of weights, for example, is no setting.
    """
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
    if isinstance(value, functions) or (type(value) is tuple and all(map(is_plain, value))):
        return True
    return is_users_addition(value)


def is_library_module(module: types.ModuleType) -> bool:
    """Tell whether a module belongs to torch, numpy, aotlab, the standard library or another installed package."""
    return root_of(module.__name__) in _LIBRARIES or is_installed(str(getattr(module, "__file__", None) or ""))


def is_package(value: Any) -> TypeGuard[types.ModuleType]:
    """Tell whether an object is a Python module of an installed package other than torch, numpy and aotlab.

    Attributes that the user's code reads from such a module are guarded like the attributes of the user's modules.
    """
    if not issubclass(type(value), types.ModuleType) or root_of(value.__name__) in _LIBRARIES:
        return False
    return is_installed(str(getattr(value, "__file__", None) or ""))


def is_of_library_or_package(kind: type) -> bool:
    """Tell whether a class belongs to a library or an installed package, except classes like `types.SimpleNamespace`.

    The excepted classes only store the user's values, so they are treated like classes of the user.
    """
    if kind.__name__ in ("Namespace", "SimpleNamespace"):
        return False
    return is_library(kind) or is_installed(str(getattr(sys.modules.get(kind.__module__), "__file__", None) or ""))


def is_installed(file: str) -> bool:
    """Tell whether a file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file


def changes_when_used(value: Any) -> bool:
    """Tell whether using ``value`` may change it, as reading from a file or an iterator does.

    Then the traced call and later calls would get different values. The check runs no code of the user.
    """
    kind = type(value)
    if issubclass(kind, _TYPES_THAT_CHANGE) or is_random(value):
        return True
    if issubclass(kind, io.IOBase):  # the function cannot read values from a file that is only open for writing
        try:
            return not value.closed and bool(value.readable())
        except (AttributeError, ValueError, OSError):
            return True
    step = static_member(kind, "__next__")
    # A `__next__` that is written in Python does not count, because the walk of `aotlab.guards.reach` visits its code,
    # and guards the values that this code reads.
    return step is not None and not isinstance(step, types.FunctionType)


def has_unguarded_contents(value: Any) -> bool:
    """Tell whether ``value`` has contents that the code may read and that no guard checks."""
    if isinstance(value, types.FunctionType):
        return value.__code__ is _DISPATCHER and "registry" in vars(value)
    return any(each.__module__ == "_ctypes" for each in type(type(value)).__mro__) or isinstance(
        value, _TYPES_WITH_CONTENTS
    )


def is_random(value: Any) -> bool:
    """Tell whether ``value`` is a random generator of Python or numpy."""
    if isinstance(value, random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, (numpy.Generator, numpy.BitGenerator, numpy.RandomState))
