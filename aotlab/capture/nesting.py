"""Nested containers taken apart and put together again: what goes into a function, and what comes out of it.

    {"a": [x, y], "opts": Options(scale=2.0, w=w)}

has the leaves ``x``, ``y``, ``2.0`` and ``w``; the rest is a tree of `Node`, which is compared, named (``['a'][0]``,
``['opts'].w``), and filled with other leaves. Containers are tuples, lists, dictionaries, dataclass instances, and what
is registered with `torch.utils._pytree`; in results also instances of plain classes, made anew without ``__init__``. A
list, a dictionary or an object that stands in two places, or in itself, is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.errors import OutputError, PythonValueError, RefusedError
from aotlab.guards.values import PLAIN, is_plain

#: How a container is taken apart: its items by position or key, its attributes, or what is registered for its type.
How = Literal["items", "keys", "attributes", "registered"]
#: A step from a container to what it holds: an attribute's name, or a position or key.
Step = tuple[Literal["attribute", "item"], Any]

_MAPPINGS: tuple[type, ...] = (dict, collections.OrderedDict, collections.defaultdict)
_LEAVES = (Tensor, nn.Module, type, torch.Size, torch.SymInt, torch.SymFloat, *PLAIN)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: types without it are written in C
#: The deepest nesting that is walked.
DEEPEST = 200


class Leaf:
    """Stands in a tree for what is no container."""

    def __repr__(self) -> str:
        return "*"


LEAF = Leaf()


@dataclass(frozen=True, slots=True)
class Given:
    """Stands in a result for an object that the caller passed: where it hangs in ``(args, kwargs)``."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One container: its type, how its items are held, and its children.

    ``keys`` are the keys of a mapping or the names of attributes; ``typed_keys`` are what is compared, so that 1 is not
    True. ``extra`` is a default factory, or what a registered type keeps besides its items.
    """

    kind: type
    how: How
    keys: tuple[Any, ...] = field(default=(), compare=False)
    typed_keys: tuple[Any, ...] = ()
    extra: Any = None
    children: tuple[Any, ...] = ()

    def steps(self, count: int) -> Sequence[Step | None]:
        """Return how to get at each of ``count`` children; None where only a registered function can."""
        if self.how == "registered":
            return [None] * count
        if self.how == "attributes":
            return [("attribute", name) for name in self.keys]
        return [("item", key) for key in (self.keys if self.how == "keys" else range(count))]

    def __str__(self) -> str:
        name = self.kind.__qualname__
        if self.kind in (tuple, list):
            inner = ", ".join(map(str, self.children))
            return f"[{inner}]" if self.kind is list else f"({inner}{',' if len(self.children) == 1 else ''})"
        form = {"keys": "{!r}: {}", "attributes": "{}={}"}.get(self.how, "{1}")
        inner = ", ".join(form.format(*pair) for pair in zip(self.keys or self.children, self.children, strict=True))
        return f"{{{inner}}}" if self.kind is dict else f"{name}({inner})"


Tree = Node | Given | Leaf


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


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds by name; of a dataclass with slots, the fields that are set."""
    held = getattr(value, "__dict__", {})
    names = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {name: getattr(value, name) for name in names if name not in held and hasattr(value, name)} | held


def _is_made_of_attributes(kind: Any, objects: bool) -> bool:
    """Tell whether instances of a dataclass, or of any class, are nothing but their attributes."""
    if not all(each is object or each.__flags__ & _HEAP_TYPE for each in kind.__mro__) or hasattr(kind, "__del__"):
        return False
    if dataclasses.is_dataclass(kind) or not objects or kind is object:
        return dataclasses.is_dataclass(kind)
    usual = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    return usual and not any(vars(each).get("__slots__") for each in kind.__mro__)


def _take_apart(value: Any, objects: bool = False) -> tuple[Node, list[Any]] | None:
    """Return a node without children, and these; None for a leaf. With ``objects`` plain classes are no leaves."""
    kind: type = type(value)
    named = issubclass(kind, tuple) and hasattr(kind, "_fields") and not getattr(value, "__dict__", None)
    if kind is tuple or kind is list or named:
        return Node(kind=kind, how="items"), list(tuple.__iter__(value) if kind is not list else value)
    if kind in _MAPPINGS:
        keys = tuple(value)
        factory = getattr(value, "default_factory", None)
        node = Node(kind=kind, how="keys", keys=keys, typed_keys=tuple(map(typed_key, keys)), extra=factory)
        return node, list(value.values())
    if kind is slice and any(isinstance(part, Tensor) for part in (value.start, value.stop, value.step)):
        attributes = {"start": value.start, "stop": value.stop, "step": value.step}
    elif isinstance(value, _LEAVES):
        return None
    elif (registered := internals.registered_container(kind)) is not None:
        children, context = registered.flatten_fn(value)
        return Node(kind=kind, how="registered", extra=context), list(children)
    elif _is_made_of_attributes(kind, objects):
        attributes = attributes_of(value)
    else:
        return None
    names = tuple(attributes)
    return Node(kind=kind, how="attributes", keys=names, typed_keys=names), list(attributes.values())


