"""Nested containers taken apart and put together again: what goes into a function, and what comes out of it.

    {"a": [x, y], "opts": Options(scale=2.0, w=w)}

has the leaves ``x``, ``y``, ``2.0`` and ``w``; the rest is a tree of `Node`, which is compared (a call with another
nesting is another call), named (``['a'][0]``, ``['opts'].w``), and filled with other leaves. Tuples, lists,
dictionaries, deques, named tuples, torch's return types, dataclass instances, and what is registered with
`torch.utils._pytree` are containers. With ``objects=True``, for results, so are sets, subclasses of the built-in
containers, and plain instances of any class that Python, not C, defines: such an object is made anew of the attributes
that it had, without a call of its ``__init__``.

A container that stands in two places is one container: the second place is `Again`. Tuples are exempt in arguments,
where Python itself may or may not keep equal ones as one.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from aotlab import torch_internals as internals
from aotlab.errors import OutputError, PythonValueError, RefusedError
from aotlab.values import PLAIN, items_in

#: How a container is taken apart: its items by position, by key, or by the functions registered for its type.
How = Literal["items", "keys", "registered"]
#: A step from a container to what it holds: an attribute's name, or a position or key.
Step = tuple[Literal["attribute", "item"], Any]

_ITEMS: dict[type, Callable[[Any], list[Any]]] = {
    tuple: lambda value: list(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    collections.deque: lambda value: list(collections.deque.__iter__(value)),
    set: lambda value: list(set.__iter__(value)),
    frozenset: lambda value: list(frozenset.__iter__(value)),
}
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_BASES = (*_ITEMS, *_MAPPINGS, types.SimpleNamespace, object)
_NO_OBJECTS = (Tensor, nn.Module, type, torch.Size)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: types without it are written in C
#: The deepest nesting that is walked.
DEEPEST = 200


class Leaf:
    """Stands in a tree for what is no container."""

    def __repr__(self) -> str:
        return "*"


LEAF = Leaf()


@dataclass(frozen=True, slots=True)
class Again:
    """Stands for the container that is number ``number`` of the tree, counted in the order in which they are met."""

    number: int

    def __str__(self) -> str:
        return f"container {self.number} again"


@dataclass(frozen=True, slots=True)
class Given:
    """Stands in a result for an object that the caller has: number ``root`` of the known roots, then ``steps``."""

    root: int
    steps: tuple[Step, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One container.

    Attributes
    ----------
    kind
        Its type.
    how
        How its items are held.
    keys
        The keys of a mapping, as they are; ``typed_keys`` are what is compared, so that 1 is not True.
    extra
        A default factory, a maximal length, or what a registered type keeps besides its items.
    attributes
        The names of its attributes, which follow the items among the children.
    children
        What it holds.
    """

    kind: type
    how: How
    keys: tuple[Any, ...] = field(default=(), compare=False)
    typed_keys: tuple[Any, ...] = ()
    extra: Any = None
    attributes: tuple[str, ...] = ()
    children: tuple[Any, ...] = ()
    number: int | None = None

    @property
    def items(self) -> int:
        """How many of the children are items, not attributes."""
        return len(self.children) - len(self.attributes)

    def steps(self) -> list[Step | None]:
        """Return how to get at each child; None where only a registered function can."""
        if self.how == "registered":
            found: list[Step | None] = [None] * self.items
        elif self.kind in (set, frozenset):
            found = [None] * self.items
        else:
            found = [("item", key) for key in (self.keys if self.how == "keys" else range(self.items))]
        return found + [("attribute", name) for name in self.attributes]

    def __str__(self) -> str:
        name = self.kind.__qualname__
        if self.kind in (tuple, list) and not self.attributes:
            inner = ", ".join(map(str, self.children))
            return f"[{inner}]" if self.kind is list else f"({inner}{',' if len(self.children) == 1 else ''})"
        labels = [repr(key) for key in self.keys] if self.how == "keys" else [""] * self.items
        if self.kind is dict and not self.attributes:
            return "{" + ", ".join(f"{k}: {c}" for k, c in zip(labels, self.children, strict=True)) + "}"
        labels = [f"{label}: " if label else "" for label in labels] + [f"{name}=" for name in self.attributes]
        return f"{name}(" + ", ".join(f"{k}{c}" for k, c in zip(labels, self.children, strict=True)) + ")"


Tree = Node | Again | Given | Leaf


def typed_key(key: Any) -> Any:
    """Return a form of a dictionary's key by which 1, 1.0 and True differ."""
    if type(key) is str:
        return key
    if isinstance(key, tuple):
        return (type(key), *map(typed_key, key))
    return (type(key), key.hex() if isinstance(key, float) else key)


