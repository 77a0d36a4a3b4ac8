"""Functionalization: wrappers whose mutations become pure ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

# A mode that sees every op below autograd and functionalization.
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def functionalization() -> Iterator[None]:
    """Make factory functions return functional wrappers too; views stay views in the graph."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


def to_functional(tensor: Tensor) -> Tensor:
    """Wrap ``tensor`` so that mutations of the wrapper become functional ops."""
    return torch._to_functional_tensor(tensor)


def is_functional(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is such a wrapper."""
    return torch._is_functional_tensor(tensor)


def sync(tensor: Tensor) -> None:
    """Apply mutations that were made through other views of the wrapper's storage."""
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]  # not in the stubs


def from_functional(tensor: Tensor) -> Tensor:
    """Return the value that a wrapper holds now; `sync` it first."""
    return torch._from_functional_tensor(tensor)


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


def has_data_mutation(wrapper: Tensor) -> bool:
    """Tell whether a wrapper's values were written (zero-size and self-copy writes count)."""
    return bool(torch._functionalize_has_data_mutation(wrapper))  # type: ignore[attr-defined]  # not in the stubs


def has_metadata_mutation(wrapper: Tensor) -> bool:
    """Tell whether a wrapper's sizes, strides or offset changed in place."""
    return bool(torch._functionalize_has_metadata_mutation(wrapper))


def was_storage_changed(wrapper: Tensor) -> bool:
    """Tell whether a wrapper was given another storage."""
    return bool(torch._functionalize_was_storage_changed(wrapper))


def mutations_under_no_grad(wrapper: Tensor) -> bool:
    """Tell whether all writes happened under ``no_grad`` or ``inference_mode``."""
    return bool(torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode(wrapper))
