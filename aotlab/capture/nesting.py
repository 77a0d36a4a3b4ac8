"""Flatten nested containers into leaves and a tree, and build them again: for arguments and for results.

    {"a": [x, y], "opts": Options(scale=2.0, w=w)}

This value has the leaves ``x``, ``y``, ``2.0`` and ``w``. Its containers become a tree of `Node` objects. Trees can be
compared, their leaves have paths (``['a'][0]``, ``['opts'].w``), and a tree can be filled with other leaves. Containers
are tuples, lists, dictionaries, dataclass instances, and types that are registered with `torch.utils._pytree`. In
results, instances of plain classes are containers, too. They are built again without a call of ``__init__``. A list,
dictionary or object that occurs twice, or contains itself, is refused.
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
from aotlab.errors import BY_DYNAMO, OutputError, PythonValueError, RefusedError
from aotlab.guards.guarded_values import PLAIN, is_plain

#: How to reach the items of a container: by position, key or attribute, or by the functions registered for its type.
How = Literal["items", "keys", "attributes", "registered"]
#: A step from a container to one of its items: the name of an attribute, or a position or key.
Step = tuple[Literal["attribute", "item"], Any]

_MAPPINGS: tuple[type, ...] = (dict, collections.OrderedDict, collections.defaultdict)
_LEAVES = (Tensor, nn.Module, type, torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, *PLAIN)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: types without it are written in C
#: The maximum depth of nesting.
DEEPEST = 200


class Leaf:
    """Marks, in a tree, the position of a value that is not a container. All leaves are the same object, `LEAF`."""

    def __repr__(self) -> str:
        return "*"


LEAF = Leaf()


@dataclass(frozen=True, slots=True)
class CallerObject:
    """Marks, in the tree of a result, the position of an object that the caller passed as an argument or within one.

    ``steps`` is the path of the object in ``(args, kwargs)``. A compiled call returns the object that it finds there.
    """

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A container in a tree. Two containers have equal nodes if they differ only in their leaves.

    ``kind`` is the type of the container. ``how`` says how its items are reached, and ``children`` are their trees.
    ``keys`` are the keys of a mapping or the names of attributes. Comparisons use ``typed_keys`` instead, so that the
    keys 1 and True differ. ``extra`` is the factory of a `collections.defaultdict`, or the context that the flattening
    function of a registered type returned.
    """

    kind: type
    how: How
    keys: tuple[Any, ...] = field(default=(), compare=False)
    typed_keys: tuple[Any, ...] = ()
    extra: Any = None
    children: tuple[Any, ...] = ()

    def steps(self, count: int) -> Sequence[Step | None]:
        """Return the step from the container to each of its ``count`` children.

        The steps are None if only the flattening function of a registered type can reach the children.
        """
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


Tree = Node | CallerObject | Leaf


def typed_key(key: Any) -> Any:
    """Return a form of a dictionary's key in which 1, 1.0 and True differ."""
    if type(key) is str:
        return key
    if isinstance(key, tuple):
        return (type(key), *map(typed_key, key))
    return (type(key), key.hex() if isinstance(key, float) else key)


def _is_plain_key(key: Any) -> bool:
    """Tell whether a guard may compare a dictionary's key with ``==``.

    This holds for plain values, classes and functions, and for tuples, frozensets and dataclass instances that consist
    of them. Any other key may be an object with state that the comparison ignores, so a guard would accept keys in
    another state.
    """
    if isinstance(key, (*PLAIN, type, types.FunctionType, types.BuiltinFunctionType)):
        return True
    if dataclasses.is_dataclass(key):
        return all(map(_is_plain_key, attributes_of(key).values()))
    return isinstance(key, (tuple, frozenset)) and all(map(_is_plain_key, key))


