"""Calls that write: in place, into ``out=``, or into the tensors of a list.

Where what functionalization puts in their place is no equal of eager's write, it is mended here, or left to eager.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import combinations, product
from types import EllipsisType, NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.capture.signals import RunEagerly
from aotlab.guards.places import user_line
from aotlab.trace import custom_ops
from aotlab.trace.boundary import op_name
from aotlab.trace.chronicle import Chronicle, span
from aotlab.trace.running import operations_since, operations_so_far
from aotlab.trace.tape import tensors_in

#: In-place functions that convert whatever they are given.
_CONVERTS = frozenset(("copy_", "__setitem__", "fill_", "masked_fill_", "index_fill_", "index_put_", "zero_"))
#: In-place functions with kernels of their own, for which autocast casts nothing; it would for their twins.
_UNKNOWN_TO_AUTOCAST = frozenset(("__setitem__", "index_copy_", "index_put_", "scatter_add_"))
#: What leaves an `out` as it is, gives it other memory or counts no write; what takes gaps in a tensor for elements.
_OWN_OUT = frozenset(("empty", "empty_permuted", "empty_strided", "fft_ihfftn", "kron", "linear"))
_MISREADS_GAPS = frozenset(("narrow_copy", "gelu", "avg_pool3d", "native_batch_norm"))


@functools.cache
def writes_in_place(func: Any) -> bool:
    """Tell whether a function writes its first argument, by its name."""
    name = op_name(func)
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def run(chronicle: Chronicle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function, which may write."""
    if custom_ops.written_by(func):
        return _by_copies(chronicle, func, args, kwargs)
    in_place = bool(args) and writes_in_place(func)
    into_out = not in_place and kwargs.get("out") is not None
    casts, count = internals.any_autocast_enabled(), operations_so_far()
    own = casts and in_place and op_name(func) in _UNKNOWN_TO_AUTOCAST
    with internals.disable_autocast() if own else nullcontext():
        if in_place:
            result = _in_place(chronicle, func, args, kwargs)
        else:
            result = _into_out(chronicle, func, args, kwargs) if into_out else func(*args, **kwargs)
    recorded = operations_since(count) if casts else ()
    to_widest = not any(operation.target is internals.CAST for operation in recorded)  # they were of one dtype
    for operation in recorded:
        is_known = internals.autocast_knows(operation.target)
        if (
            is_known
            and (in_place or into_out)
            and not (to_widest and operation.target is torch.ops.aten.index_copy.default)
        ):
            _fall_back(f"`{op_name(func)}` writes under autocast what its twin casts")
        if operation.target in internals.CASTS_INSIDE:  # a graph runs without autocast
            _fall_back(f"`{op_name(func)}` casts inside of its kernel under autocast")
    return result


