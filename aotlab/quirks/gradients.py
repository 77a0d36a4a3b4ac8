"""``torch.autograd.grad`` inside of the function: what it computes is traced like anything else.

Hooks that it would pass, and views of others among the inputs, which the trace has not, run eagerly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.places import user_line
from aotlab.runtime.draft import Draft
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.function import Findings
from aotlab.trace.quirk import Handler, Point, Quirk


class Gradients(Quirk):
    """Lets the function take gradients, where no hook is on the way."""

    name = "gradients"

    def __init__(self) -> None:
        self._used = False

    def claims(self) -> Mapping[Any, Handler]:
        return {torch.autograd.grad: self._grad}

    def _grad(self, guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._used = True
        if guard.hooks:  # which are registered when the compiled function runs
            raise RunEagerly(f"`torch.autograd.grad` is called where there may be hooks, at {user_line()}")
        return guard.run(func, args, kwargs)

    def check(self, findings: Findings) -> None:
        if not self._used:
            return
        if not are_alone(*(item.real for item in findings.inputs if item.real.requires_grad)):
            raise RunEagerly(
                "gradients are taken inside, and an argument has hooks, or is a view of another or a no_grad view",
                passing=True,
            )
        if findings.call.state.counters and any(info.moves_version for info in findings.infos):
            raise RunEagerly("gradients are taken inside, and inputs that count writes together are written")

    def emit(self, draft: Draft, at: Point) -> None:
        wanted = [draft.kept(info.index) for info in draft.meta.input_info if info.requires_grad]
        if self._used and at == "prologue" and wanted:
            draft.miss([f"not {draft.w.constant('are_alone', are_alone)}({draft.star(wanted)})"])


def are_alone(*tensors: Tensor) -> bool:
    """Tell whether no tensor has hooks or is a view of another, and none is a leaf since it is a view under no_grad."""
    bases = [internals.base_of(tensor) for tensor in tensors]
    related = any(base is tensor for base in bases for tensor in tensors if base is not None)
    return not related and not any(internals.is_hooked(t) or internals.is_leaf_by_its_base(t) for t in tensors)
