"""Functions for which eager runs another kernel than the ops that a trace records.

    torch.linalg.svdvals(x)           # computes no vectors if nothing is differentiated
    F.max_pool1d(x.mT, 2)             # returns a contiguous result

A plain trace would compute vectors that eager does not compute, and would give the result other strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.trace import boundary
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.quirk import Quirk
from aotlab.trace.running_recorder import values_only
from aotlab.trace.tape import tensors_in


class Kernels(Quirk):
    """Handles the functions in four tables of `aotlab.trace.boundary`, so that the recorded ops give eager's result."""

    name = "kernels"

    def claims(self) -> Mapping[Any, Handler]:
        return {
            **dict.fromkeys(boundary.CONTIGUOUS_IN_EAGER, _row_by_row),
            **dict.fromkeys(boundary.MAX_POOLS, _max_pool1d),
            **dict.fromkeys(boundary.WITH_VECTORS, _without_phase),
            **dict.fromkeys(boundary.WITHOUT_VECTORS, _without_vectors),
        }


def _are_differentiated(values: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(values))


def _row_by_row(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the result contiguous unless it is an argument. Eager's kernel does this, and the recorded ops do not."""
    result = guard.run(func, args, kwargs)
    is_new = isinstance(result, Tensor) and not any(result is tensor for tensor in tensors_in((args, kwargs)))
    return result.contiguous() if is_new else result


def _max_pool1d(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the result of `max_pool1d` contiguous if eager runs its own kernel for it: on the CPU, without gradients."""
    tensors = tensors_in((args, kwargs))
    by_own_kernel = not _are_differentiated(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)
    return _row_by_row(guard, func, args, kwargs) if by_own_kernel else guard.run(func, args, kwargs)


def _without_vectors(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute no singular vectors or eigenvectors if no gradient needs them.

    Under transforms of ``torch.func``, eager computes them in any case.
    """
    if internals.transforms_active() or _are_differentiated((args, kwargs)):
        return guard.run(func, args, kwargs)
    with values_only():
        return guard.run(func, args, kwargs)


def _without_phase(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuse complex singular vectors or eigenvectors that require grad.

    Their phase is arbitrary. Eager's backward reads the values of the gradient, and raises if the loss depends on the
    phase. A graph cannot do that.
    """
    result = guard.run(func, args, kwargs)
    if any(tensor.is_complex() and tensor.requires_grad for tensor in tensors_in(tuple(result))):
        raise RunEagerly("complex-vectors-with-grad", op=func.__name__, at=user_line())
    return result
