"""Calls that write: in place, into ``out=``, or into the tensors of a list.

Functionalization puts an op that returns a new tensor in the place of each. Where that is something else than the
write that eager does, it is mended here, or the call falls back to eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations, product
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.capture.signals import RunEagerly
from aotlab.trace.chronicle import Chronicle
from aotlab.trace.places import user_line
from aotlab.trace.running import operations_since, operations_so_far, ordinary_values
from aotlab.trace.storage_looks import StorageLooks
from aotlab.trace.tape import tensors_in

VIEWS = frozenset((Tensor.view, torch.ops.aten.view, torch.ops.aten.view.dtype))
SEES_AS_DTYPE = VIEWS | frozenset(
    (torch.view_as_complex, torch.ops.aten.view_as_complex, torch.ops.aten.view_as_complex.default)
)
#: In-place functions that convert whatever they are given.
_CONVERTS = frozenset(("copy_", "__setitem__", "fill_", "masked_fill_", "index_fill_", "index_put_", "set_", "zero_"))
#: What may write the very tensor that it reads, beside ops with torch's tag for that.
_COPIES = frozenset(("copy_", "set_", "resize_as_", "resize_as_sparse_"))
#: In-place functions with kernels of their own, for which autocast casts nothing; it would for their twins.
_UNKNOWN_TO_AUTOCAST = frozenset(("__setitem__", "index_copy_", "index_put_", "scatter_add_"))
#: What leaves an `out` as it is, gives it other memory or counts no write; what takes gaps in a tensor for elements.
_OWN_OUT = frozenset(("empty", "empty_permuted", "empty_strided", "fft_ihfftn", "kron", "linear"))
_MISREADS_GAPS = frozenset(("narrow_copy", "gelu", "avg_pool3d", "native_batch_norm"))
_in_place: dict[Any, bool] = {}


def op_name(func: Any) -> str:
    """Return the name of a function; of one overload of an op, that of the op."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


def writes_in_place(func: Any) -> bool:
    """Tell whether a function writes its first argument, by its name."""
    known = _in_place.get(func)
    if known is None:
        name = op_name(func)
        operator = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
        known = name == "__setitem__" or operator or (name.endswith("_") and not name.endswith("__"))
        _in_place[func] = known
    return known


