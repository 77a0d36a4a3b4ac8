"""Functionalization: torch's functional tensors, whose mutations become pure ops.

A functional tensor wraps another tensor, its value. An in-place op gives the functional tensor a new value. Each
constant below is a private function of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

#: Wraps a tensor in a functional tensor.
to_functional: Callable[[Tensor], Tensor] = torch._to_functional_tensor
#: Tells whether a tensor is a functional tensor.
is_functional: Callable[[Tensor], bool] = torch._is_functional_tensor
#: Updates the value of a functional tensor after writes through other views of its storage.
sync: Callable[[Tensor], None] = torch._sync  # type: ignore[attr-defined]  # not in the stubs
#: Returns the present value of a functional tensor. Call `sync` on the functional tensor first.
from_functional: Callable[[Tensor], Tensor] = torch._from_functional_tensor
#: Tells whether a functional tensor was written. A write of no elements also counts, and so does a copy of a tensor to
#: itself.
has_data_mutation: Callable[[Tensor], bool] = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
#: Tells whether a functional tensor's sizes, strides or storage offset were changed in place.
has_metadata_mutation: Callable[[Tensor], bool] = torch._functionalize_has_metadata_mutation
#: Tells whether a functional tensor was given another storage, for example by ``set_``.
was_storage_changed: Callable[[Tensor], bool] = torch._functionalize_was_storage_changed
#: Tells whether all writes of a functional tensor happened under ``no_grad`` or ``inference_mode``.
mutations_under_no_grad: Callable[[Tensor], bool] = (
    torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode
)


@contextlib.contextmanager
def functionalization() -> Iterator[None]:
    """Switch functionalization on for a block. Factory functions then return functional tensors, too.

    View ops remain view ops in the graph; functionalization does not replace them by copies.
    """
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


def is_seen_through(wrapper: Tensor, operator: str) -> bool:
    """Tell whether a functional tensor was made from its storage by view ops that include ``operator``.

    ``operator`` is the name of a view op, for example ``"expand"``.
    """
    # Functionalization stores the sequence of these view ops, so that it can write a new value of the tensor back into
    # the storage. The sequence has one object for each view op, and the class of the object has the name of the op.
    metas = torch._C._functionalization.get_view_meta_sequence(wrapper)
    return any(type(meta_).__name__ == f"{operator}_ViewMeta" for meta_ in metas)


def replace_value(wrapper: Tensor, value: Tensor) -> None:
    """Give the functional tensor ``wrapper`` the new ``value``, and update the values of its aliases accordingly."""
    torch._functionalize_replace(wrapper, value)
    torch._functionalize_commit_update(wrapper)
    sync(wrapper)


_ASSIGNS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a slot wrapper
_SWAP = torch._C._swap_tensor_impl  # read here, because a trace replaces the name


def become(tensor: Tensor, other: Tensor) -> None:
    """Turn ``tensor`` into the tensor ``other``, with its memory and history; ``other`` must not be used again."""
    _SWAP(tensor, other)


def take_memory(wrapper: Tensor, other: Tensor) -> None:
    """Give the functional tensor ``wrapper`` the memory, sizes and strides of ``other``, but not its history."""
    sync(other)
    _ASSIGNS_DATA(wrapper, other)


def alias_of(wrapper: Tensor, fake: Tensor) -> Tensor:
    """Return an alias of a functional tensor that records no op, and has its own version counter and no history.

    ``fake`` is any fake tensor of the same dtype and device.
    """
    alias = to_functional(fake)
    take_memory(alias, wrapper)
    return alias


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Run the ops in the block as ordinary ops: they are neither recorded nor functionalized."""
    functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        torch._C._ExcludeDispatchKeyGuard(functionalize),
    ):
        yield
