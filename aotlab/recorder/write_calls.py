"""Calls that write: in place, into ``out``, or into the tensors of a list.

Functionalization puts an op that returns a new tensor in the place of each. Where that is something else than the
write that eager does, it is mended here, or the call is left to eager.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder.after_writes import count_write, keep_strides, shapes_of_results, versions_before
from aotlab.recorder.chronicle import Chronicle
from aotlab.recorder.corrections import corrected
from aotlab.recorder.memory import WholeStorages
from aotlab.recorder.mode import (
    casting_ops_since,
    casts_inside_since,
    casts_since,
    draws_since,
    operations_so_far,
    ordinary_values,
    strides_are_certain,
)
from aotlab.recorder.places import user_line
from aotlab.recorder.reshaper import Reshaper
from aotlab.recorder.signals import RunEagerly
from aotlab.recorder.storage_looks import Ground, StorageLooks
from aotlab.recorder.tape import tensors_in
from aotlab.recorder.ways_around import spoken_name
from aotlab.recorder.writing import (
    eager_misreads,
    is_same_window,
    keeps_dtype,
    op_name,
    overlaps_itself,
    refuse_casts,
    refuse_overlaps,
    writes_by_other_ops,
    writes_in_place,
    written_part,
)

VIEWS = frozenset((Tensor.view, torch.ops.aten.view, torch.ops.aten.view.dtype))
SEES_AS_DTYPE = VIEWS | frozenset(
    (torch.view_as_complex, torch.ops.aten.view_as_complex, torch.ops.aten.view_as_complex.default)
)
#: Writes of one value to all elements, by whatever way.
_FILLS = frozenset((Tensor.fill_, torch.fill_, Tensor.__setitem__))


class Writes:
    """Lets calls pass that may write, for an `EscapeGuard`, whose memory, looks, chronicle and inputs these are."""

    def __init__(
        self,
        grounds: Mapping[int, Ground],
        looks: StorageLooks,
        memory: WholeStorages,
        reshapes: Reshaper,
        chronicle: Chronicle,
    ) -> None:
        self._grounds = grounds
        self._looks = looks
        self._memory = memory
        self._reshapes = reshapes
        self._chronicle = chronicle
        self._owners: dict[int, weakref.ref[Tensor]] = {}  # memory → what aliases that know no base are made of

    def let_pass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let a function pass that may write: in place, into ``out``, or into the tensors of a list."""
        written = kwargs.get("out")
        in_place = writes_in_place(func) and bool(args)
        if in_place:
            written = args[0]
        if not in_place and written is not None and eager_misreads(func, tensors_in((args, written))):
            raise RunEagerly(
                f"`{func.__name__}` with `out` takes tensors with gaps for contiguous ones, at {user_line()}"
            )
        correction = corrected(func)
        if written is None:
            count = operations_so_far()
            result = func(*args, **kwargs) if correction is None else correction(args, kwargs)
            if internals.any_autocast_enabled() and casts_inside_since(count):
                raise RunEagerly(f"`{spoken_name(func)}` casts inside of its kernel under autocast, at {user_line()}")
            if func in SEES_AS_DTYPE and args and isinstance(args[0], Tensor) and internals.is_functional(args[0]):
                self._looks.as_dtype(args[0], result)
            return result
        if not internals.any_autocast_enabled():
            return self._pass_write(func, args, kwargs, written, correction, in_place=in_place)
        # autocast casts for ops that return new tensors, which is what functionalization puts for those that write
        count, by_others = operations_so_far(), writes_by_other_ops(func, in_place=in_place)
        with nullcontext() if by_others else internals.disable_autocast():
            result = self._pass_write(func, args, kwargs, written, correction, in_place=in_place)
        if by_others and casting_ops_since(count):
            raise RunEagerly(f"`{spoken_name(func)}` writes under autocast what other ops compute, at {user_line()}")
        return result

    def _pass_write(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Any,
        correction: Callable[..., Any] | None,
        *,
        in_place: bool,
    ) -> Any:
        """Let a function write ``written``: a tensor, or those of a list."""
        if not isinstance(written, Tensor):
            outs = written if "out" in kwargs and isinstance(written, list | tuple) else ()
            if any(self._memory.ground(each) is not None for each in tensors_in(outs)):
                raise RunEagerly(f"`{spoken_name(func)}` writes several tensors, at {user_line()}")
            if outs and all(isinstance(each, Tensor) for each in outs):
                refuse_overlaps(func, args, kwargs, outs, in_place=False)
                return self._write(func, args, kwargs, outs, correction, in_place=False)
            for each in tensors_in(written):
                self._chronicle.writes(each)
                if self._memory.ground(each) is not None:
                    raise RunEagerly(f"`{spoken_name(func)}` writes several tensors, at {user_line()}")
            self._looks.check_writes(tensors_in(written))
            self._looks.note_writes(tensors_in(written))
            versions, count = versions_before(written), operations_so_far()
            result = func(*args, **kwargs) if correction is None else correction(args, kwargs)
            count_write(versions)
            for each in tensors_in(written):
                self._chronicle.older.wrote(each if (base := internals.base_of(each)) is None else base)
                refuse_casts(func, casts_since(count, each), each, in_place=in_place)
            return result
        in_memory = self._memory.ground(written) is not None
        if in_memory and func is Tensor.__setitem__ and overlaps_itself(written):
            args = (written_part(func, args), Ellipsis, args[2])
            written = args[0]
        if overlaps_itself(written):
            raise RunEagerly(f"in-place write to a tensor that overlaps itself, at {user_line()}")
        refuse_overlaps(func, args, kwargs, [written], in_place=in_place)
        self._check_windows(written, tensors_in((args, kwargs)))
        operands = [other for other in tensors_in((args[1:], kwargs)) if other is not written]
        numbers = [value for value in args[1:] if type(value) in (int, float, complex)]
        if not keeps_dtype(func, written, [*operands, *numbers], rounds=bool(kwargs.get("rounding_mode"))):
            raise RunEagerly(f"in-place write of a result of another dtype, at {user_line()}")
        if in_memory:
            return self._write_memory(func, args, kwargs, written, correction, in_place=in_place)
        return self._write(func, args, kwargs, [written], correction, in_place=in_place)

    def _write_memory(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Tensor,
        correction: Callable[..., Any] | None,
        *,
        in_place: bool,
    ) -> Any:
        """Run an op that writes a tensor in a base that is a whole storage on a window of the base in its place."""
        window = self._memory.window(written, of_one_value=op_name(func) in ("zero_", "fill_"))
        version = internals.version_of(window)
        if in_place:
            args = (window, *args[1:])
        else:
            kwargs = {**kwargs, "out": window}
        result = self._write(func, args, kwargs, [window], correction, in_place=in_place)
        self._memory.wrote(written, window, version)
        return written if result is window else result

    def _write(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[Tensor],
        correction: Callable[..., Any] | None,
        *,
        in_place: bool,
    ) -> Any:
        """Run an op that writes tensors, and see to it that they keep their strides."""
        of_inference = any(tensor.is_inference() or self._reshapes.is_inference(tensor) for tensor in written)
        if of_inference and not torch.is_inference_mode_enabled():
            # the op itself sees that of whole tensors only; the wrapper of an input is none
            raise RunEagerly(f"an inference tensor is written outside of inference_mode, at {user_line()}")
        differentiable = written[0].is_floating_point() or written[0].is_complex()
        if func in _FILLS and torch.is_grad_enabled() and not differentiable:
            values = tensors_in((args[1:], kwargs))
            if any(
                value.requires_grad for value in values
            ):  # eager gives it a history, which no backward can go through
                raise RunEagerly(f"integers are filled with what requires grad, at {user_line()}")
        self._looks.check_writes(written)
        self._looks.note_writes(written)
        owners = [tensor if (base := internals.base_of(tensor)) is None else base for tensor in written]
        kept = [(owner.shape, owner.stride()) for owner in owners]
        own_strides = [tensor.stride() for tensor in written]
        unknown = [(other, other.shape, other.stride()) for other in self._owners_unknown_to(owners)]
        shapes = [tensor.shape for tensor in written]
        in_order = all(tensor.is_contiguous() for tensor in written)
        before = [internals.is_functional(t) and internals.has_data_mutation(t) for t in written]
        views = any(
            tensor is not owner or self.is_hidden(tensor) for tensor, owner in zip(written, owners, strict=True)
        )
        expected = shapes_of_results(func, args, kwargs) if "out" in kwargs else shapes
        if shapes != expected:
            operands = {internals.storage_key(t) for t in tensors_in(args) if internals.is_functional(t)}
            own = any(internals.storage_key(tensor) in operands for tensor in written)
            filled = any(tensor.numel() and not self._reshapes.is_input(tensor) for tensor in written)
            if views or own or filled:
                # eager keeps the memory, which may be larger, be seen by others, or be what the op reads
                raise RunEagerly(f"`out=` of another shape on a view, an operand or an intermediate, at {user_line()}")
        count = operations_so_far()
        versions = [None if in_place or tensor.is_inference() else internals.version_of(tensor) for tensor in written]
        ordinary = not any(tensor.is_inference() for tensor in written)
        required = in_place and written[0].requires_grad
        for tensor in written:
            self._chronicle.writes(tensor)
        with ordinary_values() if ordinary else nullcontext():
            result = func(*args, **kwargs) if correction is None else correction(args, kwargs)
            for tensor in written:
                if ordinary and torch.is_inference_mode_enabled() and internals.is_functional(tensor):
                    internals.sync(tensor)  # later, the value would be made where the function is by then
        if in_place:
            self._chronicle.wrote(func, args, kwargs, required_grad=required)
        for owner in owners:
            self._chronicle.older.wrote(owner)
        for tensor, version in zip(written, versions, strict=True):
            unmoved = internals.is_functional(tensor) and internals.version_of(tensor) == version
            if unmoved and tensor.numel() and not internals.has_data_mutation(tensor):
                raise RunEagerly(f"`{func.__name__}` writes its `out` around the trace, at {user_line()}")
            if version is not None and isinstance(kwargs.get("out"), (list, tuple)):
                count_write([(tensor, version)])
            refuse_casts(func, casts_since(count, tensor), tensor, in_place=in_place)
        if "out" in kwargs and expected is not None and [tensor.shape for tensor in written] != expected:
            # functionalization takes the steps again that an `out` went, over the shape that it was given since
            raise RunEagerly(f"`out=` of another shape after other changes in place, at {user_line()}")
        resized = [tensor.shape != shape for tensor, shape in zip(written, shapes, strict=True)]
        if not in_place and draws_since(count) and (not in_order or any(resized)):
            raise RunEagerly(f"`{spoken_name(func)}` draws into an `out` with other strides or sizes, at {user_line()}")
        if in_place and any(resized):
            # functionalization lets the result of the out-of-place twin take the tensor's place, whatever its shape
            raise RunEagerly(f"in-place write of a result of another shape, at {user_line()}")
        for n, (tensor, owner) in enumerate(zip(written, owners, strict=True)):
            if not internals.is_functional(owner):
                continue
            keep_strides(owner, *kept[n])
            if tensor is not owner and not resized[n]:
                keep_strides(tensor, shapes[n], own_strides[n])
            for other in unknown:
                keep_strides(*other)
            self._reshapes.written(tensor)
            if resized[n] and self._reshapes.is_input(tensor):
                self._reshapes.written_out(tensor, shapes[n], before=before[n])
        return result

    def _check_windows(self, written: Tensor, operands: Sequence[Tensor]) -> None:
        """Leave to eager a write to a window that an op reads by other strides, perhaps: that is an error of its."""
        for operand in operands:
            if operand is written or 1 not in written.shape or not is_same_window(written, operand):
                continue
            if not all(self._reshapes.is_input(each) or strides_are_certain(each) for each in (written, operand)):
                raise RunEagerly(
                    f"in-place write to a tensor that overlaps an operand, in part perhaps, at {user_line()}"
                )

    def note_owner(self, tensor: Tensor) -> None:
        """Note what an alias is made of that will not know it as its base."""
        with internals.disable_torch_function():  # in hooks of a backward this mode is in force twice
            base = internals.base_of(tensor)
            self._owners.setdefault(internals.storage_key(tensor), weakref.ref(tensor if base is None else base))

    def _owners_unknown_to(self, owners: Sequence[Tensor]) -> list[Tensor]:
        """Return what `note_owner` noted of the memory of tensors, as far as it is none of these."""
        found = {}
        for tensor in owners if self._owners else ():
            noted = self._owners.get(internals.storage_key(tensor)) if internals.is_functional(tensor) else None
            other = None if noted is None else noted()
            if other is not None and not any(other is each for each in owners):
                found[id(other)] = other
        return list(found.values())

    def is_hidden(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has the memory of an input without being it."""
        if not internals.is_functional(tensor):
            return False
        return internals.storage_key(tensor) in self._grounds and not self._reshapes.is_input(tensor)
