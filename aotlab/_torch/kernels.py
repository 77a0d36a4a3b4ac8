"""What torch's kernels do otherwise than their fakes: how their results lie in memory, and what they refuse.

    x = torch.ones(3, 4).t()
    torch.cat([torch.ones(0), x]).stride()     # (3, 1); Inductor takes it for a copy of x: (1, 4)

A wrong promise shows when strides are read in the function, when a gradient of that layout is asked for, or in what
Inductor returns. What is listed was found by `aotlab verify ops`, with ``config.debug_assert`` on. (What cannot be
mended runs eagerly by `boundary.EAGER_FUNCTIONS`; what is recorded as other ops is in `aotlab.quirks.kernels`.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from aotlab._torch.functional import outside_of_trace
from aotlab._torch.ops import ASSERTIONS, BATCH_NORMS, FFT_OF_REAL, SOFTMAX
from aotlab._torch.symbols import is_symbolic, traced

# --- fake results ----------------------------------------------------------------------------------------------------

#: Makes the right fake results of an op from the op, its arguments and the wrong ones.
FakeCorrection = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], Any]


def _by_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Ask the kernel how it lays out its results, with zeros in tensors that lie like the arguments."""
    given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if op is not FFT_OF_REAL and all(tensor.is_contiguous() for tensor in given):
        return result.new_empty(result.shape)
    with outside_of_trace(), torch.inference_mode(False), torch.no_grad():
        real_args, real_kwargs = pytree.tree_map_only((Tensor, torch.SymInt, torch.SymFloat), _real, (args, kwargs))
        try:
            real = op(*real_args, **real_kwargs)
        except Exception:  # noqa: BLE001  # what a kernel has against zeros says nothing of its layout
            return result
    same = real.shape != traced(result.shape) or real.stride() == traced(result.stride())
    if not same and is_symbolic(result):
        raise RuntimeError(f"`{op}` lays out its result otherwise than its fake says, for sizes that vary")
    return result if same else result.new_empty_strided(result.shape, real.stride())


def _real(fake: Any) -> Any:
    if not isinstance(fake, Tensor):
        return fake.node.hint
    shape, stride = traced(fake.shape), traced(fake.stride())
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = torch.zeros(0 if 0 in shape else last + 1, dtype=fake.dtype, device=fake.device)
    return memory.as_strided(shape, stride)


def _batch_norm(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # the result has the memory format of what is given; of the GPU's kernels that is not known
    if args[0].device.type != "cpu":
        return result
    normed = result[0].new_empty(result[0].shape)
    return (normed.to(memory_format=suggest_memory_format(args[0])), *result[1:])


def _multilabel_margin_loss(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # a single sample has a single loss, however it is to be reduced
    loss, is_target = result
    return (loss.new_empty(()) if args[0].dim() < 2 else loss, is_target)


def _softmax(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # the kernel looks whether there is such a dimension
    tensor, dim = args[0], args[1]
    (tensor if tensor.dim() else tensor.unsqueeze(0)).size(dim)
    return result


def _view(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # around a dimension of size one the fake takes tensors for viewable that are not, and has strides of its own
    tensor, strides = args[0], result.stride()
    if not tensor.is_contiguous() or 1 in traced(tensor.shape):
        with outside_of_trace():
            like = torch.empty_strided(traced(tensor.shape), traced(tensor.stride()), device="meta")
            own = like.view(traced(result.shape)).stride()
        strides = strides if is_symbolic(result) else own
    if strides != result.stride() or result.storage_offset() != tensor.storage_offset():
        # the fake mode's cache has taken another view of a tensor without elements for this one
        return tensor.as_strided(result.shape, strides, tensor.storage_offset())
    return result


def _constant_pad(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # where nothing is added, the kernel clones what is left
    left, pad = args[:2]
    if any(count > 0 for count in pad):
        return result
    for n, (front, back) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        left = left.narrow(-1 - n, -front, left.size(-1 - n) + front + back)
    return left.clone()


_ATEN = torch.ops.aten
_LAYOUTS: dict[Any, FakeCorrection] = {
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    _ATEN.constant_pad_nd.default: _constant_pad,
    **dict.fromkeys(
        (
            _ATEN.binary_cross_entropy.default, _ATEN.channel_shuffle.default, _ATEN.copysign.Tensor,
            _ATEN.div.Tensor_mode, _ATEN.floor_divide.default, _ATEN.grid_sampler_2d.default, _ATEN.heaviside.default,
            _ATEN.im2col.default, _ATEN.index.Tensor, _ATEN.ldexp.Tensor, _ATEN.logaddexp.default,
            _ATEN.logaddexp2.default, _ATEN.logical_and.default, _ATEN.logical_or.default, _ATEN.logical_xor.default,
            _ATEN.logit_backward.default, _ATEN.max_unpool2d.default, _ATEN.native_channel_shuffle.default,
            _ATEN.native_dropout_backward.default, _ATEN.pow.Scalar, _ATEN.roll.default, _ATEN.special_xlog1py.default,
            _ATEN.xlogy.Tensor, FFT_OF_REAL,
        ),
        _by_kernel,
    ),
}  # fmt: skip
#: Ops whose results lie in memory otherwise than torch's fakes say.
LAID_OUT = frozenset(_LAYOUTS)

_FAKES: dict[Any, FakeCorrection] = {
    **_LAYOUTS,
    _ATEN.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    SOFTMAX: _softmax,
    _ATEN.view.default: _view,
}


def as_in_eager(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, mode: FakeTensorMode) -> Any:
    """Return the fake ``result`` of ``op`` in the sizes and strides that eager gives it."""
    correction = _FAKES.get(op)
    if correction is None:
        return result
    with mode:
        return correction(op, args, kwargs, result)


# --- ops that may raise when they run although their fake did not, so that they stay though nobody uses their result
# These are, by the op database: mixed dtypes (as of a value and an index), unusual ones, and what few kernels read.

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

#: Parts of the names of ops whose kernels refuse some values: on any device, and on the CPU alone (a GPU says no word).
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
    """Tell whether a kernel may refuse at one call what it took at another, perhaps with an input half written."""
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
