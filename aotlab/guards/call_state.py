"""What a compiled entry assumes of a call, as facts; and in what another call differs, as sentences.

    f(x, 2)         x: float32[3], strides (1,), a leaf that requires grad; 2: an int; grad mode on; …

A `CallState` is everything about a call that a trace may have baked in; an entry keeps that of the traced call.
`aotlab.runtime.prologue` turns it into straight-line checks, with torch's C++ guards for tensors and global state. When
they fail, `difference` compares the state of the new call. Both read the same facts.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.errors import PythonValueError, SubclassError, TransformError, UnsupportedTensorError
from aotlab.guards.objects import is_library, is_library_module
from aotlab.guards.reach import reach
from aotlab.guards.reached import Reached
from aotlab.guards.values import (
    MISSING,
    NOTHING_MENTIONED,
    Attributes,
    Mentioned,
    attributes_that_count,
    is_plain,
    same_value,
    shown,
)
from aotlab.ir.extents import counted_together, overlapping_pairs

# --- facts about arguments ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a trace may assume of a tensor argument; the order is the order in which differences are told."""

    type: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_leaf: bool
    is_inference: bool
    offset: int
    may_be_written: bool
    attributes: Attributes = ()
    is_view: bool = field(default=False, compare=False)  # counts only where a write would change the history of both


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """A Python argument: compared by type and value, or by identity (and ``code``) where ``by_identity``."""

    type: type
    value: Any
    by_identity: bool
    code: types.CodeType | None = None

    def matches(self, other: ValueFacts) -> bool:
        """Compare as the compiled check does."""
        if self.by_identity or other.by_identity:
            return self.value is other.value and self.code is other.code
        return self.type is other.type and bool(same_value(self.value, other.value))


def tensor_facts(tensor: Tensor, mentioned: Mentioned = NOTHING_MENTIONED, name: str = "") -> TensorFacts:
    """Take the facts of one tensor; raises `PythonValueError` if an attribute that counts may change unseen."""
    attributes = tuple(attributes_that_count(tensor, mentioned).items()) if mentioned else ()
    for key, value in attributes:
        if not is_plain(value):
            raise PythonValueError(
                f"`{name}.{key}`, which the function may read, is a `{type(value).__qualname__}`",
                why="a compiled entry could not tell when its contents change",
                suggestion="pass it as an argument of its own",
                argument=name,
            )
    strided = tensor.layout == torch.strided
    return TensorFacts(
        type=type(tensor),
        dtype=tensor.dtype,
        device=tensor.device,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()) if strided else (),
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        is_inference=tensor.is_inference(),
        offset=int(tensor.storage_offset()) if strided else 0,
        may_be_written=internals.may_be_written(tensor),
        attributes=attributes,
        is_view=internals.base_of(tensor) is not None,
    )


