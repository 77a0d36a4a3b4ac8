"""``--device``: what a cell uses is moved there, storage by storage.

    %%aotcompile --device cuda
    loss = model(x).sum()      # `model` and `x` are on the CPU: moved, before anything runs

Each tensor stays the object that it is, so that optimizers, containers and other variables keep what they hold. All
tensors over a storage move together, also those that the cell does not name: what shared memory shares it afterwards.
Gradients move with their tensors, and so does what optimizers keep for them.
"""

from __future__ import annotations

import dis
import gc
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from aotlab._torch import pytree, storage_key
from aotlab.errors import DeviceError
from aotlab.notebook.names import named_tensors
from aotlab.report.text import data_size

#: Copies a storage to a device.
Copy = Callable[[torch.UntypedStorage, torch.device], torch.UntypedStorage]
#: What optimizers keep on the CPU for kernels that do not read it on the device.
_COUNTER = "step"


def used(names: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that code with these names uses, also in functions of the notebook that it names."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found and name in namespace:
            found.add(name)
            function = inspect.unwrap(namespace[name]) if callable(namespace[name]) else None
            if isinstance(function, FunctionType) and function.__globals__ is namespace:
                codes = [function.__code__]
                for code in codes:
                    todo += (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
                    codes += (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {name: value for name, value in namespace.items() if name in found}


def move(namespace: Mapping[str, Any], device: torch.device) -> str:
    """Move what some variables hold to a device; return what was moved as a sentence, empty if nothing was.

    Parameters
    ----------
    namespace
        The variables that a cell uses.

    Raises
    ------
    DeviceError
        A tensor cannot be moved as it is; nothing was.
    """
    tensors, optimizers = _alive()
    counters: set[int] = set()
    beside: dict[int, list[Tensor]] = {}
    for parameter, is_counter, value in (each for optimizer in optimizers for each in _kept(optimizer)):
        counters |= {id(value)} if is_counter else set()
        beside.setdefault(id(parameter), []).extend([] if is_counter else [value])
    named = [
        pair
        for key, pair in named_tensors(namespace, longest=None).items()
        if key not in counters and pair[1].device != device
    ]
    names: dict[int, str] = {}
    for name, tensor in named:
        gradient = tensor.grad if tensor.is_leaf else None
        for each in (tensor, *beside.get(id(tensor), ()), *([] if gradient is None else [gradient])):
            names.setdefault(_storage(each, name), name)
    moving = [tensor for tensor in tensors if _over_any(tensor, names)]
    for tensor in moving:
        _check(tensor, names[_storage(tensor, "")])
    size = move_storages(moving, device, _copied)
    owners = dict.fromkeys(name.partition(".")[0].partition("[")[0] for name, _ in named)
    return f"moved to {device}: {', '.join(f'`{owner}`' for owner in owners)} ({data_size(size)})" if moving else ""


def move_storages(tensors: Iterable[Tensor], device: torch.device, copy: Copy) -> int:
    """Put copies of their storages under some tensors; return the bytes. All are moved, or none if it is interrupted.

    ``copy`` makes each; tensors over the same storage get the same one, with the offsets and strides that they had.
    """
    made: dict[int, torch.UntypedStorage] = {}
    before: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        pairs = []
        for tensor in {id(each): each for each in tensors}.values():
            key = storage_key(tensor)
            if key not in made:
                made[key] = copy(tensor.untyped_storage(), device)
            pairs.append((tensor, _over(made[key], tensor)))
        try:
            for tensor, moved in pairs:
                before.append((tensor, tensor.data))
                tensor.data = moved
        except BaseException:
            for tensor, data in before:
                tensor.data = data
            raise
    return sum(storage.nbytes() for storage in made.values())


def _over(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return made.conj() if tensor.is_conj() else made


def _copied(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)


def _alive() -> tuple[list[Tensor], list[torch.optim.Optimizer]]:
    """Return the tensors and optimizers that Python knows of."""
    objects = gc.get_objects()
    tensors = [each for each in objects if issubclass(type(each), Tensor)]
    return tensors, [each for each in objects if issubclass(type(each), torch.optim.Optimizer)]


def _kept(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, bool, Tensor]]:
    """Yield what an optimizer keeps: for which parameter, whether it is a counter that stays on the CPU, the tensor."""
    for group in optimizer.param_groups:
        stays = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, Tensor):
                        yield parameter, stays and key == _COUNTER, tensor


def _over_any(tensor: Tensor, storages: Container[int]) -> bool:
    with suppress(NotImplementedError, RuntimeError):
        return storage_key(tensor) in storages
    return False


def _storage(tensor: Tensor, name: str) -> int:
    try:
        return storage_key(tensor)
    except NotImplementedError:
        _refuse(name, f"a {str(tensor.layout).removeprefix('torch.')} tensor")


def _check(tensor: Tensor, name: str) -> None:
    """Refuse what cannot be moved as it is."""
    if tensor.is_meta:
        _refuse(name, "on the meta device, without data")
    if type(tensor) not in (Tensor, nn.Parameter):
        _refuse(name, f"a `{type(tensor).__name__}`")
    if tensor.grad_fn is not None:
        _refuse(name, f"computed on {tensor.device}, with a history there")
    if tensor.is_inference() or tensor.is_neg():
        _refuse(name, "made in inference mode" if tensor.is_inference() else "a negated view")


def _refuse(name: str, what: str) -> NoReturn:
    raise DeviceError(f"`{name}` cannot be moved as it is: {what}", suggestion=f"make `{name}` anew on the device")
