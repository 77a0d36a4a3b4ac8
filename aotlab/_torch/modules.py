"""What modules keep, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Where the tensors of parametrized modules are cached.
from torch.nn.utils import parametrize

# The containers that users have registered; every torch that we support has them under this name only.
from torch.utils import _pytree as pytree


def registered_container(kind: type) -> Any:
    """Return the functions by which a type registered with ``torch.utils._pytree`` is flattened; None if it is not."""
    return pytree.SUPPORTED_NODES.get(kind)


#: The dictionaries in which a module keeps its tensors and submodules, and the set of names that it does not save.
MODULE_DICTIONARIES = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def parameters_held(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which ``module`` itself keeps its parameters."""
    return module._parameters  # type: ignore[return-value]  # parameters are tensors


def buffers_held(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which ``module`` itself keeps its buffers."""
    return module._buffers


def children_held(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dictionary in which ``module`` itself keeps its submodules."""
    return module._modules


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Tell whether a module, or all modules, have hooks on their backward."""
    everywhere = torch.nn.modules.module._global_backward_hooks or torch.nn.modules.module._global_backward_pre_hooks
    return bool(module._backward_hooks or module._backward_pre_hooks or everywhere)


def hooks_held(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries in which ``module`` keeps its forward hooks and forward pre-hooks."""
    return module._forward_hooks, module._forward_pre_hooks


def parametrization_cache(module: torch.nn.Module) -> tuple[dict[str, Any], str] | None:
    """Return where it is kept whether parametrized tensors are cached; None if the module has none."""
    if not parametrize.is_parametrized(module):
        return None
    return vars(parametrize), "_cache_enabled"


def global_hooks_held() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of the forward hooks and forward pre-hooks of all modules."""
    return torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks


def module_call() -> Callable[..., Any]:
    """Return what ``torch.nn.Module.__call__`` calls; a class's own ``__call__`` is dear to replace."""
    return torch.nn.Module._call_impl


def set_module_call(call: Callable[..., Any]) -> None:
    """Let ``torch.nn.Module.__call__`` call something else."""
    torch.nn.Module._call_impl = call  # type: ignore[method-assign]
