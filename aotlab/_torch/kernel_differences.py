"""Cases in which torch's kernels differ from their fake kernels: the layouts of results, and arguments that raise.

    x = torch.ones(3, 4).t()
    torch.cat([torch.ones(0), x]).stride()     # (3, 1); Inductor clones x instead, so it gets (1, 4)

A user can see a wrong layout if the function reads strides, if a gradient must have this layout, or in Inductor's
results. `aotlab verify ops` with ``config.debug_assert`` found these cases. (If the results of a function cannot be
corrected, the function runs eagerly: see `boundary.EAGER_FUNCTIONS`. If eager's kernel computes the same as another op
than the recorded one, the trace records that other op: see `aotlab.quirks.kernels`.)
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
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from aotlab._torch.functional import outside_of_trace
from aotlab._torch.symbolic_sizes import is_symbolic, traced, unbacked_in
from aotlab._torch.undocumented_ops import ASSERTIONS, BATCH_NORMS, FFT_OF_REAL, SOFTMAX

# --- fake results ----------------------------------------------------------------------------------------------------

#: Corrects the results of a fake kernel: takes an op, its arguments, its keyword arguments and the wrong fake results,
#: and returns the right ones.
FakeCorrection = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Any], Any]


def _by_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Run eager's kernel on zeros with the layouts of the arguments; give the fake ``result`` the layout of its result.

    If all arguments are contiguous, the kernel is not run, because its result is contiguous, too. Only the kernel of
    `FFT_OF_REAL` is then run, because its result may have other strides.
    """
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if op is not FFT_OF_REAL and all(tensor.is_contiguous() for tensor in tensors):
        return result.new_empty(result.shape)
    with outside_of_trace(), torch.inference_mode(False), torch.no_grad():
        real_args, real_kwargs = pytree.tree_map_only((Tensor, torch.SymInt, torch.SymFloat), _real, (args, kwargs))
        try:
            actual = op(*real_args, **real_kwargs)
        except Exception:  # noqa: BLE001  # a kernel that raises for zeros tells nothing about the layout of its result
            return result
    is_same = actual.shape != traced(result.shape) or actual.stride() == traced(result.stride())
    if not is_same and is_symbolic(result):
        raise RuntimeError(f"the strides of the result of `{op}` are only known for sizes that do not vary")
    return result if is_same else result.new_empty_strided(result.shape, actual.stride())


def _real(fake: Any) -> Any:
    if not isinstance(fake, Tensor):
        return fake.node.hint
    shape, stride = traced(fake.shape), traced(fake.stride())
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = torch.zeros(0 if 0 in shape else last + 1, dtype=fake.dtype, device=fake.device)
    return memory.as_strided(shape, stride)


