"""The lines that take the arguments apart and put the result together."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from aotlab import nesting
from aotlab.analysis.containers import still_there
from aotlab.nesting import Again, Given, Leaf, Node, Result, Step, Tree
from aotlab.stages.runtime.writer import Writer

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
        self._numbered: dict[int, str] = {}
        self._kinds: dict[type, list[str]] = {}

    def unpack(self, tree: Tree, expression: str) -> None:
        """Write the code for one argument."""
        if isinstance(tree, Again):
            self._miss([f"{expression} is not {self._numbered[tree.number]}"])
            return
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
        elif tree.items or kind in (tuple, list, collections.deque):
            conditions.append(f"len({expression}) != {tree.items}")
        if kind is collections.deque:
            conditions.append(f"{expression}.maxlen != {tree.extra}")
        if kind is collections.defaultdict:
            conditions.append(f"{expression}.default_factory is not {w.constant('factory', tree.extra)}")
        if tree.how == "items" and not issubclass(kind, (tuple, list, collections.deque)):
            attributes = w.constant("attributes_of", nesting.attributes_of)
            conditions.append(f"tuple({attributes}({expression})) != {tree.attributes!r}")
        self._miss(conditions)
        if tree.number is not None:
            self._numbered[tree.number] = expression
            self._kinds.setdefault(kind, []).append(expression)
        for step, child in zip(tree.steps(), tree.children, strict=True):
            assert step is not None
            self.unpack(child, expression + self._step(step))

    def distinct(self) -> None:
        """Write the check that containers of one type which were different objects are so again."""
        for expressions in self._kinds.values():
            if len(expressions) > 1:
                ids = ", ".join(f"id({expression})" for expression in expressions)
                self._miss([f"len({{{ids}}}) != {len(expressions)}"])

    def _type(self, kind: type) -> str:
        return kind.__name__ if kind in (tuple, list, dict) else self._w.constant(kind.__name__, kind)

    def _step(self, step: Step) -> str:
        return step_text(self._w, step)


def step_text(writer: Writer, step: Step) -> str:
    """Write a step from a container to what it holds."""
    how, key = step
    if how == "attribute":
        return f".{key}"
    return f"[{key!r}]" if type(key) in (str, int) else f"[{writer.constant('key', key)}]"


def typed_keys(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    """Return the keys of a mapping in a form by which 1 and True differ."""
    return tuple(map(nesting.typed_key, mapping))


def write_given_guards(writer: Writer, result: Result, miss: Callable[[Sequence[str]], None]) -> dict[Given, str]:
    """Write the checks that the objects which a result holds are still where they were; return an expression for each.

    Those among the arguments need none: they are looked up in the arguments.
    """
    found: dict[Given, str] = {}
    for given in nesting.givens(result.tree):
        if given in found:
            continue
        assert given.steps is not None
        if given.root in (0, 1):
            start = "args" if given.root == 0 else "kwargs"
            found[given] = start + "".join(step_text(writer, step) for step in given.steps)
            continue
        root = result.roots[given.root]
        kept = writer.constant("known", nesting.follow(root, given.steps))
        found[given] = kept
        if not given.steps and given.root in result.reads:
            # what was found by its name may have been replaced by something equal
            miss([f"{writer.constant('read', result.reads[given.root])}() is not {kept}"])
        if given.steps:
            look = writer.constant("look", lambda root=root, given=given: still_there(root, given))
            miss([f"{look}() is not {kept}"])
    return found


def write_result(writer: Writer, result: Result, outputs: Sequence[str], given: dict[Given, str]) -> str:
    """Write the expression that nests the outputs as the function did."""
    tree = result.tree
    again = any(isinstance(child, Again) for node in nesting.nodes(tree) for child in node.children)
    following = iter(outputs)
    text = None if again else _text(writer, tree, following, given, 0)
    if text is not None:
        return text
    order = {each: i for i, each in enumerate(given)}

    def build(leaves: list[Any], known: list[Any]) -> Any:
        return nesting.unflatten(leaves, tree, given=lambda each: known[order[each]])

    name = writer.constant("build", build)
    return f"{name}([{', '.join(outputs)}], [{', '.join(given.values())}])"


def _text(writer: Writer, tree: Tree, outputs: Any, given: dict[Given, str], depth: int) -> str | None:
    """Write a nesting as an expression; None if it has other containers than tuple, list and dict."""
    if isinstance(tree, Leaf):
        return str(next(outputs))
    if isinstance(tree, Given):
        return given[tree]
    if not isinstance(tree, Node) or tree.attributes or tree.kind not in (tuple, list, dict) or depth > _DEEPEST:
        return None
    items = [_text(writer, child, outputs, given, depth + 1) for child in tree.children]
    if any(item is None for item in items):
        return None
    if tree.kind is dict:
        keys = [repr(key) if type(key) in (str, int) else writer.constant("key", key) for key in tree.keys]
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(keys, items, strict=True)) + "}"
    inner = ", ".join(item for item in items if item is not None)
    if tree.kind is list:
        return f"[{inner}]"
    return f"({inner},)" if len(items) == 1 else f"({inner})"
