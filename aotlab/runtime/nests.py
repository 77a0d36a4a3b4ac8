"""The lines that take the arguments apart and put the result together."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aotlab.capture import nesting
from aotlab.capture.nesting import Given, Leaf, Node, Step, Tree
from aotlab.runtime.writer import Writer

#: Deeper nestings are not written out: Python's own parser would not read them.
_DEEPEST = 20


def can_be_written(tree: Tree, depth: int = 0) -> bool:
    """Tell whether a tree of arguments can be taken apart by straight-line code."""
    if not isinstance(tree, Node):
        return True
    if tree.how == "registered" or tree.kind is slice or depth > _DEEPEST:
        return False
    return all(can_be_written(child, depth + 1) for child in tree.children)


class Unpacker:
    """Writes the guards of the nesting of one argument after the other, and names its leaves.

    Parameters
    ----------
    writer
        Where the lines go.
    miss
        Writes the return of `MISS` under any of some conditions.
    leaf
        Is told the expression of each leaf, in order.
    """

    def __init__(self, writer: Writer, miss: Callable[[Sequence[str]], None], leaf: Callable[[str], None]) -> None:
        self._w = writer
        self._miss = miss
        self._leaf = leaf
        self._kinds: dict[type, list[str]] = {}

    def unpack(self, tree: Tree, expression: str) -> None:
        """Write the code for one argument."""
        if not isinstance(tree, Node):
            self._leaf(expression)
            return
        kind, w = tree.kind, self._w
        conditions = [f"type({expression}) is not {self._type(kind)}"]
        if tree.how == "keys":
            keys = w.constant("keys", tree.keys)
            if all(type(key) is str for key in tree.keys):
                conditions.append(f"tuple({expression}) != {keys}")
                if tree.keys:  # a member of an enum of strings equals the string
                    types = w.constant("key_types", [str] * len(tree.keys))
                    conditions.append(f"[*map(type, {expression})] != {types}")
            else:
                typed, wanted = w.constant("typed_keys", typed_keys), w.constant("keys", tree.typed_keys)
                conditions.append(f"{typed}({expression}) != {wanted}")
        elif tree.how == "items":
            conditions.append(f"len({expression}) != {len(tree.children)}")
        else:
            attributes = w.constant("attributes_of", nesting.attributes_of)
            conditions.append(f"tuple({attributes}({expression})) != {tree.keys!r}")
        if kind is collections.defaultdict:
            conditions.append(f"{expression}.default_factory is not {w.constant('factory', tree.extra)}")
        self._miss(conditions)
        if not issubclass(kind, tuple):
            self._kinds.setdefault(kind, []).append(expression)
        for step, child in zip(tree.steps(), tree.children, strict=True):
            assert step is not None
            self.unpack(child, expression + step_text(w, step))

    def distinct(self) -> None:
        """Write the check that the containers of one type are different objects."""
        for expressions in self._kinds.values():
            if len(expressions) > 1:
                ids = ", ".join(f"id({expression})" for expression in expressions)
                self._miss([f"len({{{ids}}}) != {len(expressions)}"])

    def _type(self, kind: type) -> str:
        return kind.__name__ if kind in (tuple, list, dict) else self._w.constant(kind.__name__, kind)


def step_text(writer: Writer, step: Step) -> str:
    """Write a step from a container to what it holds."""
    how, key = step
    if how == "attribute":
        return f".{key}"
    return f"[{key!r}]" if type(key) in (str, int) else f"[{writer.constant('key', key)}]"


def typed_keys(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    """Return the keys of a mapping in a form by which 1 and True differ."""
    return tuple(map(nesting.typed_key, mapping))


def write_result(writer: Writer, tree: Tree, outputs: Sequence[str]) -> str:
    """Write the expression that nests the outputs as the function did."""
    text = _text(writer, tree, iter(outputs), 0)
    if text is not None:
        return text
    given = dict.fromkeys(nesting.givens(tree))

    def build(leaves: list[Any], known: list[Any]) -> Any:
        return nesting.unflatten(leaves, tree, dict(zip(given, known, strict=True)))

    found = ", ".join(_given_text(writer, each) for each in given)
    return f"{writer.constant('build', build)}([{', '.join(outputs)}], [{found}])"


def _given_text(writer: Writer, given: Given) -> str:
    (_, root), *steps = given.steps
    return ("kwargs" if root else "args") + "".join(step_text(writer, step) for step in steps)


def _text(writer: Writer, tree: Tree, outputs: Iterator[str], depth: int) -> str | None:
    """Write a nesting as an expression; None if it has other containers than tuple, list and dict."""
    if isinstance(tree, Leaf):
        return next(outputs)
    if isinstance(tree, Given):
        return _given_text(writer, tree)
    if tree.kind not in (tuple, list, dict) or depth > _DEEPEST:
        return None
    items = [_text(writer, child, outputs, depth + 1) for child in tree.children]
    if any(item is None for item in items):
        return None
    if tree.kind is dict:
        keys = [repr(key) if type(key) in (str, int) else writer.constant("key", key) for key in tree.keys]
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(keys, items, strict=True)) + "}"
    inner = ", ".join(item for item in items if item is not None)
    if tree.kind is list:
        return f"[{inner}]"
    return f"({inner},)" if len(items) == 1 else f"({inner})"
