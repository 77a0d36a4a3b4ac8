"""Find the tensors of a notebook that were written, and the user's names for them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.frontends.tensor_names import named_tensors
from aotlab.ir.extents import within_its_storage
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.report.model import Input
from aotlab.report.rows import tensor_info

#: A `Watch` keeps copies of at most this many bytes of values, to detect writes that no version counter records.
_MOST_KEPT = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """A tensor of the notebook, as it was when a `Watch` began.

    ``bits`` is a copy of the tensor's bytes, or None, for example if the tensor is too large. ``layout`` is the shape,
    the strides and the storage offset. ``storage`` identifies the storage.
    """

    name: str
    tensor: weakref.ref[Tensor]
    version: int
    bits: Tensor | None
    layout: tuple[object, ...]
    storage: int | None

    def written(self) -> Tensor | None:
        """Return the tensor if its version counter, its bytes or its storage are different now; None otherwise."""
        tensor = self.tensor()
        if tensor is None or tensor.is_inference():
            return None
        if internals.version_of(tensor) != self.version or self.replaced(tensor):
            return tensor
        bits = _bits(tensor) if self.bits is not None else None
        return tensor if bits is not None and self.bits is not None and not torch.equal(bits, self.bits) else None

    def replaced(self, tensor: Tensor) -> bool:
        """Tell whether the tensor now has another storage."""
        return _storage(tensor) != self.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedArgument:
    """A tensor argument of a call, as it was before the call.

    ``position`` is the index of the argument, or its keyword. ``layout`` is the shape, the strides and the storage
    offset.
    """

    position: int | str
    tensor: Tensor
    version: int
    layout: tuple[object, ...]

    def written(self) -> Input | None:
        """Describe how the call changed the tensor, from its version counter and layout.

        Return None if the call changed nothing. The caller must fill in the name of the returned row.
        """
        layout = _layout(self.tensor)
        if internals.version_of(self.tensor) == self.version and layout == self.layout:
            return None
        return Input(
            name="",
            kind="outside",
            tensor=tensor_info(spec_of(self.tensor, StorageNumbers())),
            mutates_data=True if layout == self.layout else None,
            mutates_metadata=layout != self.layout,
            requires_grad_after=self.tensor.requires_grad,
        )


def watch_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[WatchedArgument]:
    """Record the tensor arguments of a call, to find out afterwards which of them were written."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [
        WatchedArgument(position=key, tensor=value, version=internals.version_of(value), layout=_layout(value))
        for key, value in arguments
        if isinstance(value, Tensor) and not value.is_inference()
    ]


def _storage(tensor: Tensor) -> int | None:
    return internals.storage_key(tensor) if tensor.layout == torch.strided else None


def _layout(tensor: Tensor) -> tuple[object, ...]:
    if tensor.layout != torch.strided:
        return (tensor.shape,)
    return (tensor.shape, tensor.stride(), tensor.storage_offset())


class Watch:
    """Finds the tensors of a notebook that were written between the creation of this object and the call of `written`.

    It compares autograd's version counters, so it sees writes by compiled graphs, by Python and by autograd. Some
    writes do not increase the counter (``.data``, the statistics of batch norm). To find them, the object keeps copies
    of the smaller tensors and compares the bytes. Tensors that were created in inference mode have no version counter
    and are not watched.

    Parameters
    ----------
    namespace
        The notebook's variables.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        tensors = [(name, tensor) for name, tensor in named_tensors(namespace).values() if not tensor.is_inference()]
        left = _MOST_KEPT
        bits: dict[int, Tensor | None] = {}
        for _name, tensor in sorted(tensors, key=lambda each: each[1].numel()):
            size = tensor.numel() * tensor.element_size() if tensor.layout == torch.strided else left + 1
            if size <= left:
                left -= size
                bits[id(tensor)] = _bits(tensor)
        self._watched = [
            _Watched(
                name=name,
                tensor=weakref.ref(tensor),
                version=internals.version_of(tensor),
                bits=bits.get(id(tensor)),
                layout=_layout(tensor),
                storage=_storage(tensor),
            )
            for name, tensor in tensors
        ]

    def written(self, in_graphs: Mapping[str, Tensor | None], moved: Collection[str] = ()) -> tuple[Input, ...]:
        """Return the tensors that were written, except the tensors whose writes the graphs already report.

        Parameters
        ----------
        in_graphs
            The tensors that compiled graphs wrote, by name. If another tensor shares bytes with one of them, the graph
            has written both, and the row of the other tensor says so. If the other tensor has the same storage, but
            shares no bytes, it has no row, because the graph's write may only have increased a common version counter.
        moved
            The names of the tensors in ``in_graphs`` whose sizes, strides or offset the graphs changed.
        """
        rows: list[Input] = []
        storages = StorageNumbers()
        for each in self._watched:
            tensor = each.written()
            if tensor is None:
                continue
            replaced, layout = each.replaced(tensor), _layout(tensor) != each.layout
            in_graph = in_graphs.get(each.name) is tensor  # then the graphs report the write of the values
            if in_graph and not (replaced or (layout and each.name not in moved)):
                continue
            through, elsewhere = [], False
            for name, other in () if in_graph else in_graphs.items():
                if other is not None and _same_storage(tensor, other):
                    if _bytes_meet(tensor, other):
                        through.append(name)
                    else:
                        elsewhere = True
            if elsewhere and not through:
                continue
            info = spec_of(tensor, storages)
            rows.append(
                Input(
                    name=each.name,
                    kind="alias" if through else "outside",
                    tensor=tensor_info(info),
                    overlaps=tuple(through),
                    # None is "unknown": if the sizes, the strides or the storage changed, values cannot be compared.
                    mutates_data=None if layout or replaced or in_graph else True,
                    mutates_metadata=layout,
                    mutates_storage=replaced,
                    requires_grad_after=tensor.requires_grad,
                )
            )
        return (*rows, *self._gradients(storages))

    def _gradients(self, storages: StorageNumbers) -> Iterator[Input]:
        """Describe the gradients (``w.grad``) that did not exist when this object was created."""
        tensors = [(each.name, tensor) for each in self._watched if (tensor := each.tensor()) is not None]
        old = {id(tensor) for _, tensor in tensors}
        for name, tensor in tensors:
            gradient = internals.gradient_of(tensor)
            if gradient is not None and id(gradient) not in old:
                info = tensor_info(spec_of(gradient, storages))
                yield Input(name=f"{name}.grad", kind="new", tensor=info, mutates_data=False, mutates_metadata=False)


def _bits(tensor: Tensor) -> Tensor | None:
    """Return a copy of a tensor's elements as bytes, or None if they cannot be read (the storage may be freed)."""
    if isinstance(tensor, internals.FakeTensor) or not within_its_storage(tensor):
        return None
    with torch.no_grad():
        plain = tensor.detach()
        if plain.layout != torch.strided or plain.is_conj() or plain.is_neg() or plain.is_quantized or plain.is_meta:
            return None
        return plain.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _same_storage(left: Tensor, right: Tensor) -> bool:
    plain = left.layout == right.layout == torch.strided
    return plain and internals.storage_key(left) == internals.storage_key(right)


def _bytes_meet(left: Tensor, right: Tensor) -> bool:
    (first, end), (other_first, other_end) = _extent(left), _extent(right)
    return first < other_end and other_first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    first = tensor.storage_offset()
    if not tensor.numel():
        return int(first) * size, int(first) * size
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first) * size, (int(first) + int(reach) + 1) * size
