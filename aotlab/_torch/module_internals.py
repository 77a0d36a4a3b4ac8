"""The contents of modules, and the function that calls them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

# This module holds the flag and the cache of ``torch.nn.utils.parametrize.cached()``.
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

#: Returns the flattening functions of a type that is registered with ``torch.utils._pytree``, or None.
registered_container: Callable[[type], Any] = pytree.SUPPORTED_NODES.get
#: The attributes in which a module stores its parameters, buffers, submodules and state-dict hooks, and the names of
#: the buffers that its state dict leaves out.
MODULE_DICTIONARIES = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
#: These three return the dictionary in which a module stores its own parameters, buffers and submodules, without those
#: of its submodules.
parameters_held: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_parameters")
buffers_held: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
children_held: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
#: The attribute that holds a module's forward hooks.
FORWARD_HOOKS = "_forward_hooks"
#: Returns the dictionaries of a module's forward hooks and forward pre-hooks.
hooks_held: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    FORWARD_HOOKS, "_forward_pre_hooks"
)
#: Returns the dictionaries of a module's backward hooks and backward pre-hooks.
backward_hooks_held: Callable[[nn.Module], tuple[dict[int, Any], dict[int, Any]]] = attrgetter(
    "_backward_hooks", "_backward_pre_hooks"
)

#: The global variables of torch's module ``torch.nn.modules.module`` that hold the hooks on all modules.
HOOKS_OF_ALL = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


def has_backward_hooks(module: nn.Module) -> bool:
    """Tell whether a module has backward hooks, or whether there are global backward hooks."""
    return any(backward_hooks_held(module)) or any(global_backward_hooks_held())


def talks_to_processes(module: nn.Module) -> bool:
    """Tell whether a module is a class of `torch.distributed`, such as `DistributedDataParallel`.

    Such a module exchanges tensors with other processes.
    """
    homes, silent = ("torch.distributed.", "torch.nn.parallel.distributed"), "torch.distributed.algorithms._checkpoint."
    names = (kind.__module__ for kind in type(module).__mro__)
    return any(name.startswith(homes) and not name.startswith(silent) for name in names)


def bucket_capacities() -> tuple[int, int] | None:
    """Return the sizes of the first and of the later buckets of gradients, in bytes, of the running DDP module.

    The result is None if no forward of a `DistributedDataParallel` is running.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    module = None if parallel is None else parallel.DistributedDataParallel._get_active_ddp_module()
    if module is None:
        return None
    default: int = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]  # made in C
    return default if module.bucket_bytes_cap_default else module.bucket_bytes_cap, module.bucket_bytes_cap


def parametrization_cache(module: nn.Module) -> tuple[dict[str, Any], str] | None:
    """Return where torch stores the flag that says whether ``torch.nn.utils.parametrize.cached()`` is active.

    The result is a namespace and a name in it. It is None if the module is not parametrized, because the flag does not
    matter to such a module.
    """
    return (vars(parametrize), "_cache_enabled") if parametrize.is_parametrized(module) else None


def global_hooks_held() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of the global forward hooks and forward pre-hooks of modules."""
    return modules._global_forward_hooks, modules._global_forward_pre_hooks


def global_backward_hooks_held() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of the global backward hooks and backward pre-hooks of modules."""
    return modules._global_backward_hooks, modules._global_backward_pre_hooks


def own_hooks_only(name: str) -> Any:
    """Return a copy of a method of `torch.nn.Module` that calls or lists hooks; the copy ignores global hooks.

    A compiled module uses such copies, because the original module inside of it runs the global hooks already.
    """
    method = getattr(nn.Module, name)
    namespace: dict[str, Any] = {**vars(modules), **{name: {} for name in HOOKS_OF_ALL}}
    del namespace["__name__"]  # otherwise Dynamo would read globals from the original Python module
    return types.FunctionType(method.__code__, namespace, method.__name__, method.__defaults__)


def module_call() -> Callable[..., Any]:
    """Return the function that ``torch.nn.Module.__call__`` calls, for `set_module_call`.

    Traces replace this function and not ``__call__`` itself, because replacing ``__call__`` would be expensive.
    """
    return torch.nn.Module._call_impl


def set_module_call(call: Callable[..., Any]) -> None:
    """Replace the function that ``torch.nn.Module.__call__`` calls."""
    torch.nn.Module._call_impl = call  # type: ignore[method-assign]
