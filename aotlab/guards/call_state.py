"""What a compiled entry assumes of a call, as facts.

    f(x, 2)         x: float32[3], strides (1,), a leaf that requires grad; 2: an int; grad mode on; …

A `CallState` is everything about a call that a trace may have baked in. That of the traced call is kept with its entry.
`aotlab.runtime.prologue` turns it into straight-line checks, with torch's C++ guards for tensors and global state. When
they fail, the state of the new call is taken too, and `aotlab.guards.explain` says in one sentence what changed. Both
read the same facts, so that a check without a sentence would show as a recompile without a reason.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.errors import PythonValueError, SubclassError, TransformError, UnsupportedTensorError
from aotlab.guards.libraries import is_library, is_library_module
from aotlab.guards.reach import reach
from aotlab.guards.reached import Reached
from aotlab.guards.settings import global_state
from aotlab.guards.values import NOTHING_MENTIONED, Attributes, Mentioned, attributes_that_count, is_plain, same_value

# --- facts about arguments ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a trace may assume of a tensor argument; the order is the order in which differences are told."""

    type: type
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_leaf: bool
    is_inference: bool
    is_conj: bool
    is_neg: bool
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
    """Take the facts of one tensor; ``mentioned`` says which of its attributes count.

    Raises `PythonValueError`: an attribute that counts is no plain value, so that it could change without a check
    seeing it.
    """
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
        layout=tensor.layout,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()) if strided else (),
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        is_inference=tensor.is_inference(),
        is_conj=tensor.is_conj(),
        is_neg=tensor.is_neg(),
        offset=int(tensor.storage_offset()) if strided else 0,
        may_be_written=internals.may_be_written(tensor),
        attributes=attributes,
        is_view=internals.base_of(tensor) is not None,
    )


def check_tensor(tensor: Tensor, name: str) -> None:
    """Refuse tensors that the engine cannot represent.

    Raises `SubclassError`, `UnsupportedTensorError` with the argument's name.
    """
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
    """Take the facts of one argument that is no tensor.

    Raises `PythonValueError` if its state could change without a check seeing it.
    """
    if is_plain(value):
        return ValueFacts(type(value), value, by_identity=False)
    if isinstance(value, types.FunctionType):
        found = reach(value)
        outside = [item.name for item in found.state if item.is_outside(value)]
        if outside:
            raise PythonValueError(
                f"`{name}` is a function that reads `{outside[0]}` from outside",
                why="a compiled entry could not tell when that changes",
                suggestion="call it by name inside the function, where what it reads is guarded",
                argument=name,
            )
        if found.unseen is not None:
            raise PythonValueError(
                f"`{name}` is a function that no guard can watch",
                why=found.unseen,
                suggestion="call it by name inside the function, which then runs eagerly",
                argument=name,
            )
        return ValueFacts(type(value), value, by_identity=True, code=value.__code__)
    of_library = (
        isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType))
        or (isinstance(value, type) and is_library(value))
        or (isinstance(value, types.ModuleType) and is_library_module(value))
    )
    if of_library:
        return ValueFacts(type(value), value, by_identity=True)
    raise PythonValueError(
        f"`{name}` is a `{type(value).__module__}.{type(value).__qualname__}`",
        why="a compiled entry could not tell when its contents change",
        suggestion="pass the tensors and plain values that it holds, register it with torch.utils._pytree, or compile "
        'with frontend="dynamo" (a method of it, say)',
        argument=name,
    )


# --- the memory that arguments share -----------------------------------------------------------------------------