def _batch_norm(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # On the CPU the result has the memory format of the input. On a GPU this has not been examined.
    if args[0].device.type != "cpu":
        return result
    normed = result[0].new_empty(result[0].shape)
    return (normed.to(memory_format=suggest_memory_format(args[0])), *result[1:])


def _multilabel_margin_loss(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # the kernel returns one number for a single sample, whatever the reduction
    loss, is_target = result
    return (loss.new_empty(()) if args[0].dim() < 2 else loss, is_target)


def _softmax(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # If the dimension does not exist, the kernel raises, and the fake kernel does not. `size` raises the same error as
    # the kernel.
    tensor, dim = args[0], args[1]
    (tensor if tensor.dim() else tensor.unsqueeze(0)).size(dim)
    return result


def _view(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # If a dimension has size one, the fake kernel accepts some views that are impossible, and gives others wrong
    # strides. The meta kernel is right.
    tensor, strides = args[0], result.stride()
    if not tensor.is_contiguous() or 1 in traced(tensor.shape):
        with outside_of_trace():
            meta_tensor = torch.empty_strided(traced(tensor.shape), traced(tensor.stride()), device="meta")
            strides_of_meta = meta_tensor.view(traced(result.shape)).stride()
        strides = strides if is_symbolic(result) else strides_of_meta
    if strides != result.stride() or result.storage_offset() != tensor.storage_offset():
        # for an empty tensor, the cache of the fake mode may have returned another view
        return tensor.as_strided(result.shape, strides, tensor.storage_offset())
    return result


def _constant_pad(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    # If no padding is positive, the kernel clones what negative padding leaves of the input. So the result has the
    # strides of this clone.
    cropped, pad = args[:2]
    if any((unbacked_in(count) and cropped.is_contiguous()) or count > 0 for count in pad):
        return result
    for n, (front, back) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        cropped = cropped.narrow(-1 - n, -front, cropped.size(-1 - n) + front + back)
    return cropped.clone()


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
#: Ops whose results have other strides than the results of their fake kernels.
LAID_OUT = frozenset(_LAYOUTS)

_FAKES: dict[Any, FakeCorrection] = {
    **_LAYOUTS,
    _ATEN.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    SOFTMAX: _softmax,
    _ATEN.view.default: _view,
}


def as_in_eager(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, mode: FakeTensorMode) -> Any:
    """Correct the ``result`` of a fake kernel: give it the sizes and strides that eager's result has."""
    correction = _FAKES.get(op)
    if correction is None:
        return result
    with mode:
        return correction(op, args, kwargs, result)


def assume_copy(tensor: Tensor) -> None:
    """Assume that eager copies a tensor whose sizes depend on values, because ``reshape`` copied it in the trace.

    A trace copies if it does not know whether a view has the new sizes. In eager, a view has them if a size is at most
    1, or if the elements of two dimensions follow each other. A call with such sizes must run eagerly.
    """
    sizes, strides = tensor.shape, tensor.stride()
    for i, size in enumerate(sizes):
        if unbacked_in(size):
            torch._check(size > 1)
        if i and any(map(unbacked_in, (size, strides[i], strides[i - 1]))):
            follows = strides[i - 1] == size * strides[i]
            if not statically_known_true(follows):
                torch._check(torch.sym_not(follows))


# --- ops whose kernel may raise although their fake kernel did not
# Graphs contain such ops even if their results are not used. According to torch's op database (`aotlab verify ops`),
# such calls have arguments of several dtypes (a value and an index, for example), arguments of unusual dtypes, or
# arguments whose values the kernel checks.

_USUAL = frozenset((torch.float32, torch.float64))

#: Parts of the names of ops whose kernels check the values of their arguments.
_LOOK = (
    "binary_cross_entropy", "bucketize", "cat", "cholesky", "complex", "geqrf", "hist", "linalg_", "lu_", "ormqr",
    "polar", "scatter", "searchsorted", "segment_reduce", "triangular_solve",
)  # fmt: skip

#: Ops that accept any tensor of any dtype. Functionalization leaves many of them in a graph.
_NEVER = frozenset(
    (
        "_to_copy", "clone", "copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "fill", "empty_like",
        "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full", "zero",
        "new_empty_strided", "scalar_tensor", "as_strided_scatter", "select_scatter", "slice_scatter",
        "diagonal_scatter", "logical_not",
    )
)  # fmt: skip

#: Parts of the names of ops whose kernels raise for some values of their arguments. The ops of the first tuple raise on
#: any device, and the ops of the second tuple only on the CPU.
_REFUSE = ("bincount", "cholesky", "hist", "inverse", "linalg_", "lu_", "triangular_solve")
_REFUSE_ON_CPU = (
    "_assert", "bernoulli", "binary_cross_entropy", "binomial", "ctc_loss", "dirichlet", "embedding", "fake_quant",
    "gather", "index", "margin_loss", "multinomial", "nll_loss", "normal", "one_hot", "ormqr", "poisson", "put",
    "repeat_interleave", "scatter", "segment_reduce", "take", "unpool",
)  # fmt: skip
#: The ops that raise on the CPU if an integer is divided by 0.
_DIVIDES = ("div", "floor_divide", "fmod", "remainder")
#: Parts of the names of ops that raise if their arguments have several dtypes.
_OF_ONE_DTYPE = ("mm", "mv", "dot", "convolution")


def _selects_by_value(target: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether an op selects a part of a tensor whose sizes depend on values, and may have no such part."""
    return target is torch.ops.aten.select.int and any(unbacked_in(size) for size in tensors[0].shape)


@functools.cache
def _name(target: Any) -> str | None:
    """Return the name of an op whose kernel might raise, without namespace and overload.

    The result is None for ops that never raise, namely views and ops that accept any tensor. It is also None if
    ``target`` is no op.
    """
    if not isinstance(target, OpOverload):
        return None
    name = target._schema.name.rpartition("::")[2]
    return None if name in _NEVER or any(each.alias_info is not None for each in target._schema.returns) else name


def may_raise(target: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether a kernel may raise for arguments that its fake kernel accepted.

    For example, ``mm`` raises for tensors of different dtypes. ``target`` is the op, and ``tensors`` are its tensor
    arguments.
    """
    if _selects_by_value(target, tensors):
        return True
    name = _name(target)
    if target in ASSERTIONS or name is None or not tensors:
        return target in ASSERTIONS
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) > 1 or not dtypes <= _USUAL or any(part in name for part in _LOOK)


def may_raise_late(target: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether a kernel may raise at one call of an entry although it does not raise at another.

    This depends on the values of the arguments, which no guard checks. It matters if the compiled call writes an input
    before the kernel raises, because then the call cannot simply be run again.
    """
    if _selects_by_value(target, tensors):
        return True
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
