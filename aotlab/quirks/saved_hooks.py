"""``saved_tensors_hooks`` that the function sets itself: what they do is traced, in the forward and in the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab.trace.quirk import Handler, Point, Quirk

if TYPE_CHECKING:
    from aotlab.runtime.draft import Draft
    from aotlab.trace.escapes import EscapeGuard


class SavedHooks(Quirk):
    """Sets the function's hooks in the trace; they are called below autograd, where no function mode is on."""

    name = "saved_hooks"

    def __init__(self) -> None:
        self._used = False

    def claims(self) -> Mapping[Any, Handler]:
        return {internals.push_saved_tensor_hooks: self._push}

    def _push(self, guard: EscapeGuard, push: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._used = True
        pack, unpack = args
        push(_guarded(pack, guard), _guarded(unpack, guard.of_a_backward()))  # that is called when the run is over

    def emit(self, draft: Draft, at: Point) -> None:
        if self._used and at == "prologue":
            draft.miss([f"{draft.w.constant('hooks_disabled', internals.saved_tensor_hooks_disabled)}()"])


def _guarded(hook: Callable[..., Any], guard: EscapeGuard) -> Callable[..., Any]:
    """Let a function mode see what a hook does."""

    def call(value: Any) -> Any:
        TorchFunctionMode.__enter__(guard)
        try:
            return hook(value)
        finally:
            TorchFunctionMode.__exit__(guard, None, None, None)

    return call
