"""The modules and parameters of FSDP2 (``torch.distributed.fsdp.fully_shard``).

Hooks around the forward and the backward of a sharded module gather its parameters from all processes: they allocate
the memory of the parameters and fill it. Other hooks free this memory after the forward, and again after the backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import Tensor, nn

from aotlab._torch.fake import storage_id

#: The tensors whose storages FSDP2 frees and fills again, by the id of the storage, as `is_gathered` last saw them.
_gathered: dict[int | None, weakref.ref[Tensor]] = {}


def is_sharded(module: object) -> TypeGuard[nn.Module]:
    """Tell whether ``fully_shard`` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def share_sharding(module: nn.Module, other: nn.Module) -> None:
    """Let FSDP2 find the state of the sharded module ``module`` at the module ``other``, too."""
    states = _states()
    states[other] = states[module]


def is_gathered(tensor: Tensor) -> bool:
    """Tell whether FSDP2 frees the memory of a tensor after the forward, and has filled it again."""
    if tensor.data_ptr() == 0:
        return False
    storage = storage_id(tensor)
    if not _is_held(storage):
        _gathered.clear()
        _gathered.update({storage_id(each): weakref.ref(each) for each in _gathered_tensors()})
    return storage in _gathered


def _is_held(storage: int | None) -> bool:
    """Tell whether a tensor in `_gathered` still has this storage. If not, another storage may have its id now."""
    tensor = _gathered[storage]() if storage in _gathered else None
    return tensor is not None and storage_id(tensor) == storage


def _states() -> Any:
    """Return torch's mapping of modules to weak references to the states of composable APIs, such as FSDP2."""
    module = sys.modules.get("torch.distributed._composable_state")
    return {} if module is None else module._module_state_mapping


def _gathered_tensors() -> Iterator[Tensor]:
    states = (reference() for reference in list(_states().values()))
    for state in {id(each): each for each in states}.values():
        # Until torch 2.12, a state has one group of parameters or none, in another attribute.
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in (each for group in groups if group is not None for each in group.fsdp_params):
            yield from (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors)
