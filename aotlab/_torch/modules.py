"""What modules keep, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

# Where the tensors of parametrized modules are cached.
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

#: Returns the functions by which a type registered with ``torch.utils._pytree`` is flattened; None if it is not.
registered_container: Callable[[type], Any] = pytree.SUPPORTED_NODES.get
#: The dictionaries in which a module keeps its tensors and submodules, and the set of names that it does not save.
MODULE_DICTIONARIES = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
#: Return the dictionaries in which a module itself keeps its parameters, buffers and submodules ...
parameters_held: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_parameters")
buffers_held: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
children_held: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
#: ... and its forward hooks and forward pre-hooks.
hooks_held: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks"
)


def has_backward_hooks(module: nn.Module) -> bool:
    """Tell whether a module, or all modules, have hooks on their backward."""
    everywhere = modules._global_backward_hooks or modules._global_backward_pre_hooks
    return bool(module._backward_hooks or module._backward_pre_hooks or everywhere)


def parametrization_cache(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Return where it is kept whether parametrized tensors are cached; None if the module has none."""
    return (vars(parametrize), "_cache_enabled") if parametrize.is_parametrized(module) else None


def global_hooks_held() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of the forward hooks and forward pre-hooks of all modules."""
    return modules._global_forward_hooks, modules._global_forward_pre_hooks


def module_call() -> Callable[..., Any]:
    """Return what ``torch.nn.Module.__call__`` calls; a class's own ``__call__`` is dear to replace."""
    return torch.nn.Module._call_impl


def set_module_call(call: Callable[..., Any]) -> None:
    """Let ``torch.nn.Module.__call__`` call something else."""
    torch.nn.Module._call_impl = call  # type: ignore[method-assign]
