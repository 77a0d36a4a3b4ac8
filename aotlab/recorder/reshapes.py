"""What the traced function does to the sizes, strides and storage of its inputs, in place, step by step.

    x.t_()
    x.mul_(2)
    x.unsqueeze_(0)

Functionalization forgets such steps: after the run it says that something happened, and what the result looks like.
For autograd, and for the views of ``x`` that the caller holds, it matters how it came about. So the steps are written
down when they happen, and the epilogue takes them again on the caller's tensor.

There are three kinds. A step that *moves* gives the same elements other indices. One that *narrows* (``as_strided_``,
``resize_`` to fewer elements) may lose sight of elements that were written, and that the caller still sees through
other tensors: from there on the whole is kept in view, to be written back before that step. One that *replaces*
(``resize_`` to more elements, ``out=`` of another shape) starts with new memory. Mixtures that would need more than one
write are left to eager.

What eager's autograd makes of views of a tensor that changes its sizes, and of a view that does, cannot be seen on
wrappers: once the version has moved, a view's history is made again, in eager by its sizes, strides and offset, on a
wrapper by the view op that made it, which then means something else. Such a program is left to eager too, unless it
is seen to be without gradients.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.ir.metadata import MetadataStep
from aotlab.recorder.escapes import RunEagerly
from aotlab.recorder.places import user_line
from aotlab.recorder.tape import tensors_in

_MOVES = frozenset(
    (Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_)
)
_RESIZES = frozenset((Tensor.resize_, Tensor.resize_as_, torch.resize_as_))
_DETACHES = frozenset((Tensor.detach_, torch.detach_))


class Reshaped(Protocol):
    """An input of a trace, as far as steps change it; see `aotlab.analysis.Entered`."""

    name: str
    real: Tensor
    wrapper: Tensor
    grad_fn: Any
    steps: list[MetadataStep]
    whole: Tensor | None
    write_after: int | None


class Reshapes:
    """Runs the steps on the wrappers of a trace's inputs, and writes them down."""

    def __init__(self, inputs: Iterable[Reshaped] = ()) -> None:
        self._items = {id(item.wrapper): item for item in inputs}
        self._changed: dict[int, Tensor] = {}  # tensors that were changed, or of which a view was

    def is_input(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` is an input itself, other than a view of one."""
        return id(tensor) in self._items

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take one step, and write it down if it is on an input.

        Raises
        ------
        RunEagerly
            The epilogue could not do the same.
        """
        tensor = args[0]
        if func not in _DETACHES:
            base = internals.base_of(tensor)
            if tensor.requires_grad and _has_views(tensor):
                raise RunEagerly(f"`{func.__name__}` on a tensor that was viewed, at {user_line()}")
            changed = tensor if base is None else base
            self._changed[id(changed)] = changed
        return self._run_on_input(func, args, kwargs) if self.is_input(tensor) else func(*args, **kwargs)

    def written(self, tensor: Tensor) -> None:
        """Look at a tensor after it was written.

        Raises
        ------
        RunEagerly
            There are views whose history cannot be told any more.
        """
        if self._changed:
            base = internals.base_of(tensor)
            base = tensor if base is None else base
            if id(base) in self._changed and base.requires_grad and _has_views(base):
                raise RunEagerly(f"a tensor is written that changed its sizes, or a view of it, at {user_line()}")

    def _run_on_input(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        item = self._items[id(args[0])]
        step = self._step(item, func, args[1:], kwargs)
        if func not in _MOVES and func not in _DETACHES and not self._keeps_all(item, step):
            if func in _RESIZES and math.prod(_sizes(step)) > item.wrapper.numel():
                self._replace(item, grows=True)
                if not _ends_its_storage(item.real):
                    raise RunEagerly(f"`{item.name}` is resized over memory that the trace cannot see")
            else:
                self._narrow(item)
        grad_fn = item.wrapper.grad_fn
        # functionalization would take `resize_as_` for a write
        result = item.wrapper.resize_(_sizes(step)) if step.method == "resize_" else func(*args, **kwargs)
        if grad_fn is item.grad_fn:  # a later look at it is for writes only
            item.grad_fn = item.wrapper.grad_fn
        item.steps.append(step)
        return result

    def written_out(self, func: Any, out: Tensor, shape: torch.Size, args: tuple[Any, ...], kwargs: Any) -> None:
        """Note that an op gave its ``out=`` tensor, an input that had ``shape``, the shape of its result."""
        item = self._items[id(out)]
        if item.whole is not None or (item.write_after is not None and out.numel() < shape.numel()):
            raise RunEagerly(f"`{item.name}` is narrowed and resized, at {user_line()}")
        stride = _strides_of_out(func, out, shape, args, kwargs)
        self._replace(item, grows=out.numel() > shape.numel())
        size = tuple(out.shape)
        item.steps.append(MetadataStep(method="resize_", args=(size,), grad_mode=torch.is_grad_enabled()))
        if stride != _contiguous(size):
            again = MetadataStep(method="as_strided_", args=(size, stride), grad_mode=torch.is_grad_enabled())
            item.steps.append(again)

    def _step(self, item: Reshaped, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetadataStep:
        name = func.__name__
        if name == "resize_as_":
            if len(args) != 1 or kwargs:
                raise RunEagerly(f"`resize_as_` of `{item.name}` with a memory format")
            name, args = "resize_", (tuple(args[0].shape),)
        if any(True for _ in tensors_in((args, kwargs))):
            raise RunEagerly(f"`{name}` of `{item.name}` with a tensor as its argument")
        return MetadataStep(
            method=name,
            args=tuple(_plain(a) for a in args),
            kwargs=tuple((k, _plain(v)) for k, v in kwargs.items()),
            grad_mode=torch.is_grad_enabled(),
        )

    def _keeps_all(self, item: Reshaped, step: MetadataStep) -> bool:
        """Tell whether ``as_strided_`` leaves all elements in sight, as the steps do that only move them."""
        if step.method != "as_strided_":
            return False
        if internals.has_data_mutation(item.wrapper) and item.real.storage_offset():
            raise RunEagerly(f"`{item.name}` is written and restrided, and begins elsewhere in its storage")
        after = replayed(item.real, [*item.steps, step])
        same_place = after.storage_offset() == item.real.storage_offset()
        return same_place and after.numel() == item.real.numel() and _is_dense(after) and _is_dense(item.real)

    def _narrow(self, item: Reshaped) -> None:
        if item.write_after is not None and item.whole is None:
            raise RunEagerly(f"`{item.name}` is resized and narrowed, at {user_line()}")
        if item.whole is not None:
            return
        if not _is_dense(item.real):
            raise RunEagerly(f"`{item.name}` has gaps and is narrowed, at {user_line()}")
        with torch.no_grad():
            item.whole = item.wrapper.detach()
        item.write_after = len(item.steps)

    def _replace(self, item: Reshaped, *, grows: bool) -> None:
        written = internals.has_data_mutation(item.wrapper)
        if item.whole is not None or item.steps or (written and not grows):
            raise RunEagerly(f"`{item.name}` is resized after other changes in place, at {user_line()}")
        item.write_after = 0


def _has_views(tensor: Tensor) -> bool:
    """Tell whether views of ``tensor`` are alive; slow, for rare occasions."""
    return any(issubclass(type(other), Tensor) and internals.base_of(other) is tensor for other in gc.get_objects())


def replayed(real: Tensor, steps: Sequence[MetadataStep]) -> Tensor:
    """Take the steps on a tensor without memory that has the place of ``real`` in its storage."""
    offset = real.storage_offset()
    room = offset + 1 + sum((size - 1) * step for size, step in zip(real.shape, real.stride(), strict=True))
    with internals.outside_of_trace(), torch.no_grad():
        below = torch.empty(max(room, 0), dtype=real.dtype, device="meta")
        tensor = below.as_strided(real.shape, real.stride(), offset)
        for step in steps:
            if step.method != "detach_":
                getattr(tensor, step.method)(*step.args, **dict(step.kwargs))
    return tensor


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    with internals.outside_of_trace():
        return torch.empty(size, device="meta").stride()


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _sizes(step: MetadataStep) -> tuple[int, ...]:
    """Return the sizes that ``resize_`` was asked for, as one argument or as many."""
    given: Any = dict(step.kwargs).get("size", step.args)
    return tuple(given[0]) if given and isinstance(given[0], tuple) else tuple(given)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` has each element from its first to its last once."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _ends_its_storage(real: Tensor) -> bool:
    if not real.numel():
        return real.untyped_storage().nbytes() == 0
    return real.untyped_storage().nbytes() == (real.storage_offset() + real.numel()) * real.element_size()


def _strides_of_out(
    func: Any, out: Tensor, shape: torch.Size, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Return the strides that eager gives an ``out=`` tensor that had ``shape`` and does not fit."""

    def without_memory(value: Any) -> Any:
        if value is out:
            return torch.empty(shape, dtype=out.dtype, device="meta")
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):
            return type(value)(without_memory(item) for item in value)
        return value

    try:
        with internals.outside_of_trace(), torch.no_grad():
            kwargs = {key: without_memory(value) for key, value in kwargs.items()}
            func(*(without_memory(value) for value in args), **kwargs)
            return tuple(kwargs["out"].stride())
    except Exception as error:
        raise RunEagerly(f"`out=` of another shape, at {user_line()}: {error}") from error