def check_tensor(tensor: Tensor, name: str) -> None:
    """Refuse tensors that the engine cannot represent."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise SubclassError(
            f"`{name}` is a `{type(tensor).__qualname__}`",
            why="tensor subclasses are not supported yet",
            suggestion="pass the plain tensors that it consists of",
            argument=name,
        )
    lazy = "call resolve_conj() or resolve_neg() on it"
    for kind, is_so, suggestion in (
        ("a sparse tensor or of another layout than strided", tensor.layout != torch.strided, "pass to_dense() of it"),
        ("quantized", tensor.is_quantized, "pass dequantize() of it"),
        ("nested", tensor.is_nested, "pass its parts, as unbind() gives them, or a padded tensor"),
        ("a lazy conjugate", tensor.is_conj(), lazy),
        ("a lazy negative", tensor.is_neg(), lazy),
        ("on the meta device", tensor.is_meta, "pass a tensor with memory"),
    ):
        if is_so:
            why = "a trace cannot represent it"
            raise UnsupportedTensorError(f"`{name}` is {kind}", why=why, suggestion=suggestion, argument=name)


def value_facts(value: Any, name: str) -> ValueFacts:
    """Take those of an argument that is no tensor; raises `PythonValueError` if it may change unseen."""
    if is_plain(value):
        return ValueFacts(type(value), value, by_identity=False)
    if isinstance(value, types.FunctionType):
        found = reach(value)
        outside = next((item.name for item in found.state if item.is_outside(value)), None)
        if outside is not None or found.unseen is not None:
            what = "no guard can watch" if outside is None else f"reads `{outside}` from outside"
            raise PythonValueError(
                f"`{name}` is a function that {what}",
                why=found.unseen or "a compiled entry could not tell when that changes",
                suggestion="call it by name inside the function, where what it reads is looked at",
                argument=name,
            )
        return ValueFacts(type(value), value, by_identity=True, code=value.__code__)
    if (
        isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType))
        or (isinstance(value, type) and is_library(value))
        or (isinstance(value, types.ModuleType) and is_library_module(value))
    ):
        return ValueFacts(type(value), value, by_identity=True)
    raise PythonValueError(
        f"`{name}` is a `{type(value).__module__}.{type(value).__qualname__}`",
        why="a compiled entry could not tell when its contents change",
        suggestion="pass the tensors and plain values that it holds, register it with torch.utils._pytree, or compile "
        'with frontend="dynamo" (a method of it, say)',
        argument=name,
    )


# --- the state of a call -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallState:
    """All that a trace may have baked in of one call.

    ``structure`` and ``nesting`` are the nesting of the arguments, as text and as what is compared; ``same_as`` has for
    each flat argument the position of the first one that is the same tensor. ``reached`` is what the function reads
    besides, ``mentioned`` names the attributes of tensors that it may read; ``function_modes`` counts default devices.
    An entry that writes an input ``must_not_overlap``: its guards watch which inputs share memory. ``offsets`` are the
    positions of tensors whose storage offset was read.
    """

    structure: str
    names: tuple[str, ...]
    leaves: tuple[TensorFacts | ValueFacts, ...]
    same_as: tuple[int, ...]
    settings: tuple[tuple[str, Any], ...]
    reached: tuple[Reached, ...] = field(repr=False)
    overlapping: tuple[tuple[int, int, int], ...] = ()
    counters: tuple[tuple[int, int], ...] = ()
    function_modes: int = 0
    mentioned: Mentioned = NOTHING_MENTIONED
    nesting: Any = field(default=None, repr=False)
    must_not_overlap: bool = True
    offsets: tuple[int, ...] = ()


def transform_around() -> str | None:
    """Say which transform, which is to see each op of the function, a call stands under; None if there is none."""
    if internals.transforms_active():
        return "a torch.func transform"
    return "forward-mode differentiation" if internals.forward_ad_active() else None


def check_surroundings() -> int:
    """Refuse calls under transforms and modes that a compiled function has no part in; count the default devices."""
    what = transform_around() or ("a torch dispatch mode" if internals.dispatch_mode_count() else None)
    count = internals.function_mode_count()
    if what is None and count and not internals.only_default_devices():
        what = "a torch function mode"
    if what is not None:
        raise TransformError(
            f"a compiled function was called under {what}",
            why="its graph would not take part in it",
            suggestion="call the original function there",
        )
    return count


def call_state(
    *,
    structure: str,
    nesting: Any,
    names: Sequence[str],
    values: Sequence[Any],
    reached: tuple[Reached, ...],
    mentioned: Mentioned = NOTHING_MENTIONED,
) -> CallState:
    """Take the state of a call, whose flat arguments are ``values``; raises `RefusedError` if it cannot be guarded."""
    function_modes = check_surroundings()
    leaves: list[TensorFacts | ValueFacts] = []
    first: dict[int, int] = {}
    same_as = []
    tensors = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        if isinstance(value, Tensor):
            check_tensor(value, name)
            leaves.append(tensor_facts(value, mentioned, name))
            same_as.append(first.setdefault(id(value), i))
            if same_as[i] == i:
                tensors.append((i, value))
        else:
            leaves.append(value_facts(value, name))
            same_as.append(i)
    return CallState(
        structure=structure,
        nesting=nesting,
        names=tuple(names),
        leaves=tuple(leaves),
        same_as=tuple(same_as),
        settings=internals.global_state(),
        reached=reached,
        overlapping=overlapping_pairs(tensors),
        counters=counted_together(tensors),
        function_modes=function_modes,
        mentioned=mentioned,
    )


# --- as sentences -------------------------------------------------------------------------------------------------

_FIELD_WORDS = {
    "dtype": "has dtype {}",
    "device": "is on {}",
    "shape": "has shape {}",
    "stride": "has strides {}",
    "requires_grad": "has requires_grad={}",
    "is_leaf": "has is_leaf={}",
    "is_inference": "has is_inference()={}",
}


def _show(value: Any) -> str:
    return value.__qualname__ if isinstance(value, type) else str(value)


def _said(facts: TensorFacts | ValueFacts) -> str:
    return shown(facts.value) if isinstance(facts, ValueFacts) else f"a {_show(facts.type)}"


def _unchecked(state: CallState) -> set[str]:
    """Return the names of the settings that an entry does not look at."""
    return {switch.name for switch in internals.SWITCHES if not switch.counts(state.mentioned.names)}


def differences(then: CallState, now: CallState) -> Iterator[str]:
    """Say in a sentence each in what the call ``now`` differs from the traced call ``then``."""
    unchecked = _unchecked(then)
    for (name, before), (_, after) in zip(then.settings, now.settings, strict=True):
        if before != after and name not in unchecked:
            yield f"{name} is {_show(after)} where the compiled entry expects {_show(before)}"
    if then.function_modes != now.function_modes:
        yield "a default device was set or unset by torch.set_default_device or a `with torch.device(…)` block"
    yield from (item.change() for item in then.reached if not item.holds())
    if then.nesting != now.nesting:
        yield from _of_nesting(then, now)
    if then.nesting != now.nesting or len(then.leaves) != len(now.leaves):  # of a module, what it reaches has changed
        return
    for name, before, after in zip(now.names, then.leaves, now.leaves, strict=True):
        yield from _of_argument(name, before, after)
    yield from _of_tensors_together(then, now)


def _of_nesting(then: CallState, now: CallState) -> Iterator[str]:
    """Name the arguments that only one of two calls has, or else how each has its arguments in containers."""
    before, after = (dict(zip(state.names, state.leaves, strict=True)) for state in (then, now))
    changed = [name for name in {**before, **after} if (name in before) != (name in after)]
    if changed and all(name.isidentifier() for name in changed):
        for name in changed:
            had = _said(after[name]) if name in after else "left out"
            expected = _said(before[name]) if name in before else "it to be left out"
            yield f"`{name}` is {had} where the compiled entry expects {expected}"
        return
    expected = f"where the compiled entry expects {then.structure}"
    if then.structure == now.structure:  # two classes of one name, or keys that look the same
        expected = "in containers or by keys of another type than expected"
    yield f"the arguments are nested as {now.structure} {expected}"


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
        if not before.matches(after):
            if before.value is after.value:
                yield f"`{name}` has other code than the compiled entry expects"
            else:
                yield f"`{name}` is {shown(after.value)} where the compiled entry expects {shown(before.value)}"
    else:
        yield types


def _of_tensors_together(then: CallState, now: CallState) -> Iterator[str]:
    """Compare what counts of some tensors only, and what tensors have in common."""
    for name, before, after in zip(now.names, then.leaves, now.leaves, strict=True):
        if then.must_not_overlap and isinstance(before, TensorFacts) and isinstance(after, TensorFacts):
            if before.may_be_written and not after.may_be_written:
                yield f"`{name}` is a view with hooks, or that autograd does not let be written; an input is written"
            elif before.may_be_written != after.may_be_written:
                yield f"`{name}` may be written by autograd's rules where the compiled entry expects that it may not"
            if before.is_view != after.is_view and before.requires_grad:
                kind, expected = ("a view", "none") if after.is_view else ("no view", "one")
                doing = "views it" if before.is_leaf else "writes to it"
                yield f"`{name}` is {kind} where the compiled entry expects {expected}, and the function {doing}"
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
    if then.must_not_overlap and then.overlapping != now.overlapping:
        began = [pair for pair in now.overlapping if pair not in then.overlapping]
        a, b, _ = (began or [pair for pair in then.overlapping if pair not in now.overlapping])[0]
        verb = "share" if began else "no longer share"
        if began and any(pair[:2] == (a, b) for pair in then.overlapping):
            verb = "share another part of their"
        yield f"`{now.names[a]}` and `{now.names[b]}` {verb} memory, and the function writes to an input"
    if then.counters != now.counters:  # of an entry that takes no notice, nobody asks for a reason any more
        joined = sorted(set(now.counters) - set(then.counters))
        first, second = (joined or sorted(set(then.counters) - set(now.counters)))[0]
        verb = "count" if joined else "no longer count"
        yield f"`{now.names[first]}` and `{now.names[second]}` {verb} their writes together"


def sentences(state: CallState) -> tuple[tuple[str, str, str], ...]:
    """List what an entry assumes as (kind, subject, sentence), for the report."""
    rows: list[tuple[str, str, str]] = [("structure", "arguments", f"the arguments are nested as {state.structure}")]
    for i, (name, facts) in enumerate(zip(state.names, state.leaves, strict=True)):
        if isinstance(facts, TensorFacts):
            grad = "requires grad" if facts.requires_grad else "does not require grad"
            leaf = " and is a leaf" if facts.requires_grad and facts.is_leaf else ""
            kind = f"a {_show(facts.type)} of dtype {facts.dtype} on {facts.device}"
            sizes = f"shape {facts.shape} and strides {facts.stride}"
            rows.append(("tensor", name, f"`{name}` is {kind} with {sizes}, {grad}{leaf}"))
            rows += [("tensor", name, f"`{name}.{key}` is {shown(value)}") for key, value in facts.attributes]
            if state.same_as[i] != i:
                rows.append(("identity", name, f"`{name}` is the same tensor as `{state.names[state.same_as[i]]}`"))
        else:
            rows.append(("value", name, f"`{name}` is {facts.value!r}"))
    tensors = [i for i, facts in enumerate(state.leaves) if isinstance(facts, TensorFacts) and state.same_as[i] == i]
    if len(tensors) > 1:
        rows.append(("identity", "inputs", f"the {len(tensors)} tensor inputs are distinct tensors"))
    if state.must_not_overlap and len(tensors) > 1:
        rows.append(("overlap", "inputs", "no input shares bytes with an input that is written"))
    unchecked = _unchecked(state)
    rows += [("setting", name, f"{name} is {_show(v)}") for name, v in state.settings if name not in unchecked]
    rows += [("reached", item.name, item.sentence()) for item in state.reached]
    return tuple(rows)
