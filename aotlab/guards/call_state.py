"""The facts about a call that a compiled entry depends on.

    f(x, 2)         x: float32[3], strides (1,), a leaf that requires grad; 2: an int; grad mode on; …

A `CallState` holds every fact that a trace may depend on. An entry stores the state of the traced call.
`aotlab.runtime.prologue` turns this state into straight-line checks, with torch's C++ guards for tensors and global
settings. If a check fails, the state of the new call is recorded too, and `aotlab.guards.explain` describes the
difference of the two states. So each check needs a fact here. Otherwise the report could not name the reason of a
recompile.
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
from aotlab.guards.conditions import Condition
from aotlab.guards.guarded_values import (
    NOTHING_MENTIONED,
    Attributes,
    Mentioned,
    is_plain,
    mentioned_attributes,
    same_value,
)
from aotlab.guards.objects import is_library, is_library_module
from aotlab.guards.reach import reach
from aotlab.guards.reached import Reached
from aotlab.ir.extents import counted_together, overlapping_pairs
from aotlab.ir.size_rules import Rules

# --- facts about arguments ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """The facts about a tensor argument that a trace may depend on, in the order in which differences are reported.

    Not every entry guards all of them. ``offset`` is the storage offset. ``may_be_written`` says whether autograd
    allows an in-place write. ``attributes`` are the attributes that the code may read. ``is_view`` says whether the
    tensor is a differentiable view.
    """

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
    # guarded only if the function writes the tensor or makes views of it, because a write to a view also changes the
    # autograd history of its base
    is_view: bool = field(default=False, compare=False)
    # guarded only if the base is an input; see `base_facts`
    base: tuple[Any, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """The facts about an argument that is not a tensor.

    The arguments of two calls are compared by type and value. With ``by_identity``, they are compared by identity, and
    functions also by their ``code``.
    """

    type: type
    value: Any
    by_identity: bool
    code: types.CodeType | None = None

    def matches(self, other: ValueFacts) -> bool:
        """Tell whether the argument of another call passes the guard. The prologue compares in the same way."""
        if self.by_identity or other.by_identity:
            return self.value is other.value and self.code is other.code
        return self.type is other.type and bool(same_value(self.value, other.value))


def tensor_facts(tensor: Tensor, mentioned: Mentioned = NOTHING_MENTIONED, name: str = "") -> TensorFacts:
    """Record the facts about the tensor argument ``name``.

    ``mentioned`` has the attribute names that the user's code mentions. Raise `PythonValueError` if the tensor has such
    an attribute and the attribute's value is not plain, because no guard could notice a change in that value.
    """
    attributes = tuple(mentioned_attributes(tensor, mentioned).items()) if mentioned else ()
    for key, value in attributes:
        if not is_plain(value):
            raise PythonValueError(
                f"`{name}.{key}`, which the function may read, is a `{type(value).__qualname__}`",
                why="no guard can tell when its contents change",
                suggestion="pass it as a separate argument",
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
        base=base_facts(tensor),
    )


def base_facts(tensor: Tensor) -> tuple[Any, ...]:
    """Return the facts about the base of a view that the guards compare if the base is an input.

    The result is empty if the tensor is not a view, or if its base cannot be an input (`internals.is_strided_view`).
    """
    base = internals.base_of(tensor)
    if base is None or not internals.is_strided_view(tensor):
        return ()
    sizes = internals.traced(base.shape), internals.traced(base.stride())
    return type(base), base.dtype, base.device, *sizes, base.requires_grad, base.is_leaf


def check_tensor(tensor: Tensor, name: str) -> None:
    """Raise `SubclassError` or `UnsupportedTensorError` if a trace cannot represent a tensor, such as a sparse one."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) and not internals.is_fake(tensor):
        raise SubclassError(
            f"`{name}` is a `{type(tensor).__qualname__}`",
            why="aotlab can unwrap only subclasses that have `__tensor_flatten__`",
            suggestion="pass the plain tensors, or define `__tensor_flatten__` and `__tensor_unflatten__`",
            argument=name,
        )
    for kind, is_so, suggestion in (
        ("sparse, or has another layout than strided", tensor.layout != torch.strided, "convert it with to_dense()"),
        ("quantized", tensor.is_quantized, "convert it with dequantize()"),
        ("nested", tensor.is_nested, "pass its parts, as unbind() gives them, or a padded tensor"),
        ("a view with the negative bit", tensor.is_neg(), "call resolve_neg() on it"),
        ("on the meta device", tensor.is_meta, "pass a tensor with memory"),
    ):
        if is_so:
            why = "a trace cannot represent it"
            raise UnsupportedTensorError(f"`{name}` is {kind}", why=why, suggestion=suggestion, argument=name)


