"""In what a call differs from what a compiled entry assumes, as sentences; and what that is, for the report."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from aotlab import _torch as internals
from aotlab.guards.call_state import CallState, TensorFacts, ValueFacts
from aotlab.guards.values import MISSING, same_value, shown

_FIELD_WORDS = {
    "dtype": "has dtype {}", "device": "is on {}", "shape": "has shape {}", "stride": "has strides {}",
    "requires_grad": "has requires_grad={}", "is_leaf": "has is_leaf={}", "is_inference": "has is_inference()={}",
    "is_conj": "has is_conj()={}",
}  # fmt: skip


def _show(value: Any) -> str:
    return value.__qualname__ if isinstance(value, type) else str(value)


def _unchecked(state: CallState) -> set[str]:
    """Return the names of the settings that an entry does not look at."""
    return {switch.name for switch in internals.SWITCHES if not switch.counts(state.mentioned.names)}


def differences(then: CallState, now: CallState) -> Iterator[str]:
    """Say in a sentence each in what the call ``now`` differs from the traced call ``then``."""
    then = _with_sizes_of(then, now)
    unchecked = _unchecked(then)
    for (name, before), (_, after) in zip(then.settings, now.settings, strict=True):
        if before != after and name not in unchecked:
            yield f"{name} is {_show(after)} where the compiled entry expects {_show(before)}"
    if then.function_modes != now.function_modes:
        yield "a default device was set or unset by torch.set_default_device or a `with torch.device(…)` block"
    if then.dispatch_modes != now.dispatch_modes:
        yield "a fake mode is on, or is not, where the compiled entry expects otherwise"
    yield from (item.change() for item in then.reached if not item.holds())
    if then.nesting != now.nesting:
        yield from _of_nesting(then, now)
    elif then.names != now.names:
        gone = sorted(set(then.names).difference(now.names))
        yield from (f"`{name}`, which the function reads, is no tensor any more" for name in gone)
    if then.nesting != now.nesting or len(then.leaves) != len(now.leaves):
        return
    for name, before, after in zip(now.names, then.leaves, now.leaves, strict=True):
        yield from _of_argument(name, before, after)
    yield from _of_tensors_together(then, now)


def distance(then: CallState, now: CallState) -> tuple[int, int, int]:
    """Say how far two calls are apart: in facts; if in as many, in what containers hold, then in tensors."""
    before, after = (dict(zip(state.names, state.leaves, strict=True)) for state in (then, now))
    changed = [name for name in before.keys() & after.keys() for _ in _of_argument(name, before[name], after[name])]
    nested = (then.nesting, then.names) != (now.nesting, now.names)  # where `differences` ends
    facts = sum(1 for _ in differences(then, now)) + len(changed) * nested
    held = sum(not name.isidentifier() for name in before.keys() ^ after.keys())
    return facts, held, sum(isinstance(before[name], TensorFacts) for name in changed)


def _of_nesting(then: CallState, now: CallState) -> Iterator[str]:
    """Name the arguments that only one of two calls has, or else how each has its arguments in containers."""
    before, after = (dict(zip(state.names, state.leaves, strict=True)) for state in (then, now))
    changed = [name for name in {**before, **after} if (name in before) != (name in after)]
    if changed and all(name.isidentifier() for name in changed):
        for name in changed:
            facts = {**before, **after}[name]
            given = shown(facts.value) if isinstance(facts, ValueFacts) else f"a {_show(facts.type)}"
            left = _default(now, name, given)
            had, expected = (given, left or "it to be left out") if name in after else (left or "left out", given)
            yield f"`{name}` is {had} where the compiled entry expects {expected}"
        return
    same = then.structure == now.structure  # two classes of one name, or keys that look the same
    of_another_type = "in containers or by keys of another type than expected"
    expected = of_another_type if same else f"where the compiled entry expects {then.structure}"
    yield f"the arguments are nested as {now.structure} {expected}"


def _default(state: CallState, name: str, given: str) -> str:
    """Write what a parameter is that is left out; nothing if that is not known, or is what the other call gives."""
    roots = (item.place.owner for item in state.reached if item.inline and item.place.key == "__code__")
    found = next((inspect.signature(root).parameters.get(name) for root in roots), None)
    text = given if found is None or found.default is found.empty else shown(found.default)
    return "" if text == given else text


def _with_sizes_of(then: CallState, now: CallState) -> CallState:
    """Give a state the sizes and strides of a call's arguments, where it admits them."""
    if then.rules is None or len(then.leaves) != len(now.leaves):
        return then
    leaves = list(then.leaves)
    for i, (before, after) in enumerate(zip(then.leaves, now.leaves, strict=True)):
        if before.type is not after.type or not then.rules.admits(i, after):
            continue
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
            leaves[i] = replace(before, shape=after.shape, stride=after.stride)
        else:
            leaves[i] = after
    return replace(then, leaves=tuple(leaves))


