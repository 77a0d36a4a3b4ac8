"""What the traced function does to its tensors in place other than to their values.

    x.t_()
    x.mul_(2)
    x.unsqueeze_(0)

A step that *moves* gives the same elements other indices. Functionalization only says in the end what an input looks
like, but for autograd it matters how that came about. So the steps on inputs are noted, and the epilogue takes them
again on the caller's tensor. Autograd makes the histories of views anew after a step, by sizes and strides in eager and
by view ops in a trace: so only steps on tensors that have their memory to themselves are compiled, and nothing that
gives a tensor more elements, fewer or other ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.metadata import MetadataStep
from aotlab.trace.places import user_line

DETACHES = frozenset((Tensor.detach_, torch.detach_))
RESIZES = frozenset((Tensor.resize_, Tensor.resize_as_, torch.resize_as_))
_MOVES = frozenset(
    (Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_)
)
#: What changes a tensor in place other than in its values.
STEPS = _MOVES | DETACHES | RESIZES | {Tensor.as_strided_, torch.as_strided_, Tensor.set_}
#: The same steps as they are called below Python's methods.
METHODS_OF_STEPS: dict[Any, Any] = {
    op: method
    for method in STEPS
    if (packet := getattr(torch.ops.aten, method.__name__, None)) is not None
    for op in (packet, *(getattr(packet, overload) for overload in packet.overloads()))
}


class Reshaped(Protocol):
    """An input of a trace, as far as steps change it; see `aotlab.trace.inputs.Entered`."""

    name: str
    real: Tensor
    wrapper: Tensor
    base: Any
    steps: list[MetadataStep]

    @property
    def written_visibly(self) -> bool:
        """Whether autograd has seen a write."""

    def note_history(self) -> None:
        """Take the present history for the one without writes."""


class Reshapes:
    """Takes the steps, and notes those on a trace's inputs; knows the inputs for those who ask."""

    def __init__(self, inputs: Iterable[Reshaped] = ()) -> None:
        self._items = {id(item.wrapper): item for item in inputs}
        items = self._items.values()
        self._inference = {internals.storage_key(item.wrapper) for item in items if item.real.is_inference()}

    def is_input(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` is an input itself, other than a view of one."""
        return id(tensor) in self._items

    def is_inference(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has the memory of an input that is an inference tensor."""
        return internals.storage_key(tensor) in self._inference if self._inference else False

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of an input, None for other tensors."""
        item = self._items.get(id(tensor))
        return None if item is None else item.name

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take one step, and note it if it is on an input.

        Raises
        ------
        RunEagerly
            The epilogue could not do the same, or autograd would make of it what a trace does not know.
        """
        tensor = args[0]
        item = self._items.get(id(tensor))
        self._check(func, tensor, item)
        if item is None:
            return func(*args, **kwargs)
        written = item.written_visibly
        result = func(*args, **kwargs)
        if not written:  # a later look at the history is for writes only
            item.note_history()
        item.steps.append(_step(func, args[1:], kwargs))
        return result

    def _check(self, func: Any, tensor: Tensor, item: Reshaped | None) -> None:
        what, line = f"`{func.__name__}`", user_line()
        if func not in _MOVES and func not in DETACHES:
            raise RunEagerly(f"{what} gives a tensor other elements or other memory in place, at {line}")
        if func in DETACHES and item is None:
            return
        if internals.base_of(tensor) is not None or not internals.has_its_memory_to_itself(tensor):
            raise RunEagerly(f"{what} changes a view, or a tensor that was viewed, at {line}")
        if func in _MOVES and tensor.requires_grad and (tensor.is_leaf or not torch.is_grad_enabled()):
            raise RunEagerly(f"{what} changes a leaf, or a tensor with a history under no_grad, at {line}")
        if item is None:
            return
        is_view = internals.base_of(item.real) is not None
        if item.base is not None or (is_view and (func in DETACHES or item.real.requires_grad)):
            raise RunEagerly(f"{what} changes `{item.name}`, which shares memory or is a view, at {line}")


def _step(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> MetadataStep:
    return MetadataStep(
        method=func.__name__,
        args=tuple(_plain(a) for a in args),
        kwargs=tuple((k, _plain(v)) for k, v in kwargs.items()),
        grad_mode=torch.is_grad_enabled(),
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def keeps_size(tensor: Tensor, *size: Any, **others: Any) -> bool:
    """Tell whether ``resize_`` or ``resize_as_`` is asked for the size that ``tensor`` has."""
    if len(size) == 1 and not others:
        wanted = size[0].shape if isinstance(size[0], Tensor) else size[0]
        return (tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,)) == tuple(tensor.shape)
    return not others and size == tuple(tensor.shape)
