"""Specs: descriptions of tensors. A spec holds no tensor, so records can store it.

Sizes, strides and offsets are in elements, as ``int`` or `SymExpr`. Names that contain ``bytes`` are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aotlab._torch import is_leaf, shown_size, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class SymExpr:
    """A symbolic size: its expression as text, and the value that it had in the traced call."""

    expression: str
    hint: int | None = None

    def __str__(self) -> str:
        return self.expression if self.hint is None else f"{self.expression.replace(' ', '')}={self.hint}"


Size = int | SymExpr


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The description of one tensor.

    ``offset`` and ``byte_offset`` are the position of the tensor's first element in its storage. Tensors of one record
    share a storage if they have the same number ``storage``. ``storage_bytes`` is the size of that storage. ``nbytes``
    is the number of elements times the size of an element, even if elements overlap.
    """

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    byte_offset: Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    is_leaf: bool = True
    storage: int | None = None
    storage_bytes: Size | None = None
    nbytes: Size = 0
    type_name: str = "torch.Tensor"

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


class StorageNumbers:
    """Numbers storages in the order of their first appearance, so that specs can say which tensors share a storage.

    A `StorageNumbers` keeps the storages alive. Otherwise a new storage could get the address, and so the number, of a
    storage that was freed.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of ``tensor``'s storage, or None if it has no storage."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        return self._numbers.setdefault(storage_key(tensor), (len(self._numbers), storage))[0]


def size_of(value: int | torch.SymInt) -> Size:
    """Convert a size to an int, or to a `SymExpr` if it is symbolic."""
    if isinstance(value, int):
        return value
    text = shown_size(value)
    return int(text) if text.isdecimal() else SymExpr(expression=text, hint=value.node.hint)


def sizes_of(values: Sequence[int | torch.SymInt]) -> tuple[Size, ...]:
    """Convert sizes or strides to ints, or to `SymExpr` where they are symbolic."""
    return tuple([size_of(value) for value in values])


def spec_of(tensor: torch.Tensor, storages: StorageNumbers | None = None) -> TensorSpec:
    """Describe ``tensor``.

    With ``storages``, the spec also says which storage the tensor uses. If a record must say which of its tensors share
    memory, all its specs are made with the same ``storages``.
    """
    strided = tensor.layout == torch.strided
    itemsize = tensor.element_size()
    number = storages.number(tensor) if storages is not None and strided else None
    kind = type(tensor)
    return TensorSpec(
        shape=sizes_of(tensor.shape),
        stride=sizes_of(tensor.stride()) if strided else (),
        offset=size_of(tensor.storage_offset()) if strided else 0,
        byte_offset=size_of(tensor.storage_offset() * itemsize) if strided else 0,
        dtype=tensor.dtype,
        device=tensor.device,
        layout=tensor.layout,
        requires_grad=tensor.requires_grad,
        is_leaf=is_leaf(tensor),
        storage=number,
        storage_bytes=size_of(tensor.untyped_storage().nbytes()) if number is not None else None,
        nbytes=size_of(tensor.numel() * itemsize),
        type_name="torch.Tensor" if kind is torch.Tensor else f"{kind.__module__}.{kind.__qualname__}",
    )
