"""What eager demands of the tensors of an op that writes: which ops write what, and which may overlap or be cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder.places import user_line
from aotlab.recorder.signals import RunEagerly
from aotlab.recorder.tape import tensors_in

_in_place: dict[Any, bool] = {}


def op_name(func: Any) -> str:
    """Return the name of a function; of one overload of an op, that of the op."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


def writes_in_place(func: Any) -> bool:
    """Tell whether a function writes its first argument, by its name."""
    known = _in_place.get(func)
    if known is None:
        name = op_name(func)
        known = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        known = known or (
            name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
        )
        _in_place[func] = known
    return known


def writes_by_other_ops(func: Any, *, in_place: bool) -> bool:
    """Tell whether a function that writes may do so by calling other ops, and not by a kernel of its own."""
    name = op_name(func)
    if writes_lists(func) or name == "__setitem__":
        return False
    if name.startswith("__i") and in_place:
        name = f"{name[3:-2]}_"
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return True
    overloads = [getattr(packet, each) for each in packet.overloads()]
    writing = [op for op in overloads if op._schema.is_mutable]
    return not writing or any(internals.calls_other_ops(op) for op in writing)


def writes_lists(func: Any) -> bool:
    """Tell whether an op writes the members of lists, one after the other."""
    name = op_name(func)
    return name.endswith("_") and name.startswith(("_foreach_", "_fused_"))


def share_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a tensor in a list shares memory with another argument, or with another member of its list.

    Functionalization computes all results from the values before any write. The very same tensor or window at the same
    place of another list is read before it is written in eager too.
    """
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    members = [(n, tensor) for each in lists for n, tensor in enumerate(each) if isinstance(tensor, Tensor)]
    alone = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)]
    keys = [internals.storage_key(tensor) for _, tensor in members if internals.is_functional(tensor)]
    keys += [internals.storage_key(tensor) for tensor in alone if internals.is_functional(tensor)]
    if len(set(keys)) == len(keys):
        return False
    for k, (n, tensor) in enumerate(members):
        if not internals.is_functional(tensor):
            continue
        for m, other in members[:k]:
            if overlaps_partly(tensor, other) or (m != n and _are_one_window(tensor, other)):
                return True
        if any(overlaps_partly(tensor, other) or _are_one_window(tensor, other) for other in alone):
            return True
    return False


def _are_one_window(a: Tensor, b: Tensor) -> bool:
    if not internals.is_functional(b) or internals.storage_key(a) != internals.storage_key(b) or a.numel() == 0:
        return False
    return (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())


#: In-place ops that promote as their out-of-place twins do and then refuse a result that does not fit.
_PROMOTES = frozenset(
    f"{name}_"
    for name in (
        "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "pow",
        "float_power", "remainder", "fmod", "atan2", "arctan2", "hypot", "addcmul", "addcdiv", "lerp", "clamp", "clip",
        "copysign", "xlogy", "logaddexp", "rsub",
    )
)  # fmt: skip
_ALWAYS_FLOATING = frozenset(
    f"{name}_"
    for name in (
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2",
        "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "reciprocal", "erf", "erfc", "erfinv",
        "lgamma", "digamma", "sinc", "logit", "div", "divide", "true_divide", "float_power", "ldexp", "polygamma",
    )
)  # fmt: skip


def eager_misreads(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether eager's kernel for ``out=`` takes one of ``tensors`` for contiguous although it is not.

    What it then reads or writes lies beside the tensor's elements. No graph does that, so eager has to do it.
    """
    careless = op_name(func) in ("narrow_copy", "gelu", "avg_pool3d", "native_batch_norm")
    return careless and any(not tensor.is_contiguous() for tensor in tensors)


def keeps_dtype(func: Any, written: Tensor, operands: Sequence[Any], *, rounds: bool = False) -> bool:
    """Tell whether the result of an in-place op fits its tensor's dtype; functionalization would cast it silently.

    ``rounds`` says that a division rounds, and so stays among integers.
    """
    name = op_name(func)
    if written.dtype.is_complex:
        return True
    if name in _ALWAYS_FLOATING and not written.is_floating_point() and not rounds:
        return False
    return name not in _PROMOTES or all(
        torch.can_cast(torch.result_type(written, operand), written.dtype) for operand in operands
    )


