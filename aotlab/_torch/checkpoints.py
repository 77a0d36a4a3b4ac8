"""Checkpoints, and marks on custom Functions."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

#: What Dynamo puts for a call of ``torch.utils.checkpoint.checkpoint``; run as it is, it draws random numbers anew.
CHECKPOINT: HigherOrderOperator = torch.ops.higher_order.tag_activation_checkpoint
#: The key in the ``meta`` of the graph that it runs under which Dynamo keeps a checkpoint's ``context_fn``.
CHECKPOINT_CONTEXTS = "_checkpoint_context_fn"
#: By this a stack trace of Dynamo's names the wrapper of `once_differentiable`.
ONCE_DIFFERENTIABLE = f'{torch.autograd.function.__file__}", line '
#: What makes a derivative of a custom Function's backward an error.
once_differentiable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.autograd.function.once_differentiable


def checkpoint_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Take those keyword arguments of a `CHECKPOINT` that are the checkpoint's, not its function's."""
    return dict(CHECKPOINT.divide_kwargs(settings)[0])  # type: ignore[attr-defined]  # of this one op


def _called_by_checkpoint() -> bool:
    """Tell whether torch's checkpoint, which keeps the random state to compute again, is among the next callers."""
    frame = sys._getframe(2)
    for _ in range(5):
        if frame.f_code.co_filename.endswith(("torch/utils/checkpoint.py", "torch\\utils\\checkpoint.py")):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


@functools.cache
def _raw_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def is_checkpointed(node: Any) -> bool:
    """Tell whether torch's checkpoint stands for what an autograd node keeps: to look at it runs the function again."""
    return next(_checkpoint_hooks(node), None) is not None


def _checkpoint_hooks(node: Any) -> Iterator[Any]:
    """Go through the hooks by which checkpoint computes once more what an autograd node keeps."""
    kind: Any = type(node)
    for name in _raw_names(kind):
        try:
            saved = getattr(node, name, None)
        except RuntimeError:  # autograd has let go of it
            continue
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            hook: Any = getattr(each, "unpack_hook", None)
            if getattr(hook, "__module__", None) == "torch.utils.checkpoint":
                yield hook


def _checkpoint_frames(node: Any) -> list[Any]:
    """Return what stands for the runs of checkpointed functions that an autograd node needs."""
    return [cell.cell_contents for hook in _checkpoint_hooks(node) for cell in hook.__closure__ or ()]


def kept_by_checkpoint(node: Any) -> list[Tensor]:
    """Return the arguments of the checkpointed function that an autograd node would run again to have what it keeps.

    Checkpoint keeps them as autograd would, and looks at their versions; they are had from the hook that it sets.
    """
    found: dict[int, Tensor] = {}
    for frame in _checkpoint_frames(node):
        with contextlib.suppress(RuntimeError):  # one of them was written since: the backward raises
            found.update((id(t), t) for t in _unpack_arguments(frame))
    return list(found.values())


class _RecomputedError(RuntimeError):
    """What a checkpoint keeps is computed again by one around it, which keeps something else."""


@contextlib.contextmanager
def _nothing_computed_again() -> Iterator[None]:
    """Let a checkpoint of this thread raise where it would run its function again: only backwards may."""
    module: Any = sys.modules["torch.utils.checkpoint"]
    before, thread = module._recomputation_hook, threading.get_ident()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise _RecomputedError
        return before(*args, **kwargs)

    module._recomputation_hook = refuse
    try:
        yield
    finally:
        module._recomputation_hook = before


def _unpack_arguments(frame: Any) -> list[Tensor]:
    """Return what a frame of checkpoint keeps: as saved tensors, before torch 2.13 as those of an autograd node.

    What lies in a checkpoint around it is not kept.
    """
    with _nothing_computed_again():
        if hasattr(frame, "saved_args"):
            found = []
            for each in frame.saved_args:
                if hasattr(each, "unpack"):
                    with contextlib.suppress(_RecomputedError):
                        found.append(each.unpack())
            return found
        if hasattr(frame, "input_saver"):
            with contextlib.suppress(_RecomputedError):
                return list(frame.input_saver.grad_fn.saved_tensors[1:])  # the first is checkpoint's own
        return []