# --- one container -----------------------------------------------------------------------------------------------


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name. They include the fields that a dataclass stores in slots."""
    attributes = getattr(value, "__dict__", {})
    names = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {
        name: getattr(value, name) for name in names if name not in attributes and hasattr(value, name)
    } | attributes


def _is_made_of_attributes(kind: Any, objects: bool) -> bool:
    """Tell whether an instance of a type can be built again from its attributes alone.

    This holds for dataclasses and, with ``objects``, for plain classes, unless they have a ``__del__`` or a base class
    that is written in C.
    """
    if not all(each is object or each.__flags__ & _HEAP_TYPE for each in kind.__mro__) or hasattr(kind, "__del__"):
        return False
    if dataclasses.is_dataclass(kind) or not objects or kind is object:
        return dataclasses.is_dataclass(kind)
    usual = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    return usual and not any(vars(each).get("__slots__") for each in kind.__mro__)


def _open_container(value: Any, objects: bool = False) -> tuple[Node, list[Any]] | None:
    """Return the node of a container, without its children, and the list of its items. Return None for a leaf.

    With ``objects``, instances of plain classes are containers, too.
    """
    kind: type = type(value)
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields") and not getattr(value, "__dict__", None)
    if kind is tuple or kind is list or is_named_tuple:
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


def _build_container(node: Node, children: list[Any]) -> Any:
    """Make a container from its node and its items.

    No code of a user's class runs, except the registered function of a registered type.
    """
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
    instance = object.__new__(kind)
    for name, value in zip(node.keys, children, strict=True):
        object.__setattr__(instance, name, value)
    return instance


# --- trees ---------------------------------------------------------------------------------------------------------


def _step_text(step: Step | None, position: int) -> str:
    if step is None:
        return f"[{position}]"
    return f".{step[1]}" if step[0] == "attribute" else f"[{step[1]!r}]"


class _Flattener:
    """Flattens one value, or several, into ``leaves`` and their ``paths``.

    ``name`` is the name of the value in messages, and ``error`` the exception for values that cannot be flattened. If
    ``caller_objects`` is given, the value is the result of a function. Then `visit` replaces objects whose ids are in
    this mapping by their `CallerObject`. If the mapping has None for an object, no path leads to it from the arguments,
    so `visit` raises.
    """

    def __init__(
        self, name: str, error: type[RefusedError], caller_objects: Mapping[int, CallerObject | None] | None = None
    ) -> None:
        self._error = error
        self.caller_objects = caller_objects
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self._visited: set[int] = set()
        self._alive: list[Any] = []  # keeps the children from registered functions alive, so that ids stay unique
        self._name = name

    def visit(self, value: Any, path: str = "", depth: int = 0) -> Tree:
        if self.caller_objects is not None and id(value) in self.caller_objects:
            caller_object = self.caller_objects[id(value)]
            if caller_object is None:
                raise self._error(
                    f"`{self._name}{path}` existed before the call; the function only returns it",
                    why="a compiled call might return another object",
                    suggestion="return its contents in a new container",
                )
            return caller_object
        parts = _open_container(value, objects=self.caller_objects is not None)
        if parts is None:
            self.leaves.append(value)
            self.paths.append(path)
            return LEAF
        node, children = parts
        self._check(value, node, path, depth)
        self._visited.add(id(value))
        self._alive += (value, children)
        texts = [_step_text(step, i) for i, step in enumerate(node.steps(len(children)))]
        trees = [self.visit(child, path + text, depth + 1) for child, text in zip(children, texts, strict=True)]
        return dataclasses.replace(node, children=tuple(trees))

    def _check(self, value: Any, node: Node, path: str, depth: int) -> None:
        """Refuse a container that occurs twice, is nested too deeply, or has keys that no guard can compare."""
        # A tuple may occur twice: whether equal constant tuples are one object depends on Python's compiler.
        may_repeat = isinstance(value, tuple) and (self.caller_objects is None or all(map(is_plain, value)))
        if depth > DEEPEST or (id(value) in self._visited and not may_repeat):
            defect = "occurs twice, or contains itself" if depth <= DEEPEST else f"is nested more than {DEEPEST} deep"
            raise self._error(
                f"`{self._name}{path}` {defect}",
                why="aotlab cannot flatten such a container into a list of tensors",
                suggestion="put the tensors into one list, tuple or dictionary without nested containers",
            )
        unusual = [type(key) for key in node.keys if not _is_plain_key(key)]
        if unusual:
            raise self._error(
                f"`{self._name}{path}` has a key that is a `{unusual[0].__module__}.{unusual[0].__qualname__}`",
                why="no guard can compare such keys",
                suggestion=f"use strings, numbers or tuples of them as keys, or {BY_DYNAMO}",
            )


def flatten(value: Any) -> tuple[list[Any], Node]:
    """Flatten a container of arguments, usually ``(args, kwargs)``, and return its leaves and its tree.

    Raises `PythonValueError` if a container in it cannot be flattened.
    """
    walk = _Flattener("(args, kwargs)", PythonValueError)
    tree = walk.visit(value)
    assert isinstance(tree, Node)
    return walk.leaves, tree


def paths(parts: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the path of each leaf of some arguments, for example ``x[0]['w']``, in the order of `flatten`.

    ``parts`` are pairs of an argument's name and its value.
    """
    walk = _Flattener("", PythonValueError)
    for name, value in parts:
        walk.visit(value, name)
    return walk.paths


def flatten_result(result: Any, caller_objects: Mapping[int, CallerObject | None]) -> tuple[list[Any], list[str], Tree]:
    """Flatten a result; return its leaves, their names (``out[0]``) and its tree.

    ``caller_objects`` maps the ``id`` of an object that existed before the call to its path in the arguments (see
    `aotlab.capture.caller_objects`). Such objects are not flattened.
    """
    walk = _Flattener("out", OutputError, caller_objects)
    tree = walk.visit(result)
    return walk.leaves, ["out" + path for path in walk.paths], tree


def unflatten(leaves: Sequence[Any], tree: Tree, caller_objects: Mapping[CallerObject, Any] | None = None) -> Any:
    """Build the nested value from its leaves and its tree.

    ``caller_objects`` maps each `CallerObject` in the tree to the object that the value contains there.
    """
    return _fill(iter(leaves), tree, caller_objects or {})


def _fill(leaves: Iterator[Any], tree: Tree, caller_objects: Mapping[CallerObject, Any]) -> Any:
    # not a closure: a recursive closure is a reference cycle, which keeps the leaves until the garbage collector runs
    if isinstance(tree, Leaf):
        return next(leaves)
    if isinstance(tree, CallerObject):
        return caller_objects[tree]
    return _build_container(tree, [_fill(leaves, child, caller_objects) for child in tree.children])


def is_container(value: Any) -> bool:
    """Tell whether ``value`` is a container."""
    return _open_container(value) is not None


def parts_of(value: Any, steps: tuple[Step, ...] | None = ()) -> Iterator[tuple[Any, tuple[Step, ...] | None]]:
    """Yield ``value`` and everything inside it, each with its path: ``steps`` and the further steps that lead to it.

    The steps are None for parts that only the flattening function of a registered type can reach.
    """
    yield value, steps
    opened = _open_container(value)
    if opened is not None:
        for child, step in zip(opened[1], opened[0].steps(len(opened[1])), strict=True):
            yield from parts_of(child, None if steps is None or step is None else (*steps, step))


def caller_objects_in(tree: Tree) -> list[CallerObject]:
    """List the `CallerObject` marks in the tree of a result."""
    if isinstance(tree, CallerObject):
        return [tree]
    return [item for child in tree.children for item in caller_objects_in(child)] if isinstance(tree, Node) else []
