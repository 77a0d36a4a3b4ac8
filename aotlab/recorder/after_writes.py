"""What eager does when an op writes, and functionalization leaves out: versions are counted, strides are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder.tape import tensors_in


def shapes_of_results(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Size] | None:
    """Return the shapes of what an op computes if it is not given ``out=``; None if that cannot be told."""

    def without_memory(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):  # a graph of Dynamo's has lists of a class of fx
            return tuple(map(without_memory, value))
        return value

    try:
        with internals.outside_of_trace(), torch.no_grad():
            others = {key: without_memory(value) for key, value in kwargs.items() if key != "out"}
            if not tensors_in((args, others)):
                others["device"] = "meta"  # else an op that makes something would make it, and a random one would draw
            found = func(*map(without_memory, args), **others)
    except Exception:  # noqa: BLE001  # whatever the op makes of such arguments
        return None
    return [tensor.shape for tensor in ([found] if isinstance(found, Tensor) else found)]


def versions_before(written: Any) -> list[tuple[Tensor, int]]:
    """Note the versions of what a function is to write."""
    return [
        (each, internals.version_of(each))
        for each in (written if isinstance(written, list | tuple) else (written,))
        if isinstance(each, Tensor) and internals.is_functional(each) and not each.is_inference()
    ]


def count_write(before: list[tuple[Tensor, int]]) -> None:
    """Count a write to each tensor that was written: eager does, the wrappers of functionalization not always."""
    for tensor, version in before:
        if internals.version_of(tensor) == version:
            torch.autograd.graph.increment_version(tensor)


def keep_strides(wrapper: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> None:
    """Give a wrapper that was written the strides back that it had, where they differ.

    An op in place keeps its tensor's strides; its out-of-place twin, which functionalization puts in its stead, is free
    to choose, and what is computed from its result inherits the choice.
    """
    internals.sync(wrapper)
    if wrapper.shape != shape or internals.from_functional(wrapper).stride() == stride:
        return
    with torch.no_grad():
        fresh = torch.empty_strided(shape, stride, dtype=wrapper.dtype, device=wrapper.device)
        fresh.copy_(wrapper)
        internals.sync(fresh)
        internals.replace_value(wrapper, internals.from_functional(fresh))