class Writes:
    """Lets calls pass that may write, for an `EscapeGuard`, whose looks and chronicle these are."""

    def __init__(
        self,
        looks: StorageLooks,
        is_inference: Callable[[Tensor], bool],
        chronicle: Chronicle,
    ) -> None:
        self._looks = looks
        self._is_inference = is_inference
        self._chronicle = chronicle
        self._owners: dict[int, weakref.ref[Tensor]] = {}  # memory → what aliases that know no base are made of

    def let_pass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, which may write."""
        in_place = bool(args) and writes_in_place(func)
        count = operations_so_far()
        if in_place or kwargs.get("out") is not None:
            own = in_place and op_name(func) in _UNKNOWN_TO_AUTOCAST
            with internals.disable_autocast() if own and internals.any_autocast_enabled() else nullcontext():
                result = self._in_place(func, args, kwargs) if in_place else self._into_out(func, args, kwargs)
            if internals.any_autocast_enabled() and any(
                internals.autocast_knows(operation.target) for operation in operations_since(count)
            ):
                _fall_back(f"`{op_name(func)}` writes under autocast what its twin casts")
            return result
        result = func(*args, **kwargs)
        if internals.any_autocast_enabled() and any(
            operation.target is internals.TRILINEAR for operation in operations_since(count)
        ):  # a graph runs without autocast
            _fall_back(f"`{op_name(func)}` casts inside of its kernel under autocast")
        if func in SEES_AS_DTYPE and args and isinstance(args[0], Tensor) and internals.is_functional(args[0]):
            self._looks.as_dtype(args[0], result)
        return result

    def _into_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a result and copy it into ``out``, which has to have its sizes and dtype."""
        out, name = kwargs["out"], op_name(func)
        others = {key: value for key, value in kwargs.items() if key != "out"}
        given = tensors_in((args, others))
        if not isinstance(out, Tensor) or isinstance(func, OpOverload) or name in _OWN_OUT:
            _fall_back(f"`{name}` writes its `out` in a way of its own")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (out, *given)):
            _fall_back(f"`{name}` is given `out` where gradients are wanted")
        if name in _MISREADS_GAPS and not all(tensor.is_contiguous() for tensor in (out, *given)):
            _fall_back(f"`{name}` with `out` takes tensors with gaps for contiguous ones")
        _check_operands(func, (out, *args), others)
        count = operations_so_far()
        result = func(*args, **others)
        same = isinstance(result, Tensor) and (result.dtype, result.device) == (out.dtype, out.device)
        if not same or result.shape != out.shape:
            _fall_back(f"`{name}` is given an `out` of another shape, dtype or device than its result")
        if any(operation.draws_as for operation in operations_since(count)) and not out.is_contiguous():
            _fall_back(f"`{name}` draws into an `out` with other strides")
        self._in_place(Tensor.copy_, (out, result), {})
        return out

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that writes its first argument: a tensor, or those of a list."""
        if not isinstance(args[0], Tensor):
            return self._write_list(func, args, kwargs)
        if overlaps_itself(args[0]):
            _fall_back("in-place write to a tensor that overlaps itself")
        _check_operands(func, args, kwargs)
        return self._write(func, args, kwargs)

    def _write_list(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that writes the tensors of a list, one after the other."""
        written = tensors_in(args[0])
        others = tensors_in((args[1:], kwargs))
        several = op_name(func).startswith("_fused_")  # lists are written
        shared = share_memory([*written, *others]) if several else share_memory(written, others)
        if shared:
            _fall_back(f"`{op_name(func)}` is given tensors that share memory")
        for tensor in written:
            self._chronicle.writes(tensor)
        self._looks.check_writes(written)
        count, versions = operations_so_far(), [internals.version_of(tensor) for tensor in written]
        result = func(*args, **kwargs)
        for tensor, version in zip(written, versions, strict=True):
            if (
                internals.is_functional(tensor)
                and not tensor.is_inference()
                and internals.version_of(tensor) == version
            ):
                torch.autograd.graph.increment_version(tensor)  # eager counts it
            _check_casts(func, tensor, count)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that writes its first argument, and let that keep its strides."""
        written: Tensor = args[0]
        ordinary = not (written.is_inference() or self._is_inference(written))
        if not ordinary and not torch.is_inference_mode_enabled():
            # the op itself sees that of whole tensors only; the wrapper of an input is none
            _fall_back("an inference tensor is written outside of inference_mode")
        whole = not (written.is_floating_point() or written.is_complex())
        if whole and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args[1:], kwargs))):
            _fall_back("integers are written with what requires grad")  # which gives them a history in eager
        self._looks.check_writes([written])
        owner = _owner(written)
        kept = [(each, each.shape, each.stride()) for each in (owner, written, *self._others_unknown_to(owner))]
        shape, required, count = written.shape, written.requires_grad, operations_so_far()
        self._chronicle.writes(written)
        with ordinary_values() if not written.is_inference() else nullcontext():
            result = func(*args, **kwargs)
            if torch.is_inference_mode_enabled() and not written.is_inference() and internals.is_functional(written):
                internals.sync(written)  # later, the value would be made where the function is by then
        self._chronicle.wrote(func, args, kwargs, required_grad=required)
        _check_casts(func, written, count)
        if written.shape != shape:
            # functionalization lets the result of the out-of-place twin take the tensor's place, whatever its shape
            _fall_back("in-place write of a result of another shape")
        if internals.is_functional(owner):
            for each in kept:
                _keep_strides(*each)
        return result

    def note_owner(self, tensor: Tensor) -> None:
        """Note what an alias is made of that will not know it as its base."""
        with internals.disable_torch_function():  # in hooks of a backward this mode is in force twice
            self._owners.setdefault(internals.storage_key(tensor), weakref.ref(_owner(tensor)))

    def _others_unknown_to(self, owner: Tensor) -> Iterator[Tensor]:
        """Yield what `note_owner` noted of the memory of a tensor, if it is another one."""
        noted = self._owners.get(internals.storage_key(owner)) if internals.is_functional(owner) else None
        other = None if noted is None else noted()
        if other is not None and other is not owner:
            yield other


def _fall_back(reason: str) -> NoReturn:
    raise RunEagerly(f"{reason}, at {user_line()}")


def _owner(tensor: Tensor) -> Tensor:
    base = internals.base_of(tensor)
    return tensor if base is None else base


def _check_operands(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave to eager a write to memory that the op reads: eager has an error for it, or reads what it wrote before.

    Ops that go element by element may write the very window that they read.
    """
    written: Tensor = args[0]
    for operand in tensors_in((args[1:], kwargs)):
        overlap = _overlap(written, operand)
        if overlap == "part":
            if _overlap(_written_part(func, args), operand) == "part":
                _fall_back("in-place write to a tensor that overlaps an operand in part")
        elif overlap and not _goes_by_element(func, args):
            _fall_back(f"`{op_name(func) or 'an op'}` reads the tensor that it writes")
        elif overlap and operand is not written and 1 in written.shape:
            # whether eager takes it for the same window depends on strides that a trace may not know
            _fall_back("in-place write to a tensor that overlaps an operand, in part perhaps")


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


