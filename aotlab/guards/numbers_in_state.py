"""Numbers in state that differ between calls: a counter on ``self``, a learning rate in a dictionary.

    class Model(nn.Module):
        def forward(self, x):
            self.steps += 1
            return x * self.steps

If such a number were guarded by its value, each call would need its own entry. So a number that the function changes,
or that differs between two calls, becomes an input of the graph, like a tensor in state: each call reads it again from
its place. `aotlab.frontends.direct` finds these numbers, and writes their new values after a call.

Flags and strings change rarely. They stay guarded by their value, and `changed_constants` finds the new values, which a
call writes.
"""

from __future__ import annotations

import dis
from collections.abc import Hashable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from aotlab.guards.guarded_values import Items, Value, items_in, keys_in, same_value
from aotlab.guards.reached import Place, Reached, codes_in

#: The places of the numbers that are inputs, by `Place.identity`.
Numbers = Mapping[Hashable, Place]
#: The types of the values that a compiled call may set.
_CONSTANTS = (bool, str, type(None))
_TYPES = frozenset({"type", "isinstance", "issubclass"})


def is_number(value: Any) -> bool:
    """Tell whether a value is an int, a float, or a symbolic number. A bool is not a number here."""
    return type(value) in (int, float) or isinstance(value, (torch.SymInt, torch.SymFloat))


def changed_numbers(reached: Sequence[Reached]) -> dict[Hashable, Place]:
    """Return the places of the numbers among the reached values that have changed since their snapshots were taken.

    The result is empty if the function may call `type`, because the type of a symbolic number is not that of a number.
    """
    if any("type" in code.co_names for code in codes_in(reached)):
        return {}
    changed = (item for item in reached if item.place.kind != "attributes" and not item.holds())
    places = (place for item in changed for place in _changed_in(item.expected, item.place.read(), item.place))
    return {place.identity(): place for place in places}


def changed_constants(reached: Sequence[Reached]) -> dict[Hashable, tuple[Reached, Any]]:
    """Return the flags and strings that have been set since their snapshots were taken, each with its new value.

    The keys are the identities of the places (`Place.identity`). A new value must equal a constant of a code object
    that also assigns to its name, because a trace may compute another value than eager: a symbolic size, a random
    identifier, the name of the current thread. The result is empty if anything else has changed, too.
    """
    found: dict[Hashable, tuple[Reached, Any]] = {}
    for item in reached:
        if item.place.kind != "attributes" and not item.holds():
            new = item.place.read()
            is_constant = isinstance(item.expected, Value) and item.expected.is_plain and type(new) in _CONSTANTS
            is_of_class = isinstance(item.place.owner, type)  # a metaclass may run code when it is written
            if not is_constant or is_of_class or not item.place.is_writable() or not _is_written(new, item, reached):
                return {}
            found[item.place.identity()] = (item, new)
    return found


def _is_written(value: Any, item: Reached, reached: Sequence[Reached]) -> bool:
    """Tell whether a code object among the reached values assigns to the name of ``item``, and contains the value.

    Code that mentions `type` or `isinstance` does not count, because a symbolic size is not an ``int``.
    """
    name = item.name.rpartition(".")[2] if item.place.kind == "attribute" else item.place.key
    containing = (code for code in codes_in(reached) if any(same_value(each, value) for each in code.co_consts))
    writing = [code for code in containing if _assigns(code, name)]
    return bool(writing) and not any(_TYPES.intersection(code.co_names) for code in writing)


def _assigns(code: CodeType, name: Any) -> bool:
    """Tell whether code assigns to a variable or an attribute called ``name``, or to an item with this key."""
    stores = [each for each in dis.get_instructions(code) if each.opname.startswith("STORE_")]
    by_key = any(each.opname == "STORE_SUBSCR" for each in stores) and any(same_value(k, name) for k in code.co_consts)
    return by_key or any(each.argval == name for each in stores)


def _changed_in(expected: Any, current: Any, place: Place) -> list[Place]:
    """Return the places of the changed numbers in the value ``current`` at ``place``; ``expected`` is its snapshot."""
    if isinstance(expected, Value):
        are_numbers = is_number(expected.value) and is_number(current)
        return [place] if are_numbers and place.is_writable() and not expected.holds(current) else []
    if not isinstance(expected, Items) or type(current) is not expected.type:
        return []
    keys = range(len(expected.children)) if expected.keys is None else keys_in(current)
    return [
        found
        for key, item, child in zip(keys, items_in(current), expected.children, strict=False)
        for found in _changed_in(child, item, Place("item", current, key))
    ]
