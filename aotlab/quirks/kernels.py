"""Functions that eager computes by another kernel than the ops that a trace records for them.

    torch.linalg.svdvals(x)           # computes no vectors where nothing is to be differentiated
    F.max_pool1d(x.mT, 2)             # lays its result out row by row

A trace cannot tell that nothing is to be differentiated, and its ops lay out their results otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.places import user_line
from aotlab.trace import boundary
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.quirk import Handler, Quirk
from aotlab.trace.running import values_only
from aotlab.trace.tape import tensors_in


class Kernels(Quirk):
    """Calls the functions so that what is recorded does the same."""

    name = "kernels"

    def claims(self) -> Mapping[Any, Handler]:
        return {
            **dict.fromkeys(boundary.LAID_OUT_BY_ROWS, _row_by_row),
            **dict.fromkeys(boundary.MAX_POOLS, _max_pool1d),
            **dict.fromkeys(boundary.WITH_VECTORS, _without_phase),
            **dict.fromkeys(boundary.WITHOUT_VECTORS, _without_vectors),
        }


def _are_differentiated(given: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(given))


def _row_by_row(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lay out a new result row by row, as eager's kernel does and the ops that stand for it do not."""
    result = guard.run(func, args, kwargs)
    is_new = isinstance(result, Tensor) and not any(result is tensor for tensor in tensors_in((args, kwargs)))
    return result.contiguous() if is_new else result


def _max_pool1d(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lay out the result row by row where it has a kernel of its own."""
    given = tensors_in((args, kwargs))
    by_own_kernel = not _are_differentiated(given) and all(tensor.device.type == "cpu" for tensor in given)
    return _row_by_row(guard, func, args, kwargs) if by_own_kernel else guard.run(func, args, kwargs)


def _without_vectors(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute no vectors where no gradient needs them; under transforms of ``torch.func`` eager does, too."""
    if internals.transforms_active() or _are_differentiated((args, kwargs)):
        return guard.run(func, args, kwargs)
    with values_only():
        return guard.run(func, args, kwargs)


def _without_phase(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave complex vectors that are differentiated to eager: its backward looks at values, and may refuse the loss."""
    result = guard.run(func, args, kwargs)
    if any(tensor.is_complex() and tensor.requires_grad for tensor in tensors_in(tuple(result))):
        raise RunEagerly(f"`{func.__name__}` makes complex vectors with a gradient, at {user_line()}")
    return result
