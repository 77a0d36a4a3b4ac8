"""What a function can read besides its arguments, found by looking at its code and at what that mentions.

From the function itself the walk goes to its closure, defaults and globals, to the functions and classes of the user's
that those lead to, and to modules, with their flags, hooks and submodules. On plain objects it looks at the attributes
whose names the code mentions:

    cfg = SimpleNamespace(scale=2.0, step=0)
    def f(x): return x * cfg.scale         # `cfg.scale` is guarded, `cfg.step` is not

Nothing of the user's is run for that; libraries are not looked at. Where `getattr` and its like are mentioned, all
attributes count. What no guard watches runs eagerly (`aotlab.guards.objects`), unless only a package reads it.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import gc
import sys
import threading
import types
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from torch import Tensor, fx, nn

from aotlab import _torch as internals
from aotlab.guards import objects, values
from aotlab.guards.code import line_like, names_in
from aotlab.guards.reached import Place, Reached, Slot, SlotKind

#: Methods that Python calls by itself, but not while a trace runs the function, or only to show an object.
_NOT_CALLED = frozenset(
    ("__init__", "__new__", "__del__", "__repr__", "__str__", "__format__", "__init_subclass__", "__set_name__",
     "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__class_getitem__", "__sizeof__", "__dir__")
)  # fmt: skip
#: Private attributes of torch's objects that are no caches but state: what a scheduler's `get_last_lr` returns.
_PRIVATE_STATE = frozenset(("_last_lr",))
#: In which order slots of what kind are passed on.
_ORDER = get_args(SlotKind)
#: What a module keeps about its tensors and hooks; the parts of it that count are looked at by themselves.
_MODULE_OWN = frozenset(vars(nn.Module())) | {"forward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a function may read besides its arguments, and the objects in which it could leave something behind.

    ``slots`` are the places of tensors, which become inputs: parameters first, then buffers, then others.
    ``mentioned`` are the names of attributes in its code, by which it may read what hangs on its arguments;
    ``unseen`` says what it may read that no guard can watch.
    """

    state: tuple[Reached, ...]
    slots: tuple[Slot, ...]
    objects: tuple[tuple[str, Any], ...]
    mentioned: values.Mentioned
    unseen: str | None = None


def reach(function: Any) -> Reach:
    """Collect what ``function`` can reach."""
    walk = _Walk(function)
    once: dict[Hashable, Slot] = {}
    for slot in walk.slots:
        once.setdefault(slot.place.identity(), slot)
    return Reach(
        state=walk.result(),
        slots=tuple(sorted(once.values(), key=lambda slot: _ORDER.index(slot.kind))),
        objects=tuple(walk.objects),
        mentioned=walk.mentioned,
        unseen=walk.unseen(),
    )


@functools.cache
def _own_names(kind: Hashable) -> frozenset[str]:
    """Return the attributes that ``forward`` of a module class of torch's mentions, directly or by other methods."""
    assert isinstance(kind, type)
    methods: dict[str, list[types.CodeType]] = {}
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, member in vars(each).items():
            if isinstance(member, types.FunctionType):
                methods.setdefault(name, []).append(member.__code__)
    names, todo = {"forward"}, ["forward"]
    while todo:
        for code in methods.get(todo.pop(), ()):
            fresh = names_in(code).attributes - names
            names |= fresh
            todo += fresh
    return frozenset(names)


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(values.is_plain, value.values()))
    return values.is_plain(value) or (type(value) in (list, tuple) and all(map(values.is_plain, value)))