#: In-place functions that convert whatever they are given.
_CONVERTS = frozenset(("copy_", "__setitem__", "fill_", "masked_fill_", "index_fill_", "index_put_", "set_", "zero_"))


def refuse_casts(func: Any, casts: Sequence[torch.dtype], written: Tensor, *, in_place: bool) -> None:
    """Leave a write that functionalization made possible by a cast to eager, which may have an error to raise.

    In place, eager casts where the kind of number stays; with ``out``, some functions do and some want the very dtype.
    """
    name = op_name(func)
    if not casts or name in _CONVERTS or (in_place and all(torch.can_cast(cast, written.dtype) for cast in casts)):
        return
    raise RunEagerly(f"`{name}` writes a result of dtype {casts[0]} into {written.dtype}, at {user_line()}")


def written_part(func: Any, args: tuple[Any, ...]) -> Tensor:
    """Return what an op in place writes: of ``a[::2] = …``, the window, if it can be had as one."""
    written: Tensor = args[0] if args else torch.empty(0)
    if func is Tensor.__setitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        if all(key is None or key is Ellipsis or type(key) in (int, slice) for key in keys):
            with torch.no_grad():
                return written[args[1]]
    return written


def refuse_overlaps(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor], *, in_place: bool
) -> None:
    """Leave to eager a write to memory that the op reads: eager has an error for it, or reads what it wrote before.

    Ops that go element by element may write the very window that they read.
    """
    others = {key: value for key, value in kwargs.items() if key != "out"}
    # what there is in place, too, may be given its first operand as `out=`
    first = in_place or hasattr(torch.ops.aten, f"{op_name(func)}_")
    operands = tensors_in((args[1:], others))
    for tensor in written:
        for operand in operands:
            if overlaps_partly(tensor, operand):
                if overlaps_partly(written_part(func, args) if in_place else tensor, operand):
                    raise RunEagerly(f"in-place write to a tensor that overlaps an operand in part, at {user_line()}")
            elif is_same_window(tensor, operand) and not _goes_by_element(func, args):
                name = op_name(func) or "an op"
                raise RunEagerly(f"`{name}` reads the tensor that it writes, at {user_line()}")
        for operand in () if in_place else tensors_in(args[:1]):
            if overlaps_partly(tensor, operand) or (is_same_window(tensor, operand) and not first):
                raise RunEagerly(f"`out=` shares memory with an operand, at {user_line()}")


#: What may write what it reads, beside ops with torch's tag for that.
_COPIES = frozenset(("copy_", "set_", "resize_as_", "resize_as_sparse_"))


def _goes_by_element(func: Any, args: tuple[Any, ...]) -> bool:
    name = op_name(func)
    if func is Tensor.__setitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        return not any(isinstance(key, Tensor | list) for key in keys)
    if name in _COPIES or (name.startswith("__i") and name.endswith("__")):
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def is_same_window(written: Tensor, operand: Tensor) -> bool:
    """Tell whether two tensors are the same window of one storage."""
    if written.numel() == 0 or not internals.is_functional(operand) or not internals.is_functional(written):
        return False
    if internals.storage_key(written) != internals.storage_key(operand):
        return False
    windows = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (written, operand)]
    return windows[0] == windows[1]


def overlaps_partly(written: Tensor, operand: Tensor) -> bool:
    """Tell whether two tensors on one storage share bytes without being the same window of it."""
    if not internals.is_functional(operand) or internals.storage_key(written) != internals.storage_key(operand):
        return False
    windows = [(t.shape, t.stride(), t.storage_offset()) for t in (written, operand)]
    if windows[0] == windows[1] or written.numel() == 0 or operand.numel() == 0:
        return False
    spans = []
    for tensor, (shape, stride, offset) in zip((written, operand), windows, strict=True):
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        spans.append((offset * tensor.element_size(), (last + 1) * tensor.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two indices of ``tensor`` surely share memory, as after ``expand``."""
    return tensor.numel() > 0 and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