def _by_copies(chronicle: Chronicle, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the functional form of an op of the user's, and copy what it would have written."""
    values, others = custom_ops.arguments_of(op, args, kwargs)
    tensors = tensors_in(values)
    if share_memory(tensors) or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return op(*args, **kwargs)  # there is no functional form that has a gradient
    found = custom_ops.functional_form(op)(*values, **others)
    found = (found,) if isinstance(found, Tensor) else tuple(found)
    written = custom_ops.written_by(op)
    for n, new in zip(written, found[-len(written) :], strict=True):
        _in_place(chronicle, Tensor.copy_, (values[n], new), {})
    results = found[: -len(written)]
    return results[0] if len(results) == 1 else results or None


def _into_out(chronicle: Chronicle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a result and copy it into ``out``, which has to have its sizes and dtype."""
    out, name = kwargs["out"], op_name(func)
    others = {key: value for key, value in kwargs.items() if key != "out"}
    given = tensors_in((args, others))
    if not isinstance(out, Tensor) or isinstance(func, OpOverload) or name in _OWN_OUT:
        _fall_back(f"`{name}` writes its `out` in a way of its own")
    if name in _MISREADS_GAPS and not all(tensor.is_contiguous() for tensor in (out, *given)):
        _fall_back(f"`{name}` with `out` takes tensors with gaps for contiguous ones")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (out, *given)):
        _fall_back(f"`{name}` is given `out` where gradients are wanted")
    _check_operands(func, (out, *args), others)
    count = operations_so_far()
    result = func(*args, **others)
    if not out.is_contiguous() and any(operation.draws_as for operation in operations_since(count)):
        _fall_back(f"`{name}` draws into an `out` with other strides")
    same = isinstance(result, Tensor) and (result.dtype, result.device) == (out.dtype, out.device)
    if not same or result.shape != out.shape:
        _fall_back(f"`{name}` is given an `out` of another shape, dtype or device than its result")
    _in_place(chronicle, Tensor.copy_, (out, result), {})
    return out


def _in_place(chronicle: Chronicle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that writes its first argument: a tensor, or those of a list."""
    return (_write if isinstance(args[0], Tensor) else _write_list)(chronicle, func, args, kwargs)


def _write_list(chronicle: Chronicle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that writes the tensors of a list, one after the other."""
    written = tensors_in(args[0])
    others = tensors_in((args[1:], kwargs))
    all_written = op_name(func).startswith("_fused_")
    if share_memory([*written, *others]) if all_written else share_memory(written, others):
        _fall_back(f"`{op_name(func)}` is given tensors that share memory")
    chronicle.check_writes(written)
    count, versions = operations_so_far(), [internals.version_of(tensor) for tensor in written]
    result = func(*args, **kwargs)
    for tensor, version in zip(written, versions, strict=True):
        if internals.is_functional(tensor) and not tensor.is_inference() and internals.version_of(tensor) == version:
            torch.autograd.graph.increment_version(tensor)  # eager counts it
        _check_casts(func, tensor, count)
    return result


def _write(chronicle: Chronicle, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that writes its first argument, and let that keep its strides."""
    written: Tensor = args[0]
    if overlaps_itself(written):
        _fall_back("in-place write to a tensor that overlaps itself")
    _check_operands(func, args, kwargs)
    whole = not (written.is_floating_point() or written.is_complex())
    if whole and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args[1:], kwargs))):
        _fall_back("integers are written with what requires grad")  # which gives them a history in eager
    chronicle.check_writes([written])
    kept = [(each, each.shape, each.stride()) for each in (written, internals.base_of(written)) if each is not None]
    shape, required, count = written.shape, written.requires_grad, operations_so_far()
    result = func(*args, **kwargs)
    chronicle.wrote(func, args, kwargs, required_grad=required)
    _check_casts(func, written, count)
    if written.shape != shape:
        # functionalization lets the result of the out-of-place twin take the tensor's place, whatever its shape
        _fall_back("in-place write of a result of another shape")
    mended = [_keep_strides(*each) for each in reversed(kept) if internals.is_functional(each[0])]
    if any(mended) and internals.storage_key(written) in chronicle.aliased:
        _fall_back("a tensor is written that has an alias, and whose strides a trace does not keep")
    return result


def _fall_back(reason: str) -> NoReturn:
    raise RunEagerly(f"{reason}, at {user_line()}")


