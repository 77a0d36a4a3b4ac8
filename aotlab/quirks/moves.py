"""What the function does to tensors in place other than to their values.

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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.metadata import MetadataStep
from aotlab.trace.boundary import CHANGES_SIZES
from aotlab.trace.inputs import Entered
from aotlab.trace.places import user_line
from aotlab.trace.quirk import Handler, Quirk

if TYPE_CHECKING:
    from aotlab.trace.escapes import EscapeGuard

_DETACHES = (Tensor.detach_, torch.detach_)
_RESIZES = (Tensor.resize_, Tensor.resize_as_, torch.resize_as_)
_MOVES = (Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_)


class Moves(Quirk):
    """Takes the steps, and notes those on inputs."""

    name = "moves"

    def claims(self) -> Mapping[Any, Handler]:
        return dict.fromkeys(CHANGES_SIZES, _step)


def _step(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    inference = torch.is_inference_mode_enabled()
    if func in _RESIZES:
        same_size = _keeps_size(tensor, *args[1:], **kwargs)
        if tensor.requires_grad and (same_size or inference):  # an error in eager, and none under inference_mode
            raise RunEagerly(f"`{func.__name__}` of a tensor that requires grad, at {user_line()}")
        if same_size:
            return tensor  # nothing happens, whatever its strides
    if func in _DETACHES and inference:
        return tensor  # autograd is out of the way there, and nobody else does anything
    if tensor.is_inference() and func not in _DETACHES and not inference:
        raise RunEagerly(f"an inference tensor changes outside of inference_mode, at {user_line()}")
    hooks = guard.hooks_of(tensor)
    if any(hook.kind == "retain_grad" or func not in _DETACHES for hook in hooks):
        # a tensor retains the gradient of the history that it had; later hooks go with those from before a move
        raise RunEagerly(f"a tensor with a hook is detached, or changes its sizes, at {user_line()}")
    item = guard.inputs.get(tensor)
    if func in _DETACHES and (item is not None or tensor.requires_grad or internals.base_of(tensor) is not None):
        guard.chronicle.detaches(tensor)
    _check(func, tensor, item)
    if item is None:
        return func(*args, **kwargs)
    written = item.written_visibly
    result = func(*args, **kwargs)
    if not written:  # a later look at the history is for writes only
        item.note_history()
    item.steps.append(_noted(func, args[1:], kwargs))
    return result


def _check(func: Any, tensor: Tensor, item: Entered | None) -> None:
    """Fall back to eager where the epilogue could not do the same, or autograd would do what a trace does not know."""
    what, line = f"`{func.__name__}`", user_line()
    if func not in _MOVES and func not in _DETACHES:
        raise RunEagerly(f"{what} gives a tensor other elements or other memory in place, at {line}")
    if func in _DETACHES and item is None:
        return
    if internals.base_of(tensor) is not None or not internals.has_its_memory_to_itself(tensor):
        raise RunEagerly(f"{what} changes a view, or a tensor that was viewed, at {line}")
    if func in _MOVES and tensor.requires_grad and (tensor.is_leaf or not torch.is_grad_enabled()):
        raise RunEagerly(f"{what} changes a leaf, or a tensor with a history under no_grad, at {line}")
    if item is None:
        return
    is_view = internals.base_of(item.real) is not None
    if item.base is not None or (is_view and (func in _DETACHES or item.real.requires_grad)):
        raise RunEagerly(f"{what} changes `{item.name}`, which shares memory or is a view, at {line}")


def _noted(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> MetadataStep:
    return MetadataStep(
        method=func.__name__,
        args=tuple(_plain(a) for a in args),
        kwargs=tuple((k, _plain(v)) for k, v in kwargs.items()),
        grad_mode=torch.is_grad_enabled(),
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _keeps_size(tensor: Tensor, *size: Any, **others: Any) -> bool:
    """Tell whether ``resize_`` or ``resize_as_`` is asked for the size that ``tensor`` has."""
    if len(size) == 1 and not others:
        wanted = size[0].shape if isinstance(size[0], Tensor) else size[0]
        return (tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,)) == tuple(tensor.shape)
    return not others and size == tuple(tensor.shape)