def _is_plain_key(key: Any) -> bool:
    """Tell whether a dictionary's key is all that there is to it, so that equal ones are as good as the same."""
    if isinstance(key, (*PLAIN, type, types.FunctionType, types.BuiltinFunctionType)):
        return True
    if dataclasses.is_dataclass(key):
        return all(map(_is_plain_key, attributes_of(key).values()))
    return isinstance(key, (tuple, frozenset)) and all(map(_is_plain_key, key))


# --- one container -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _slots(kind: Any) -> tuple[str, ...]:
    """Return the names of the slots of a class, as attributes are looked up."""
    names = []
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{each.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__"):
                names.append(name)
    return tuple(names)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds by name, in its slots and in its dictionary."""
    found = {}
    kind: Any = type(value)
    for name in _slots(kind):
        try:
            found[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue  # a slot that was never set
    held = getattr(value, "__dict__", None)
    return found | held if isinstance(held, dict) else found


@lru_cache(maxsize=512)
def _base_of(kind: Any) -> Any:
    """Return the built-in type that lays out the instances of ``kind``; None if C code does that in another way."""
    for each in kind.__mro__:
        if each in _BASES:
            return each
        if not each.__flags__ & _HEAP_TYPE:
            return None
    return None


def _is_return_type(kind: type) -> bool:
    """Tell whether ``kind`` is one of C's named tuples, as `torch.return_types` has them."""
    return issubclass(kind, tuple) and hasattr(kind, "n_sequence_fields")


def _is_plain_object(value: Any) -> bool:
    """Tell whether an object is nothing but its attributes."""
    kind: Any = type(value)
    if isinstance(value, _NO_OBJECTS) or kind is object or hasattr(kind, "__del__"):
        return False
    if dataclasses.is_dataclass(kind):
        return True
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return kind is types.SimpleNamespace
    try:
        object.__reduce_ex__(value, 2)  # raises for types of C that keep something where Python cannot see it
    except Exception:  # noqa: BLE001  # the object's own state functions may raise anything
        return False
    return True


def _take_apart(value: Any, objects: bool) -> tuple[Node, list[Any]] | None:
    """Return a node without children, and the children; None for a leaf."""
    kind: type = type(value)
    if kind is tuple or kind is list:
        return Node(kind=kind, how="items"), list(value)
    if kind is dict:
        keys = tuple(value)
        return Node(kind=kind, how="keys", keys=keys, typed_keys=tuple(map(typed_key, keys))), list(value.values())
    if kind is slice and any(isinstance(part, Tensor) for part in (value.start, value.stop, value.step)):
        names = ("start", "stop", "step")
        return Node(kind=kind, how="items", attributes=names), [value.start, value.stop, value.step]
    if isinstance(value, (*_NO_OBJECTS, *PLAIN)) or (kind.__module__ == "builtins" and kind not in _ITEMS):
        return None
    if _is_return_type(kind):
        return Node(kind=kind, how="items"), list(value)
    base = _base_of(kind)
    registered = internals.registered_container(kind) if base is not kind else None
    if registered is not None:
        children, context = registered.flatten_fn(value)
        return Node(kind=kind, how="registered", extra=context), list(children)
    if base is None:
        return None
    attributes = attributes_of(value)
    named = base is tuple and hasattr(kind, "_fields")
    known = kind in (*_MAPPINGS, collections.deque) or named
    if base in _ITEMS or base in _MAPPINGS:
        if not (objects or (known and not attributes)):
            return None
    elif not (objects or dataclasses.is_dataclass(kind)) or not _is_plain_object(value):
        return None
    held = list(attributes.values())
    if base in _MAPPINGS:
        keys = tuple(base.__iter__(value))
        factory = value.default_factory if base is collections.defaultdict else None
        items = [dict.__getitem__(value, key) for key in keys]
        typed = tuple(map(typed_key, keys))
        node = Node(kind=kind, how="keys", keys=keys, typed_keys=typed, extra=factory, attributes=tuple(attributes))
        return node, items + held
    if base in _ITEMS:
        longest = value.maxlen if base is collections.deque else None
        return Node(kind=kind, how="items", extra=longest, attributes=tuple(attributes)), _ITEMS[base](value) + held
    return Node(kind=kind, how="items", attributes=tuple(attributes)), held


def _put_together(node: Node, children: Sequence[Any]) -> Any:
    """Make a container of a node's kind, without asking the code of its class."""
    kind, count = node.kind, node.items
    items = children[:count]
    if kind is list:
        return list(items)
    if kind is tuple:
        return tuple(items)
    if node.how == "registered":
        registered = internals.registered_container(kind)
        assert registered is not None
        return registered.unflatten_fn(list(items), node.extra)
    if _is_return_type(kind):
        return kind(items)
    if kind is slice:
        return slice(*children)
    base = _base_of(kind)
    made: Any
    if base is tuple or base is frozenset:
        made = base.__new__(kind, items)
    elif base is collections.deque:
        made = collections.deque.__new__(kind)
        collections.deque.__init__(made, items, node.extra)
    else:
        assert base is not None
        made = base.__new__(kind)
        if base is list:
            list.extend(made, items)
        elif base is set:
            set.update(made, items)
        elif base in _MAPPINGS:
            if base is collections.defaultdict:
                made.default_factory = node.extra
            setter = base.__setitem__
            for key, item in zip(node.keys, items, strict=True):
                setter(made, key, item)
    for name, value in zip(node.attributes, children[count:], strict=True):
        object.__setattr__(made, name, value)
    return made


# --- trees of them -----------------------------------------------------------------------------------------------


def _step_text(step: Step | None, position: int) -> str:
    if step is None:
        return f"[{position}]"
    return f".{step[1]}" if step[0] == "attribute" else f"[{step[1]!r}]"


class _Walk:
    """Takes one value apart."""

    def __init__(self, objects: bool, given: Mapping[int, Given], name: str, error: type[RefusedError]) -> None:
        self.objects = objects
        self.given = given
        self.error = error
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()
        self._alive: list[Any] = []  # what registered functions return may live no longer than this walk
        self._name = name

    def visit(self, value: Any, path: str = "", depth: int = 0) -> Tree:
        """Take ``value`` apart."""
        given = self.given.get(id(value))
        if given is not None:
            if given.steps is None:
                raise self.error(
                    f"`{self._name}{path}` belongs to the caller and hangs in an object that torch's pytree flattens",
                    why="a compiled call could not find it again",
                    suggestion="return what it holds, in a new container",
                )
            return given
        parts = _take_apart(value, self.objects)
        if parts is None:
            self.leaves.append(value)
            self.paths.append(path)
            return LEAF
        if id(value) in self._open or depth > DEEPEST:
            what = "contains itself" if id(value) in self._open else f"is nested more than {DEEPEST} levels deep"
            raise self.error(
                f"`{self._name}{path}` {what}",
                why="its tensors cannot be listed",
                suggestion="pass and return the tensors in a flat container",
            )
        node, children = parts
        strange = [key for key in node.keys if not _is_plain_key(key)]
        if strange:
            raise self.error(
                f"`{self._name}{path}` has a key that is a `{type(strange[0]).__module__}."
                f"{type(strange[0]).__qualname__}`",
                why="a compiled entry could not tell that key from another",
                suggestion="use strings, numbers or tuples of them as keys",
            )
        number = None
        if self.objects or not isinstance(value, tuple):
            if id(value) in self._numbers:
                return Again(self._numbers[id(value)])
            number = self._numbers[id(value)] = len(self._numbers)
        self._open.add(id(value))
        self._alive += (value, children)
        steps = dataclasses.replace(node, children=(LEAF,) * len(children)).steps()
        trees = []
        for i, (child, step) in enumerate(zip(children, steps, strict=True)):
            trees.append(self.visit(child, path + _step_text(step, i), depth + 1))
        self._open.discard(id(value))
        return dataclasses.replace(node, children=tuple(trees), number=number)


def flatten(value: Any) -> tuple[list[Any], Node]:
    """Take arguments, ``(args, kwargs)``, apart: return the leaves and the tree.

    Raises
    ------
    PythonValueError
        For a container that contains itself.
    """
    walk = _Walk(False, {}, "(args, kwargs)", PythonValueError)
    tree = walk.visit(value)
    assert isinstance(tree, Node)
    return walk.leaves, tree


def paths(parts: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the path of each leaf of some named arguments, in the order of `flatten`: ``x[0]['w']``."""
    walk = _Walk(False, {}, "", PythonValueError)
    for name, value in parts:
        walk.visit(value, name)
    return walk.paths


def flatten_result(result: Any, given: Mapping[int, Given]) -> tuple[list[Any], list[str], Tree]:
    """Take what a function returned apart: return the leaves, their names (``out[0]``), and the tree.

    ``given`` says, by ``id``, which objects the caller has: those are not taken apart.

    Raises
    ------
    OutputError
        For a container that contains itself.
    """
    walk = _Walk(True, given, "out", OutputError)
    tree = walk.visit(result)
    return walk.leaves, ["out" + path for path in walk.paths], tree


def unflatten(
    leaves: Sequence[Any],
    tree: Tree,
    given: Callable[[Given], Any] | None = None,
    made: Callable[[Any, tuple[Step, ...] | None], None] | None = None,
) -> Any:
    """Fill a tree with leaves; ``given`` finds the caller's objects, ``made`` is told of each part and its place."""
    return _Fill(leaves, given, made).fill(tree, ())


class _Fill:
    """Fills one tree. A function that called itself would be a cycle, and keep what it made until it is collected."""

    def __init__(
        self,
        leaves: Sequence[Any],
        given: Callable[[Given], Any] | None,
        made: Callable[[Any, tuple[Step, ...] | None], None] | None,
    ) -> None:
        self._following = iter(leaves)
        self._given = given
        self._made = made
        self._numbered: dict[int, Any] = {}

    def fill(self, tree: Tree, place: tuple[Step, ...] | None) -> Any:
        """Return what stands for a tree, or a part of it at some place."""
        made = self._made
        if isinstance(tree, Leaf):
            leaf = next(self._following)
            if made is not None:
                made(leaf, place)
            return leaf
        if isinstance(tree, Again):
            return self._numbered[tree.number]
        if isinstance(tree, Given):
            assert self._given is not None
            return self._given(tree)
        inner = tree.steps() if made is not None else [None] * len(tree.children)
        children = [
            self.fill(child, None if place is None or step is None else (*place, step))
            for child, step in zip(tree.children, inner, strict=True)
        ]
        container = _put_together(tree, children)
        if tree.number is not None:
            self._numbered[tree.number] = container
        if made is not None:
            made(container, place)
        return container


def is_container(value: Any) -> bool:
    """Tell whether ``value``, as an argument, is taken apart."""
    return _take_apart(value, False) is not None


def nodes(tree: Tree) -> list[Node]:
    """List the containers of a tree."""
    if not isinstance(tree, Node):
        return []
    return [tree, *(node for child in tree.children for node in nodes(child))]


def follow(value: Any, steps: Sequence[Step]) -> Any:
    """Go from an object to one that it holds."""
    for how, key in steps:
        value = getattr(value, key) if how == "attribute" else value[key]
    return value


_SINGLE = (*PLAIN, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def known_objects(
    roots: Sequence[Any], *, first: int, limit: int = 2000, depth: int = 4
) -> tuple[dict[int, Given], list[Any]]:
    """List the containers and objects that can be reached from ``roots``, by ``id``, with the way to each.

    The roots are numbered from ``first``. The second result keeps the objects alive, and their ids with them. What is
    the same object wherever it stands (functions, classes, empty tuples) is listed only as a root.
    """
    found: dict[int, Given] = {}
    alive: list[Any] = []
    todo: collections.deque[tuple[Any, Given]] = collections.deque(
        (root, Given(first + i, ())) for i, root in enumerate(roots)
    )
    while todo and len(found) < limit:
        value, here = todo.popleft()
        assert here.steps is not None
        empty = isinstance(value, (tuple, frozenset)) and not items_in(value)
        single = empty or isinstance(value, _SINGLE)
        if id(value) in found or isinstance(value, PLAIN) or (single and here.steps):
            continue
        found[id(value)] = here
        alive.append(value)
        if single or isinstance(value, Tensor) or len(here.steps) >= depth:
            continue
        if isinstance(value, dict):
            inner: list[tuple[Step, Any]] = [(("item", key), item) for key, item in list(dict.items(value))[:limit]]
        elif isinstance(value, (list, tuple, collections.deque)):
            inner = [(("item", i), item) for i, item in enumerate(items_in(value)[:limit])]
        else:
            inner = [(("attribute", name), item) for name, item in attributes_of(value).items()]
        todo += [(item, Given(here.root, (*here.steps, step))) for step, item in inner]
    return found, alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a function's result is put together.

    ``roots`` are the objects besides the arguments in which `Given` finds its steps, by number: root 0 is the tuple of
    arguments, 1 the dictionary of keyword arguments. ``reads`` look up those of them that have a name, by number.
    """

    tree: Tree
    roots: dict[int, Any] = field(default_factory=dict)
    reads: dict[int, Callable[[], Any]] = field(default_factory=dict)


def givens(tree: Tree) -> list[Given]:
    """List the caller's objects in a tree."""
    if isinstance(tree, Given):
        return [tree]
    return [given for child in tree.children for given in givens(child)] if isinstance(tree, Node) else []
