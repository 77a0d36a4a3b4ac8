"""Run functions that write to their arguments: in place, into ``out=``, or into the tensors of a list.

Functionalization replaces such a function by its out-of-place twin (``mul_`` by ``mul``). If the result of the twin
differs from the result that eager writes, this module corrects it, or the call runs eagerly. `EscapeGuard` calls `run`.
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
from torch.nn import functional

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.trace import custom_ops
from aotlab.trace.boundary import op_name
from aotlab.trace.running_recorder import describe_views, operations_since, operations_so_far
from aotlab.trace.storage_notes import StorageNotes, span
from aotlab.trace.tape import tensors_in

#: In-place functions that convert a value of any dtype to the dtype of the written tensor.
_CONVERTS = frozenset(("copy_", "__setitem__", "fill_", "masked_fill_", "index_fill_", "index_put_", "zero_"))
#: In-place functions whose arguments autocast does not cast, although it casts the arguments of their twins.
_UNKNOWN_TO_AUTOCAST = frozenset(("__setitem__", "index_copy_", "index_put_", "scatter_add_"))
#: Functions that do not write their `out`, that give it other memory, or that do not change its version counter.
_OWN_OUT = frozenset(("empty", "empty_permuted", "empty_strided", "fft_ihfftn", "kron", "linear"))
#: Functions that with `out` treat a tensor with gaps in its memory as if it were contiguous.
_MISREADS_GAPS = frozenset(("narrow_copy", "gelu", "avg_pool3d", "native_batch_norm"))

#: Functions that write the running mean and the running variance.
WRITES_STATISTICS = frozenset(
    (functional.batch_norm, functional.instance_norm, torch.batch_norm, torch.instance_norm, torch.native_batch_norm)
)


@functools.cache
def writes_in_place(func: Any) -> bool:
    """Tell whether a function writes to its first argument, according to the function's name."""
    name = op_name(func)
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def run(notes: StorageNotes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that may write to its arguments; run eagerly if a trace cannot repeat its writes."""
    if custom_ops.written_arguments(func):
        return _run_functional_form(notes, func, args, kwargs)
    in_place = bool(args) and writes_in_place(func)
    into_out = not in_place and kwargs.get("out") is not None
    casts, count = internals.any_autocast_enabled(), operations_so_far()
    unknown_to_autocast = casts and in_place and op_name(func) in _UNKNOWN_TO_AUTOCAST
    with internals.disable_autocast() if unknown_to_autocast else nullcontext():
        if in_place:
            result = _in_place(notes, func, args, kwargs)
        else:
            result = _into_out(notes, func, args, kwargs) if into_out else func(*args, **kwargs)
    recorded = operations_since(count) if casts else ()
    # Autocast promotes the arguments of `index_copy` to the widest of their dtypes. `to_widest` is true if no cast was
    # recorded. Then the arguments have one dtype, the promotion has no effect, and `index_copy` may be traced.
    to_widest = not any(operation.target is internals.CAST for operation in recorded)
    for operation in recorded:
        is_known = internals.autocast_knows(operation.target)
        if (
            is_known
            and (in_place or into_out)
            and not (to_widest and operation.target is torch.ops.aten.index_copy.default)
        ):
            _fall_back("autocast-casts-differently", func)
        if operation.target in internals.CASTS_INSIDE:  # under autocast its kernel casts, but a graph has no autocast
            _fall_back("autocast-casts-differently", func)
    return result


def _run_functional_form(notes: StorageNotes, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the functional form of a custom op, and copy the new values into the arguments that the op writes."""
    values, keyword_args = custom_ops.arguments_of(op, args, kwargs)
    tensors = tensors_in(values)
    if share_memory(tensors) or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return op(*args, **kwargs)  # functional forms have no gradient
    returned = custom_ops.functional_form(op)(*values, **keyword_args)
    returned = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    written = custom_ops.written_arguments(op)
    for n, new in zip(written, returned[-len(written) :], strict=True):
        _in_place(notes, Tensor.copy_, (values[n], new), {})
    results = returned[: -len(written)]
    return results[0] if len(results) == 1 else results or None


def _into_out(notes: StorageNotes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function without its argument ``out``, and copy the result into ``out``.

    Run eagerly if the copy might differ from eager's write into ``out``. In particular, ``out`` must have the sizes,
    dtype and device of the result.
    """
    out, name = kwargs["out"], op_name(func)
    other_kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    tensors = tensors_in((args, other_kwargs))
    if not isinstance(out, Tensor) or isinstance(func, OpOverload) or name in _OWN_OUT:
        _fall_back("out-is-no-copy", func, why="it has its own rule for `out`")
    if name in _MISREADS_GAPS and not all(tensor.is_contiguous() for tensor in (out, *tensors)):
        _fall_back("out-is-no-copy", func, why="it writes tensors with gaps as if they were contiguous")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (out, *tensors)):
        _fall_back("out-is-no-copy", func, why="a tensor requires grad")
    _check_operands(func, (out, *args), other_kwargs)
    count = operations_so_far()
    result = func(*args, **other_kwargs)
    if not out.is_contiguous() and any(operation.draws_as for operation in operations_since(count)):
        _fall_back("out-is-no-copy", func, why="it draws random numbers, and `out` is not contiguous")
    same = isinstance(result, Tensor) and (result.dtype, result.device) == (out.dtype, out.device)
    if not same or result.shape != out.shape:
        _fall_back("out-is-no-copy", func, why="`out` has another shape, dtype or device than the result")
    _in_place(notes, Tensor.copy_, (out, result), {})
    return out


def _in_place(notes: StorageNotes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that writes to its first argument, a tensor or a list of tensors."""
    return (_write if isinstance(args[0], Tensor) else _write_list)(notes, func, args, kwargs)


def _write_list(notes: StorageNotes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function that writes to the tensors of a list, one after the other."""
    written = tensors_in(args[0])
    operands = tensors_in((args[1:], kwargs))
    all_written = op_name(func).startswith("_fused_")
    if share_memory([*written, *operands]) if all_written else share_memory(written, operands):
        _fall_back("writes-one-of-aliases", func)
    notes.check_writes(written)
    count, versions = operations_so_far(), [internals.version_of(tensor) for tensor in written]
    result = func(*args, **kwargs)
    for tensor, version in zip(written, versions, strict=True):
        if internals.is_functional(tensor) and not tensor.is_inference() and internals.version_of(tensor) == version:
            torch.autograd.graph.increment_version(tensor)  # eager increments the counter of each tensor
        _check_casts(func, tensor, count)
    return result


def _write(notes: StorageNotes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that writes to its first argument, and give this argument the strides that it had before the op."""
    written: Tensor = args[0]
    if overlaps_itself(written):
        _fall_back("writes-overlapping-elements", func)
    _check_operands(func, args, kwargs)
    whole = not (written.is_floating_point() or written.is_complex())
    if whole and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args[1:], kwargs))):
        _fall_back("writes-grad-into-integers", func)  # in eager the integer tensor then has an autograd history
    notes.check_writes([written])
    layouts = [(each, each.shape, each.stride()) for each in (written, internals.base_of(written)) if each is not None]
    shape, required, count = written.shape, written.requires_grad, operations_so_far()
    result = func(*args, **kwargs)
    notes.note_write(func, args, kwargs, required_grad=required)
    _check_casts(func, written, count)
    if written.shape != shape:
        # functionalization replaced the tensor by the result of the out-of-place twin, although it has another shape
        _fall_back("write-does-not-fit", func, result=f"shape {tuple(written.shape)}", own=f"shape {tuple(shape)}")
    mended = [_keep_strides(*each) for each in reversed(layouts) if internals.is_functional(each[0])]
    if any(mended) and internals.storage_key(written) in notes.aliased:
        _fall_back("write-restrides-aliased-tensor", func)
    return result


