"""Guards for attributes of libraries that the code reads by name, so that a later replacement is noticed.

    def f(x): return F.gelu(x) * math.pi       # `F.gelu` and `math.pi` are guarded, the rest of both modules is not
    F.gelu = my_gelu                           # `f` is compiled again

The *owner* of such an attribute is a library module, a class of torch's modules, or `torch.Tensor`. One guard for each
owner compares the functions, classes and plain values that the code mentions. The code of functions of torch and of
installed packages is searched for names, too. So a model with an `nn.GELU`, whose ``forward`` calls `F.gelu`, is also
compiled again.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import fx, nn

from aotlab.guards import guarded_values, objects
from aotlab.guards.code_names import names_in
from aotlab.guards.reached import Place, Reached

#: The torch modules whose functions are *followed*: the code of these functions is searched for names, because they
#: call other torch functions, which users may replace.
_FOLLOWED = ("torch.nn.", "torch.functional", "torch._tensor")
#: The methods of `nn.Module` through which a call reaches ``forward``. ``_call_impl`` is missing, because a trace
#: replaces it.
_CALLS_FORWARD = frozenset(("forward", "__call__", "_wrapped_call_impl"))
_ATTRIBUTES_OF_TENSORS = frozenset(dir(torch.Tensor))
_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, type)
_DESCRIPTORS = (property, functools.cached_property, types.GetSetDescriptorType)


@functools.cache
def methods_of(kind: Hashable) -> dict[str, list[types.FunctionType]]:
    """Return the methods that ``forward`` of a torch module class calls, directly or through other methods.

    The result maps a name to the definitions of this method in the class and its bases.
    """
    assert isinstance(kind, type)
    defined: dict[str, list[types.FunctionType]] = {}
    for class_ in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, member in vars(class_).items():
            if isinstance(member, types.FunctionType):
                defined.setdefault(name, []).append(member)
    methods: dict[str, list[types.FunctionType]] = {}
    todo = ["forward"]
    while todo:
        name = todo.pop()
        if name in defined and name not in methods:
            methods[name] = defined[name]
            todo += [class_ for method in methods[name] for class_ in names_in(method.__code__).attributes]
    return methods


@functools.cache
def names_forward_mentions(kind: Hashable) -> frozenset[str]:
    """Return the attribute names that ``forward`` of a torch module class, and the methods that it calls, mention."""
    methods = [method for methods in methods_of(kind).values() for method in methods]
    return frozenset(("forward",)).union(*(names_in(method.__code__).attributes for method in methods))


class Libraries:
    """Collects library modules and classes with the attribute names that the user's code mentions, and makes guards.

    First call the ``add`` methods and `follow` for the code that a trace may run, then `guards`.
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[str, Any, set[str]]] = {}
        self._followed: set[types.CodeType] = set()

    def add(
        self, label: str, owner: types.ModuleType | type, names: Collection[str], within: tuple[object, ...] = ()
    ) -> None:
        """Note that the code may read those attributes in ``names`` that ``owner`` has.

        ``label`` is the name of the owner in the code, for messages. ``within`` are the modules through which the code
        reads ``owner``. They are not added again, because modules may refer to each other in a cycle.
        """
        mentioned = self._owners.setdefault(id(owner), (label, owner, set()))[2]
        attribute_names: Container[str] = vars(owner) if isinstance(owner, types.ModuleType) else _ATTRIBUTES_OF_TENSORS
        for name in [each for each in names if each in attribute_names]:
            value = getattr(owner, name, None)
            is_new = name not in mentioned
            mentioned.add(name)
            if _is_module(value) and objects.is_library_module(value):
                # Add the module even if it was added before, because `names` may have names that are new for it.
                if value not in within:
                    self.add(value.__name__, value, names, (*within, owner))
            elif is_new and isinstance(value, types.FunctionType):
                self.follow(value)

    def add_code(
        self, code: types.CodeType, namespace: Mapping[str, Any], cells: Iterable[types.CellType] = ()
    ) -> None:
        """Note the attributes of library modules that a user's function mentions.

        ``code`` is the function's code, ``namespace`` its globals, and ``cells`` its closure.
        """
        names = names_in(code)
        mentioned = names.attributes | names.operators | (names.strings if names.by_string else set())
        self.add("torch.Tensor", torch.Tensor, mentioned)
        free = zip(code.co_freevars, cells, strict=False)  # for the frame that Dynamo captures, `cells` is empty
        values_by_name = {name: Place("attribute", cell, "cell_contents").read() for name, cell in free}
        values_by_name |= {name: namespace.get(name) for name in names.globals}
        values_by_name |= {name: sys.modules.get(name) for name in names.imports}
        for label, module in values_by_name.items():
            if _is_module(module) and objects.is_library_module(module):
                self.add(label, module, mentioned)

    def add_module_class(self, kind: type[nn.Module]) -> None:
        """Note the methods of `nn.Module` and of a torch module class through which a call reaches ``forward``.

        For a user's class, its first base class in torch is noted. The user's own methods are guarded elsewhere: by the
        walk of `aotlab.guards.reach`, or by `aotlab.guards.inlined`.
        """
        # A graph module has its own class, whose `forward` may be generated at the first call. So it is left out.
        library = next(
            each for each in kind.__mro__ if objects.is_library(each) and not issubclass(each, fx.GraphModule)
        )
        methods = methods_of(cast(Hashable, library))
        if id(library) not in self._owners:
            self._owners[id(library)] = (f"nn.{library.__name__}", library, {*_CALLS_FORWARD, *methods})
            for method in [each for several in methods.values() for each in several]:
                self.follow(method)

    def follow(self, function: types.FunctionType) -> None:
        """Note the functions and classes that ``function`` reads, and follow these functions.

        Only functions of installed packages and of the modules of torch in `_FOLLOWED` are followed.
        """
        module, code = sys.modules.get(function.__module__), function.__code__
        if module is None or code in self._followed or not _is_followed(module):
            return
        self._followed.add(code)
        names = names_in(code)
        self.add("torch.Tensor", torch.Tensor, names.attributes)
        globals_by_name = {name: function.__globals__.get(name) for name in names.globals}
        self.add(
            module.__name__, module, [name for name, value in globals_by_name.items() if isinstance(value, _CALLABLES)]
        )
        for root, attribute, *_ in names.chains:
            value = globals_by_name.get(root)
            if _is_module(value) and _is_followed(value):
                self.add(value.__name__, value, [attribute])

    def guards(self) -> Iterator[Reached]:
        """Yield one guard for each owner: that the attributes that the code mentions are still the same.

        Owners without attributes that a guard can compare have no guard.
        """
        for label, owner, mentioned in self._owners.values():
            names = tuple(name for name in sorted(mentioned) if _stays(owner, getattr(owner, name, None)))
            if names:
                place = Place("attributes", owner, names if len(names) > 1 else names * 2)
                yield Reached(name=label, place=place, expected=guarded_values.Names(place.key, place.read()))


def _is_module(value: Any) -> TypeGuard[types.ModuleType]:
    """Tell whether a value is a module, without running code of its class. `isinstance` may run such code."""
    return issubclass(type(value), types.ModuleType)


def _is_followed(module: types.ModuleType) -> bool:
    """Tell whether the code of a module's functions is searched for names of other functions (see `_FOLLOWED`)."""
    if objects.root_of(module.__name__) == "torch":
        return module is torch or module.__name__.startswith(_FOLLOWED)
    return objects.is_installed(str(getattr(module, "__file__", None) or ""))


def _stays(owner: Any, value: Any) -> bool:
    """Tell whether reading an attribute of ``owner`` gives the same object each time, so that a guard can compare it.

    ``value`` is the present value of the attribute.
    """
    if isinstance(owner, type) and isinstance(value, types.MethodType):
        return False  # a class method: reading it makes a new bound method each time
    return callable(value) or isinstance(value, _DESCRIPTORS) or guarded_values.is_plain(value)
