"""Find the values that a function can read besides its arguments, from its code and the objects that the code mentions.

The walk starts at the function. It visits its closure, defaults and globals, the user's functions and classes that
these lead to, and modules, with their flags, hooks and submodules. Of plain objects it visits the attributes whose
names the code mentions:

    cfg = SimpleNamespace(scale=2.0, step=0)
    def f(x): return x * cfg.scale         # `cfg.scale` is guarded, `cfg.step` is not

The walk runs no code of the user. It treats installed packages like the user's modules. Of torch, numpy and Python's
own libraries it guards the attributes that the code mentions (`aotlab.guards.libraries`). If the code mentions
`getattr` or a similar function, all attributes of plain objects are visited. A function runs eagerly if it reads a
value whose changes no guard can notice (`aotlab.guards.objects`), unless only a package's code reads the value.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import gc
import sys
import threading
import types
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import torch
from torch import Tensor, fx, nn

from aotlab import _torch as internals
from aotlab.guards import guarded_values, objects
from aotlab.guards.code_names import line_like, names_in
from aotlab.guards.libraries import Libraries, names_forward_mentions
from aotlab.guards.reached import Place, Reached, Slot, SlotKind
from aotlab.guards.user_code import is_users

#: Private attributes of torch's objects that are guarded, because they are state and not caches. `get_last_lr` of a
#: learning-rate scheduler returns ``_last_lr``.
_PRIVATE_STATE = frozenset(("_last_lr",))
#: The kinds of slots in the order in which they become inputs.
_ORDER = get_args(SlotKind)
#: The attributes that every `nn.Module` has, for its tensors, submodules and hooks. `_Walk._module` visits these.
_MODULE_OWN = frozenset(vars(nn.Module())) | {"forward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The values that a function may read besides its arguments: the result of `reach`.

    ``state`` has these values, except the tensors that become inputs; an entry guards them. ``slots`` are the places
    where those tensors are stored: parameters first, then buffers, then other tensors. ``objects`` are the objects that
    the function can reach, each with its name; the function could leave a traced tensor in them. ``mentioned`` has the
    attribute names in the function's code, which it may read from its arguments.

    ``unseen`` describes a value that the function may read and whose changes no guard can notice, or is None.
    ``by_identity`` says how the function may look for a tensor by identity, or is None. That cannot be traced, because
    a traced tensor is another object than the tensor that it replaces.
    """

    state: tuple[Reached, ...]
    slots: tuple[Slot, ...]
    objects: tuple[tuple[str, Any], ...]
    mentioned: guarded_values.Mentioned
    unseen: str | None = None
    by_identity: str | None = None


def reach(function: Any, numbers: Mapping[Hashable, Place] = types.MappingProxyType({})) -> Reach:
    """Find the values that ``function`` may read and the objects that it can reach.

    ``numbers`` are the places of numbers that are inputs (see `aotlab.guards.numbers_in_state`).
    """
    walk = _Walk(function, numbers)
    slots_by_place: dict[Hashable, Slot] = {}
    for slot in walk.slots:
        slots_by_place.setdefault(slot.place.identity(), slot)
    return Reach(
        state=walk.result(),
        slots=tuple(sorted(slots_by_place.values(), key=lambda slot: _ORDER.index(slot.kind))),
        objects=tuple(walk.objects),
        mentioned=walk.mentioned,
        unseen=walk.unseen(),
        by_identity=walk.by_identity,
    )


def _content_of(cell: types.CellType) -> Any:
    return Place("attribute", cell, "cell_contents").read()


def _is_simple(value: Any) -> bool:
    """Tell whether a value is plain, or a list, tuple or dictionary of plain values."""
    if isinstance(value, dict):
        return all(map(guarded_values.is_plain, value.values()))
    return guarded_values.is_plain(value) or (type(value) in (list, tuple) and all(map(guarded_values.is_plain, value)))


