"""Wrapper subclasses: recognize them, split them into parts, functionalize their ops, and regenerate their views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

try:  # `OpaqueBase` is the class of the opaque objects that a `DTensor` has as attributes. torch 2.15 has renamed it.
    from torch._custom_class_base import CustomClassBase as OpaqueBase  # type: ignore[import-not-found]
except ImportError:
    from torch._opaque_base import OpaqueBase

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def is_wrapper(value: Any) -> bool:
    """Tell whether a value is a wrapper subclass: a tensor that ``__tensor_flatten__`` splits into parts."""
    return type(value) not in _PLAIN and isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def is_opaque(value: Any) -> bool:
    """Tell whether an inner attribute of a wrapper subclass is one of torch's opaque objects, and not a tensor."""
    return isinstance(value, OpaqueBase)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """List the plain tensors of which a wrapper subclass consists. For a plain tensor, list only the tensor itself."""
    if not is_wrapper(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # part of the wrapper protocol
    inner = (getattr(tensor, name) for name in names)
    return [part for each in inner if not is_opaque(each) for part in parts_of(each)]


_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


def functionalization_left_out() -> Any:
    """Keep the ops in a ``with`` block from being functionalized."""
    return torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE)


def functionalization_again() -> Any:
    """Functionalize the ops in a ``with`` block, even if functionalization is off around it."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(include | _FUNCTIONALIZE, exclude - _FUNCTIONALIZE)


#: Calls the op that made a view (first argument) on another base (second). A third argument is a function that replaces
#: the op's symbolic sizes.
view_again: Callable[..., Tensor] = Tensor._view_func_unsafe


def same_size(first: Any, second: Any) -> bool:
    """Tell whether two sizes are the same number, or the same expression of symbols."""
    if isinstance(first, torch.SymInt) and isinstance(second, torch.SymInt):
        return bool(first.node.expr == second.node.expr)
    return type(first) is type(second) and first == second


make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
SPARSE: Any = torch.ops.aten._sparse_coo_tensor_unsafe.default
MAKES_SPARSE: Any = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
BACKWARD_OF_BAGS: Any = torch.ops.aten._embedding_bag_backward.default
#: The ops that look up rows of a weight, each with the positions of its arguments ``sparse`` and ``padding_idx``.
_LOOKUPS = {torch.ops.aten.embedding.default: (4, 2), torch.ops.aten._embedding_bag.default: (5, 8)}


def padding_of_lookup(func: Any, args: tuple[Any, ...]) -> int | None:
    """Return the argument ``padding_idx`` of an op that looks up rows of a weight whose gradient is sparse.

    The default of ``padding_idx`` is -1. Return None for other calls. ``func`` is the op, and ``args`` are its
    arguments.
    """
    sparse, padding = _LOOKUPS.get(func, (0, 0))
    is_sparse = sparse and any(args[sparse : sparse + 1]) and torch.is_grad_enabled()
    return dict(enumerate(args)).get(padding, -1) if is_sparse else None
