"""The option ``--device``: move the values that a cell uses to a device, storage by storage.

    %%aotcompile --device cuda
    loss = model(x).sum()      # `model` and `x` are on the CPU: moved, before anything runs

Each tensor stays the same object, so the references in optimizers, containers and other variables stay valid. All
tensors that share a storage are moved together, also those that the cell does not name, so they still share memory
afterwards. The gradient and the optimizer state of a tensor are moved with the tensor.
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

from aotlab._torch import gradient_of, is_leaf, pytree, storage_key
from aotlab.errors import DeviceError
from aotlab.frontends.tensor_names import named_tensors
from aotlab.report.text import data_size

#: A function that returns a copy of a storage on a device.
Copy = Callable[[torch.UntypedStorage, torch.device], torch.UntypedStorage]
#: The key of the step counters in an optimizer's state. The counters stay on the CPU, because kernels do not read them.
#: Only the kernels of an optimizer that is ``capturable`` or ``fused`` do, so its counters are moved.
_COUNTER = "step"


def used(names: Iterable[str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a cell uses, directly or through functions of the notebook.

    ``names`` are the names that the cell reads. ``namespace`` has the notebook's variables.
    """
    used_names: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in used_names and name in namespace:
            used_names.add(name)
            function = inspect.unwrap(namespace[name]) if callable(namespace[name]) else None
            if isinstance(function, FunctionType) and function.__globals__ is namespace:
                codes = [function.__code__]
                for code in codes:
                    todo += (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
                    codes += (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {name: value for name, value in namespace.items() if name in used_names}


def move(namespace: Mapping[str, Any], device: torch.device) -> str:
    """Move the tensors of some variables to a device; return a sentence about the move, or "" if nothing was moved.

    Parameters
    ----------
    namespace
        The variables that a cell uses.

    Raises
    ------
    DeviceError
        A tensor cannot be moved. In this case no tensor was moved.
    """
    tensors, optimizers = _alive()
    counters: set[int] = set()
    beside: dict[int, list[Tensor]] = {}
    for parameter, is_counter, value in (each for optimizer in optimizers for each in _state_tensors(optimizer)):
        counters |= {id(value)} if is_counter else set()
        beside.setdefault(id(parameter), []).extend([] if is_counter else [value])
    named = [
        pair
        for key, pair in named_tensors(namespace, longest=None).items()
        if key not in counters and pair[1].device != device
    ]
    names: dict[int, str] = {}
    for name, tensor in named:
        gradient = gradient_of(tensor)
        for each in (tensor, *beside.get(id(tensor), ()), *([] if gradient is None else [gradient])):
            names.setdefault(_storage(each, name), name)
    moving = [tensor for tensor in tensors if _over_any(tensor, names)]
    # The garbage collector lists the tensors in any order. The message names the first that the cell names.
    for tensor in (*(tensor for _, tensor in named), *moving):
        _check(tensor, names[_storage(tensor, "")])
    size = move_storages(moving, device, _copied)
    owners = dict.fromkeys(name.partition(".")[0].partition("[")[0] for name, _ in named)
    return f"moved to {device}: {', '.join(f'`{owner}`' for owner in owners)} ({data_size(size)})" if moving else ""


def move_storages(tensors: Iterable[Tensor], device: torch.device, copy: Copy) -> int:
    """Move tensors to copies of their storages, and return the number of copied bytes.

    ``copy`` copies one storage. Tensors that shared a storage share the copy, with the same offsets and strides. If an
    error or an interrupt occurs, no tensor is moved.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    before: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        pairs = []
        for tensor in {id(each): each for each in tensors}.values():
            key = storage_key(tensor)
            if key not in copies:
                copies[key] = copy(tensor.untyped_storage(), device)
            pairs.append((tensor, _over(copies[key], tensor)))
        try:
            for tensor, moved in pairs:
                before.append((tensor, tensor.data))
                tensor.data = moved
        except BaseException:
            for tensor, data in before:
                tensor.data = data
            raise
    return sum(storage.nbytes() for storage in copies.values())


def _over(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    result = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    result.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return result.conj() if tensor.is_conj() else result


def _copied(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device=device).copy_(storage)


def _alive() -> tuple[list[Tensor], list[torch.optim.Optimizer]]:
    """Return all live tensors and optimizers that the garbage collector tracks."""
    objects = gc.get_objects()
    tensors = [each for each in objects if issubclass(type(each), Tensor)]
    return tensors, [each for each in objects if issubclass(type(each), torch.optim.Optimizer)]


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, bool, Tensor]]:
    """Yield for each state tensor: its parameter, whether it is a counter that stays on the CPU, and the tensor."""
    # An optimizer whose constructor raised has no groups, and a traceback may keep it alive.
    for group in getattr(optimizer, "param_groups", ()):
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
    """Raise DeviceError if a tensor cannot be moved."""
    if tensor.is_meta:
        _refuse(name, "on the meta device, without data")
    if type(tensor) not in (Tensor, nn.Parameter):
        _refuse(name, f"a `{type(tensor).__name__}`")
    if not is_leaf(tensor):
        _refuse(name, f"computed on {tensor.device}, with an autograd history there")
    if tensor.is_inference() or tensor.is_neg():
        _refuse(name, "made in inference mode" if tensor.is_inference() else "a view with the negative bit")


def _refuse(name: str, what: str) -> NoReturn:
    raise DeviceError(f"`{name}` cannot be moved as it is: {what}", suggestion=f"create `{name}` on the device")