def _fall_back(case: str, func: Any, **facts: Any) -> NoReturn:
    raise RunEagerly(case, op=op_name(func) or "an op", at=user_line(), **facts)


def _check_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run eagerly if an op writes to memory that it also reads, unless it is a pointwise op on the same elements."""
    written: Tensor = args[0]
    for operand in tensors_in((args[1:], kwargs)):
        overlap = _overlap(written, operand)
        if overlap == "part":
            if _overlap(_written_part(func, args), operand) == "part":
                _fall_back("reads-what-it-writes", func)
        elif overlap and not _is_pointwise(func, args):
            _fall_back("reads-what-it-writes", func)


def _is_pointwise(func: Any, args: tuple[Any, ...]) -> bool:
    name = op_name(func)
    if func is Tensor.__setitem__:
        return not any(isinstance(key, Tensor | list) for key in _keys(args))
    if name == "copy_" or (name.startswith("__i") and name.endswith("__")):
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _written_part(func: Any, args: tuple[Any, ...]) -> Tensor:
    """Return the part of a tensor that an in-place op writes: for ``a[::2] = …``, the view ``a[::2]``."""
    written: Tensor = args[0]
    if func is Tensor.__setitem__ and all(type(key) in (int, slice, NoneType, EllipsisType) for key in _keys(args)):
        with torch.no_grad():
            return written[args[1]]
    return written


def _keys(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1] if isinstance(args[1], tuple) else (args[1],)


def _check_casts(func: Any, written: Tensor, count: int) -> None:
    """Run eagerly if functionalization cast the result to the written tensor's dtype and eager would not.

    ``count`` is the number of ops that were recorded before the write.
    """
    for operation in () if op_name(func) in _CONVERTS else operations_since(count):
        if operation.target is internals.CAST and operation.result.shape == written.shape:
            dtype = operation.args[0].dtype
            if operation.result.dtype == written.dtype != dtype and not torch.can_cast(dtype, written.dtype):
                _fall_back("write-does-not-fit", func, result=f"dtype {dtype}", own=f"dtype {written.dtype}")


def _keep_strides(traced: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Restore the strides of a written tensor, and return whether the op's out-of-place twin had changed them."""
    internals.sync(traced)
    if traced.shape != shape or internals.from_functional(traced).stride() == stride:
        return False
    with torch.no_grad():
        fresh = torch.empty_strided(shape, stride, dtype=traced.dtype, device=traced.device)
        fresh.copy_(traced)
        internals.sync(fresh)
        internals.replace_value(traced, internals.from_functional(fresh))
    return True


