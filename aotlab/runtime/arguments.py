"""The lines that give every argument a name, and guard the values among them.

if len(args) != 2 or kwargs: return MISS
x, factor = args
if type(factor) is not int or factor != 2: return MISS
"""

from __future__ import annotations

from itertools import count

from aotlab.capture import nesting
from aotlab.capture.nesting import Leaf, Node
from aotlab.guards.call_state import ValueFacts
from aotlab.guards.values import same_value
from aotlab.runtime.draft import Draft
from aotlab.runtime.nests import Unpacker, can_be_written


class Arguments:
    """Takes the nested arguments apart, checking their nesting on the way."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._w = draft.w
        self._call = draft.parts.call

    def write(self) -> None:
        """Write the code for lifted parameters and buffers, ``args`` and ``kwargs``."""
        call, w = self._call, self._w
        if call.lifted_count:
            w.add(f"parameters = {w.constant('lifted', call.target.lifter())}()")
            for i in range(call.lifted_count):
                self._draft.expressions[i] = f"parameters[{i}]"
        if can_be_written(call.spec):
            self._take_apart(call.spec)
        else:
            self._flatten(call.spec)

    def _flatten(self, tree: Node) -> None:
        w, call = self._w, self._call
        w.add(f"leaves, nesting = {w.constant('tree_flatten', nesting.flatten)}((args, kwargs))")
        self._draft.miss([f"nesting != {w.constant('expected_nesting', tree)}"])
        for i in range(call.lifted_count, len(call.values)):
            self._leaf(f"leaves[{i - call.lifted_count}]", i)

    def _take_apart(self, tree: Node) -> None:
        w, miss = self._w, self._draft.miss
        following = count(self._call.lifted_count)
        args, kwargs = tree.children
        assert isinstance(args, Node)
        assert isinstance(kwargs, Node)
        conditions = [f"len(args) != {len(args.children)}"]
        conditions.append(f"tuple(kwargs) != {kwargs.keys!r}" if kwargs.keys else "kwargs")
        miss(conditions)
        unpacker = Unpacker(w, miss, lambda expression: self._leaf(expression, next(following)))
        if len(args.children) > 1 and all(isinstance(child, Leaf) for child in args.children):
            positions = [next(following) for _ in args.children]
            w.add(f"{', '.join([self._name(i) for i in positions])} = args")
            for i in positions:
                self._value_guard(i)
        else:
            for i, child in enumerate(args.children):
                unpacker.unpack(child, f"args[{i}]")
        for key, child in zip(kwargs.keys, kwargs.children, strict=True):
            unpacker.unpack(child, f"kwargs[{key!r}]")
        unpacker.distinct()

    def _leaf(self, expression: str, position: int) -> None:
        self._w.add(f"{self._name(position)} = {expression}")
        self._value_guard(position)

    def _name(self, position: int) -> str:
        name = self._w.local(self._draft.state.names[position])
        self._draft.expressions[position] = name
        return name

    def _value_guard(self, position: int) -> None:
        """Write the check of an argument that is no tensor."""
        facts = self._draft.state.leaves[position]
        if not isinstance(facts, ValueFacts):
            return
        w, miss = self._w, self._draft.miss
        name, value = self._draft.expressions[position], facts.value
        if facts.by_identity or value is None or isinstance(value, bool):
            expected = repr(value) if value is None or isinstance(value, bool) else w.constant(name, value)
            conditions = [f"{name} is not {expected}"]
            if facts.code is not None:
                conditions.append(f"{name}.__code__ is not {w.constant(f'code_of_{name}', facts.code)}")
            miss(conditions)
        elif type(value) in (int, str):
            miss([f"type({name}) is not {type(value).__name__}", f"{name} != {value!r}"])
        else:
            same = w.constant("same_value", same_value)
            miss([f"not {same}({name}, {w.constant(f'expected_{name}', value)})"])
