"""What a compiled entry assumes of a call, and in what another call differs, as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotlab import _torch as internals
from aotlab.guards.attributes import what_differs
from aotlab.guards.call_state import CallState, TensorFacts, ValueFacts
from aotlab.guards.values import shown

_FIELD_WORDS = {
    "type": "is a {now} where the compiled entry expects a {then}",
    "dtype": "has dtype {now} where the compiled entry expects {then}",
    "device": "is on {now} where the compiled entry expects {then}",
    "layout": "has layout {now} where the compiled entry expects {then}",
    "shape": "has shape {now} where the compiled entry expects {then}",
    "stride": "has strides {now} where the compiled entry expects {then}",
    "requires_grad": "has requires_grad={now} where the compiled entry expects {then}",
    "is_leaf": "has is_leaf={now} where the compiled entry expects {then}",
    "is_inference": "has is_inference()={now} where the compiled entry expects {then}",
    "is_conj": "has is_conj()={now} where the compiled entry expects {then}",
    "is_neg": "has is_neg()={now} where the compiled entry expects {then}",
}


def _show(value: Any) -> str:
    return value.__qualname__ if isinstance(value, type) else str(value)


def difference(then: CallState, now: CallState, *, mutates: bool, offsets: Sequence[int] = ()) -> str | None:
    """Say in one sentence in what the call ``now`` differs from the traced call ``then``; None if in nothing.

    ``mutates`` says whether overlaps count: only an entry that writes an input looks at them. ``offsets`` are the
    positions of tensors whose storage offset counts.
    """
    unchecked = {switch.name for switch in internals.SWITCHES if not switch.counts(then.mentioned.names)}
    for (name, before), (_, after) in zip(then.settings, now.settings, strict=True):
        if before != after and name not in unchecked:
            return f"{name} is {_show(after)} where the compiled entry expects {_show(before)}"
    if then.function_modes != now.function_modes:
        return "a default device was set or unset by torch.set_default_device or a `with torch.device(…)` block"
    for item in then.reached:
        if not item.holds():
            return item.change()
    if then.nesting != now.nesting:
        if then.structure == now.structure:  # two classes of one name, or keys that look the same
            return f"the arguments are nested as {now.structure} in containers or by keys of another type than expected"
        return f"the arguments are nested as {now.structure} where the compiled entry expects {then.structure}"
    for name, before, after in zip(now.names, then.leaves, now.leaves, strict=True):
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
            for attribute, words in _FIELD_WORDS.items():
                was, is_now = getattr(before, attribute), getattr(after, attribute)
                if was != is_now:
                    return f"`{name}` " + words.format(now=_show(is_now), then=_show(was))
            found = what_differs(before.attributes, after.attributes, name)
            if found is not None:
                return found
        elif isinstance(before, ValueFacts) and isinstance(after, ValueFacts):
            if not before.matches(after):
                if before.value is after.value:
                    return f"`{name}` has other code than the compiled entry expects"
                return f"`{name}` is {shown(after.value)} where the compiled entry expects {shown(before.value)}"
        else:
            return f"`{name}` is a {_show(after.type)} where the compiled entry expects a {_show(before.type)}"
    for name, before, after in zip(now.names, then.leaves, now.leaves, strict=True):
        if mutates and isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
            if before.may_be_written and not after.may_be_written:
                return f"`{name}` is a view with hooks, or that autograd does not let be written; an input is written"
            if before.may_be_written != after.may_be_written:
                return f"`{name}` may be written by autograd's rules where the compiled entry expects that it may not"
            if before.is_view != after.is_view and before.requires_grad:
                kind, expected = ("a view", "none") if after.is_view else ("no view", "one")
                doing = "views it" if before.is_leaf else "writes to it"
                return f"`{name}` is {kind} where the compiled entry expects {expected}, and the function {doing}"
    for i in offsets:
        earlier, later = then.leaves[i], now.leaves[i]
        if isinstance(earlier, TensorFacts) and isinstance(later, TensorFacts) and earlier.offset != later.offset:
            return (
                f"`{now.names[i]}` begins at element {later.offset} of its storage where the compiled entry expects "
                f"{earlier.offset}"
            )
    for i, (was_same, is_same) in enumerate(zip(then.same_as, now.same_as, strict=True)):
        if was_same != is_same:
            if is_same != i:
                return f"`{now.names[i]}` is the same tensor as `{now.names[is_same]}`; the compiled entry expects two"
            return f"`{now.names[i]}` and `{now.names[was_same]}` are two tensors; the compiled entry expects one"
    if mutates and then.overlapping != now.overlapping:
        began = [pair for pair in now.overlapping if pair not in then.overlapping]
        a, b, _ = (began or [pair for pair in then.overlapping if pair not in now.overlapping])[0]
        verb = "share" if began else "no longer share"
        if began and any(pair[:2] == (a, b) for pair in then.overlapping):
            verb = "share another part of their"
        return f"`{now.names[a]}` and `{now.names[b]}` {verb} memory, and the function writes to an input"
    if then.counters != now.counters:  # of an entry that takes no notice, nobody asks for a reason any more
        joined = sorted(set(now.counters) - set(then.counters))
        first, second = (joined or sorted(set(then.counters) - set(now.counters)))[0]
        verb = "count" if joined else "no longer count"
        return f"`{now.names[first]}` and `{now.names[second]}` {verb} their writes together"
    return None


def distance(then: CallState, now: CallState, *, mutates: bool = False, offsets: Sequence[int] = ()) -> int:
    """Count in how many facts two calls differ, to find the entry that a call is nearest to."""
    if then.nesting != now.nesting or len(then.leaves) != len(now.leaves):
        return 1000
    found = sum(a != b for a, b in zip(then.settings, now.settings, strict=True))
    found += then.function_modes != now.function_modes
    found += sum(not item.holds() for item in then.reached)
    found += sum(a != b for a, b in zip(then.same_as, now.same_as, strict=True))
    found += mutates and then.overlapping != now.overlapping
    found += mutates and then.counters != now.counters
    for i, (before, after) in enumerate(zip(then.leaves, now.leaves, strict=True)):
        if isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
            found += sum(getattr(before, name) != getattr(after, name) for name in _FIELD_WORDS)
            found += i in offsets and before.offset != after.offset
            found += what_differs(before.attributes, after.attributes, "") is not None
        elif isinstance(before, ValueFacts) and isinstance(after, ValueFacts):
            found += not before.matches(after)
        else:
            found += 10
    return found


def sentences(state: CallState, *, mutates: bool) -> tuple[tuple[str, str, str], ...]:
    """List what an entry assumes as (kind, subject, sentence), for the report."""
    rows: list[tuple[str, str, str]] = [("structure", "arguments", f"the arguments are nested as {state.structure}")]
    for i, (name, facts) in enumerate(zip(state.names, state.leaves, strict=True)):
        if isinstance(facts, TensorFacts):
            grad = "requires grad" if facts.requires_grad else "does not require grad"
            leaf = " and is a leaf" if facts.requires_grad and facts.is_leaf else ""
            rows.append(
                (
                    "tensor",
                    name,
                    f"`{name}` is a {_show(facts.type)} of dtype {facts.dtype} on {facts.device} with shape "
                    f"{facts.shape} and strides {facts.stride}, {grad}{leaf}",
                )
            )
            rows += [("tensor", name, f"`{name}.{key}` is {shown(value)}") for key, value in facts.attributes]
            if state.same_as[i] != i:
                rows.append(("identity", name, f"`{name}` is the same tensor as `{state.names[state.same_as[i]]}`"))
        else:
            rows.append(("value", name, f"`{name}` is {facts.value!r}"))
    tensors = [i for i, facts in enumerate(state.leaves) if isinstance(facts, TensorFacts) and state.same_as[i] == i]
    if len(tensors) > 1:
        rows.append(("identity", "inputs", f"the {len(tensors)} tensor inputs are distinct tensors"))
    if mutates and len(tensors) > 1:
        rows.append(("overlap", "inputs", "no input shares bytes with an input that is written"))
    names = state.mentioned.names
    unchecked = {switch.name for switch in internals.SWITCHES if not switch.counts(names)}
    rows += [("setting", name, f"{name} is {_show(v)}") for name, v in state.settings if name not in unchecked]
    rows += [("reached", item.name, item.sentence()) for item in state.reached]
    return tuple(rows)
