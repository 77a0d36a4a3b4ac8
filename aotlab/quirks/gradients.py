"""``torch.autograd.grad`` inside the function: the trace records the ops that compute the gradient.

A call of the compiled function runs eagerly if the gradient may pass a hook, because hooks are registered only at run
time. It also runs eagerly if an input is a view of another input, because the traced tensors do not have this relation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.runtime.draft import Draft
from aotlab.runtime.emitting_quirk import EmittingQuirk, Point
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.findings import Findings


class Gradients(EmittingQuirk):
    """Runs `torch.autograd.grad` in the trace, so that its ops are recorded, or lets the call run eagerly.

    An entry of a function that calls `torch.autograd.grad` guards that the inputs that require grad have no hooks and
    are not views of each other (see `are_alone`).
    """

    name = "gradients"

    def __init__(self) -> None:
        self._used = False

    def claims(self) -> Mapping[Any, Handler]:
        return {torch.autograd.grad: self._grad}

    def _grad(self, guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._used = True
        # A trace does not register the function's hooks. It only records them, and compiled calls register them. So the
        # gradient that the trace computes here would not pass through the hooks.
        if guard.hooks:
            raise RunEagerly("grad-inside", what="hooks are registered before it", at=user_line())
        return guard.run(func, args, kwargs)

    def check(self, findings: Findings) -> None:
        if not self._used:
            return
        if not are_alone(*(item.real for item in findings.inputs if item.real.requires_grad)):
            what = "an argument has hooks, or is a view of another argument or a view that was made under no_grad"
            raise RunEagerly("grad-inside", what=what, transient=True)
        if findings.call.state.counters and any(info.moves_version for info in findings.infos):
            what = "the function writes an argument that shares a version counter with another one"
            raise RunEagerly("grad-inside", what=what)

    def emit(self, draft: Draft, at: Point) -> None:
        wanted = [draft.kept(info.index) for info in draft.meta.input_info if info.requires_grad]
        if self._used and at == "prologue" and wanted:
            draft.miss([f"not {draft.w.constant('are_alone', are_alone)}({draft.star(wanted)})"])


def are_alone(*tensors: Tensor) -> bool:
    """Tell whether gradients of these tensors pass no hook and no view relation that is missing in the trace.

    That is true if none of them has hooks, none is a view of another one, and none is a leaf that is a view made under
    ``no_grad``.
    """
    bases = [internals.base_of(tensor) for tensor in tensors]
    related = any(base is tensor for base in bases for tensor in tensors if base is not None)
    return not related and not any(internals.is_hooked(t) or internals.is_leaf_by_its_base(t) for t in tensors)
