"""Whose a function, a class or a module is, and what a class says of its objects without being asked."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from aotlab.guards.values import is_plain, items_in, keys_in

_LIBRARIES = frozenset(("torch", "aotlab", "numpy", "builtins")) | sys.stdlib_module_names - {"__main__"}


def root_of(name: Any) -> str:
    """Return the first part of a dotted name."""
    return str(name).split(".", 1)[0]


def is_library(thing: Any) -> bool:
    """Tell whether a function or class belongs to torch, numpy, the standard library or to aotlab itself.

    A function does if it was written there, whatever `functools.wraps` has it say: that it names a function of torch's.
    """
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
        yield from (
            (repr(key) if is_plain(key) else "…", item) for key, item in zip(keys_in(value), items, strict=True)
        )
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


def is_data_descriptor(found: Any) -> bool:
    """Tell whether a member of a class answers before what its object holds."""
    return found is not None and hasattr(type(found), "__set__")


def answered_by_class(kind: type) -> frozenset[str]:
    """Return the names for which a class answers first, whatever its object holds."""
    members = {name: member for each in reversed(kind.__mro__) for name, member in vars(each).items()}
    kinds = functools.cached_property
    return frozenset(n for n, member in members.items() if is_data_descriptor(member) or isinstance(member, kinds))


def is_library_module(module: types.ModuleType) -> bool:
    """Tell whether a module is not the user's own: of the standard library, or installed."""
    file = str(getattr(module, "__file__", None) or "")
    return root_of(module.__name__) in _LIBRARIES or is_installed(file)


def is_of_others(kind: type) -> bool:
    """Tell whether a class is a library's or a package's, and does not just hold what its user puts there."""
    if kind.__name__ in ("Namespace", "SimpleNamespace"):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return is_library(kind) or is_installed(str(file or ""))


def is_installed(file: str) -> bool:
    """Tell whether a file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file
