"""Write the lines that unpack the arguments into local variables, and guard the pytree structure and plain values.

For a call ``f(x, 2)`` they are, in short::

    if len(args) != 2 or kwargs: return MISS
    x, factor = args
    if type(factor) is not int or factor != 2: return MISS
"""

from __future__ import annotations

from itertools import count

from aotlab.capture import nesting
from aotlab.capture.nesting import Leaf, Node, Step, Tree
from aotlab.guards.call_state import ValueFacts
from aotlab.guards.guarded_values import same_value
from aotlab.runtime.draft import Draft, Writer

#: Pytrees that are nested more deeply than this are not unpacked by straight-line code: Python's parser has a limit.
DEEPEST = 20


def can_be_written(tree: Tree, depth: int = 0) -> bool:
    """Tell whether straight-line code can unpack a pytree of arguments, which is nested ``depth`` levels deep.

    It cannot if the pytree has rare types of containers or keys, or is nested too deeply. Then the generated function
    calls `nesting.flatten`.
    """
    if not isinstance(tree, Node):
        return True
    is_object = tree.how == "attributes" and tree.kind is not slice
    if tree.kind not in (tuple, list, dict) and not is_object and not hasattr(tree.kind, "_fields"):
        return False
    if depth > DEEPEST or (tree.how == "keys" and any(type(key) is not str for key in tree.keys)):
        return False
    return all(can_be_written(child, depth + 1) for child in tree.children)


def step_text(writer: Writer, step: Step) -> str:
    """Write the step from a container to one of its items as Python text: ``.key`` or ``[key]``."""
    access, key = step
    if access == "attribute":
        return f".{key}"
    return f"[{key!r}]" if type(key) in (str, int) else f"[{writer.constant('key', key)}]"


class Arguments:
    """Writes the code that unpacks the nested arguments and checks their structure."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._w = draft.w
        self._miss = draft.miss
        self._next_position = count(draft.parts.call.lifted_count)
        sizes = draft.trace.recorder.sizes
        self._dynamic_numbers = {} if sizes is None else sizes.numbers
        # type → the expressions of the mutable containers of this type; a guard checks that they are distinct objects
        self._containers: dict[type, list[str]] = {}

    def write(self) -> None:
        """Write the code for the lifted inputs, for ``args`` and for ``kwargs``."""
        call, w = self._draft.parts.call, self._w
        if call.lifted_count:
            w.add(f"parameters = {w.constant('lifted', call.target.lifter())}()")
            for i in range(call.lifted_count):
                self._draft.expressions[i] = f"parameters[{i}]"
                self._value_guard(i)
        if not can_be_written(call.spec):
            w.add(f"leaves, nesting = {w.constant('tree_flatten', nesting.flatten)}((args, kwargs))")
            self._miss([f"nesting != {w.constant('expected_nesting', call.spec)}"])
            for i in range(len(call.leaves_among(call.values))):
                self._leaf(f"leaves[{i}]")
            return
        args, kwargs = call.spec.children
        self._miss(
            [f"len(args) != {len(args.children)}", f"tuple(kwargs) != {kwargs.keys!r}" if kwargs.keys else "kwargs"]
        )
        if len(args.children) > 1 and all(isinstance(child, Leaf) for child in args.children):
            positions = [next(self._next_position) for _ in args.children]
            names = list(map(self._name, positions))
            self._draft.many_names = names if len(names) > 20 else []
            w.add(f"{', '.join(names)} = args")
            for i in positions:
                self._value_guard(i)
        else:
            for i, child in enumerate(args.children):
                self._unpack(child, f"args[{i}]")
        for key, child in zip(kwargs.keys, kwargs.children, strict=True):
            self._unpack(child, f"kwargs[{key!r}]")
        for expressions in self._containers.values():
            if len(expressions) > 1:
                ids = ", ".join(f"id({expression})" for expression in expressions)
                self._miss([f"len({{{ids}}}) != {len(expressions)}"])

    def _unpack(self, tree: Tree, expression: str) -> None:
        """Write the code for one argument or, if it is a container, for its items."""
        if not isinstance(tree, Node):
            self._leaf(expression)
            return
        w, kind = self._w, tree.kind
        plain = kind in (tuple, list, dict)
        conditions = [f"type({expression}) is not {kind.__name__ if plain else w.constant(kind.__name__, kind)}"]
        if tree.how == "keys":
            conditions.append(f"tuple({expression}) != {w.constant('keys', tree.keys)}")
            if tree.keys:  # a key may be equal and have another type: a member of a string enum equals the string
                types = w.constant("key_types", [str] * len(tree.keys))
                conditions.append(f"[*map(type, {expression})] != {types}")
        elif tree.how == "items":
            conditions.append(f"len({expression}) != {len(tree.children)}")
        else:
            attributes = w.constant("attributes_of", nesting.attributes_of)
            conditions.append(f"tuple({attributes}({expression})) != {tree.keys!r}")
        self._miss(conditions)
        if not issubclass(kind, tuple):
            self._containers.setdefault(kind, []).append(expression)
        for step, child in zip(tree.steps(len(tree.children)), tree.children, strict=True):
            assert step is not None
            self._unpack(child, expression + step_text(w, step))

    def _leaf(self, expression: str) -> None:
        position = next(self._next_position)
        self._w.add(f"{self._name(position)} = {expression}")
        self._value_guard(position)

    def _name(self, position: int) -> str:
        name = self._w.local(self._draft.state.names[position])
        self._draft.expressions[position] = name
        return name

    def _value_guard(self, position: int) -> None:
        """Write the guard of an argument that is not a tensor."""
        facts = self._draft.state.leaves[position]
        if not isinstance(facts, ValueFacts):
            return
        w, name, value = self._w, self._draft.expressions[position], facts.value
        if position in self._dynamic_numbers:
            self._miss([f"type({name}) is not {type(value).__name__}"])
        elif facts.by_identity or value is None or isinstance(value, bool):
            expected = repr(value) if value is None or isinstance(value, bool) else w.constant(name, value)
            conditions = [f"{name} is not {expected}"]
            if facts.code is not None:
                conditions.append(f"{name}.__code__ is not {w.constant(f'code_of_{name}', facts.code)}")
            self._miss(conditions)
        elif type(value) in (int, str):
            self._miss([f"type({name}) is not {type(value).__name__}", f"{name} != {value!r}"])
        else:
            same = w.constant("same_value", same_value)
            self._miss([f"not {same}({name}, {w.constant(f'expected_{name}', value)})"])