def _overlap(written: Tensor, operand: Tensor) -> str:
    """Return how the tensor that an op writes and another tensor of the op share memory.

    The result is ``"same"`` (they have the same elements in the same order), ``"part"`` (they may share some bytes),
    or ``""`` (they share no memory).
    """
    traced = internals.is_functional(operand) and internals.is_functional(written)
    if not traced or internals.storage_key(written) != internals.storage_key(operand):
        return ""
    windows = [_window(written), _window(operand)]
    (start, stop), (first, last) = span(written), span(operand)
    if 0 in (written.numel(), operand.numel()) or start >= last or first >= stop:
        return ""
    if windows[0] == windows[1]:
        # eager's check also compares the strides of dimensions of size one, which may differ between trace and eager
        is_same = operand is written or 1 not in written.shape or describe_views(written) == describe_views(operand)
        return "same" if is_same else "part"
    return "" if written.dtype == operand.dtype and _are_other_columns(written, operand) else "part"


def _window(tensor: Tensor) -> tuple[Any, ...]:
    """Return a description of a tensor's elements in its storage and of their order, for a comparison by `_overlap`."""
    steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return tensor.shape, steps, tensor.storage_offset(), tensor.dtype


def _are_other_columns(*tensors: Tensor) -> bool:
    """Tell whether two tensors are certainly different columns of one matrix, like ``x[:, 2:]`` and ``x[:, :2]``."""
    for row in {step for tensor in tensors for step in tensor.stride()} - {0, 1}:
        firsts = [int(tensor.storage_offset()) % row for tensor in tensors]
        sizes = [zip(tensor.shape, tensor.stride(), strict=True) for tensor in tensors]
        lasts = [a + sum((n - 1) * step for n, step in s if step % row) for a, s in zip(firsts, sizes, strict=True)]
        if max(lasts) < row and (lasts[0] < firsts[1] or lasts[1] < firsts[0]):  # no element reaches the next row
            return True
    return False


def share_memory(written: Sequence[Tensor], operands: Sequence[Tensor] = ()) -> bool:
    """Tell whether one of the tensors ``written`` shares memory with another of them, or with one of ``operands``."""
    keys = [internals.storage_key(tensor) for tensor in written if internals.is_functional(tensor)]
    operand_keys = {internals.storage_key(tensor) for tensor in operands if internals.is_functional(tensor)}
    if len(set(keys)) == len(keys) and operand_keys.isdisjoint(keys):
        return False
    return any(_overlap(a, b) for a, b in (*combinations(written, 2), *product(written, operands)))


def may_overlap_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether two indices of a tensor may address the same element.

    The result is False only if it is certain: each stride is larger than the extent of all dimensions with smaller
    strides.
    """
    if internals.surely_contiguous(shape, stride):
        return False
    if any(map(internals.unbacked_in, (*shape, *stride))):
        order = sorted(range(len(shape)), key=internals.traced(stride).__getitem__, reverse=True)
        return not internals.surely_contiguous([shape[d] for d in order], [stride[d] for d in order])
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two indices of ``tensor`` certainly address the same element, as after ``expand``."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    return any(internals.is_zero(stride) and size > 1 for size, stride in dims) and tensor.numel() > 0
