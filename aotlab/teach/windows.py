"""A map of storages: the place of each element of each tensor. A place is a position in a storage, counted from 0."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from aotlab import _torch as torch_internals
from aotlab.errors import UsageError
from aotlab.teach.shown import Shown

#: At most this many elements of a storage are drawn.
_MOST = 32
_FREE = "·"


class _Storage(Shown):
    """The map of one storage: a column for each element, a row for each tensor."""

    def __init__(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        first = next(iter(tensors.values()))
        memory = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
        dtype, nbytes = str(first.dtype).removeprefix("torch."), first.untyped_storage().nbytes()
        self.title = f"Storage {number}: {len(memory)} elements of {dtype}, {nbytes} bytes"
        self.note = f"Only the first {_MOST} elements are drawn." if len(memory) > _MOST else ""
        values = memory[:_MOST].tolist()
        drawn = range(len(values))
        self.head = ("place", *map(str, drawn))
        rows = [("value", *(f"{value:g}" for value in values))]
        for name, tensor in tensors.items():
            lies = elements(tensor)
            rows.append((name, *(" ".join(lies.get(place, [_FREE])) for place in drawn)))
        self.rows = rows

    def style(self, cell: str) -> str:
        """Return a background color for the cells of places at which a tensor has an element."""
        return "background:rgba(0,114,178,.3)" if cell.startswith("[") else ""


class StorageMap(Shown):
    """The maps of the storages of some tensors, one below the other."""

    def __init__(self, storages: list[_Storage]) -> None:
        self.storages = storages

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.storages))

    def _repr_html_(self) -> str:
        return "".join(storage._repr_html_() for storage in self.storages)


def storage_map(**tensors: Any) -> StorageMap:
    """Draw a map of the storages of tensors: a column for each element of a storage, a row for each tensor.

    Raises
    ------
    UsageError
        An argument is not a tensor, a tensor is complex, or two tensors use one storage with different dtypes.

    Examples
    --------
    >>> x = torch.arange(4.0).view(2, 2)
    >>> storage_map(x=x, column=x[:, 1])
    Storage 0: 4 elements of float32, 16 bytes
    place   0      1      2      3
    value   0      1      2      3
    x       [0,0]  [0,1]  [1,0]  [1,1]
    column  ·      [0]    ·      [1]
    """
    groups: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_complex():
            raise UsageError(f"a storage map shows real tensors, and `{name}` is of type {type(tensor).__name__}")
        groups.setdefault(torch_internals.storage_key(tensor), {})[name] = tensor.detach()
    for group in groups.values():
        if len({tensor.dtype for tensor in group.values()}) > 1:
            raise UsageError(f"{', '.join(group)} view one storage as different dtypes, which a map cannot show")
    return StorageMap([_Storage(number, group) for number, group in enumerate(groups.values())])


def elements(tensor: torch.Tensor) -> dict[int, list[str]]:
    """Return a mapping from each place of the storage to the elements of the tensor at that place."""
    places: dict[int, list[str]] = {}
    for index in itertools.product(*map(range, tensor.shape)):
        place = int(tensor.storage_offset()) + sum(i * step for i, step in zip(index, tensor.stride(), strict=True))
        if place < _MOST:
            places.setdefault(place, []).append(f"[{','.join(map(str, index))}]")
    return places
