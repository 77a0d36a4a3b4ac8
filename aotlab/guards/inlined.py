"""Guards for the code that Dynamo inlines into a graph, which Dynamo itself does not check.

    class Net(nn.Module):
        def forward(self, x):
            return self.scale(x)        # Dynamo inlines `scale`
    Net.scale = another                 # and would not notice

The guards check the methods of a class, their code, and the attributes of libraries that the code mentions. They also
check that no class has got its own version of an attribute that it inherited at the time of the capture. The guards
hold only weak references to classes and functions of the user. Dynamo keeps the guards as long as the code object
lives, and a class or function refers to its code. So with strong references, guards and code would live forever.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from aotlab import _torch as internals
from aotlab.guards.code_names import names_in
from aotlab.guards.guarded_values import Value, is_plain
from aotlab.guards.libraries import Libraries
from aotlab.guards.objects import is_library, static_member, undefined_special_methods
from aotlab.guards.reached import Place, Reached, fast_check

#: A function that Dynamo inlined, and its first argument, if this is an object or a class of the user (a method's
#: ``self`` or ``cls``), or None.
Inlined = tuple[types.FunctionType, object | None]


def _function_of(member: Any) -> Any:
    """Return the function of ``member``, an attribute of a class: of a property, a static method or a class method."""
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


@dataclass(frozen=True, slots=True)
class _Method:
    """The record of an inlined function, for the check that a call would still run the same code.

    ``code`` and ``defaults`` are the code and the defaults that the function had in the capture. If it is a method or a
    property, the class ``kind`` must still have it under the name ``name``. Otherwise ``kind`` is None.
    """

    function: weakref.ref[types.FunctionType]
    code: weakref.ref[types.CodeType]
    defaults: tuple[Any, ...] | None  # None also if some defaults are not plain: the guard must not keep objects alive
    kind: weakref.ref[type] | None
    name: str

    def holds(self) -> bool:
        function = self.function()
        if function is None:
            # The function does not exist any more, so a method has been replaced. For a plain function, the result is
            # true, because Dynamo itself guards the code of the function that replaces it.
            return self.kind is None
        if function.__code__ is not self.code() or self.defaults not in (None, function.__defaults__):
            return False
        return self.kind is None or _function_of(getattr(self.kind(), self.name, None)) is function


def _method(function: types.FunctionType, kind: type | None, name: str = "") -> _Method:
    members = () if kind is None or name else (item for each in kind.__mro__ for item in vars(each).items())
    name = next((name for name, member in members if _function_of(member) is function), name)
    is_reached = kind is not None and _function_of(static_member(kind, name)) is function
    refs = weakref.ref(function), weakref.ref(function.__code__)
    defaults = function.__defaults__ if all(map(is_plain, function.__defaults__ or ())) else None
    return _Method(*refs, defaults, weakref.ref(kind) if kind is not None and is_reached else None, name)


def _inherited(kinds: Iterable[type], mentioned: Container[str]) -> list[tuple[weakref.ref[type], frozenset[str]]]:
    """List the user's classes among ``kinds`` and their bases, each with attribute names that it must not define.

    If the class defines one of these later, the code may call another function. They are the names that the code
    mentions and that the class inherits, and the special methods that the class does not define.
    """
    lists: dict[type, frozenset[str]] = {}
    for chain in [kind.__mro__ for kind in kinds]:
        for n, kind in enumerate(chain):
            if not is_library(kind):
                inherited = {name for base in chain[n + 1 :] for name in vars(base) if name in mentioned}
                names = frozenset(inherited - vars(kind).keys() | undefined_special_methods(kind))
                lists[kind] = lists.get(kind, frozenset()) | names
    return [(weakref.ref(kind), names) for kind, names in lists.items()]


def check_of_inlined(
    code: types.CodeType, namespace: Mapping[str, Any], inlined: Iterable[Inlined], kinds: Iterable[type]
) -> Callable[[], bool]:
    """Return a check that the code that Dynamo captured would still call the same functions.

    ``code`` is the code of the captured frame, and ``namespace`` its globals. ``inlined`` are the functions that Dynamo
    inlined into it. ``kinds`` are the classes that the code uses, and the classes of the objects that it uses.
    """
    libraries = Libraries()
    libraries.add_code(code, namespace)
    mentioned = set(names_in(code).attributes)
    methods: dict[tuple[int, int], _Method] = {}
    modules: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[type]]] = {}
    for function, receiver in inlined:
        kind = receiver if receiver is None or isinstance(receiver, type) else type(receiver)
        if isinstance(receiver, nn.Module):
            modules[id(receiver)] = weakref.ref(receiver), weakref.ref(type(receiver))
        if (id(function), id(kind)) in methods:
            continue
        methods[id(function), id(kind)] = _method(function, kind)
        if is_library(function):
            libraries.follow(function)
        else:
            libraries.add_code(function.__code__, function.__globals__, function.__closure__ or ())
            mentioned |= names_in(function.__code__).attributes
        if kind is not None and issubclass(kind, nn.Module):
            libraries.add_module_class(kind)
            if isinstance(call := static_member(kind, "__call__"), types.FunctionType):
                methods[id(call), id(kind)] = _method(call, kind, "__call__")
    hooks = [*internals.global_hooks_held(), *internals.global_backward_hooks_held()]
    sizes = [
        Reached(
            name="the number of hooks of all modules", place=Place("size", class_), expected=Value(len(class_), True)
        )
        for class_ in hooks
    ]
    library_check = fast_check([*libraries.guards(), *sizes])
    assert library_check is not None
    methods_to_check, pairs, inherited = tuple(methods.values()), tuple(modules.values()), _inherited(kinds, mentioned)
    return lambda: (
        library_check()
        and all(method.holds() for method in methods_to_check)
        and all((module := ref()) is None or type(module) is kind() for ref, kind in pairs)
        and all((class_ := ref()) is None or vars(class_).keys().isdisjoint(names) for ref, names in inherited)
    )