def value_facts(value: Any, name: str) -> ValueFacts:
    """Record the facts about an argument that is not a tensor.

    Raise `PythonValueError` if no guard could notice a change of the argument's contents.
    """
    if is_plain(value):
        return ValueFacts(type(value), value, by_identity=False)
    if isinstance(value, types.FunctionType):
        reached = reach(value)
        outside = next((item.name for item in reached.state if item.is_outside(value)), None)
        if outside is not None or reached.unseen is not None:
            defect = "no guard can check" if outside is None else f"reads `{outside}`, which is not its argument"
            raise PythonValueError(
                f"`{name}` is a function that {defect}",
                why=reached.unseen or "no guard can tell when this value changes",
                suggestion="call it by its name in the compiled function, so that guards check the values it reads",
                argument=name,
            )
        return ValueFacts(type(value), value, by_identity=True, code=value.__code__)
    if (
        internals.is_mesh(value)
        or isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType))
        or (isinstance(value, type) and is_library(value))
        or (isinstance(value, types.ModuleType) and is_library_module(value))
    ):
        return ValueFacts(type(value), value, by_identity=True)
    raise PythonValueError(
        f"`{name}` is a `{type(value).__module__}.{type(value).__qualname__}`",
        why="no guard can tell when its contents change",
        suggestion=f"pass the tensors and plain values in it, register it with torch.utils._pytree, or {BY_DYNAMO}",
        argument=name,
    )


# --- the state of a call -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallState:
    """The facts about one call that a trace may depend on.

    ``structure`` and ``nesting`` both describe how the arguments are nested: as text, and as an object that can be
    compared. ``names`` and ``leaves`` are the names of the flat arguments and the facts about them. ``same_as`` holds,
    for each flat argument, the position of the first argument that is the same tensor. ``settings`` are torch's global
    settings. ``overlapping`` holds the pairs of arguments that may share memory, with their distance in bytes (see
    `aotlab.ir.extents.overlapping_pairs`), and ``counters`` the pairs that share a version counter. ``reached`` are the
    other values that the function may read. ``mentioned`` holds the attribute names in the function's code, which it
    may read from tensors. ``function_modes`` and ``dispatch_modes`` count the active torch function modes and dispatch
    modes. Only the modes of default devices and fake modes are allowed.

    The last five fields are set after the trace. ``watches_overlap`` is true for an entry that writes an input: such
    an entry checks which inputs share memory, and how. ``offsets`` are the positions of tensors whose storage offset
    the function read. ``rules`` say which sizes may differ between calls. If it is None, no size may differ.
    ``watches_bases`` are the positions of views whose bases are inputs of the graph. ``conditions`` are the conditions
    that the function asked for.
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
    watches_bases: tuple[int, ...] = ()
    conditions: tuple[Condition, ...] = ()


def transform_around() -> str | None:
    """Return the name of the transform under which the call runs, or None.

    A transform must see each op of the function, so a compiled graph cannot be used under it.
    """
    if internals.transforms_active():
        return "a torch.func transform"
    return "forward-mode differentiation" if internals.forward_ad_active() else None


def check_surroundings() -> int:
    """Raise `TransformError` for a call under a transform or mode that must see each op of the function.

    Otherwise return the number of active torch function modes, all of which set a default device.
    """
    surrounding = transform_around() or (None if internals.only_fake_modes() else "a torch dispatch mode")
    count = internals.function_mode_count()
    if surrounding is None and count and not internals.only_default_devices():
        surrounding = "a torch function mode"
    if surrounding is not None:
        raise TransformError(
            f"a compiled function was called under {surrounding}",
            why="this transform or mode must see each op of the function, which a compiled graph does not show",
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
    """Record the state of a call with the flat arguments ``values``. Raise `RefusedError` if it cannot be guarded."""
    function_modes = check_surroundings()
    leaves: list[TensorFacts | ValueFacts] = []
    first_positions: dict[int, int] = {}
    same_as, tensors = [], []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        if isinstance(value, Tensor):
            check_tensor(value, name)
            leaves.append(tensor_facts(value, mentioned, name))
            same_as.append(first_positions.setdefault(id(value), i))
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
