"""What a compiled entry assumes of a call, as facts.

    f(x, 2)         x: float32[3], strides (1,), a leaf that requires grad; 2: an int; grad mode on; …

A `CallState` is everything about a call that a trace may have baked in; an entry keeps that of the traced call.
`aotlab.runtime.prologue` turns it into straight-line checks, with torch's C++ guards for tensors and global state. When
they fail, the state of the new call is taken too, and `aotlab.guards.explain` says what changed. Both read the same
facts, so that a check without a sentence would show as a recompile without a reason.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.errors import BY_DYNAMO, PythonValueError, SubclassError, TransformError, UnsupportedTensorError
from aotlab.guards.objects import is_library, is_library_module
from aotlab.guards.reach import reach
from aotlab.guards.reached import Reached
from aotlab.guards.values import NOTHING_MENTIONED, Attributes, Mentioned, attributes_that_count, is_plain, same_value
from aotlab.ir.extents import counted_together, overlapping_pairs
from aotlab.ir.size_rules import Rules

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
    is_conj: bool
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
        shape=internals.traced(tensor.shape),
        stride=internals.traced(tensor.stride()) if strided else (),
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        is_inference=tensor.is_inference(),
        is_conj=tensor.is_conj(),
        offset=internals.traced([tensor.storage_offset()])[0] if strided else 0,
        may_be_written=internals.may_be_written(tensor),
        attributes=attributes,
        is_view=internals.base_of(tensor) is not None,
    )


def check_tensor(tensor: Tensor, name: str) -> None:
    """Refuse tensors that the engine cannot represent."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and not internals.is_fake(tensor):
        raise SubclassError(
            f"`{name}` is a `{type(tensor).__qualname__}`",
            why="without `__tensor_flatten__` nobody knows what it consists of",
            suggestion="pass the plain tensors that it consists of",
            argument=name,
        )
    for kind, is_so, suggestion in (
        ("a sparse tensor or of another layout than strided", tensor.layout != torch.strided, "pass to_dense() of it"),
        ("quantized", tensor.is_quantized, "pass dequantize() of it"),
        ("nested", tensor.is_nested, "pass its parts, as unbind() gives them, or a padded tensor"),
        ("a lazy negative", tensor.is_neg(), "call resolve_neg() on it"),
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
        suggestion=f"pass the tensors and plain values in it, register it with torch.utils._pytree, or {BY_DYNAMO}",
        argument=name,
    )


# --- the state of a call -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallState:
    """All that a trace may have baked in of one call.

    ``structure`` and ``nesting`` are the nesting of the arguments, as text and as what is compared; ``same_as`` has for
    each flat argument the position of the first one that is the same tensor. ``reached`` is what the function reads
    besides, ``mentioned`` names the attributes of tensors that it may read; ``function_modes`` counts default devices,
    ``dispatch_modes`` fake modes. An entry that writes an input ``watches_overlap``: which inputs share memory, and
    how. ``offsets`` are the positions of tensors whose offset was read; ``rules`` say which sizes may be others.
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
    dispatch_modes: int = 0
    mentioned: Mentioned = NOTHING_MENTIONED
    nesting: Any = field(default=None, repr=False)
    watches_overlap: bool = True
    offsets: tuple[int, ...] = ()
    rules: Rules | None = None


def transform_around() -> str | None:
    """Say which transform, which is to see each op of the function, a call stands under; None if there is none."""
    if internals.transforms_active():
        return "a torch.func transform"
    return "forward-mode differentiation" if internals.forward_ad_active() else None


def check_surroundings() -> int:
    """Refuse calls under transforms and modes that a compiled function has no part in; count the default devices."""
    what = transform_around() or (None if internals.only_fake_modes() else "a torch dispatch mode")
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
    same_as, tensors = [], []
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
        dispatch_modes=internals.dispatch_mode_count(),
        mentioned=mentioned,
    )
