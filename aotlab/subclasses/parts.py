"""Unwrap wrappers into parts, describe them, and wrap parts again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import parts_of
from aotlab.errors import SubclassError
from aotlab.ir.subclass_records import Layout, Opaque, SizeOfPart, SubclassSpec

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def spec_of(tensor: Tensor, name: str, parts: Sequence[Tensor] | None = None) -> SubclassSpec:
    """Describe a wrapper; raise `SubclassError` if it cannot be wrapped again from its parts.

    ``name`` is the name of the wrapper in errors. ``parts`` are its parts, if they are already known. A size that
    equals a size of a part is described as a reference to the part, because both may vary together.
    """
    if tensor.layout != torch.strided or tensor.is_nested:
        raise SubclassError(
            f"`{name}` is a `{type(tensor).__qualname__}`, which is nested or has another layout than strided",
            why="a trace cannot represent its sizes",
            suggestion="compute with its inner tensors, for example values() and offsets() of a jagged tensor",
            argument=name,
        )
    return _spec_of(tensor, name, parts_of(tensor) if parts is None else parts, iter(range(1 << 30)))


def _spec_of(tensor: Tensor, name: str, parts: Sequence[Tensor], numbers: Iterator[int]) -> SubclassSpec:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a protocol
    inner: list[tuple[str, int | SubclassSpec | Opaque]] = []
    for attribute in names:
        part, path = getattr(tensor, attribute), f"{name}.{attribute}"
        if internals.is_wrapper(part):
            inner.append((attribute, _spec_of(part, path, parts, numbers)))
        elif isinstance(part, Tensor):
            inner.append((attribute, next(numbers)))
        elif internals.is_opaque(part):
            inner.append((attribute, Opaque(part)))
        else:
            raise SubclassError(
                f"`{path}` is a `{type(part).__qualname__}`",
                why="`__tensor_flatten__` may name only tensors",
                suggestion="return it in the context",
                argument=name,
            )
    sizes = [size_like_part(size, d, parts) for d, size in enumerate(tensor.shape)]
    strides = [size_like_part(step, d, parts, Tensor.stride) for d, step in enumerate(tensor.stride())]
    layout = Layout(size=tuple(sizes), stride=tuple(strides))
    return SubclassSpec(type=type(tensor), dtype=tensor.dtype, parts=tuple(inner), context=context, layout=layout)


def size_like_part(
    value: Any, dim: int, parts: Sequence[Tensor], read_size: Callable[..., Any] = Tensor.size
) -> int | SizeOfPart:
    """Find a part whose size in dimension ``dim`` equals ``value``, a size of the wrapper; return a reference to it.

    If no part has this size, return ``value`` as a number. ``read_size`` reads the size of a part. To describe a
    stride, pass `Tensor.stride`.
    """
    for k, part in enumerate(parts):
        if dim < part.dim() and internals.same_size(read_size(part, dim), value):
            return SizeOfPart(k, dim)
    if internals.is_symbolic(value):
        raise SubclassError("a tensor subclass has a size that varies, and none of its parts has that size")
    return int(value)


def sizes(values: Sequence[int | SizeOfPart], parts: Sequence[Tensor]) -> tuple[Any, ...]:
    """Replace each reference to a part (`SizeOfPart`) in ``values`` by the size of that part; keep plain numbers."""

    def size(part: Tensor, dim: int) -> int:
        return part.numel() if dim < 0 else part.size(dim)

    return tuple([size(parts[n.part], n.dim) if isinstance(n, SizeOfPart) else n for n in values])


def wrap_parts(spec: SubclassSpec, parts: Sequence[Any]) -> Any:
    """Make the wrapper that a spec describes from its parts."""
    inner = {name: _part(part, parts) for name, part in spec.parts}
    strides = tuple([parts[n.part].stride(n.dim) if isinstance(n, SizeOfPart) else n for n in spec.layout.stride])
    size = sizes(spec.layout.size, parts)
    return spec.type.__tensor_unflatten__(inner, spec.context, size, strides)  # type: ignore[attr-defined]


def _part(part: int | SubclassSpec | Opaque, parts: Sequence[Any]) -> Any:
    if isinstance(part, Opaque):
        return part.value
    return parts[part] if isinstance(part, int) else wrap_parts(part, parts)


def fits(tensor: Any, spec: SubclassSpec) -> bool:
    """Tell whether a tensor has the type, attributes and context that a spec describes."""
    kind: type = type(tensor)
    if kind is not spec.type:
        return False
    names, context = tensor.__tensor_flatten__()
    if list(names) != [name for name, _ in spec.parts] or context != spec.context:
        return False
    return all(_fits(getattr(tensor, name), part) for name, part in spec.parts)


def _fits(value: Any, part: int | SubclassSpec | Opaque) -> bool:
    if isinstance(part, Opaque):
        return value is part.value
    return type(value) in _PLAIN if isinstance(part, int) else fits(value, part)


def is_differentiable(parts: Sequence[Tensor]) -> bool:
    """Tell whether a compiled backward can compute gradients for all of these parts.

    Integers and bools have no gradients. Complex parts are excluded, too, because they may be lazy conjugates.
    """
    return all(part.is_floating_point() for part in parts)


def state_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the state of a wrapper besides its values, to detect changes.

    Attributes that start with an underscore are left out, because they may be caches.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    inner = None if flatten is None else flatten()
    attributes = [(name, id(value)) for name, value in vars(tensor).items() if not name.startswith("_")]
    return tensor.shape, tensor.stride(), tensor.storage_offset(), inner, attributes