def byte_interval(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte that ``tensor`` may touch and the one after the last; both 0 for an empty tensor."""
    if tensor.numel() == 0:
        return (0, 0)
    start = tensor.data_ptr()
    return (start, start + extent_bytes(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()))


def extent_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return how many bytes lie between a strided tensor's first byte and the one after its last."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


def overlapping_pairs(tensors: Sequence[tuple[int, Tensor]]) -> tuple[tuple[int, int, int], ...]:
    """Return the pairs of positions that share memory or a differentiable base, and the bytes from one to the other."""
    spans = [(tensor.device.type, *byte_interval(tensor), i) for i, tensor in tensors]
    starts = {i: start for _, start, _, i in spans}
    pairs: set[tuple[int, int]] = set()
    reaching: list[tuple[str, int, int, int]] = []  # earlier ones that end after the beginning of this one
    for span in sorted(span for span in spans if span[1] != span[2]):
        device, start, _, i = span
        reaching = [each for each in reaching if each[0] == device and each[2] > start]
        pairs.update((min(other, i), max(other, i)) for *_, other in reaching)
        reaching.append(span)
    families: dict[int, int] = {}
    for i, tensor in tensors:
        if tensor.requires_grad and tensor.numel():
            base = internals.base_of(tensor)
            first = families.setdefault(id(tensor if base is None else base), i)
            if first != i:
                pairs.add((first, i))
    return tuple(sorted((a, b, starts[b] - starts[a]) for a, b in pairs))


def counted_together(tensors: Sequence[tuple[int, Tensor]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of numbers of tensors that share a version counter; of several, each with the first of them.

    Slices of one buffer do, also where they share no byte: a write to one counts for the other.
    """
    families: dict[int, list[tuple[int, Tensor]]] = {}
    for n, tensor in tensors:
        families.setdefault(internals.storage_key(tensor), []).append((n, tensor))
    pairs = []
    for family in families.values():
        firsts: list[tuple[int, Tensor]] = []
        for n, tensor in family if len(family) > 1 else ():
            first = next((m for m, other in firsts if internals.share_version(other, tensor)), None)
            if first is None:
                firsts.append((n, tensor))
            else:
                pairs.append((first, n))
    return tuple(pairs)


# --- the state of a call -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CallState:
    """All that a trace may have baked in of one call.

    Attributes
    ----------
    structure, nesting
        The nesting of the arguments, as text and as what is compared.
    names, leaves
        A name for each flat argument, and its facts.
    same_as
        For each flat argument, the position of the first one that is the same tensor (its own position otherwise).
    settings
        `global_state` of the call.
    reached
        What the function reads besides its arguments.
    overlapping
        Pairs of positions as in `overlapping_pairs`, of tensors that are not the same object.
    counters
        Pairs of positions as in `counted_together`.
    function_modes
        How many default devices are set.
    mentioned
        Which attributes of tensors the function may read.
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


def transform_around() -> str | None:
    """Say which transform, which is to see each op of the function, a call stands under; None if there is none."""
    if internals.transforms_active():
        return "a torch.func transform"
    return "forward-mode differentiation" if internals.forward_ad_active() else None


def check_surroundings() -> int:
    """Refuse calls under modes that a compiled function could not respect; return the number of function modes.

    Raises `TransformError` under ``torch.func`` transforms, forward-mode AD, or a user's dispatch or function mode.
    """
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
    """Take the state of a call; ``values`` are the flat arguments, lifted parameters and buffers first.

    Raises `RefusedError`: an argument, or the surroundings of the call, cannot be guarded.
    """
    function_modes = check_surroundings()
    leaves: list[TensorFacts | ValueFacts] = []
    first: dict[int, int] = {}
    same_as = []
    tensors = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        position = i
        if isinstance(value, Tensor):
            check_tensor(value, name)
            leaves.append(tensor_facts(value, mentioned, name))
            position = first.setdefault(id(value), i)
            if position == i:
                tensors.append((i, value))
        else:
            leaves.append(value_facts(value, name))
        same_as.append(position)
    return CallState(
        structure=structure,
        nesting=nesting,
        names=tuple(names),
        leaves=tuple(leaves),
        same_as=tuple(same_as),
        settings=global_state(),
        reached=reached,
        overlapping=overlapping_pairs(tensors),
        counters=counted_together(tensors),
        function_modes=function_modes,
        mentioned=mentioned,
    )
