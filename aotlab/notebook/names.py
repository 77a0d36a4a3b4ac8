"""The tensors that a notebook holds, by the names under which its user knows them, and which of them were written."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import torch_internals as internals
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.report.assemble import tensor_info
from aotlab.report.model import Input

_IPYTHON = frozenset({"In", "Out", "exit", "quit", "get_ipython"})
_LONGEST = 200
_DEEPEST = 3


def named_tensors(namespace: Mapping[str, Any]) -> dict[int, tuple[str, Tensor]]:
    """Return the tensors that can be reached from variables, by `id`, each with its first name.

    Variables hold tensors directly, in lists, tuples and dicts, in modules, in optimizers, and as attributes of objects
    whose class was defined in the notebook. A tensor's gradient is ``name.grad``; what an optimizer keeps for a
    parameter is ``opt.state[name]['key']``.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    variables = [(name, value) for name, value in list(namespace.items()) if _public(name)]
    for name, value in variables:
        for path, tensor in _reached(name, value, 0):
            found.setdefault(id(tensor), (path, tensor))
    for path, tensor in list(found.values()):
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None:
            found.setdefault(id(gradient), (f"{path}.grad", gradient))
    for name, value in variables:
        if isinstance(value, torch.optim.Optimizer):
            for path, tensor in _optimizer_state(name, value, found):
                found.setdefault(id(tensor), (path, tensor))
    return found


def _public(name: str) -> bool:
    return not name.startswith("_") and name not in _IPYTHON


def _reached(path: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{path}.{name}", tensor
    elif depth < _DEEPEST:
        if type(value) in (list, tuple):
            for index, item in enumerate(value[:_LONGEST]):
                yield from _reached(f"{path}[{index}]", item, depth + 1)
        elif type(value) is dict:
            for key, item in list(value.items())[:_LONGEST]:
                yield from _reached(f"{path}[{key!r}]", item, depth + 1)
        elif type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
            for name, item in list(vars(value).items())[:_LONGEST]:
                yield from _reached(f"{path}.{name}", item, depth + 1)


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


class Watch:
    """Tells which tensors of a notebook were written between its making and `written`.

    Eager's own version counters tell it, so that writes are seen wherever they happen: in compiled graphs, in Python,
    in autograd. Tensors made under inference mode have no counter and are not watched.

    Parameters
    ----------
    namespace
        The notebook's variables.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._watched = [
            _Watched(name=name, tensor=weakref.ref(tensor), version=tensor._version)
            for name, tensor in named_tensors(namespace).values()
            if not tensor.is_inference()
        ]

    def written(self, in_graphs: Mapping[str, Tensor | None]) -> tuple[Input, ...]:
        """Return what was written since, but for what is in ``in_graphs``.

        Parameters
        ----------
        in_graphs
            The tensors that compiled graphs wrote, by name. A tensor that shares bytes with one of them was written
            through it, and says so; one that only shares its storage was not.
        """
        rows: list[Input] = []
        storages = StorageNumbers()
        for each in self._watched:
            tensor = each.tensor()
            if tensor is None or tensor.is_inference() or tensor._version == each.version or each.name in in_graphs:
                continue
            through, elsewhere = [], False
            for name, other in in_graphs.items():
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
                    mutates_data=True,
                    requires_grad_after=tensor.requires_grad,
                )
            )
        return tuple(rows)


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
