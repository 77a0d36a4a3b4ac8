"""Let subclasses do their ops themselves in a trace, and have only what they call functionalized.

Functionalization, asked for an op of a wrapper and a plain tensor, would let the op pass and take the wrapper that
comes out for a tensor of its own. So it is switched off, and on again for each op that no subclass takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.subclasses.parts import parts_of


class AboveFunctionalization(internals.TorchDispatchMode):
    """Comes before the recorder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._open: list[ExitStack] = []
        self._writes: dict[int, bool] = {}  # the grad mode of the first write to each memory

    def __enter__(self) -> Any:
        """Switch functionalization off."""
        stack = ExitStack()
        stack.enter_context(internals.functionalization_left_out())
        self._open.append(stack)
        return super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        self._open.pop().close()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let subclasses do an op, or else have it functionalized, and then recorded."""
        if any(kind is not internals.FakeTensor for kind in types):
            if func._schema.is_mutable:
                with internals.disable_torch_function():
                    self._note_write(args[0])
            return NotImplemented
        with internals.disable_torch_function(), internals.functionalization_again():
            return func(*args, **kwargs or {})

    def _note_write(self, target: Any) -> None:
        """Refuse a write to a tensor with a history in another grad mode than an earlier one's."""
        now = torch.is_grad_enabled()
        for tensor in target if isinstance(target, list | tuple) else [target]:
            for part in parts_of(tensor):
                if self._writes.setdefault(internals.storage_key(part), now) is not now and tensor.requires_grad:
                    raise RunEagerly("a tensor subclass is changed both in grad mode and out of it")
