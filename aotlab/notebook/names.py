"""The tensors that a notebook holds, by the names under which its user knows them, and which of them were written."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.report.assemble import tensor_info
from aotlab.report.model import Input

_IPYTHON = frozenset({"In", "Out", "exit", "quit", "get_ipython"})
_LONGEST = 200
_DEEPEST = 3

#: Bytes of values that are kept to see writes that no version counter counts.
_MOST_KEPT = 32 * 2**20


def named_tensors(namespace: Mapping[str, Any], longest: int | None = _LONGEST) -> dict[int, tuple[str, Tensor]]:
    """Return the tensors that can be reached from variables, by `id`, each with its first name.

    Variables hold tensors directly, in lists, tuples and dicts, in modules, in optimizers, and as attributes of objects
    whose class was defined in the notebook. A tensor's gradient is ``name.grad``; what an optimizer keeps for a
    parameter is ``opt.state[name]['key']``. Of a list or dict, ``longest`` items are looked at, or all.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    variables = [(name, value) for name, value in list(namespace.items()) if _public(name)]
    for name, value in variables:
        for path, tensor in _reached(name, value, longest, 0):
            found.setdefault(id(tensor), (path, tensor))
    for path, tensor in list(found.values()):
        try:
            gradient = tensor.grad if tensor.is_leaf else None
        except RuntimeError:  # a view that became invalid when its base was written
            continue
        if gradient is not None:
            found.setdefault(id(gradient), (f"{path}.grad", gradient))
    for name, value in variables:
        if isinstance(value, torch.optim.Optimizer):
            for path, tensor in _optimizer_state(name, value, found):
                found.setdefault(id(tensor), (path, tensor))
    return found


def _public(name: str) -> bool:
    return not name.startswith("_") and name not in _IPYTHON


def _reached(path: str, value: Any, longest: int | None, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{path}.{name}", tensor
    elif depth < _DEEPEST:
        if type(value) in (list, tuple):
            for index, item in enumerate(value[:longest]):
                yield from _reached(f"{path}[{index}]", item, longest, depth + 1)
        elif type(value) is dict:
            for key, item in list(value.items())[:longest]:
                yield from _reached(f"{path}[{key!r}]", item, longest, depth + 1)
        elif type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
            for name, item in list(vars(value).items())[:longest]:
                yield from _reached(f"{path}.{name}", item, longest, depth + 1)


def _optimizer_state(
    path: str, optimizer: torch.optim.Optimizer, known: Mapping[int, tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    position = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = known[id(parameter)][0] if id(parameter) in known else str(position)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{path}.state[{name}][{key!r}]", value
            position += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    name: str
    tensor: weakref.ref[Tensor]
    version: int
    bits: Tensor | None
    layout: tuple[object, ...]
    storage: int | None

    def written(self) -> Tensor | None:
        """Return the tensor if it was written since, by its counter, by its bits, or by the memory that it has."""
        tensor = self.tensor()
        if tensor is None or tensor.is_inference():
            return None
        if internals.version_of(tensor) != self.version or self.replaced(tensor):
            return tensor
        bits = _bits(tensor) if self.bits is not None else None
        return tensor if bits is not None and self.bits is not None and not torch.equal(bits, self.bits) else None

    def replaced(self, tensor: Tensor) -> bool:
        """Tell whether the tensor was given other memory."""
        return _storage(tensor) != self.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedArgument:
    """A tensor in the arguments of a call, as it was before."""

    position: int | str
    tensor: Tensor
    version: int
    layout: tuple[object, ...]

    def written(self) -> Input | None:
        """Say what the call did to it, by its version counter and its layout; None if nothing, and without its name."""
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
    """Note the tensors that a function is called with, to tell afterwards which of them were written."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [
        WatchedArgument(position=key, tensor=value, version=internals.version_of(value), layout=_layout(value))
        for key, value in given
        if isinstance(value, Tensor) and not value.is_inference()
    ]


def _storage(tensor: Tensor) -> int | None:
    return internals.storage_key(tensor) if tensor.layout == torch.strided else None


def _layout(tensor: Tensor) -> tuple[object, ...]:
    if tensor.layout != torch.strided:
        return (tensor.shape,)
    return (tensor.shape, tensor.stride(), tensor.storage_offset())


class Watch:
    """Tells which tensors of a notebook were written between its making and `written`.

    Eager's own version counters tell it, so that writes are seen wherever they happen: in compiled graphs, in Python,
    in autograd. Some writes are not counted (``.data``, the statistics of batch norm): the bits of the smaller tensors
    are kept and compared. Tensors made under inference mode have no counter and are not watched.

    Parameters
    ----------
    namespace
        The notebook's variables.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        found = [(name, tensor) for name, tensor in named_tensors(namespace).values() if not tensor.is_inference()]
        left = _MOST_KEPT
        kept: dict[int, Tensor | None] = {}
        for _name, tensor in sorted(found, key=lambda each: each[1].numel()):
            size = tensor.numel() * tensor.element_size() if tensor.layout == torch.strided else left + 1
            if size <= left:
                left -= size
                kept[id(tensor)] = _bits(tensor)
        self._watched = [
            _Watched(
                name=name,
                tensor=weakref.ref(tensor),
                version=internals.version_of(tensor),
                bits=kept.get(id(tensor)),
                layout=_layout(tensor),
                storage=_storage(tensor),
            )
            for name, tensor in found
        ]

    def written(self, in_graphs: Mapping[str, Tensor | None], moved: Collection[str] = ()) -> tuple[Input, ...]:
        """Return what was written since, but for what is in ``in_graphs``.

        Parameters
        ----------
        in_graphs
            The tensors that compiled graphs wrote, by name. A tensor that shares bytes with one of them was written
            through it, and says so; one that only shares its storage was not.
        moved
            The names of those whose sizes, strides or offset they changed.
        """
        rows: list[Input] = []
        storages = StorageNumbers()
        for each in self._watched:
            tensor = each.written()
            if tensor is None:
                continue
            replaced, layout = each.replaced(tensor), _layout(tensor) != each.layout
            own = in_graphs.get(each.name) is tensor  # then the graphs tell of its values
            if own and not (replaced or (layout and each.name not in moved)):
                continue
            through, elsewhere = [], False
            for name, other in () if own else in_graphs.items():
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
                    # Where sizes, strides or the memory changed, nobody knows which values to compare.
                    mutates_data=None if layout or replaced or own else True,
                    mutates_metadata=layout,
                    mutates_storage=replaced,
                    requires_grad_after=tensor.requires_grad,
                )
            )
        return (*rows, *self._gradients(storages))

    def _gradients(self, storages: StorageNumbers) -> Iterator[Input]:
        """Describe the gradients that are new."""
        tensors = [(each.name, tensor) for each in self._watched if (tensor := each.tensor()) is not None]
        old = {id(tensor) for _, tensor in tensors}
        for name, tensor in tensors:
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None and id(gradient) not in old:
                info = tensor_info(spec_of(gradient, storages))
                yield Input(name=f"{name}.grad", kind="new", tensor=info, mutates_data=False, mutates_metadata=False)


def _bits(tensor: Tensor) -> Tensor | None:
    """Copy a tensor's elements as bytes, None if they cannot be had so."""
    if isinstance(tensor, internals.FakeTensor):
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
