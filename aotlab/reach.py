"""What a function can read besides its arguments, found by looking at its code and at what that mentions.

From the function itself the walk goes to its closure, defaults and globals, to the functions and classes of the user's
that those lead to, and to the modules, with their flags, hooks and submodules. On plain objects (an instance of a class
of the user's, a namespace, a module of the user's) it looks at the attributes whose names the code mentions:

    cfg = SimpleNamespace(scale=2.0, step=0)
    def f(x): return x * cfg.scale         # `cfg.scale` is guarded, `cfg.step` is not

Nothing of the user's is run for that: properties and methods are followed as code. The code of torch, of numpy and of
the standard library is not looked at, but for the names of attributes in methods of torch's that the user's code calls.
What is read by a name that stands in no code (`getattr` with a computed name, a dataclass' generated comparison) counts
as all attributes where `getattr` and its like are mentioned; otherwise it is a documented exclusion, as is the state of
most objects written in C, and what `datetime` says. What reads an iterator, a file, or names by `eval` runs eagerly
(`aotlab.unseen`), unless only the code of an installed package does; so does what follows a weak reference to where
nothing else leads. The environment is guarded where the code mentions ``environ`` or `getenv`, and what reads `time`
runs eagerly. Of a logger only flags and levels count: it changes by being used, and leads to all others of the process.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import sys
import threading
import types
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from aotlab import torch_internals as internals
from aotlab.buffers import is_buffer
from aotlab.code_lines import line_like
from aotlab.code_names import names_in
from aotlab.reached import Absent, Attribute, Default, Held, Item, KeywordDefault, Place, Reached, Size, Variable
from aotlab.unseen import READERS_OF_NAMES, is_unseen, kept_in, names_looked_up, parts_behind
from aotlab.values import (
    CONTAINERS,
    MISSING,
    Mentioned,
    is_array,
    is_of_its_own_kind,
    is_plain,
    items_in,
    keys_in,
    snapshot,
)

_LIBRARIES = frozenset(("torch", "aotlab", "numpy", "builtins")) | sys.stdlib_module_names - {"__main__"}
#: Methods that Python calls by itself, but not while a trace runs the function, or only to show an object.
_NOT_CALLED = frozenset(
    ("__init__", "__new__", "__del__", "__repr__", "__str__", "__format__", "__init_subclass__", "__set_name__",
     "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__class_getitem__", "__sizeof__", "__dir__")
)  # fmt: skip
#: Attributes of torch's objects that are state although they are private: what a scheduler's `get_last_lr` returns.
_PRIVATE_STATE = frozenset(("_last_lr",))
#: What a module keeps about its tensors and hooks; the parts of it that count are looked at by themselves.
_MODULE_OWN = frozenset(vars(nn.Module())) | {"forward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a function may read besides its arguments, and the objects in which it could leave something behind.

    ``mentioned`` are the names of attributes in its code, by which it may read what hangs on its arguments;
    ``unseen`` says what it may read that no guard can watch.
    """

    state: tuple[Reached, ...]
    objects: tuple[tuple[str, Any], ...]
    mentioned: Mentioned
    unseen: str | None = None


def reach(function: Any) -> Reach:
    """Collect what ``function`` can reach.

    Raises
    ------
    PythonValueError
        It reads an array too large to be compared at every call.
    """
    walk = _Walk(function)
    return Reach(state=walk.result(), objects=tuple(walk.objects), mentioned=walk.mentioned, unseen=walk.unseen())


def reached_state(function: Any) -> tuple[Reached, ...]:
    """Collect what ``function`` may read besides its arguments."""
    return reach(function).state


def _root(name: Any) -> str:
    return str(name).split(".", 1)[0]


def is_library(thing: Any) -> bool:
    """Tell whether a function or class belongs to torch, numpy, the standard library or to aotlab itself.

    A function does if it was written there, whatever `functools.wraps` has it say: that it names a function of torch's.
    """
    if _root(getattr(thing, "__module__", None)) not in _LIBRARIES:
        return False
    written_in = thing.__globals__.get("__name__") if isinstance(thing, types.FunctionType) else None
    return written_in is None or _root(written_in) in _LIBRARIES


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


