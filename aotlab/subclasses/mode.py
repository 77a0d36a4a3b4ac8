"""Let subclasses do their ops themselves in a trace, and have only what they call functionalized.

Functionalization, asked for an op of a wrapper and a plain tensor, would let the op pass and take the wrapper that
comes out for a tensor of its own. So it is switched off, and on again for each op that no subclass takes part in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.subclasses import AnchoredGradient
from aotlab.subclasses.sparse import called


class AboveFunctionalization(internals.TorchDispatchMode):
    """Comes before the recorder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._open: list[ExitStack] = []
        self._writes: dict[int, bool] = {}  # the grad mode of the first write to each memory
        self._views: dict[int, bool] = {}
        self.mixed: set[int] = set()
        self.values: Sequence[Any] = ()  # the function's arguments
        self.lookups: dict[int, AnchoredGradient] = {}  # the sparse gradients of some of them
        self.padding, self.mask = -1, ((), -1)  # of the lookup whose gradient is computed, and what is no padding

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
            if func._schema.is_mutable or (func.is_view and func is not torch.ops.aten.detach.default):
                with internals.disable_torch_function():
                    self._note(args[0], func._schema.is_mutable)
            return NotImplemented
        with internals.disable_torch_function(), internals.functionalization_again():
            result = called(self, func, args)
            return func(*args, **kwargs or {}) if result is NotImplemented else result

    def _note(self, target: Any, writes: bool) -> None:
        """Note in which grad mode something is viewed, or written: for what has a history that has to be the same."""
        now = torch.is_grad_enabled()
        for tensor in target if isinstance(target, list | tuple) else [target]:
            if not writes and self._views.setdefault(internals.storage_key(tensor), now) is not now:
                self.mixed.add(internals.storage_key(tensor))
            for part in internals.parts_of(tensor) if writes else ():
                if self._writes.setdefault(internals.storage_key(part), now) is not now and tensor.requires_grad:
                    raise RunEagerly("a tensor subclass is changed both in grad mode and out of it")


_OF_LEAVES = {getattr_static(Tensor, name).__get__: said for name, said in (("is_leaf", True), ("grad_fn", None))}


class LeavesStayLeaves(TorchFunctionMode):
    """Says of the wrappers that stand for leaves that they are such; in the trace they have a history."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        super().__init__()
        self._leaves = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer for them."""
        if args and id(args[0]) in self._leaves and func in _OF_LEAVES:
            return _OF_LEAVES[func]
        return func(*args, **kwargs or {})