class _Walk:
    """Walks from a function to all values that it may read; `reach` makes a `Reach` of the result.

    A value is *incidental* if only a package's code, or a computed attribute name, leads to it. If no guard can notice
    the changes of an incidental value, the function is compiled all the same.
    """

    def __init__(self, function: Any, numbers: Mapping[Hashable, Place]) -> None:
        self._numbers = numbers
        self.reached: list[Reached] = []
        self.slots: list[Slot] = []
        self.objects: list[tuple[str, Any]] = []
        self._root_code = getattr(function, "__code__", None) if isinstance(function, types.FunctionType) else None
        # maps the id of an object, or the id of its owner and a name, to whether the object is incidental so far
        self._visited: dict[Hashable, bool] = {}
        self._todo: list[tuple[str, Any, bool]] = [("", function, False)]
        self.mentioned = guarded_values.Mentioned()
        self._names = self.mentioned.names
        self._users: set[str] = set()  # the names that the user's own code mentions
        # objects, classes and modules whose attributes are visited, by id
        self._owners: dict[int, tuple[str, Any, bool]] = {}
        self._library_classes: dict[type, None] = {Tensor: None}  # whose attributes from the user are visited
        self._libraries = Libraries()
        # library modules that are stored in attributes and containers, by id
        self._held_libraries: dict[int, tuple[str, types.ModuleType]] = {}
        self._tensors: list[tuple[str, Tensor]] = []  # tensors in whose `__dict__` somebody has stored attributes
        self._unseen: str | None = None
        self.by_identity: str | None = None
        self._alive: list[Any] = []  # keeps objects alive, so that the ids above stay valid
        self._follow()

    def result(self) -> tuple[Reached, ...]:
        """Return the values that were found, each only once, and records of the names that must stay missing."""
        count = len(self.reached)
        for label, owner, _ in self._owners.values():
            if missing := self._missing(owner):
                self._guard(f"{label or 'self'}.…", Place("unheld", owner, missing), guarded_values.MISSING)
        for label, module in self._held_libraries.values():
            self._libraries.add(label, module, self._names)
        # `inline`: the generated function itself checks the methods of `torch.Tensor`, beside torch's settings
        self.reached += [replace(each, inline=each.place.owner is Tensor) for each in self._libraries.guards()]
        reached_by_place = {item.place.identity(): item for item in reversed(self.reached[:count])}
        return (*reversed(reached_by_place.values()), *self.reached[count:])

    def unseen(self) -> str | None:
        """Name a value that the function may read and that no guard watches, or return None."""
        for label, tensor in self._tensors:
            for name in guarded_values.mentioned_attributes(tensor, self.mentioned):
                self._cannot_watch(f"`{label}.{name}`, an attribute of a tensor")
        return self._unseen

    def _cannot_watch(self, description: str) -> None:
        self._unseen = self._unseen or f"it reads {description}"

    def _missing(self, owner: Any) -> frozenset[str]:
        """Return the names that the code mentions and that ``owner`` does not have.

        A guard checks that they stay missing.
        """
        if isinstance(owner, types.ModuleType):
            return frozenset()  # if the code read a missing name of a Python module, the trace would raise
        if not hasattr(owner, "__dict__") or (isinstance(owner, nn.Module) and objects.is_library(type(owner))):
            return frozenset()  # for torch's modules, only existing attributes are guarded
        names = self._names - vars(owner).keys()
        if isinstance(owner, type):
            names = {name for name in names if not name.startswith("__")}
            return frozenset(names | objects.undefined_special_methods(owner))
        # leave out cached properties: the object gets an attribute when such a property is first read
        members = (member for each in type(owner).__mro__ for member in vars(each).items())
        names -= {name for name, member in members if isinstance(member, functools.cached_property)}
        if isinstance(owner, nn.Module):
            names -= _MODULE_OWN
        return frozenset(name for name in names if not name.startswith("__"))

    # --- the walk

    def _follow(self) -> None:
        while True:
            while self._todo:
                label, value, incidental = self._todo.pop()
                if self._is_new(id(value), incidental):
                    self._alive.append(value)
                    self._enter(label, value, incidental)
            count = len(self._visited)
            for label, owner, incidental in list(self._owners.values()):
                self._visit_attributes(label, owner, incidental)
            for class_ in list(self._library_classes):
                self._visit_additions(class_)
            if not self._todo and count == len(self._visited):
                return

    def _is_new(self, key: Hashable, incidental: bool = False) -> bool:
        """Mark the object that ``key`` identifies as visited, and tell whether it must be visited now.

        It must if it is new, or if it was only incidental so far and the present way to it is not ``incidental``.
        """
        before = self._visited.get(key)
        if is_new := before is None or (before and not incidental):
            self._visited[key] = incidental
        return is_new

    def _guard(self, name: str, place: Place, value: Any, **options: Any) -> None:
        """Add the guard that ``place`` contains ``value``: a plain value is compared by value, others by identity.

        ``name`` is the name of the value in sentences.
        """
        self.reached.append(
            Reached(
                name=name, place=place, expected=guarded_values.Value(value, guarded_values.is_plain(value)), **options
            )
        )

    def _visit(self, label: str, value: Any, place: Place, *, incidental: bool = False) -> None:
        """Guard the value that is stored in ``place``, and queue it so that the walk continues from it.

        ``label`` is the name of the value in sentences. An ordinary tensor becomes an input.
        """
        if isinstance(value, types.ModuleType):
            # `Libraries` handles other library modules
            if place.kind == "held" or not objects.is_library_module(value):
                self._todo.append((label, value, incidental))
            return  # no guard checks that the name still refers to the same module
        if not isinstance(value, Tensor):
            self.objects.append((label, value))
        if place.identity() in self._numbers and type(value) in (int, float):
            self.slots.append(Slot(label, "input", place))
            return
        is_slot = isinstance(value, Tensor) and guarded_values.is_ordinary(value) and place.is_writable()
        if is_slot:
            self.slots.append(Slot(label, "input", place))
        try:
            if guarded_values.is_stateless(value) and place.owner is value.__globals__:
                expected: guarded_values.Snapshot = guarded_values.Function(value)
            else:
                expected = guarded_values.snapshot(
                    value, label, self.mentioned, is_slot=is_slot, numbers=self._numbers.keys()
                )
        except guarded_values.CannotBeWatched as error:
            if not incidental:
                self._cannot_watch(str(error))
            return
        alive = None if isinstance(value, Tensor) else value
        self.reached.append(Reached(name=label, place=place, expected=expected, value=alive))
        if not (isinstance(expected, guarded_values.Value) and expected.is_plain):
            self._todo.append((label, value, incidental))

    def _visit_held(self, label: str, place: Place, *, incidental: bool = False) -> None:
        """Visit the value that is stored in a place. If the place is empty, guard that it stays empty."""
        value = place.read()
        if value is guarded_values.MISSING:
            self._guard(label, place, guarded_values.MISSING)
        else:
            self._visit(label, value, place, incidental=incidental)

    def _enter(self, label: str, value: Any, incidental: bool) -> None:
        if not incidental and (objects.has_unguarded_contents(value) or objects.changes_when_used(value)):
            self._cannot_watch(f"`{label or 'self'}`, a `{type(value).__qualname__}`")
        elif isinstance(value, Tensor):
            if vars(value) and not internals.is_wrapper(value):
                self._tensors.append((label, value))
        elif isinstance(value, guarded_values.CONTAINERS):
            if not incidental and guarded_values.has_tensors_for_keys(value):
                self.by_identity = self.by_identity or f"`{label}` has tensors for keys"
            for key, _ in guarded_values.slots_in(value):
                self.slots.append(Slot(f"{label}[{key!r}]", "input", Place("item", value, key)))
            for place in self._numbers.values():
                if place.owner is value and type(place.read()) in (int, float):
                    self.slots.append(Slot(f"{label}[{place.key!r}]", "input", place))
            items = (each for each in objects.labelled_items(value) if not guarded_values.is_plain(each[1]))
            self._todo += [(f"{label}[{k}]", item, incidental) for k, item in items]
            if guarded_values.has_users_class(value):
                self._object(label, value, incidental)
        elif isinstance(value, types.MethodType):
            self.objects.append((label or "self", value.__self__))
            self._todo += [(label or "self", value.__self__, incidental), (label, value.__func__, incidental)]
        elif isinstance(value, (property, staticmethod, classmethod, functools.cached_property)):
            functions = [getattr(value, name, None) for name in ("fget", "fset", "__func__", "func")]
            self._todo += [(label, code, incidental) for code in functions if code is not None]
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._module(".".join(part for part in (label, path) if part), module, incidental)
        elif isinstance(value, type):
            self._class(value, incidental)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            self._todo.append((label, value.func, incidental))
            for name in ("args", "keywords"):
                place = Place("attribute", value, name)
                self._visit(f"{label or 'partial'}.{name}", getattr(value, name), place, incidental=incidental)
        elif isinstance(value, types.FunctionType) and not objects.is_library(value):
            original = objects.compiled_from(value)
            self._function(value if original is None else original)
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType)):
            if value.__name__ in internals.SWITCH_NAMES:
                self._names.add(value.__name__)
            if isinstance(value, types.FunctionType):
                self._libraries.follow(value)
            owner = getattr(value, "__self__", None)
            if not (owner is None or isinstance(owner, (type, types.ModuleType)) or objects.is_random(owner)):
                self._visit(f"{label}.__self__", owner, Place("attribute", value, "__self__"), incidental=incidental)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.objects.append((label, value))
            self._todo.append((label, value.__wrapped__, incidental))
        elif isinstance(value, contextvars.ContextVar):
            self._visit_held(f"{label}.get()", Place("variable", value))
        elif isinstance(value, types.MappingProxyType):
            (dictionary,) = gc.get_referents(value)
            self._visit(label, dictionary, Place("item", {0: dictionary}, 0), incidental=incidental)
        elif isinstance(value, types.ModuleType):
            if objects.is_library_module(value):
                self._held_libraries[id(value)] = label, value
            else:
                self._owners.setdefault(id(value), (label, value, False))
        elif isinstance(value, threading.Thread) and objects.is_library_module(sys.modules[type(value).__module__]):
            return  # a library's thread, such as tqdm's: its attributes are private and change at any time
        elif not guarded_values.is_plain(value):
            original = objects.compiled_from(value)
            if original is None:
                self._object(label, value, incidental)
            else:
                self._todo.append((label, original, incidental))

    def _function(self, function: types.FunctionType) -> None:
        code, name = function.__code__, function.__name__
        names = names_in(code)
        self._names |= names.attributes
        self._libraries.add_code(code, function.__globals__, function.__closure__ or ())
        self.mentioned.by_string = self.mentioned.by_string or names.by_string
        file = function.__globals__.get("__file__") if code.co_filename == "<string>" else code.co_filename
        installed = objects.is_installed(str(file))  # then all that it reads is incidental, for example counters
        if not installed:
            self._users |= names.attributes
            for reader in objects.READERS_OF_NAMES.intersection(names.globals) - function.__globals__.keys():
                line = line_like([code], rf"\b{reader}\b") or f"`{name}`"
                self._unseen = f"it calls `{reader}`, which may read anything, in {line}"
            if "id" in names.globals and "id" not in function.__globals__ and is_users(code):
                self.by_identity = self.by_identity or "it calls `id`"
        place = Place("attribute", function, "__code__")
        self._guard(f"the code of {name}", place, code, inline=code is self._root_code)
        for label, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._visit_held(label, Place("attribute", cell, "cell_contents"), incidental=installed)
        for attribute, word in (("__defaults__", "defaults"), ("__kwdefaults__", "keyword defaults")):
            if defaults := getattr(function, attribute):
                place = Place("attribute", function, attribute)
                self._visit(f"the {word} of {name}", defaults, place, incidental=installed)
        missing, undefined = [], []
        for label in names.globals:
            if label in function.__globals__:
                place_of_global = Place("item", function.__globals__, label)
                self._visit(label, function.__globals__[label], place_of_global, incidental=installed)
                continue
            missing.append(label)
            if hasattr(builtins, label):
                self._guard(label, Place("item", vars(builtins), label), getattr(builtins, label))
            else:
                undefined.append(label)
        for namespace, absent in ((function.__globals__, missing), (vars(builtins), undefined)):
            if absent:
                self._guard("…", Place("absent", namespace, frozenset(absent)), guarded_values.MISSING)
        for label in names.imports:
            imported = sys.modules.get(label) or sys.modules.get(f"{function.__globals__.get('__package__')}.{label}")
            if objects.is_package(imported):
                self._package(label, imported, names.attributes)
            elif imported is not None and not objects.is_library_module(imported):
                self._todo.append((label, imported, installed))
        self._chains(function, names.chains)
        if function.__dict__:
            self._owners.setdefault(id(function), (name, function, installed))

    def _chains(self, function: types.FunctionType, chains: Iterable[tuple[str, ...]]) -> None:
        """Visit the attributes of installed packages that a function reads in the form ``package.module.name``."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for first, *attributes in chains:
            if first.startswith("@"):  # pytest uses such names in the code that it generates for each ``assert``
                continue
            cell = cells.get(first)
            value = function.__globals__.get(first) if cell is None else _content_of(cell)
            label = first
            for name in attributes:
                if objects.is_package(value):
                    self._package(label, value, (name,))
                value = vars(value).get(name) if issubclass(type(value), types.ModuleType) else None
                label = f"{label}.{name}"

    def _package(self, label: str, module: types.ModuleType, names: Iterable[str]) -> None:
        """Visit the attributes ``names`` of a Python module of an installed package, which the user's code reads."""
        for name in names:
            if name in vars(module) and self._is_new((id(module), name), True):
                place = Place("item", vars(module), name)
                self._visit(f"{label}.{name}", vars(module)[name], place, incidental=True)

    def _class(self, kind: type, incidental: bool) -> None:
        """Visit the methods of a class that the code may call, and the methods that construct an instance of it."""
        self._classes_of(type(kind), incidental)
        self._classes_of(kind, incidental)
        for class_ in kind.__mro__:
            for name in ("__init__", "__new__", "__post_init__"):
                if name in vars(class_) and not objects.is_library(class_):
                    self._visit(
                        f"{class_.__name__}.{name}",
                        vars(class_)[name],
                        Place("held", class_, name),
                        incidental=incidental,
                    )
        if issubclass(kind, nn.Module):
            self._names.add("forward")
        elif issubclass(kind, torch.autograd.Function):
            self._names |= {"forward", "setup_context", "backward", "vjp", "jvp"}

    def _classes_of(self, kind: type, incidental: bool) -> None:
        """Note a class and its bases, whose attributes are visited if the code mentions their names.

        Special methods are visited in any case, because Python calls them although no code mentions their names.
        """
        if not objects.is_of_library_or_package(kind) and self._is_new((id(kind), "its bases")):
            self._guard(f"the bases of {kind.__name__}", Place("attribute", kind, "__mro__"), kind.__mro__)
        for class_ in type.mro(kind):
            if objects.is_library(class_):
                continue
            if id(class_) not in self._owners or not incidental:
                self._owners[id(class_)] = (class_.__name__, class_, incidental)
            for name in (
                objects.DISPLAY_METHODS & vars(class_).keys() if not objects.is_of_library_or_package(class_) else ()
            ):
                self._guard(f"{class_.__name__}.{name}", Place("held", class_, name), vars(class_)[name])
            for name, member in objects.special_methods(class_):
                self._visit(f"{class_.__name__}.{name}", member, Place("held", class_, name), incidental=incidental)

    def _object(self, label: str, value: Any, incidental: bool) -> None:
        kind = type(value)
        if objects.root_of(kind.__module__) in ("aotlab", "numpy", "builtins"):
            return
        self.objects.append((label or "self", value))
        if not objects.is_library(kind):
            self._guard(f"the class of {label or 'self'}", Place("attribute", value, "__class__"), kind)
        self._add_owner(label or "self", value, incidental)

    def _module(self, label: str, module: nn.Module, incidental: bool) -> None:
        """Guard the state of one `nn.Module`, and make its parameters and buffers inputs.

        The state consists of its class, flags, submodules, hooks, plain attributes, and a ``forward`` that was assigned
        to the instance.
        """
        if not self._is_new((id(module), "a module"), incidental):
            return
        self._alive.append(module)
        dot, name_or_self = f"{label}." if label else "", label or "self"
        attributes = vars(module)
        self._guard(f"the class of {name_or_self}", Place("attribute", module, "__class__"), type(module))
        self._libraries.add_module_class(type(module))
        self._library_classes |= dict.fromkeys([each for each in type(module).__mro__[:-1] if objects.is_library(each)])
        flag = objects.static_member(type(module), "training")
        if not hasattr(type(flag), "__set__"):  # otherwise the class has a property, which reads another object's flag
            self._guard(f"{dot}training", Place("item", attributes, "training"), module.training)
        self._visit_held(f"{dot}forward", Place("item", attributes, "forward"))
        for name in internals.MODULE_DICTIONARIES:
            if attributes.get(name):  # a module reads nothing from an empty dictionary
                self._guard(f"{dot}{name}", Place("item", attributes, name), attributes[name])
        children = internals.children_held(module)
        self._guard(f"the number of submodules of {name_or_self}", Place("size", children), len(children))
        for key, child in children.items():
            self._guard(f"{dot}{key}", Place("item", children, key), child)
        self._hooks(name_or_self, internals.hooks_held(module), internals.backward_hooks_held(module))
        if self._is_new("the hooks of all modules"):
            self._hooks("all modules", internals.global_hooks_held(), internals.global_backward_hooks_held())
        for name, value in attributes.items():
            if isinstance(value, torch.ScriptObject):  # the packed weights of a quantized layer
                self._guard(f"{dot}{name}", Place("item", attributes, name), value)
        cache = internals.parametrization_cache(module)
        if cache is not None:
            self._guard("torch.nn.utils.parametrize.cached()", Place("item", *cache), cache[0][cache[1]])
            if cache[0][cache[1]]:
                self._unseen = "it is called under `torch.nn.utils.parametrize.cached()`"
        dictionaries: tuple[tuple[SlotKind, Any], ...]
        dictionaries = ("parameter", internals.parameters_held), ("buffer", internals.buffers_held)
        for kind, tensors_of in dictionaries:
            tensors = tensors_of(module)
            self._guard(f"the number of {kind}s of {name_or_self}", Place("size", tensors), len(tensors))
            for key, tensor in tensors.items():
                place = Place("item", tensors, key)
                if tensor is None:
                    self._guard(f"{dot}{key}", place, None)
                else:
                    self.slots.append(Slot(f"{dot}{key}", kind, place))
        if not objects.is_library(type(module)):
            self._names.add("forward")
            self._add_owner(name_or_self, module, incidental)
            return
        if not isinstance(module, fx.GraphModule):  # a graph module may get further attributes at its first call
            # A new attribute could hide a parameter, a buffer or a submodule, so the number of attributes is guarded.
            self._guard(f"the number of attributes of {name_or_self}", Place("size", attributes), len(attributes))
        original = objects.compiled_from(module)
        if original is not None:
            self._todo.append((label, original, incidental))
            return
        graph = type(module)
        # not if the graph module generates its `forward` at its first call, which would make the guard fail
        if isinstance(module, fx.GraphModule) and graph.forward.__name__ == "forward":
            self._names |= names_in(graph.forward.__code__).attributes
            self._guard(f"{dot}forward", Place("held", graph, "forward"), graph.forward)
        for name in sorted((names_forward_mentions(cast(Hashable, type(module))) & attributes.keys()) - _MODULE_OWN):
            value = attributes[name]
            if objects.is_setting(value):
                self._is_new((id(module), name))
                self._visit(f"{dot}{name}", value, Place("item", attributes, name))
        self._owners.setdefault(id(module), (name_or_self, module, False))

    def _visit_additions(self, class_: type) -> None:
        """Visit the attributes that the user has added to a class of torch, and that the code mentions."""
        for name, value in list(vars(class_).items()):
            if not (name in self._names or self.mentioned.by_string):
                continue
            if not name.startswith("__") and objects.is_users_addition(value) and self._is_new((id(class_), name)):
                self._visit(f"{class_.__name__}.{name}", value, Place("held", class_, name))

    def _hooks(
        self, owner_name: str, forward: tuple[dict[int, Any], ...], backward: tuple[dict[int, Any], ...]
    ) -> None:
        """Guard hooks of modules; ``forward`` and ``backward`` are dictionaries of hooks.

        A module with backward hooks is refused, so only the number of backward hooks is guarded.
        """
        for kind, hooks in zip(("forward hooks", "forward pre-hooks"), forward, strict=True):
            self._guard(f"the number of {kind} of {owner_name}", Place("size", hooks), len(hooks))
            for number, hook in hooks.items():
                self._visit(f"one of the {kind} of {owner_name}", hook, Place("item", hooks, number))
        for hooks in backward:
            self._guard(f"the number of backward hooks of {owner_name}", Place("size", hooks), len(hooks))

    def _add_owner(self, label: str, owner: Any, incidental: bool) -> None:
        """Note an object whose attributes are visited if the code mentions their names, and visit its classes."""
        if id(owner) not in self._owners or not incidental:
            self._owners[id(owner)] = (label, owner, incidental)
        self._classes_of(type(owner), incidental)

    def _visit_attributes(self, label: str, owner: Any, incidental: bool) -> None:
        """Visit those attributes of an object, a class or a module that the code visited so far mentions."""
        if hasattr(owner, "__dict__"):
            for name in sorted(map(str, self._names_to_visit(label, owner))):
                if isinstance(owner, nn.Module) and name in _MODULE_OWN:
                    continue
                kind = owner if isinstance(owner, type) else type(owner)
                is_incidental = incidental or (name not in self._users and objects.is_of_library_or_package(kind))
                if not self._is_new((id(owner), name), is_incidental):
                    continue
                attributes = vars(owner)
                place = (
                    Place("item", attributes, name)
                    if isinstance(owner, types.ModuleType)
                    else Place("held", owner, name)
                )
                self._visit(f"{label}.{name}", attributes[name], place, incidental=is_incidental)
        if isinstance(owner, type):
            return
        for name in sorted(objects.slots_of(type(owner)) & self._names):
            if self._is_new((id(owner), name), incidental):
                self._visit_held(f"{label}.{name}", Place("attribute", owner, name), incidental=incidental)

    def _names_to_visit(self, label: str, owner: Any) -> set[str]:
        """Return the names in the ``__dict__`` of an object, a class or a module whose values must be visited.

        These are the names that the code mentions. For objects of torch, except modules, they include the public
        attributes with simple values. If the code computes names, they include the names that it may compute.
        """
        attributes = vars(owner)
        names: set[str] = attributes.keys() & self._names
        is_object = not isinstance(owner, (type, types.ModuleType))
        if objects.root_of(type(owner).__module__) == "torch" and is_object:
            if isinstance(owner, nn.Module):
                return names
            public_names = (name for name in attributes if not name.startswith("_") or name in _PRIVATE_STATE)
            return names | {name for name in public_names if _is_simple(attributes[name])}
        if self.mentioned.by_string and not isinstance(owner, types.FunctionType):
            if is_object and self._is_new((id(owner), "")):
                self._guard(f"the number of attributes of {label}", Place("size", attributes), len(attributes))
            public_names = (name for name in attributes if not name.startswith("__"))
            names |= {name for name in public_names if is_object or guarded_values.is_plain(attributes[name])}
        if objects.root_of(type(owner).__module__) == "logging":
            names = {name for name in names if guarded_values.is_plain(attributes[name])}
        return names
