"""Detect, while programs run, the programs whose result eager does not determine.

If a program writes to a tensor in an op that also reads overlapping memory at other strides, or writes to a tensor
whose own elements overlap, the result depends on the order in which a kernel visits the elements. An engine does not
have to reproduce that order, so these programs are not drawn. In-place products of complex numbers are not drawn either
if the kernel rounds them differently than the out-of-place product. This happens if the target has gaps between its
elements.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotlab._torch import TorchDispatchMode

#: Ops that change the metadata of a tensor and do not write its elements.
_METADATA = ("aten.set_", "aten.resize_", "aten.as_strided_", "aten.t_", "aten.transpose_", "aten.squeeze_")

#: The largest number of elements of a tensor.
_LARGEST = 10_000

#: In-place products, and the out-of-place op for the same product.
_PRODUCTS = {
    torch.ops.aten.mul_.Tensor: torch.ops.aten.mul.Tensor,
    torch.ops.aten.addcmul_.default: torch.ops.aten.addcmul.default,
}


class NotDefinedError(ValueError):
    """The result of a statement depends on uninitialized memory or on the order in which a kernel visits elements.

    This error is also raised for two kinds of statements that are useless for a comparison: in-place products that a
    kernel rounds differently than out-of-place products, and statements after which integers require grad, because
    eager's own backward then fails an assertion.
    """


class OnlyDefined(TorchDispatchMode):
    """A dispatch mode that raises `NotDefinedError` at an op whose result eager does not determine.

    Pass ``whole=True`` if the mode is active for one run of a whole function. Then the mode also checks ``resize_``: if
    it gives a tensor more memory, the next op must be a ``fill_`` of this tensor. Otherwise the program could read
    uninitialized memory.

    Without ``whole``, ``resize_`` is not checked. `writer` runs single statements in this way; `drawing` then runs the
    finished function with ``whole=True``.
    """

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._whole = whole
        self._unwritten: torch.Tensor | None = None

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Raise if the last op left uninitialized memory in a tensor."""
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # untyped in torch
        if self._unwritten is not None and error is None:
            raise NotDefinedError("not drawn: uninitialized memory is returned")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._unwritten is not None and not (str(func).startswith("aten.fill_") and args[0] is self._unwritten):
            raise NotDefinedError("not drawn: uninitialized memory is read")
        self._unwritten = None
        if self._whole and func is torch.ops.aten.resize_.default:
            before = args[0].untyped_storage().nbytes()
            resized = func(*args, **kwargs)
            grown = resized.untyped_storage().nbytes() > before
            self._unwritten = resized if grown and resized.numel() else None
            return resized
        if func is torch.ops.inductor.resize_storage_bytes_.default and not _fills_storage(*args):
            raise NotDefinedError("not drawn: other memory of a freed storage")
        written = _written(func)
        if not written:
            return _small(func(*args, **kwargs))
        named = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        problem = ""
        targets = [named[name] for name in written if isinstance(named.get(name), torch.Tensor)]
        for target in targets:
            if overlaps_itself(target):
                problem = "a tensor with overlapping elements is written"
            for other in _tensors(named.values()):
                if other is not target and overlap(target, other) and not _same_window(target, other):
                    problem = "a tensor is written while overlapping memory is read"
        product = _product_elsewhere(func, args, kwargs)
        # Run the op before NotDefinedError is raised. If eager raises, eager's error is raised instead.
        result = func(*args, **kwargs)
        if product is not None and not torch.allclose(result, product, rtol=0, atol=0, equal_nan=True):
            problem = problem or "an in-place product is rounded differently"
        if problem:
            raise NotDefinedError(f"not drawn: {problem}")
        return result


def _small(result: Any) -> Any:
    """Return ``result``, or raise if a tensor in it is so large that further statements could use up the memory."""
    if any(tensor.numel() > _LARGEST for tensor in _tensors([result])):
        raise NotDefinedError("not drawn: a large tensor")
    return result


def _fills_storage(tensor: torch.Tensor, size: int) -> bool:
    """Tell whether a storage that is freed, or is resized to ``size`` bytes, has no bytes besides ``tensor``."""
    return max(size, tensor.untyped_storage().nbytes()) == tensor.nbytes and not overlaps_itself(tensor)


def _product_elsewhere(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Compute an in-place product of complex numbers with the out-of-place op; return None for any other op.

    The result is None too if the out-of-place op raises, or if it gives another shape or dtype.
    """
    if func not in _PRODUCTS or not args[0].is_complex():
        return None
    try:
        product = _PRODUCTS[func](*args, **kwargs)
    except RuntimeError:
        return None
    return product if product.shape == args[0].shape and product.dtype == args[0].dtype else None


@functools.cache
def _written(func: Any) -> tuple[str, ...]:
    """Return the position (as text) and the name of each argument that an op writes to: ``("0", "self")``."""
    if str(func).startswith(_METADATA):
        return ()
    names = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names += [str(index), argument.name]
    return tuple(names)


def _tensors(values: Any) -> list[torch.Tensor]:
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Tell whether two tensors overlap, if gaps between their elements count as used memory."""
    (start, end), (other_start, other_end) = _span(one), _span(two)
    return start < other_end and other_start < end


def _same_window(one: torch.Tensor, two: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (two.data_ptr(), two.shape, two.stride(), two.dtype)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether two elements of a tensor may share memory."""
    if not tensor.numel():
        return False
    steps: Sequence[tuple[int, int]] = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    reach = 0
    for stride, size in steps:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