class _Walk:
    """Goes from a function to all that it may read; *by chance* means: by a library's code or a computed name alone."""

    def __init__(self, function: Any) -> None:
        self.found: list[Reached] = []
        self.slots: list[Slot] = []
        self.objects: list[tuple[str, Any]] = []
        self._root_code = getattr(function, "__code__", None) if isinstance(function, types.FunctionType) else None
        self._seen: dict[Hashable, bool] = {}  # by id, or by id and name: whether it was found by chance alone
        self._todo: list[tuple[str, Any, bool]] = [("", function, False)]
        self.mentioned = values.Mentioned()
        self._names = self.mentioned.names
        self._users: set[str] = set()  # the names that no package's code alone mentions
        self._things: dict[int, tuple[str, Any, bool]] = {}  # objects, classes, modules whose attributes count, by id
        self._tensors: list[tuple[str, Tensor]] = []  # those with attributes
        self._unseen: str | None = None
        self._alive: list[Any] = []  # ids above belong to these
        self._follow()

    def result(self) -> tuple[Reached, ...]:
        """Return what was found, each place once, and what the namespaces do not have."""
        count = len(self.found)
        for label, thing, _ in self._things.values():
            if missing := self._missing(thing):
                self._guard(f"{label or 'self'}.…", Place("unheld", thing, missing), values.MISSING)
        found = {item.place.identity(): item for item in reversed(self.found[:count])}
        return (*reversed(found.values()), *self.found[count:])

    def unseen(self) -> str | None:
        """Say what the function may read that no guard watches; None if there is nothing."""
        for label, tensor in self._tensors:
            for name in values.attributes_that_count(tensor, self.mentioned):
                self._cannot_watch(f"`{label}.{name}`, an attribute of a tensor")
        return self._unseen

    def _cannot_watch(self, what: str) -> None:
        self._unseen = self._unseen or f"it reads {what}, which no guard watches"

    def _missing(self, thing: Any) -> frozenset[str]:
        if isinstance(thing, types.ModuleType):
            return frozenset()  # a module whose names come later would have raised
        if not hasattr(thing, "__dict__") or (isinstance(thing, nn.Module) and objects.is_library(type(thing))):
            return frozenset()  # of torch's modules, what is there counts
        names = self._names - vars(thing).keys()
        if not isinstance(thing, type):
            # what such a property has computed once, an object holds
            members = (member for each in type(thing).__mro__ for member in vars(each).items())
            names -= {name for name, member in members if isinstance(member, functools.cached_property)}
        if isinstance(thing, nn.Module):
            names -= _MODULE_OWN
        return frozenset(name for name in names if not name.startswith("__"))

    # --- the walk

    def _follow(self) -> None:
        while True:
            while self._todo:
                label, value, chance = self._todo.pop()
                if self._is_new(id(value), chance):
                    self._alive.append(value)
                    self._enter(label, value, chance)
            count = len(self._seen)
            for label, thing, chance in list(self._things.values()):
                self._look_at(label, thing, chance)
            if not self._todo and count == len(self._seen):
                return

    def _is_new(self, key: Hashable, chance: bool = False) -> bool:
        """Note something as seen; tell whether it had not been, or by chance alone."""
        before = self._seen.get(key)
        if is_new := before is None or (before and not chance):
            self._seen[key] = chance
        return is_new

    def _guard(self, name: str, place: Place, value: Any, **more: Any) -> None:
        """Have a plain value compared by value, and anything else as an object."""
        self.found.append(Reached(name=name, place=place, expected=values.Value(value, values.is_plain(value)), **more))

    def _visit(self, label: str, value: Any, place: Place, *, chance: bool = False) -> None:
        """Guard one value, and go on to what it leads to."""
        if isinstance(value, types.ModuleType):
            if not objects.is_library_module(value):
                self._todo.append((label, value, chance))
            return  # modules are not rebound
        if not isinstance(value, Tensor):
            self.objects.append((label, value))
        is_slot = isinstance(value, Tensor) and values.is_ordinary(value) and place.is_writable()
        if is_slot:
            self.slots.append(Slot(label, "input", place))
        try:
            known = values.snapshot(value, label, self.mentioned, is_slot=is_slot)
        except values.CannotBeWatched as what:
            self._cannot_watch(str(what))
            return
        kept = None if isinstance(value, Tensor) else value
        self.found.append(Reached(name=label, place=place, expected=known, value=kept))
        if not (isinstance(known, values.Value) and known.is_plain):
            self._todo.append((label, value, chance))

    def _visit_held(self, label: str, place: Place, *, chance: bool = False) -> None:
        """Visit what is in a place; if nothing is, guard that."""
        value = place.read()
        if value is values.MISSING:
            self._guard(label, place, values.MISSING)
        else:
            self._visit(label, value, place, chance=chance)

    def _enter(self, label: str, value: Any, chance: bool) -> None:
        if not chance and (objects.is_holding(value) or objects.is_changing(value)):
            self._cannot_watch(f"`{label or 'self'}`, a `{type(value).__qualname__}`")
        elif isinstance(value, Tensor):
            if vars(value) and not internals.is_wrapper(value):
                self._tensors.append((label, value))
        elif isinstance(value, values.CONTAINERS):
            for key, _ in values.slots_in(value):
                self.slots.append(Slot(f"{label}[{key!r}]", "input", Place("item", value, key)))
            items = (each for each in objects.entries_of(value) if not values.is_plain(each[1]))
            self._todo += [
                (f"{label}[{k}]", item, chance) for k, item in items if not isinstance(item, types.ModuleType)
            ]
            if values.is_of_its_own_kind(value):
                self._object(label, value, chance)
        elif isinstance(value, types.MethodType):
            self.objects.append((label or "self", value.__self__))
            self._todo += [(label or "self", value.__self__, chance), (label, value.__func__, chance)]
        elif isinstance(value, (property, staticmethod, classmethod, functools.cached_property)):
            held = [getattr(value, name, None) for name in ("fget", "fset", "__func__", "func")]
            self._todo += [(label, code, chance) for code in held if code is not None]
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._module(".".join(part for part in (label, path) if part), module, chance)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            self._todo.append((label, value.func, False))
            for name in ("args", "keywords"):
                self._visit(f"{label or 'partial'}.{name}", getattr(value, name), Place("attribute", value, name))
        elif isinstance(value, types.FunctionType) and not objects.is_library(value):
            self._function(value)
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType)):
            if value.__name__ in internals.SWITCH_NAMES:
                self._names.add(value.__name__)
            owner = getattr(value, "__self__", None)
            if not (owner is None or isinstance(owner, (type, types.ModuleType)) or objects.is_random(owner)):
                self._visit(f"{label}.__self__", owner, Place("attribute", value, "__self__"), chance=chance)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.objects.append((label, value))
            self._todo.append((label, value.__wrapped__, chance))
        elif isinstance(value, contextvars.ContextVar):
            self._visit_held(f"{label}.get()", Place("variable", value))
        elif isinstance(value, types.MappingProxyType):
            (behind,) = gc.get_referents(value)
            self._visit(label, behind, Place("item", {0: behind}, 0), chance=chance)
        elif isinstance(value, types.ModuleType):
            self._things.setdefault(id(value), (label, value, False))
        elif isinstance(value, threading.Thread) and objects.is_library_module(sys.modules[type(value).__module__]):
            return  # what it holds is its own, and changes by itself: tqdm has such a thread for its bars
        elif not values.is_plain(value):
            original = objects.compiled_from(value)
            if original is None:
                self._object(label, value, chance)
            else:
                self._todo.append((label, original, chance))

    def _function(self, function: types.FunctionType) -> None:
        code, name = function.__code__, function.__name__
        names = names_in(code)
        self._names |= names.attributes
        self.mentioned.by_string = self.mentioned.by_string or names.by_string
        file = function.__globals__.get("__file__") if code.co_filename == "<string>" else code.co_filename
        installed = objects.is_installed(str(file))  # a package, which has its counters and registers for itself
        if not installed:
            self._users |= names.attributes
            for reader in objects.READERS_OF_NAMES.intersection(names.globals) - function.__globals__.keys():
                where = line_like([code], rf"\b{reader}\b") or f"`{name}`"
                self._unseen = f"it calls `{reader}`, which may read what no guard watches, in {where}"
        place = Place("attribute", function, "__code__")
        self._guard(f"the code of {name}", place, code, inline=code is self._root_code)
        for label, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._visit_held(label, Place("attribute", cell, "cell_contents"), chance=installed)
        for attribute, word in (("__defaults__", "defaults"), ("__kwdefaults__", "keyword defaults")):
            if defaults := getattr(function, attribute):
                place = Place("attribute", function, attribute)
                self._visit(f"the {word} of {name}", defaults, place, chance=installed)
        missing, nowhere = [], []
        for label in names.globals:
            if label in function.__globals__:
                found = Place("item", function.__globals__, label)
                self._visit(label, function.__globals__[label], found, chance=installed)
                continue
            missing.append(label)
            if hasattr(builtins, label):
                self._guard(label, Place("item", vars(builtins), label), getattr(builtins, label))
            else:
                nowhere.append(label)
        for namespace, absent in ((function.__globals__, missing), (vars(builtins), nowhere)):
            if absent:
                self._guard("…", Place("absent", namespace, frozenset(absent)), values.MISSING)
        for label in names.imports:
            module = sys.modules.get(label)
            if module is not None and not objects.is_library_module(module):
                self._todo.append((label, module, installed))
        if function.__dict__:
            self._things.setdefault(id(function), (name, function, installed))

    def _class(self, kind: type) -> None:
        """Go through the methods of a class that the code could call, or make an object of."""
        self._classes_of(type(kind))
        self._classes_of(kind)
        for each in kind.__mro__:
            made = [vars(each).get(name) for name in ("__init__", "__new__", "__post_init__")]
            if not objects.is_library(each):
                self._todo += [(each.__name__, member, False) for member in made if member is not None]
        if issubclass(kind, nn.Module):
            self._names.add("forward")
        elif issubclass(kind, torch.autograd.Function):
            self._names |= {"forward", "setup_context", "backward", "vjp", "jvp"}

    def _classes_of(self, kind: type) -> None:
        """Have the attributes of a class looked at; methods that Python calls without their names in code count all."""
        for each in type.mro(kind):
            if objects.is_library(each):
                continue
            self._things.setdefault(id(each), (each.__name__, each, False))
            for name, member in list(vars(each).items()):
                if not (name.startswith("__") and name.endswith("__")) or name in _NOT_CALLED:
                    continue
                # `dataclasses` write some, too
                written = isinstance(member, types.FunctionType) and member.__code__.co_filename != "<string>"
                if written or isinstance(member, (staticmethod, classmethod)):
                    self._visit(f"{each.__name__}.{name}", member, Place("held", each, name))

    def _object(self, label: str, value: Any, chance: bool) -> None:
        kind = type(value)
        if objects.root_of(kind.__module__) in ("aotlab", "numpy", "builtins"):
            return
        self.objects.append((label or "self", value))
        if not objects.is_library(kind):
            self._guard(f"the class of {label or 'self'}", Place("attribute", value, "__class__"), kind)
        self._thing(label or "self", value, chance)

    def _module(self, label: str, module: nn.Module, chance: bool) -> None:
        """Guard what a module is made of: flags, submodules, hooks, its own ``forward``, plain attributes."""
        if not self._is_new((id(module), "a module"), chance):
            return
        self._alive.append(module)
        dot, own = f"{label}." if label else "", label or "self"
        attributes = vars(module)
        flag = objects.static_member(type(module), "training")
        if not hasattr(type(flag), "__set__"):  # else the flag of one that it holds
            self._guard(f"{dot}training", Place("item", attributes, "training"), module.training)
        self._visit_held(f"{dot}forward", Place("item", attributes, "forward"))
        for name in internals.MODULE_DICTIONARIES:
            if attributes.get(name):  # else nothing is read from it
                self._guard(f"{dot}{name}", Place("item", attributes, name), attributes[name])
        children = internals.children_held(module)
        self._guard(f"the number of submodules of {own}", Place("size", children), len(children))
        for key, child in children.items():
            self._guard(f"{dot}{key}", Place("item", children, key), child)
        for whose, both in ((own, internals.hooks_held(module)), ("all modules", internals.global_hooks_held())):
            for kind, held in zip(("forward hooks", "forward pre-hooks"), both, strict=True):
                self._guard(f"the number of {kind} of {whose}", Place("size", held), len(held))
                for number, hook in held.items():
                    self._visit(f"one of the {kind} of {whose}", hook, Place("item", held, number))
        cache = internals.parametrization_cache(module)
        if cache is not None:
            self._guard("torch.nn.utils.parametrize.cached()", Place("item", *cache), cache[0][cache[1]])
            if cache[0][cache[1]]:
                self._unseen = "it is called under `torch.nn.utils.parametrize.cached()`, which keeps its tensors"
        holding: tuple[tuple[SlotKind, Any], ...]
        holding = ("parameter", internals.parameters_held), ("buffer", internals.buffers_held)
        for kind, of in holding:
            tensors = of(module)
            self._guard(f"the number of {kind}s of {own}", Place("size", tensors), len(tensors))
            for key, tensor in tensors.items():
                place = Place("item", tensors, key)
                if tensor is None:
                    self._guard(f"{dot}{key}", place, None)
                else:
                    self.slots.append(Slot(f"{dot}{key}", kind, place))
        if not objects.is_library(type(module)):
            self._names.add("forward")
            self._thing(own, module, chance)
            return
        original = objects.compiled_from(module)
        if original is not None:
            self._todo.append((label, original, chance))
            return
        graph = type(module)
        if isinstance(module, fx.GraphModule) and graph.forward.__name__ == "forward":  # else made later
            self._names |= names_in(graph.forward.__code__).attributes
            self._guard(f"{dot}forward", Place("held", graph, "forward"), graph.forward)
        for name in sorted((_own_names(cast(Hashable, type(module))) & attributes.keys()) - _MODULE_OWN):
            value = attributes[name]
            if values.is_plain(value) or (type(value) is tuple and all(map(values.is_plain, value))):
                self._is_new((id(module), name))
                self._visit(f"{dot}{name}", value, Place("item", attributes, name))
        self._things.setdefault(id(module), (own, module, False))

    def _thing(self, label: str, value: Any, chance: bool) -> None:
        if id(value) not in self._things or not chance:
            self._things[id(value)] = (label, value, chance)
        self._classes_of(type(value))

    def _look_at(self, label: str, thing: Any, chance: bool) -> None:
        """Visit the attributes of an object, a class or a module that the code so far mentions."""
        if hasattr(thing, "__dict__"):
            for name in sorted(map(str, self._wanted(label, thing))):
                if isinstance(thing, nn.Module) and name in _MODULE_OWN:
                    continue
                kind = thing if isinstance(thing, type) else type(thing)
                by_chance = chance or (name not in self._users and objects.is_of_others(kind))
                if not self._is_new((id(thing), name), by_chance):
                    continue
                held = vars(thing)
                place = Place("item", held, name) if isinstance(thing, types.ModuleType) else Place("held", thing, name)
                self._visit(f"{label}.{name}", held[name], place, chance=by_chance)
        if isinstance(thing, type):
            return
        for name in sorted(objects.slots_of(type(thing)) & self._names):
            if self._is_new((id(thing), name), chance):
                self._visit_held(f"{label}.{name}", Place("attribute", thing, name), chance=chance)

    def _wanted(self, label: str, thing: Any) -> set[str]:
        """Return the names in the dictionary of an object, a class or a module that count."""
        held = vars(thing)
        wanted: set[str] = held.keys() & self._names
        is_object = not isinstance(thing, (type, types.ModuleType))
        if objects.root_of(type(thing).__module__) == "torch" and is_object:
            if isinstance(thing, nn.Module):
                return wanted
            public = (name for name in held if not name.startswith("_") or name in _PRIVATE_STATE)
            return wanted | {name for name in public if _is_simple(held[name])}
        if self.mentioned.by_string and not isinstance(thing, types.FunctionType):
            if is_object and self._is_new((id(thing), "")):
                self._guard(f"the number of attributes of {label}", Place("size", held), len(held))
            own = (name for name in held if not name.startswith("__"))
            wanted |= {name for name in own if is_object or values.is_plain(held[name])}
        if objects.root_of(type(thing).__module__) == "logging":
            wanted = {name for name in wanted if values.is_plain(held[name])}
        return wanted
