"""Functionalization: wrappers whose mutations become pure ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

#: Wraps a tensor so that mutations of the wrapper become functional ops.
to_functional: Callable[[Tensor], Tensor] = torch._to_functional_tensor
#: Tells whether a tensor is such a wrapper.
is_functional: Callable[[Tensor], bool] = torch._is_functional_tensor
#: Applies mutations that were made through other views of the wrapper's storage.
sync: Callable[[Tensor], None] = torch._sync  # type: ignore[attr-defined]  # not in the stubs
#: Returns the value that a wrapper holds now; `sync` it first.
from_functional: Callable[[Tensor], Tensor] = torch._from_functional_tensor
#: Tells whether a wrapper's values were written (zero-size and self-copy writes count).
has_data_mutation: Callable[[Tensor], bool] = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
#: Tells whether a wrapper's sizes, strides or offset changed in place.
has_metadata_mutation: Callable[[Tensor], bool] = torch._functionalize_has_metadata_mutation
#: Tells whether a wrapper was given another storage.
was_storage_changed: Callable[[Tensor], bool] = torch._functionalize_was_storage_changed
#: Tells whether all writes happened under ``no_grad`` or ``inference_mode``.
mutations_under_no_grad: Callable[[Tensor], bool] = (
    torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode
)


@contextlib.contextmanager
def functionalization() -> Iterator[None]:
    """Make factory functions return functional wrappers too; views stay views in the graph."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


def is_seen_through(wrapper: Tensor, operator: str) -> bool:
    """Tell whether a view op of this name lies on the way from the memory of a wrapper to the wrapper."""
    # only functionalization knows by which views it will write back, and it names them by their classes
    ways = torch._C._functionalization.get_view_meta_sequence(wrapper)
    return any(type(way).__name__ == f"{operator}_ViewMeta" for way in ways)


def replace_value(wrapper: Tensor, value: Tensor) -> None:
    """Let ``wrapper`` hold ``value`` from now on, and its aliases what follows from that."""
    torch._functionalize_replace(wrapper, value)
    torch._functionalize_commit_update(wrapper)
    sync(wrapper)


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Let ops in the block be ordinary ones again: neither recorded, nor on wrappers."""
    functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        torch._C._ExcludeDispatchKeyGuard(functionalize),
    ):
        yield