def _written_part(func: Any, args: tuple[Any, ...]) -> Tensor:
    """Return what an op in place writes: of ``a[::2] = …``, the window, if it can be had as one."""
    written: Tensor = args[0]
    if func is Tensor.__setitem__:
        keys = args[1] if isinstance(args[1], tuple) else (args[1],)
        if all(key is None or key is Ellipsis or type(key) in (int, slice) for key in keys):
            with torch.no_grad():
                return written[args[1]]
    return written


def _check_casts(func: Any, written: Tensor, count: int) -> None:
    """Leave to eager a write of a result that functionalization cast, unless eager casts it too."""
    for operation in () if op_name(func) in _CONVERTS else operations_since(count):
        if operation.target is internals.CAST and operation.result.shape == written.shape:
            dtype = operation.args[0].dtype
            if operation.result.dtype == written.dtype != dtype and not torch.can_cast(dtype, written.dtype):
                _fall_back(f"`{op_name(func)}` writes a result of dtype {dtype} into {written.dtype}")


def _keep_strides(wrapper: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> None:
    """Give a wrapper that was written the strides back that it had, where they differ.

    An op in place keeps its tensor's strides; its out-of-place twin, which functionalization puts in its stead, is free
    to choose, and what is computed from its result inherits the choice.
    """
    internals.sync(wrapper)
    if wrapper.shape != shape or internals.from_functional(wrapper).stride() == stride:
        return
    with torch.no_grad():
        fresh = torch.empty_strided(shape, stride, dtype=wrapper.dtype, device=wrapper.device)
        fresh.copy_(wrapper)
        internals.sync(fresh)
        internals.replace_value(wrapper, internals.from_functional(fresh))


def _overlap(written: Tensor, operand: Tensor) -> str:
    """Say how two tensors share bytes: ``"same"`` window of one storage, in ``"part"`` (perhaps), or ``""``."""
    if not internals.is_functional(operand) or not internals.is_functional(written):
        return ""
    if written.numel() == 0 or operand.numel() == 0:
        return ""
    if internals.storage_key(written) != internals.storage_key(operand):
        return ""
    windows = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (written, operand)]
    if windows[0] == windows[1]:
        return "same"
    spans = []
    for shape, stride, offset, dtype in windows:
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        spans.append((offset * dtype.itemsize, (last + 1) * dtype.itemsize))
    if not (spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]):
        return ""
    one, other = (window[:3] for window in windows)
    return "" if written.dtype == operand.dtype and _are_other_columns(one, other) else "part"


_Window = tuple[Sequence[int], Sequence[int], int | torch.SymInt]


def _are_other_columns(one: _Window, other: _Window) -> bool:
    """Tell whether two windows are surely different columns of the same rows, as ``x[:, 2:]`` and ``x[:, :2]``."""
    for row in {step for window in (one, other) for step in window[1] if step > 1}:
        # where in its row each window begins and ends; not within one row, it may reach into the next
        columns = [
            (
                offset % row,
                offset % row + sum((n - 1) * step for n, step in zip(shape, stride, strict=True) if step % row),
            )
            for shape, stride, offset in (one, other)
        ]
        inside = all(end < row for _, end in columns)
        if inside and (columns[0][1] < columns[1][0] or columns[1][1] < columns[0][0]):
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
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two indices of ``tensor`` surely share memory, as after ``expand``."""
    return tensor.numel() > 0 and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