def _check_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave to eager a write to memory that the op reads, but for ops that go element by element."""
    written: Tensor = args[0]
    for operand in tensors_in((args[1:], kwargs)):
        overlap = _overlap(written, operand)
        if overlap == "part":
            if _overlap(_written_part(func, args), operand) == "part":
                _fall_back("in-place write to a tensor that overlaps an operand in part")
        elif overlap and not _goes_by_element(func, args):
            _fall_back(f"`{op_name(func) or 'an op'}` reads the tensor that it writes")


def _goes_by_element(func: Any, args: tuple[Any, ...]) -> bool:
    name = op_name(func)
    if func is Tensor.__setitem__:
        return not any(isinstance(key, Tensor | list) for key in _keys(args))
    if name == "copy_" or (name.startswith("__i") and name.endswith("__")):
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _written_part(func: Any, args: tuple[Any, ...]) -> Tensor:
    """Return what an op in place writes: of ``a[::2] = …``, the window, if it can be had as one."""
    written: Tensor = args[0]
    if func is Tensor.__setitem__ and all(type(key) in (int, slice, NoneType, EllipsisType) for key in _keys(args)):
        with torch.no_grad():
            return written[args[1]]
    return written


def _keys(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1] if isinstance(args[1], tuple) else (args[1],)


def _check_casts(func: Any, written: Tensor, count: int) -> None:
    """Leave to eager a write of a result that functionalization cast, unless eager casts it too."""
    for operation in () if op_name(func) in _CONVERTS else operations_since(count):
        if operation.target is internals.CAST and operation.result.shape == written.shape:
            dtype = operation.args[0].dtype
            if operation.result.dtype == written.dtype != dtype and not torch.can_cast(dtype, written.dtype):
                _fall_back(f"`{op_name(func)}` writes a result of dtype {dtype} into {written.dtype}")


def _keep_strides(wrapper: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Give a written wrapper the strides back that the op's out-of-place twin may have changed; tell if it had."""
    internals.sync(wrapper)
    if wrapper.shape != shape or internals.from_functional(wrapper).stride() == stride:
        return False
    with torch.no_grad():
        fresh = torch.empty_strided(shape, stride, dtype=wrapper.dtype, device=wrapper.device)
        fresh.copy_(wrapper)
        internals.sync(fresh)
        internals.replace_value(wrapper, internals.from_functional(fresh))
    return True


def _overlap(written: Tensor, operand: Tensor) -> str:
    """Say how two tensors share bytes: ``"same"`` window of one storage, in ``"part"`` (perhaps), or ``""``."""
    traced = internals.is_functional(operand) and internals.is_functional(written)
    if not traced or internals.storage_key(written) != internals.storage_key(operand):
        return ""
    windows = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (written, operand)]
    (start, stop), (first, last) = span(written), span(operand)
    if 0 in (written.numel(), operand.numel()) or start >= last or first >= stop:
        return ""
    if windows[0] == windows[1]:  # if for eager as well depends on strides that a trace may not know
        return "part" if operand is not written and 1 in written.shape else "same"
    return "" if written.dtype == operand.dtype and _are_other_columns(written, operand) else "part"


def _are_other_columns(*tensors: Tensor) -> bool:
    """Tell whether two tensors are surely different columns of the same rows, as ``x[:, 2:]`` and ``x[:, :2]``."""
    for row in {step for tensor in tensors for step in tensor.stride()} - {0, 1}:
        firsts = [int(tensor.storage_offset()) % row for tensor in tensors]
        sizes = [zip(tensor.shape, tensor.stride(), strict=True) for tensor in tensors]
        lasts = [a + sum((n - 1) * step for n, step in s if step % row) for a, s in zip(firsts, sizes, strict=True)]
        if max(lasts) < row and (lasts[0] < firsts[1] or lasts[1] < firsts[0]):  # none reaches into the next row
            return True
    return False


def share_memory(written: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
    """Tell whether one of the tensors ``written`` shares bytes with another of them, or with one of the others."""
    keys = [internals.storage_key(tensor) for tensor in written if internals.is_functional(tensor)]
    read = {internals.storage_key(tensor) for tensor in others if internals.is_functional(tensor)}
    if len(set(keys)) == len(keys) and read.isdisjoint(keys):
        return False
    return any(_overlap(a, b) for a, b in (*combinations(written, 2), *product(written, others)))


def may_overlap_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether two indices may mean the same element; False only if each step is longer than all smaller ones."""
    if internals.surely_contiguous(shape, stride):
        return False
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two indices of ``tensor`` surely share memory, as after ``expand``."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(stride == 0 and size > 1 for size, stride in dims)
