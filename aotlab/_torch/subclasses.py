"""Tensor subclasses that wrap tensors: which are, how a trace calls them, and their views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

try:  # what a `DTensor` has beside its tensor, objects that are what they are: by its name of torch 2.15, and before
    from torch._custom_class_base import CustomClassBase as OpaqueBase  # type: ignore[import-not-found]
except ImportError:
    from torch._opaque_base import OpaqueBase

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)


def is_wrapper(value: Any) -> bool:
    """Tell whether a value is a tensor that ``__tensor_flatten__`` takes apart."""
    return type(value) not in _PLAIN and isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def is_opaque(value: Any) -> bool:
    """Tell whether an attribute of a wrapper is an object that a graph need not know."""
    return isinstance(value, OpaqueBase)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """List the plain tensors that a wrapper consists of; of a plain tensor, itself."""
    if not is_wrapper(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a protocol
    inner = (getattr(tensor, name) for name in names)
    return [part for each in inner if not is_opaque(each) for part in parts_of(each)]


_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


def functionalization_left_out() -> Any:
    """Let no op in a ``with`` block be functionalized."""
    return torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE)


def functionalization_again() -> Any:
    """Let ops in a ``with`` block be functionalized, whatever is around."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(include | _FUNCTIONALIZE, exclude - _FUNCTIONALIZE)


#: Makes the view of another base that a view is of its own; a third argument changes the sizes that it takes.
view_again: Callable[..., Tensor] = Tensor._view_func_unsafe


def same_size(one: Any, other: Any) -> bool:
    """Tell whether two sizes are one number, or one expression of symbols."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return type(one) is type(other) and one == other


make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass
SPARSE: Any = torch.ops.aten._sparse_coo_tensor_unsafe.default
MAKES_SPARSE: Any = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
BACKWARD_OF_BAGS: Any = torch.ops.aten._embedding_bag_backward.default
#: Where ops that look up rows of a weight have ``sparse`` among their arguments, and the row that is padding.
_LOOKUPS = {torch.ops.aten.embedding.default: (4, 2), torch.ops.aten._embedding_bag.default: (5, 8)}


def padding_of_lookup(func: Any, args: tuple[Any, ...]) -> int | None:
    """Return the row without a gradient, or -1, if an op looks up rows of a weight whose gradient is to be sparse."""
    sparse, padding = _LOOKUPS.get(func, (0, 0))
    is_sparse = sparse and any(args[sparse : sparse + 1]) and torch.is_grad_enabled()
    return dict(enumerate(args)).get(padding, -1) if is_sparse else None
