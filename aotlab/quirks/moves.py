"""What the function does to tensors in place other than to their values.

    y = x * 2
    y.unsqueeze_(0)
    x.t_()

Such a step gives the same elements other indices, or the tensor no history. Autograd makes the histories of views anew
after it, by sizes and strides in eager and by view ops in a trace: so it is compiled only for a tensor that has its
memory to itself. Of arguments only those that require no grad are moved; the epilogue repeats the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.places import user_line
from aotlab.trace.boundary import CHANGES_SIZES
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.function import Findings
from aotlab.trace.quirk import Handler, Quirk

_DETACHES = (Tensor.detach_, torch.detach_)
_MOVES = (Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_)


class Moves(Quirk):
    """Takes the steps that are certain."""

    name = "moves"

    def claims(self) -> Mapping[Any, Handler]:
        return dict.fromkeys(CHANGES_SIZES, _step)

    def check(self, findings: Findings) -> None:
        tensors = findings.outputs.tensors.values()
        counted = {position for pair in findings.call.state.counters for position in pair}
        for item, position in zip(findings.inputs, findings.dedupe.kept, strict=True):
            viewed = any(t is not item.wrapper and internals.storage_key(t) == item.storage for t in tensors)
            foreign = item.real.is_inference() and not torch.is_inference_mode_enabled()
            if item.steps and (viewed or foreign or position in counted):
                raise RunEagerly(f"`{item.name}` changes its sizes, and has views or counts writes with another input")


def _step(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    item = guard.inputs.get(id(tensor))
    what, line = f"`{func.__name__}`", user_line()
    if func in _DETACHES and torch.is_inference_mode_enabled():
        return tensor  # autograd is out of the way there, and nobody else does anything
    if func not in _MOVES and func not in _DETACHES:
        raise RunEagerly(f"{what} gives a tensor other elements or other memory in place, at {line}")
    if item is not None and (func in _DETACHES or tensor.requires_grad or item.base is not None):
        raise RunEagerly(
            f"{what} changes `{item.name}`, which requires grad or shares memory, other than in its values, at {line}",
            suggestion="use the form that returns a new tensor, as t() for t_(), to have it compiled",
        )
    if internals.base_of(tensor) is not None or not internals.has_its_memory_to_itself(tensor):
        raise RunEagerly(f"{what} changes a view, or a tensor that was viewed, at {line}")
    if func in _MOVES and tensor.requires_grad and (tensor.is_leaf or not torch.is_grad_enabled()):
        raise RunEagerly(f"{what} changes a leaf, or a tensor with a history under no_grad, at {line}")
    if guard.hooks_of(tensor):  # they go with the history from before
        raise RunEagerly(f"a tensor with a hook is detached, or changes its sizes, at {line}")
    result = func(*args, **kwargs)
    if item is not None:
        given = [*map(repr, args[1:]), *(f"{key}={value!r}" for key, value in kwargs.items())]
        item.steps.append(f"{func.__name__}({', '.join(given)})")
    return result
