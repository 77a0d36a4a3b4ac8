"""Sentences for the report: about the guards of an entry, and about the guards that fail for a call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from aotlab import _torch as internals
from aotlab.guards.call_state import CallState, TensorFacts, ValueFacts
from aotlab.guards.guarded_values import MISSING, same_value, shown

_FIELD_WORDS = {
    "dtype": "has dtype {}", "device": "is on {}", "shape": "has shape {}", "stride": "has strides {}",
    "requires_grad": "has requires_grad={}", "is_leaf": "has is_leaf={}", "is_inference": "has is_inference()={}",
    "is_conj": "has is_conj()={}",
}  # fmt: skip


def _show(value: Any) -> str:
    return value.__qualname__ if isinstance(value, type) else str(value)


def _unchecked(state: CallState) -> set[str]:
    """Return the names of torch's settings that the entry with the state ``state`` does not check.

    These are settings that only kernels read: the user's code does not mention them (see `Switch.counts`).
    """
    return {switch.name for switch in internals.SWITCHES if not switch.counts(state.mentioned.names)}


def differences(traced: CallState, current: CallState) -> Iterator[str]:
    """Yield one sentence for each guard of an entry that fails for a call.

    ``traced`` is the state that the entry guards, and ``current`` the state of the call, which the entry has tried to
    serve: its conditions have the answers of this call.
    """
    traced = _with_sizes_of(traced, current)
    unchecked = _unchecked(traced)
    for (name, before), (_, after) in zip(traced.settings, current.settings, strict=True):
        if before != after and name not in unchecked:
            yield f"{name} is {_show(after)} where the compiled entry expects {_show(before)}"
    if traced.function_modes != current.function_modes:
        yield "a default device was set or unset by torch.set_default_device or a `with torch.device(…)` block"
    if traced.dispatch_modes != current.dispatch_modes:
        yield "a fake mode is on where the compiled entry expects none, or the other way round"
    yield from (item.change() for item in traced.reached if not item.holds())
    yield from (each.change() for each in traced.conditions if each.found is (not each.expected))
    if traced.nesting != current.nesting:
        yield from _of_nesting(traced, current)
    elif traced.names != current.names:
        missing = sorted(set(traced.names).difference(current.names))
        yield from (f"`{name}`, which the function reads, is not a tensor any more" for name in missing)
    if traced.nesting != current.nesting:
        return
    if len(traced.leaves) != len(current.leaves):  # an older entry may lift fewer numbers
        leaves = dict(zip(traced.names, traced.leaves, strict=True))
        for name, after in zip(current.names, current.leaves, strict=True):
            yield from _of_argument(name, leaves.get(name, after), after)
        return
    for name, before, after in zip(current.names, traced.leaves, current.leaves, strict=True):
        yield from _of_argument(name, before, after)
    yield from _of_tensors_together(traced, current)


def distance(traced: CallState, current: CallState) -> tuple[int, int, int]:
    """Return how different a call is from the traced call of an entry, as a tuple of numbers that can be compared.

    The report names first the reason of the entry with the smallest distance. The first number counts the facts that
    differ. The second counts the names inside containers that only one of the calls has, and the third the arguments
    that differ and were tensors.
    """
    before, after = (dict(zip(state.names, state.leaves, strict=True)) for state in (traced, current))
    changed = [name for name in before.keys() & after.keys() for _ in _of_argument(name, before[name], after[name])]
    # If the nesting differs, `differences` yields nothing about single arguments, so these are counted here.
    differs_in_nesting = (traced.nesting, traced.names) != (current.nesting, current.names)
    facts = sum(1 for _ in differences(traced, current)) + len(changed) * differs_in_nesting
    nested_names = sum(not name.isidentifier() for name in before.keys() ^ after.keys())
    return facts, nested_names, sum(isinstance(before[name], TensorFacts) for name in changed)


def _of_nesting(traced: CallState, current: CallState) -> Iterator[str]:
    """Yield sentences about two calls whose arguments are nested differently.

    If only one of the calls passes some arguments, the sentences name these. Otherwise one sentence describes both
    nestings.
    """
    before, after = (dict(zip(state.names, state.leaves, strict=True)) for state in (traced, current))
    changed = [name for name in {**before, **after} if (name in before) != (name in after)]
    if changed and all(name.isidentifier() for name in changed):
        for name in changed:
            facts = {**before, **after}[name]
            argument = shown(facts.value) if isinstance(facts, ValueFacts) else f"a {_show(facts.type)}"
            default = _default(current, name, argument)
            actual, expected = (
                (argument, default or "it to be left out") if name in after else (default or "left out", argument)
            )
            yield f"`{name}` is {actual} where the compiled entry expects {expected}"
        return
    same = traced.structure == current.structure  # the texts may be equal: two classes may have the same name
    of_another_type = "in containers or by keys of another type than expected"
    expected = of_another_type if same else f"where the compiled entry expects {traced.structure}"
    yield f"the arguments are nested as {current.structure} {expected}"


def _default(state: CallState, name: str, argument: str) -> str:
    """Return, as text, the default value of the parameter ``name``, which one of two calls left out.

    ``argument`` is the text of the argument that the other call passed. The result is an empty text if the function has
    no known default for the parameter, or if the default is equal to ``argument``.
    """
    roots = (item.place.owner for item in state.reached if item.inline and item.place.key == "__code__")
    parameter = next((inspect.signature(root).parameters.get(name) for root in roots), None)
    text = argument if parameter is None or parameter.default is parameter.empty else shown(parameter.default)
    return "" if text == argument else text


def _with_sizes_of(traced: CallState, current: CallState) -> CallState:
    """Replace the dynamic sizes in an entry's state by the sizes of a call, so that they are no differences.

    Only sizes, strides and numbers that the entry's rules admit are replaced.
    """
    if traced.rules is None or len(traced.leaves) != len(current.leaves):
        return traced
    leaves = list(traced.leaves)
    for i, (before, after) in enumerate(zip(traced.leaves, current.leaves, strict=True)):
        if before.type is not after.type or not traced.rules.admits(i, after):
            continue
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
            leaves[i] = replace(before, shape=after.shape, stride=after.stride)
        else:
            leaves[i] = after
    return replace(traced, leaves=tuple(leaves))


def difference(traced: CallState, current: CallState) -> str | None:
    """Return the first of the `differences`, or None."""
    return next(differences(traced, current), None)


def _of_argument(name: str, before: TensorFacts | ValueFacts, after: TensorFacts | ValueFacts) -> Iterator[str]:
    types = f"`{name}` is a {_show(after.type)} where the compiled entry expects a {_show(before.type)}"
    if isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
        if before.type is not after.type:
            yield types
        for attribute, words in _FIELD_WORDS.items():
            was, is_now = getattr(before, attribute), getattr(after, attribute)
            if was != is_now:
                yield f"`{name}` {words.format(_show(is_now))} where the compiled entry expects {_show(was)}"
        attributes_before, attributes_after = dict(before.attributes), dict(after.attributes)
        for key in {**attributes_before, **attributes_after}:
            was, is_now = attributes_before.get(key, MISSING), attributes_after.get(key, MISSING)
            if not same_value(was, is_now):
                yield f"`{name}.{key}` is {shown(is_now)} where the compiled entry expects {shown(was)}"
    elif isinstance(before, ValueFacts) and isinstance(after, ValueFacts):
        if not before.matches(after) and before.value is after.value:
            yield f"`{name}` has other code than the compiled entry expects"
        elif not before.matches(after):
            yield f"`{name}` is {shown(after.value)} where the compiled entry expects {shown(before.value)}"
    else:
        yield types


def _of_tensors_together(traced: CallState, current: CallState) -> Iterator[str]:
    """Yield sentences about guards that concern several tensors, or that only some entries have.

    They concern shared memory, shared version counters, views, storage offsets, and rules about sizes.
    """
    for name, before, after in zip(current.names, traced.leaves, current.leaves, strict=True):
        if traced.watches_overlap and isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
            if before.may_be_written and not after.may_be_written:
                yield f"`{name}` is a view with hooks, or one that must not be written, and an input is written"
            elif before.may_be_written != after.may_be_written:
                yield f"`{name}` may be written, but autograd forbade that when the entry was compiled"
            if before.is_view != after.is_view and before.requires_grad:
                kind, expected = ("a view", "none") if after.is_view else ("no view", "one")
                doing = "views it" if before.is_leaf else "writes to it"
                yield f"`{name}` is {kind} where the compiled entry expects {expected}, and the function {doing}"
    for i in traced.watches_bases:
        if getattr(traced.leaves[i], "base", None) != getattr(current.leaves[i], "base", None):
            yield f"`{current.names[i]}` is no view of a base like the one that the compiled entry expects"
    shapes = ([(leaf.type, getattr(leaf, "shape", None)) for leaf in state.leaves] for state in (traced, current))
    # The rules read sizes and strides by dimension. A dimension may be missing if the types or shapes of the arguments
    # differ from the expected ones. Then the rules are not evaluated, because `_of_argument` reports this difference.
    fitting = traced.rules is not None and next(shapes) == next(shapes)
    broken = traced.rules.broken(current.leaves) if traced.rules is not None and fitting else None
    if broken is not None:
        yield f"the compiled entry expects `{broken}`, which does not hold for this call"
    for i in traced.offsets:
        before, after = traced.leaves[i], current.leaves[i]
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts) and before.offset != after.offset:
            begins = f"`{current.names[i]}` begins at element {after.offset} of its storage"
            yield f"{begins} where the compiled entry expects {before.offset}"
    for i, (was_same, is_same) in enumerate(zip(traced.same_as, current.same_as, strict=True)):
        if was_same != is_same:
            name, other = current.names[i], current.names[was_same if is_same == i else is_same]
            is_one = f"`{name}` is the same tensor as `{other}`; the compiled entry expects two"
            yield f"`{name}` and `{other}` are two tensors; the compiled entry expects one" if is_same == i else is_one
    if traced.watches_overlap and traced.overlapping != current.overlapping:
        began = [pair for pair in current.overlapping if pair not in traced.overlapping]
        a, b, _ = (began or [pair for pair in traced.overlapping if pair not in current.overlapping])[0]
        shared_before = any(pair[:2] == (a, b) for pair in traced.overlapping)
        verb = "no longer share" if not began else "share another part of their" if shared_before else "share"
        yield f"`{current.names[a]}` and `{current.names[b]}` {verb} memory, and the function writes to an input"
    # The counters may also differ if the entry does not guard them. Then another guard has failed, and its sentence was
    # yielded before this one.
    if traced.counters != current.counters:
        joined = sorted(set(current.counters) - set(traced.counters))
        first, second = (joined or sorted(set(traced.counters) - set(current.counters)))[0]
        verb = "share" if joined else "no longer share"
        yield f"`{current.names[first]}` and `{current.names[second]}` {verb} a version counter"


def _any_or(numbers: tuple[int | None, ...]) -> str:
    """Return sizes or strides as text, with "any" in place of None, which means that any value is allowed."""
    return f"({', '.join('any' if n is None else str(n) for n in numbers)}{',' * (len(numbers) == 1)})"


def sentences(state: CallState) -> tuple[tuple[str, str, str], ...]:
    """List the guards of an entry as (kind, subject, sentence), for the report."""
    rows: list[tuple[str, str, str]] = [("structure", "arguments", f"the arguments are nested as {state.structure}")]
    for i, (name, facts) in enumerate(zip(state.names, state.leaves, strict=True)):
        if isinstance(facts, TensorFacts):
            grad = "requires grad" if facts.requires_grad else "does not require grad"
            leaf = " and is a leaf" if facts.requires_grad and facts.is_leaf else ""
            kind = f"a {_show(facts.type)} of dtype {facts.dtype} on {facts.device}"
            layout = (facts.shape, facts.stride) if state.rules is None else state.rules.layouts.get(i)
            shape, stride = (facts.shape, facts.stride) if layout is None else map(_any_or, layout)
            sizes = f"shape {shape} and strides {stride}"
            rows.append(("tensor", name, f"`{name}` is {kind} with {sizes}, {grad}{leaf}"))
            rows += [("tensor", name, f"`{name}.{key}` is {shown(value)}") for key, value in facts.attributes]
            if state.same_as[i] != i:
                rows.append(("identity", name, f"`{name}` is the same tensor as `{state.names[state.same_as[i]]}`"))
        elif state.rules is not None and i in state.rules.numbers:
            rows.append(("value", name, f"`{name}` is of type {facts.type.__name__}"))
        else:
            rows.append(("value", name, f"`{name}` is {facts.value!r}"))
    tensors = [i for i, facts in enumerate(state.leaves) if isinstance(facts, TensorFacts) and state.same_as[i] == i]
    if len(tensors) > 1:
        rows.append(("identity", "inputs", f"the {len(tensors)} tensor inputs are distinct tensors"))
    rows += [("size", "inputs", f"`{text}`") for text in (() if state.rules is None else state.rules.texts)]
    if state.watches_overlap and len(tensors) > 1:
        share = [f"`{state.names[a]}` and `{state.names[b]}` share bytes as they did" for a, b, _ in state.overlapping]
        rows.append(("overlap", "inputs", "; ".join(share) or "no input shares bytes with an input that is written"))
    rows += [("setting", name, f"{name} is {_show(v)}") for name, v in state.settings if name not in _unchecked(state)]
    rows += [("condition", "inputs", condition.sentence()) for condition in state.conditions]
    rows += [("reached", item.name, item.sentence()) for item in state.reached]
    return tuple(rows)
