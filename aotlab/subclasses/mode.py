"""Let subclasses do their ops themselves in a trace, and have only what they call functionalized.

Functionalization, asked for an op of a wrapper and a plain tensor, would let the op pass and take the wrapper that
comes out for a tensor of its own. So it is switched off, and on again for each op that no subclass takes part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from aotlab import _torch as internals


class AboveFunctionalization(internals.TorchDispatchMode):
    """Comes before the recorder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._open: list[ExitStack] = []

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
            return NotImplemented
        with internals.disable_torch_function(), internals.functionalization_again():
            return func(*args, **kwargs or {})
