"""In-place changes of a tensor's metadata or history.

    y = x * 2
    y.unsqueeze_(0)
    x.t_()

Such an op changes the sizes and strides of a tensor, or detaches it. Afterwards autograd regenerates the histories of
the tensor's views: from sizes and strides in eager, but from view ops in a trace. So such an op is compiled only for a
tensor that shares its memory with no other tensor. An op on an argument is compiled only if the argument requires no
grad. Then the epilogue repeats the op on the caller's tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.trace.boundary import CHANGES_SIZES
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.findings import Findings
from aotlab.trace.quirk import Quirk

_DETACHES = (Tensor.detach_, torch.detach_)
_CHANGES_LAYOUT = (Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_)


class MetadataChanges(Quirk):
    """Runs ops that change metadata in the trace, if autograd treats the changed tensor there as in eager.

    For an argument, it notes the op as a step that the epilogue repeats.
    """

    name = "metadata_changes"

    def claims(self) -> Mapping[Any, Handler]:
        return dict.fromkeys(CHANGES_SIZES, _step)

    def check(self, findings: Findings) -> None:
        tensors = findings.outputs.tensors.values()
        counted = {position for pair in findings.call.state.counters for position in pair}
        for item, position in zip(findings.inputs, findings.dedupe.kept, strict=True):
            viewed = any(t is not item.traced and internals.storage_key(t) == item.storage for t in tensors)
            foreign = item.real.is_inference() and not torch.is_inference_mode_enabled()
            if item.steps and (viewed or foreign or position in counted):
                op, why = item.steps[-1].partition("(")[0], "has views, or shares a version counter with another one"
                raise RunEagerly("changes-sizes-of-argument", op=op, name=f"`{item.name}`", why=why)


def _step(guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    item = guard.inputs.get(id(tensor))
    op, line = func.__name__, user_line()
    if func in _DETACHES and torch.is_inference_mode_enabled():
        return tensor  # in inference mode autograd records nothing, so eager does nothing here either
    if func not in _CHANGES_LAYOUT and func not in _DETACHES:
        raise RunEagerly("gives-other-elements", op=op, at=line)
    if item is not None and (func in _DETACHES or tensor.requires_grad or item.base is not None):
        why = "is detached, requires grad or shares memory"
        raise RunEagerly("changes-sizes-of-argument", op=op, name=f"`{item.name}`", why=why, at=line)
    if internals.base_of(tensor) is not None or not internals.has_its_memory_to_itself(tensor):
        raise RunEagerly("changes-sizes-of-view", op=op, at=line)
    if func in _CHANGES_LAYOUT and tensor.requires_grad and (tensor.is_leaf or not torch.is_grad_enabled()):
        raise RunEagerly("changes-sizes-of-leaf", op=op, at=line)
    if guard.hooks_of(tensor):  # in eager, the hooks stay on the `grad_fn` that the tensor had before the op
        raise RunEagerly("changes-sizes-with-hook", op=op, at=line)
    result = func(*args, **kwargs)
    if item is not None:
        arguments = [*map(repr, args[1:]), *(f"{key}={value!r}" for key, value in kwargs.items())]
        item.steps.append(f"{func.__name__}({', '.join(arguments)})")
    return result