def difference(then: CallState, now: CallState) -> str | None:
    """Return the first of the `differences`, None if there is none."""
    return next(differences(then, now), None)


def _of_argument(name: str, before: TensorFacts | ValueFacts, after: TensorFacts | ValueFacts) -> Iterator[str]:
    types = f"`{name}` is a {_show(after.type)} where the compiled entry expects a {_show(before.type)}"
    if isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
        if before.type is not after.type:
            yield types
        for attribute, words in _FIELD_WORDS.items():
            was, is_now = getattr(before, attribute), getattr(after, attribute)
            if was != is_now:
                yield f"`{name}` {words.format(_show(is_now))} where the compiled entry expects {_show(was)}"
        held, holds = dict(before.attributes), dict(after.attributes)
        for key in {**held, **holds}:
            was, is_now = held.get(key, MISSING), holds.get(key, MISSING)
            if not same_value(was, is_now):
                yield f"`{name}.{key}` is {shown(is_now)} where the compiled entry expects {shown(was)}"
    elif isinstance(before, ValueFacts) and isinstance(after, ValueFacts):
        if not before.matches(after) and before.value is after.value:
            yield f"`{name}` has other code than the compiled entry expects"
        elif not before.matches(after):
            yield f"`{name}` is {shown(after.value)} where the compiled entry expects {shown(before.value)}"
    else:
        yield types


def _of_tensors_together(then: CallState, now: CallState) -> Iterator[str]:
    """Compare what counts of some tensors only, and what tensors have in common."""
    for name, before, after in zip(now.names, then.leaves, now.leaves, strict=True):
        if then.watches_overlap and isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
            if before.may_be_written and not after.may_be_written:
                yield f"`{name}` is a view with hooks, or that autograd does not let be written; an input is written"
            elif before.may_be_written != after.may_be_written:
                yield f"`{name}` may be written by autograd's rules where the compiled entry expects that it may not"
            if before.is_view != after.is_view and before.requires_grad:
                kind, expected = ("a view", "none") if after.is_view else ("no view", "one")
                doing = "views it" if before.is_leaf else "writes to it"
                yield f"`{name}` is {kind} where the compiled entry expects {expected}, and the function {doing}"
    shapes = ([(leaf.type, getattr(leaf, "shape", None)) for leaf in state.leaves] for state in (then, now))
    fitting = then.rules is not None and next(shapes) == next(shapes)  # the rules read the sizes that there were
    broken = then.rules.broken(now.leaves) if then.rules is not None and fitting else None
    if broken is not None:
        yield f"the compiled entry expects `{broken}`, which does not hold for this call"
    for i in then.offsets:
        before, after = then.leaves[i], now.leaves[i]
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts) and before.offset != after.offset:
            begins = f"`{now.names[i]}` begins at element {after.offset} of its storage"
            yield f"{begins} where the compiled entry expects {before.offset}"
    for i, (was_same, is_same) in enumerate(zip(then.same_as, now.same_as, strict=True)):
        if was_same != is_same and is_same != i:
            yield f"`{now.names[i]}` is the same tensor as `{now.names[is_same]}`; the compiled entry expects two"
        elif was_same != is_same:
            yield f"`{now.names[i]}` and `{now.names[was_same]}` are two tensors; the compiled entry expects one"
    if then.watches_overlap and then.overlapping != now.overlapping:
        began = [pair for pair in now.overlapping if pair not in then.overlapping]
        a, b, _ = (began or [pair for pair in then.overlapping if pair not in now.overlapping])[0]
        again = any(pair[:2] == (a, b) for pair in then.overlapping)
        verb = "no longer share" if not began else "share another part of their" if again else "share"
        yield f"`{now.names[a]}` and `{now.names[b]}` {verb} memory, and the function writes to an input"
    if then.counters != now.counters:  # of an entry that takes no notice, nobody asks for a reason any more
        joined = sorted(set(now.counters) - set(then.counters))
        first, second = (joined or sorted(set(then.counters) - set(now.counters)))[0]
        verb = "count" if joined else "no longer count"
        yield f"`{now.names[first]}` and `{now.names[second]}` {verb} their writes together"


def _any_or(numbers: tuple[int | None, ...]) -> str:
    """Write sizes or strides, of which some may be any."""
    return f"({', '.join('any' if n is None else str(n) for n in numbers)}{',' * (len(numbers) == 1)})"


def sentences(state: CallState) -> tuple[tuple[str, str, str], ...]:
    """List what an entry assumes as (kind, subject, sentence), for the report."""
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
    rows += [("reached", item.name, item.sentence()) for item in state.reached]
    return tuple(rows)