@functools.cache
def _names_in_methods(kind: Hashable) -> dict[str, frozenset[str]]:
    """Return the attributes that each method or property of a class of torch's mentions, by the method's name."""
    found: dict[str, frozenset[str]] = {}
    for each in cast(type, kind).__mro__:
        for name, member in vars(each).items():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, types.FunctionType):
                found[name] = found.get(name, frozenset()) | names_in(function.__code__).attributes
    return found


def _is_simple(value: Any) -> bool:
    """Tell whether it is a plain value, or a container of such."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return is_plain(value) or (isinstance(value, (list, tuple)) and all(map(is_plain, value)))


class _Walk:
    def __init__(self, function: Any) -> None:
        self.found: list[Reached] = []
        self.objects: list[tuple[str, Any]] = []
        self._root_code = getattr(function, "__code__", None) if isinstance(function, types.FunctionType) else None
        self._seen: set[int] = set()
        self._todo: list[tuple[str, Any]] = [("", function)]
        self.mentioned = Mentioned()
        self._names = self.mentioned.names
        self._things: dict[int, tuple[str, Any]] = {}  # objects, classes and modules whose attributes count, by id
        self._looked_at: set[tuple[int, str]] = set()
        self._tensors: dict[int, tuple[str, Tensor]] = {}  # those with attributes, by id
        self._unseen: list[tuple[int, str]] = []  # what no guard can watch, as (id, a clause)
        self._weak: list[tuple[str, weakref.ref[Any]]] = []
        self._named: set[int] = set()  # ids of what the user's code names
        self._by_chance: set[int] = set()  # ids of what is looked at though nothing names it, or only a library does
        self._inside: dict[int, set[int]] = {}  # by id, the ids of what an object was found in
        self._answered: dict[type, frozenset[str]] = {}
        self._slots: dict[type, frozenset[str]] = {}
        self._alive: list[Any] = []  # ids in the sets above belong to these
        self._follow()

    def result(self) -> tuple[Reached, ...]:
        """Return what was found, each place once, and what the namespaces do not have."""
        found = {(item.place.identity(), item.how): item for item in reversed(self.found)}
        absent = []
        for label, thing in self._things.values():
            missing = self._missing(thing)
            if missing:
                name = f"{label}.…" if label else "self.…"
                absent.append(
                    Reached(name=name, place=Absent(thing, missing, by_name=True), expected=MISSING, how="absent")
                )
        return (*reversed(found.values()), *absent)

    def unseen(self) -> str | None:
        """Say what the function may read that no guard can watch; None if there is nothing."""
        unseen = (*self._unseen, *self._only_weakly_reached())
        return next((text for number, text in unseen if not self._is_by_chance(number)), None)

    def _is_by_chance(self, number: int) -> bool:
        """Tell whether nothing leads to an object but what is looked at by chance, or lies in such."""
        todo, seen = [number], {number}
        while todo:
            each = todo.pop()
            around = self._inside.get(each, set())
            if each in self._named or (each not in self._by_chance and not around):
                return False
            todo += around - seen
            seen |= around
        return True

    def _only_weakly_reached(self) -> Iterator[tuple[int, str]]:
        """Name weak references to what is not looked at otherwise: guards would keep it alive."""
        for label, reference in self._weak:
            value = reference()
            value = value.__self__ if isinstance(reference, weakref.WeakMethod) and value is not None else value
            if value is None or isinstance(value, Tensor) or id(value) in self._seen or id(value) in self._things:
                continue  # one that is dead remains so, and a trace refuses tensors that are no arguments
            if (id(value), "module") not in self._looked_at:
                yield id(reference), f"it reads `{label}`, a weak reference to what nothing else leads to"

    def _missing(self, thing: Any) -> frozenset[str]:
        if isinstance(thing, types.ModuleType):
            return frozenset()  # a module whose names come later would have raised
        if not hasattr(thing, "__dict__") or (isinstance(thing, nn.Module) and is_library(type(thing))):
            return frozenset()  # of torch's modules, what is there counts
        names = self._names - vars(thing).keys()
        if not isinstance(thing, type):
            if isinstance(thing, nn.Module):
                names -= _MODULE_OWN
            kind = type(thing)
            if kind not in self._answered:
                self._answered[kind] = _answered_by_class(kind)
            names -= self._answered[kind]
        return frozenset(name for name in names if not name.startswith("__"))

    # --- the walk

    def _follow(self) -> None:
        while True:
            while self._todo:
                label, value = self._todo.pop()
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._alive.append(value)
                    self._enter(label, value)
            count = len(self._looked_at)
            for label, thing in list(self._things.values()):
                self._look_at(label, thing)
            for label, tensor in list(self._tensors.values()):
                self._look_at_tensor(label, tensor)
            if not self._todo and count == len(self._looked_at):
                return

    def _guard(
        self, name: str, place: Place, expected: Any, how: Literal["value", "contents", "identity"], value: Any = None
    ) -> None:
        self.found.append(Reached(name=name, place=place, expected=expected, how=how, value=value))

    def _visit(self, label: str, value: Any, place: Place, *, by_chance: bool = False, within: object = None) -> None:
        """Guard one value, and go on to what it leads to; it counts as ``within`` does, if it is found in that."""
        if within is not None:
            self._inside.setdefault(id(value), set()).add(id(within))
        else:
            (self._by_chance if by_chance else self._named).add(id(value))
        if isinstance(value, types.ModuleType):
            if not is_library_module(value):
                self._todo.append((label, value))
            return  # modules are not rebound
        if isinstance(value, Tensor):
            self._guard(label, place, snapshot(value, label, mentioned=self.mentioned), "contents")
            self._tensor(label, value)
            return
        self.objects.append((label, value))
        if is_plain(value):
            self._guard(label, place, value, "value")
        elif isinstance(value, CONTAINERS) or is_array(value) or is_buffer(value):
            self._guard(label, place, snapshot(value, label, mentioned=self.mentioned), "contents", value)
            self._todo.append((label, value))
        else:
            self._guard(label, place, value, "identity", value)
            self._todo.append((label, value))

    def _enter(self, label: str, value: Any) -> None:
        """Go on to what a value leads to."""
        if is_unseen(value):
            what = f"a `{type(value).__qualname__}`, whose state may be another at each call"
            self._unseen.append((id(value), f"it reads `{label or 'self'}`, {what}"))
        if isinstance(value, weakref.ref):
            self._weak.append((label, value))
            if isinstance(value, weakref.WeakMethod):
                self._todo.append((label, getattr(value(), "__func__", None)))
        for suffix, part in parts_behind(value):
            if isinstance(part, (Tensor, *CONTAINERS)) or is_buffer(part):
                place = Item({0: part}, 0)  # nothing can put another one there
                self._visit(f"{label}{suffix}", part, place, within=value)
            elif not is_plain(part):
                self._inside.setdefault(id(part), set()).add(id(value))
                self._todo.append((f"{label}{suffix}", part))
        kept = kept_in(value)
        if kept is not None:
            self._visit(f"{label}.{kept}", vars(value)[kept], Held(value, kept), within=value)
        self._names |= names_looked_up(value)
        if isinstance(value, CONTAINERS):
            for key, item in _entries(value):
                if isinstance(item, Tensor):
                    self._tensor(f"{label}[{key}]", item)
                elif not is_plain(item) and not isinstance(item, types.ModuleType):
                    self._inside.setdefault(id(item), set()).add(id(value))
                    self._todo.append((f"{label}[{key}]", item))
            if is_of_its_own_kind(value):
                self._object(label, value)
        elif isinstance(value, types.MethodType):
            self.objects.append((label or "self", value.__self__))
            self._inside.setdefault(id(value.__self__), set()).add(id(value))
            self._todo += [(label or "self", value.__self__), (label, value.__func__)]
        elif isinstance(value, (staticmethod, classmethod)):
            self._todo.append((label, value.__func__))
        elif isinstance(value, property):
            self._todo += [(label, each) for each in (value.fget, value.fset) if each is not None]
        elif isinstance(value, functools.cached_property):
            self._todo.append((label, value.func))
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._module(".".join(part for part in (label, path) if part), module)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            self._partial(label, value)
        elif isinstance(value, types.FunctionType):
            if not is_library(value):
                self._function(value)
            elif value.__name__ in internals.SWITCH_NAMES:
                self._names.add(value.__name__)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.objects.append((label, value))
            self._todo.append((label, value.__wrapped__))
        elif isinstance(value, contextvars.ContextVar):
            variable = Variable(value)
            held = variable.read()
            if held is MISSING:
                self._guard(f"{label}.get()", variable, MISSING, "identity")
            else:
                self._visit(f"{label}.get()", held, variable)
        elif isinstance(value, types.BuiltinFunctionType) and value.__name__ in internals.SWITCH_NAMES:
            self._names.add(value.__name__)
        elif isinstance(value, types.ModuleType):
            self._things.setdefault(id(value), (label, value))
        elif isinstance(value, threading.Thread) and is_library_module(sys.modules[type(value).__module__]):
            return  # what it holds is its own, and changes by itself: tqdm has such a thread for its bars
        elif not is_plain(value) and not isinstance(value, (Tensor, types.BuiltinFunctionType)):
            original = _compiled_from(value)
            if original is None:
                self._object(label, value)
            else:
                self._todo.append((label, original))

    def _function(self, function: types.FunctionType) -> None:
        """Go through the code of a function, and what it is bound to."""
        code, name = function.__code__, function.__name__
        names = names_in(code)
        self._names |= names.attributes
        self.mentioned.by_string = self.mentioned.by_string or names.by_string
        inline = code is self._root_code
        installed = is_installed(code.co_filename)  # a package, which has its counters and registers for itself
        if not installed:
            self._reads_names(function)
        self.found.append(
            Reached(
                name=f"the code of {name}",
                place=Attribute(function, "__code__"),
                expected=code,
                how="identity",
                inline=inline,
            )
        )
        for label, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            content = Attribute(cell, "cell_contents")
            held = content.read()
            if held is MISSING:
                self._guard(label, content, MISSING, "identity")
            else:
                self._visit(label, held, content, by_chance=installed)
        if function.__defaults__:
            count = Default(function, None)
            self._guard(f"the number of defaults of {name}", count, count.read(), "value")
            for i, default in enumerate(function.__defaults__):
                self._visit(f"default {i} of {name}", default, Default(function, i), by_chance=installed)
        for key, default in (function.__kwdefaults__ or {}).items():
            self._visit(f"default {key} of {name}", default, KeywordDefault(function, key), by_chance=installed)
        missing, nowhere = [], []
        for label in names.globals:
            if label in function.__globals__:
                place = Item(function.__globals__, label)
                self._visit(label, function.__globals__[label], place, by_chance=installed)
                continue
            missing.append(label)
            if hasattr(builtins, label):
                builtin = getattr(builtins, label)
                self._guard(label, Item(vars(builtins), label), builtin, "identity")
            else:
                nowhere.append(label)
        for namespace, absent in ((function.__globals__, missing), (vars(builtins), nowhere)):
            if absent:
                absences = Absent(namespace, frozenset(absent), by_name=False)
                self.found.append(Reached(name="…", place=absences, expected=MISSING, how="absent"))
        for label in names.imports:
            module = sys.modules.get(label)
            if module is not None and not is_library_module(module):
                self._todo.append((label, module))
        if function.__dict__:
            self._things.setdefault(id(function), (name, function))

    def _reads_names(self, function: types.FunctionType) -> None:
        """Note it if code calls what reads names that do not stand in it."""
        for name in names_in(function.__code__).globals:
            if name in READERS_OF_NAMES and name not in function.__globals__:
                line = line_like([function.__code__], rf"\b{name}\b")
                where = f"`{function.__name__}`" if line is None else str(line)
                self._unseen.append((0, f"it calls `{name}`, which may read what no guard watches, in {where}"))

    def _partial(self, label: str, value: Any) -> None:
        self._todo.append((label, value.func))
        for i, item in enumerate(value.args):
            # a partial's arguments are a tuple of its own, which nothing changes
            if not is_plain(item):
                self._visit(f"{label or 'partial'}.args[{i}]", item, Item({0: item}, 0))
        for key, item in value.keywords.items():
            self._visit(f"{label or 'partial'}.{key}", item, Item(value.keywords, key))

    def _class(self, kind: type) -> None:
        """Go through the methods of a class that the code could call, or make an object of."""
        for each in type.mro(type(kind)):
            if not is_library(each):
                self._things.setdefault(id(each), (each.__name__, each))
        for each in kind.__mro__:
            if is_library(each):
                continue
            self._things.setdefault(id(each), (each.__name__, each))
            made = vars(each).get("__init__"), vars(each).get("__new__"), vars(each).get("__post_init__")
            self._todo += [(each.__name__, member) for member in made if member is not None]
        if issubclass(kind, nn.Module):
            self._names.add("forward")
        elif issubclass(kind, torch.autograd.Function):
            self._names |= {"forward", "setup_context", "backward", "vjp", "jvp"}
        self._protocols(kind)

    def _protocols(self, kind: type) -> None:
        """Go through the methods of a class that Python calls without their names standing in code."""
        for each in kind.__mro__:
            if is_library(each):
                continue
            for name, member in list(vars(each).items()):
                if not (name.startswith("__") and name.endswith("__")) or name in _NOT_CALLED:
                    continue
                written = isinstance(member, types.FunctionType) and not _is_generated(member)
                if written or isinstance(member, (staticmethod, classmethod)):
                    self._visit(f"{each.__name__}.{name}", member, Item(vars(each), name, each))

    def _object(self, label: str, value: Any) -> None:
        kind = type(value)
        if _root(kind.__module__) in ("aotlab", "numpy", "builtins"):
            return
        self.objects.append((label or "self", value))
        if not is_library(kind):
            self._guard(f"the class of {label or 'self'}", Attribute(value, "__class__"), kind, "identity")
        self._thing(label or "self", value)

    def _module(self, label: str, module: nn.Module) -> None:
        """Guard what a module is made of: flags, submodules, hooks, its own ``forward``, plain attributes."""
        if (id(module), "module") in self._looked_at:
            return
        self._looked_at.add((id(module), "module"))
        self._alive.append(module)
        dot, own = f"{label}." if label else "", label or "self"
        attributes = vars(module)
        if not _is_data_descriptor(_static(type(module), "training")):  # else the flag of a module that it holds
            self._guard(f"{dot}training", Item(attributes, "training"), module.training, "value")
        if "forward" in attributes:
            self._visit(f"{dot}forward", attributes["forward"], Item(attributes, "forward"))
        else:
            self._guard(f"{dot}forward", Item(attributes, "forward"), MISSING, "identity")
        children = internals.children_held(module)
        self._guard(f"the number of submodules of {own}", Size(children), len(children), "value")
        for key, child in children.items():
            self._guard(f"{dot}{key}", Item(children, key), child, "identity", child)
        for kind, held in zip(("forward hooks", "forward pre-hooks"), internals.hooks_held(module), strict=True):
            self._guard(f"the number of {kind} of {own}", Size(held), len(held), "value")
            for number, hook in held.items():
                self._visit(f"one of the {kind} of {own}", hook, Item(held, number))
        for kind, held in zip(("hooks", "pre-hooks"), internals.global_hooks_held(), strict=True):
            self._guard(f"the number of forward {kind} of all modules", Size(held), len(held), "value")
            for number, hook in held.items():
                self._visit(f"one of the forward {kind} of all modules", hook, Item(held, number))
        cache = internals.parametrization_cache(module)
        if cache is not None:
            self._guard("torch.nn.utils.parametrize.cached()", Item(*cache), cache[0][cache[1]], "value")
            if cache[0][cache[1]]:
                what = "it is called under `torch.nn.utils.parametrize.cached()`, which keeps what is computed there"
                self._unseen.append((0, what))
        for kind, tensors in (
            ("parameters", internals.parameters_held(module)),
            ("buffers", internals.buffers_held(module)),
        ):
            self._guard(f"the number of {kind} of {own}", Size(tensors), len(tensors), "value")
            for key, tensor in tensors.items():
                place = Item(tensors, key)
                self.found.append(Reached(name=f"{dot}{key}", place=place, expected=tensor is None, how="optional"))
        if not is_library(type(module)):
            self._names.add("forward")
            self._thing(own, module)
            return
        original = _compiled_from(module)
        if original is not None:
            self._todo.append((label, original))
            return
        if isinstance(module, fx.GraphModule):
            self._graph(dot, type(module))
        for name in sorted((_own_names(cast(Hashable, type(module))) & attributes.keys()) - _MODULE_OWN):
            value = attributes[name]
            if is_plain(value) or (isinstance(value, tuple) and all(map(is_plain, value))):
                self._looked_at.add((id(module), name))
                self._visit(f"{dot}{name}", value, Item(attributes, name))
        self._things.setdefault(id(module), (own, module))

    def _graph(self, dot: str, kind: type[fx.GraphModule]) -> None:
        """Guard the code that was last made of a graph, for which it has a class of its own."""
        if kind.forward.__name__ == "forward":  # else it is made at the first call
            self._names |= names_in(kind.forward.__code__).attributes
            self._guard(f"{dot}forward", Item(vars(kind), "forward", kind), kind.forward, "identity", kind.forward)

    def _thing(self, label: str, value: Any) -> None:
        """Have the attributes of an object looked at, and those of its class."""
        self._things.setdefault(id(value), (label, value))
        kind = type(value)
        for each in kind.__mro__:
            if not is_library(each):
                self._things.setdefault(id(each), (each.__name__, each))
        self._protocols(kind)

    def _look_at(self, label: str, thing: Any) -> None:
        """Visit the attributes of an object, a class or a module that the code so far mentions."""
        is_class = isinstance(thing, type)
        if hasattr(thing, "__dict__"):
            held = vars(thing)
            wanted = held.keys() & self._names
            of_torch = not is_class and _root(type(thing).__module__) == "torch"
            if of_torch and not isinstance(thing, nn.Module):
                self._by_methods(label, thing)
            if self.mentioned.by_string and not of_torch and not isinstance(thing, types.FunctionType):
                if not isinstance(thing, (type, types.ModuleType)) and (id(thing), "") not in self._looked_at:
                    self._looked_at.add((id(thing), ""))
                    self._guard(f"the number of attributes of {label}", Size(held), len(held), "value")
                wanted = {name for name in held if name in wanted or self._counts_by_string(thing, name, held[name])}
            if _root(type(thing).__module__) == "logging":
                wanted = {name for name in wanted if is_plain(held[name])}
            for name in sorted(str(name) for name in wanted):
                if (id(thing), name) in self._looked_at or (isinstance(thing, nn.Module) and name in _MODULE_OWN):
                    continue
                self._looked_at.add((id(thing), name))
                if is_class:
                    place: Place = Item(held, name, thing)
                elif isinstance(thing, types.ModuleType):
                    place = Item(held, name)
                else:
                    place = Held(thing, name)
                by_chance = name not in self._names and _is_of_others(type(thing))
                within = None if by_chance else thing
                self._visit(f"{label}.{name}", held[name], place, by_chance=by_chance, within=within)
        if is_class:
            return
        kind = type(thing)
        if kind not in self._slots:
            self._slots[kind] = _names_of_slots(kind)
        for name in sorted(self._slots[kind] & self._names):
            if (id(thing), name) not in self._looked_at:
                self._looked_at.add((id(thing), name))
                place = Attribute(thing, name)
                value = place.read()
                if value is MISSING:
                    self._guard(f"{label}.{name}", place, MISSING, "identity")
                else:
                    self._visit(f"{label}.{name}", value, place)

    def _tensor(self, label: str, tensor: Tensor) -> None:
        """Have the attributes of a tensor looked at; its snapshot compares them, so that no guard holds the tensor."""
        if vars(tensor):
            self._tensors.setdefault(id(tensor), (label, tensor))
            self._alive.append(tensor)

    def _look_at_tensor(self, label: str, tensor: Tensor) -> None:
        """Go on to the objects that hang on a tensor by names that the code so far mentions."""
        for name, value in list(vars(tensor).items()):
            if self.mentioned.counts(name) and (id(tensor), name) not in self._looked_at:
                self._looked_at.add((id(tensor), name))
                if isinstance(value, Tensor):
                    self._tensor(f"{label}.{name}", value)
                elif not is_plain(value) and not isinstance(value, types.ModuleType):
                    self._named.add(id(value))
                    self._todo.append((f"{label}.{name}", value))

    def _by_methods(self, label: str, thing: Any) -> None:
        """Guard the plain attributes of an object of torch's that its methods read which the code calls.

        Private ones are caches for the most part, which change by being read.
        """
        methods = _names_in_methods(cast(Hashable, type(thing)))
        names: set[str] = set()
        todo = ["__call__", *(methods.keys() & self._names)]
        while todo:
            fresh = methods.get(todo.pop(), frozenset()) - names
            names |= fresh
            todo += fresh
        for name in sorted((names & vars(thing).keys()) - self._names):
            value = vars(thing)[name]
            if name.startswith("_") and name not in _PRIVATE_STATE:
                continue
            if (id(thing), name) not in self._looked_at and _is_simple(value):
                self._looked_at.add((id(thing), name))
                self._visit(f"{label}.{name}", value, Held(thing, name), by_chance=True)

    def _counts_by_string(self, thing: Any, name: str, value: Any) -> bool:
        if name.startswith("__"):
            return False
        return is_plain(value) or not isinstance(thing, (type, types.ModuleType))


def _names_of_slots(kind: type) -> frozenset[str]:
    """Return the attributes that objects of a class keep in slots."""
    if not any("__slots__" in vars(each) for each in kind.__mro__):
        return frozenset()
    names = {name for each in kind.__mro__ for name in vars(each)}
    return frozenset(name for name in names if isinstance(_static(kind, name), types.MemberDescriptorType))


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
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


def _static(kind: type, name: str) -> Any:
    """Look a name up in a class as Python does, without running anything."""
    return next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)


def _compiled_from(value: Any) -> Any:
    """Return the function or module that a compiled one of ours runs in a trace; None for anything else."""
    if _root(type(value).__module__) != "aotlab" or not hasattr(value, "__dict__"):
        return None
    return vars(value).get("orig_module" if isinstance(value, nn.Module) else "__wrapped__")


def _is_data_descriptor(found: Any) -> bool:
    return found is not None and hasattr(type(found), "__set__")


def _answered_by_class(kind: type) -> frozenset[str]:
    """Return the names for which a class answers first, whatever its object holds."""
    members = {name: member for each in reversed(kind.__mro__) for name, member in vars(each).items()}
    kinds = functools.cached_property
    return frozenset(n for n, member in members.items() if _is_data_descriptor(member) or isinstance(member, kinds))


def _is_generated(function: types.FunctionType) -> bool:
    """Tell whether a method was written by `dataclasses`."""
    return function.__code__.co_filename == "<string>"


def is_library_module(module: types.ModuleType) -> bool:
    """Tell whether a module is not the user's own: of the standard library, or installed."""
    file = str(getattr(module, "__file__", None) or "")
    return _root(module.__name__) in _LIBRARIES or is_installed(file)


def _is_of_others(kind: type) -> bool:
    """Tell whether a class is a library's or a package's, and does not just hold what its user puts there."""
    if kind.__name__ in ("Namespace", "SimpleNamespace"):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return is_library(kind) or is_installed(str(file or ""))


def is_installed(file: str) -> bool:
    """Tell whether a file belongs to an installed package."""
    return "site-packages" in file or "dist-packages" in file
