"""Functions that a trace records as other ops than eager runs: what is called in their place.

Some linear algebra computes less where nothing is to be differentiated, but cannot tell so in a trace. Some kernels lay
out their result otherwise than the ops that are recorded for them. (Wrong strides of fake results are put right in
`aotlab.trace.fakes`; what cannot be mended runs eagerly by a row in `aotlab.trace.boundary.EAGER_OPS`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.trace.places import user_line
from aotlab.trace.running import values_only
from aotlab.trace.tape import tensors_in

#: Calls a function, which it is given, with positional and keyword arguments.
Correction = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _are_differentiated(given: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(given))


def _row_by_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lay out the result row by row, as eager's kernel does and the ops that stand for it do not."""
    result = func(*args, **kwargs)
    return result.contiguous() if isinstance(result, Tensor) else result


def _max_pool1d(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lay out the result row by row where it has a kernel of its own."""
    given = tensors_in((args, kwargs))
    by_own_kernel = not _are_differentiated(given) and all(tensor.device.type == "cpu" for tensor in given)
    return _row_by_row(func, args, kwargs) if by_own_kernel else func(*args, **kwargs)


def _without_vectors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute singular values or eigenvalues without vectors where no gradient needs them.

    Under a transform of ``torch.func`` eager computes them, too.
    """
    if internals.transforms_active() or _are_differentiated((args, kwargs)):
        return func(*args, **kwargs)
    with values_only():
        return func(*args, **kwargs)


def _without_phase(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave complex vectors that are differentiated to eager: its backward looks at values, and may refuse the loss."""
    result = func(*args, **kwargs)
    if any(tensor.is_complex() and tensor.requires_grad for tensor in tensors_in(tuple(result))):
        raise RunEagerly(f"`{func.__name__}` makes complex vectors with a gradient, at {user_line()}")
    return result


_linalg = torch.linalg
#: What is to be called in the place of a function.
CORRECTIONS: Mapping[Any, Correction] = {
    internals.ONE_HOT: _row_by_row,
    torch.max_pool1d: _max_pool1d,
    torch.nn.functional.max_pool1d: _max_pool1d,
    **dict.fromkeys((_linalg.eig, _linalg.eigh, _linalg.svd, torch.svd, Tensor.svd), _without_phase),
    **dict.fromkeys((_linalg.svdvals, _linalg.eigvalsh, _linalg.cond, _linalg.matrix_norm), _without_vectors),
    **dict.fromkeys((_linalg.matrix_rank, _linalg.norm, torch.norm, Tensor.norm), _without_vectors),
    torch.nuclear_norm: _without_vectors,
}