def _put_together(node: Node, children: list[Any]) -> Any:
    """Make a container of a node's kind, without asking the code of its class."""
    kind: Any = node.kind
    if kind is list:
        return children
    if node.how == "registered":
        return internals.registered_container(kind).unflatten_fn(children, node.extra)
    if node.how == "keys":
        items = zip(node.keys, children, strict=True)
        return kind(node.extra, items) if kind is collections.defaultdict else kind(items)
    if node.how == "items":
        return tuple.__new__(kind, children)
    if kind is slice:
        return slice(*children)
    made = object.__new__(kind)
    for name, value in zip(node.keys, children, strict=True):
        object.__setattr__(made, name, value)
    return made


# --- trees of them -----------------------------------------------------------------------------------------------


def _step_text(step: Step | None, position: int) -> str:
    if step is None:
        return f"[{position}]"
    return f".{step[1]}" if step[0] == "attribute" else f"[{step[1]!r}]"


class _Walk:
    """Takes one value apart; `None` among ``given`` stands for what can not be found again."""

    def __init__(self, name: str, error: type[RefusedError], given: Mapping[int, Given | None] | None = None) -> None:
        self._error = error
        self.given = given
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # what registered functions return may live no longer than this walk
        self._name = name

    def visit(self, value: Any, path: str = "", depth: int = 0) -> Tree:
        if self.given is not None and id(value) in self.given:
            given = self.given[id(value)]
            if given is None:
                raise self._error(
                    f"`{self._name}{path}` is not made by the function, which only knows it",
                    why="a compiled call might return another object",
                    suggestion="return what it holds, in a new container",
                )
            return given
        parts = _take_apart(value, objects=self.given is not None)
        if parts is None:
            self.leaves.append(value)
            self.paths.append(path)
            return LEAF
        node, children = parts
        self._check(value, node, path, depth)
        self._seen.add(id(value))
        self._alive += (value, children)
        texts = [_step_text(step, i) for i, step in enumerate(node.steps(len(children)))]
        trees = [self.visit(child, path + text, depth + 1) for child, text in zip(children, texts, strict=True)]
        return dataclasses.replace(node, children=tuple(trees))

    def _check(self, value: Any, node: Node, path: str, depth: int) -> None:
        """Refuse a container that stands in two places, is nested too deeply, or has keys that are objects."""
        # equal tuples may be one object or two: Python keeps constants as it likes
        loose = isinstance(value, tuple) and (self.given is None or all(map(is_plain, value)))
        if depth > DEEPEST or (id(value) in self._seen and not loose):
            what = "stands in two places, or in itself" if depth <= DEEPEST else f"is nested more than {DEEPEST} deep"
            raise self._error(
                f"`{self._name}{path}` {what}",
                why="its tensors cannot be listed",
                suggestion="pass and return the tensors in a flat container",
            )
        strange = [type(key) for key in node.keys if not _is_plain_key(key)]
        if strange:
            raise self._error(
                f"`{self._name}{path}` has a key that is a `{strange[0].__module__}.{strange[0].__qualname__}`",
                why="a compiled entry could not tell that key from another",
                suggestion="use strings, numbers or tuples of them as keys",
            )


def flatten(value: Any) -> tuple[list[Any], Node]:
    """Take arguments, ``(args, kwargs)``, apart: return the leaves and the tree; raises `PythonValueError`."""
    walk = _Walk("(args, kwargs)", PythonValueError)
    tree = walk.visit(value)
    assert isinstance(tree, Node)
    return walk.leaves, tree


def paths(parts: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the path of each leaf of some named arguments, in the order of `flatten`: ``x[0]['w']``."""
    walk = _Walk("", PythonValueError)
    for name, value in parts:
        walk.visit(value, name)
    return walk.paths


def flatten_result(result: Any, given: Mapping[int, Given | None]) -> tuple[list[Any], list[str], Tree]:
    """Take a result apart, but for what is ``given``, by ``id``: leaves, their names (``out[0]``), tree."""
    walk = _Walk("out", OutputError, given)
    tree = walk.visit(result)
    return walk.leaves, ["out" + path for path in walk.paths], tree


def unflatten(leaves: Sequence[Any], tree: Tree, given: Mapping[Given, Any] | None = None) -> Any:
    """Fill a tree with leaves, and with the objects that are ``given``."""
    return _fill(iter(leaves), tree, given or {})


def _fill(following: Iterator[Any], tree: Tree, given: Mapping[Given, Any]) -> Any:
    # no closure: one that calls itself would keep the leaves until the garbage collector comes
    if isinstance(tree, Leaf):
        return next(following)
    if isinstance(tree, Given):
        return given[tree]
    return _put_together(tree, [_fill(following, child, given) for child in tree.children])


def is_container(value: Any) -> bool:
    """Tell whether ``value`` is taken apart."""
    return _take_apart(value) is not None


def parts_of(value: Any, steps: tuple[Step, ...] | None = ()) -> Iterator[tuple[Any, tuple[Step, ...] | None]]:
    """Go through a value and all that is in it, each with its place; None where no step leads to it."""
    yield value, steps
    apart = _take_apart(value)
    if apart is not None:
        for child, step in zip(apart[1], apart[0].steps(len(apart[1])), strict=True):
            yield from parts_of(child, None if steps is None or step is None else (*steps, step))


def givens(tree: Tree) -> list[Given]:
    """List the caller's objects in a tree."""
    if isinstance(tree, Given):
        return [tree]
    return [given for child in tree.children for given in givens(child)] if isinstance(tree, Node) else []
