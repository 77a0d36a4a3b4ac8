"""Ops that may raise when they run although their fake did not, so that they stay though nobody uses their result.

A fake has no values, and does not know which kernels there are. What it lets pass and a kernel refuses are, by the op
database: mixed dtypes (as of a value and an index), unusual ones, and what a few kernels read in one dtype alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from aotlab._torch.ops import ASSERTIONS

_USUAL = frozenset((torch.float32, torch.float64))

#: Parts of the names of ops that look at values.
_LOOK = (
    "binary_cross_entropy", "bucketize", "cat", "cholesky", "complex", "geqrf", "hist", "linalg_", "lu_", "ormqr",
    "polar", "scatter", "searchsorted", "segment_reduce", "triangular_solve",
)  # fmt: skip

#: What takes any tensor of any dtype; functionalization leaves many of these behind.
_NEVER = frozenset(
    (
        "_to_copy", "clone", "copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "fill", "empty_like",
        "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "zero",
        "new_empty_strided", "scalar_tensor", "as_strided_scatter", "select_scatter", "slice_scatter",
        "diagonal_scatter", "logical_not",
    )
)  # fmt: skip

#: Parts of the names of ops whose kernels refuse some values of what they take: on any device, and where kernels can
#: say so to whoever called them, which those of a GPU cannot.
_REFUSE = ("bincount", "cholesky", "hist", "inverse", "linalg_", "lu_", "triangular_solve")
_REFUSE_ON_CPU = (
    "_assert", "bernoulli", "binary_cross_entropy", "binomial", "ctc_loss", "dirichlet", "embedding", "fake_quant",
    "gather", "index", "margin_loss", "multinomial", "nll_loss", "normal", "one_hot", "ormqr", "poisson", "put",
    "repeat_interleave", "scatter", "segment_reduce", "take", "unpool",
)  # fmt: skip
_DIVIDES = ("div", "floor_divide", "fmod", "remainder")
_OF_ONE_DTYPE = ("mm", "mv", "dot", "convolution")


@functools.cache
def _name(target: Any) -> str | None:
    """Return the name of an op that might raise; None for views, what takes any tensor, and what is no op."""
    if not isinstance(target, OpOverload):
        return None
    name = target._schema.name.rpartition("::")[2]
    return None if name in _NEVER or any(each.alias_info is not None for each in target._schema.returns) else name


def may_raise(target: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether a kernel may refuse what its fake took, as ``mm`` refuses two dtypes."""
    name = _name(target)
    if target in ASSERTIONS or name is None or not tensors:
        return target in ASSERTIONS
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) > 1 or not dtypes <= _USUAL or any(part in name for part in _LOOK)


def may_raise_late(target: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether a kernel may refuse at one call what it took at another, as ``index`` does.

    Compiled kernels do not run in the order of the program: what raises may do so when an input is half written.
    """
    name = _name(target)
    if target in ASSERTIONS or name is None or not tensors or target is torch.ops.aten.bernoulli.p:
        return target in ASSERTIONS
    dtypes = {tensor.dtype for tensor in tensors}
    if any(part in name for part in _REFUSE) or (len(dtypes) > 1 and any(part in name for part in _OF_ONE_DTYPE)):
        return True
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    whole = not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    return any(part in name for part in _REFUSE_ON_CPU) or (whole and name in _DIVIDES)
