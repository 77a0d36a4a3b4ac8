"""Let subclasses run their own ops in a trace; only the ops that they call are functionalized.

For an op on a wrapper and a traced tensor, functionalization would treat the resulting wrapper as a plain tensor. So
functionalization is off during the trace. It is switched on for each op that has no subclass among its arguments.
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
from aotlab.guards.user_code import user_line
from aotlab.ir.subclass_records import AnchoredGradient
from aotlab.subclasses.sparse import run_op


class AboveFunctionalization(internals.TorchDispatchMode):
    """The dispatch mode that sees each op before functionalization and the recorder while wrappers are traced.

    It lets the wrappers' classes run their ops (``__torch_dispatch__``), and passes all other ops on. ``mixed`` has the
    storage keys of wrappers that were viewed both in grad mode and outside it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._open: list[ExitStack] = []
        self._writes: dict[int, bool] = {}  # whether grad mode was on at the first write, by storage key
        self._views: dict[int, bool] = {}  # whether grad mode was on when the first view was made, by storage key
        self.mixed: set[int] = set()
        self.values: Sequence[Any] = ()  # the function's arguments
        self.lookups: dict[int, AnchoredGradient] = {}  # the sparse gradients of arguments, by position
        # For the embedding whose backward runs now (`aotlab.subclasses.sparse`): its ``padding_idx`` (-1 if it has
        # none), and the mask of the rows that are not padding, with the ``padding_idx`` from which it was computed.
        self.padding, self.mask = -1, ((), -1)

    def __enter__(self) -> Any:
        """Switch functionalization off."""
        stack = ExitStack()
        stack.enter_context(internals.functionalization_left_out())
        stack.enter_context(internals.shapes_computed_apart())
        self._open.append(stack)
        return super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        self._open.pop().close()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let a subclass run an op that has it among its arguments; functionalize and record any other op."""
        if any(kind is not internals.FakeTensor for kind in types):
            if func._schema.is_mutable or (func.is_view and func is not torch.ops.aten.detach.default):
                with internals.disable_torch_function():
                    self._note(args[0], func._schema.is_mutable)
            return NotImplemented
        with internals.disable_torch_function(), internals.functionalization_again():
            result = run_op(self, func, args)
            return func(*args, **kwargs or {}) if result is NotImplemented else result

    def _note(self, target: Any, writes: bool) -> None:
        """Note whether grad mode is on when ``target`` is viewed or, if ``writes`` is true, written.

        The call runs eagerly if a tensor that requires grad is written both in grad mode and outside it.
        """
        now = torch.is_grad_enabled()
        for tensor in target if isinstance(target, list | tuple) else [target]:
            if not writes and self._views.setdefault(internals.storage_key(tensor), now) is not now:
                self.mixed.add(internals.storage_key(tensor))
            for part in internals.parts_of(tensor) if writes else ():
                if self._writes.setdefault(internals.storage_key(part), now) is not now and tensor.requires_grad:
                    raise RunEagerly(
                        "subclass-in-both-grad-modes", name="a tensor subclass", done="changed", at=user_line()
                    )


_OF_LEAVES = {getattr_static(Tensor, name).__get__: said for name, said in (("is_leaf", True), ("grad_fn", None))}


class LeavesStayLeaves(TorchFunctionMode):
    """Makes `is_leaf` and `grad_fn` of traced wrappers give the caller's values.

    A wrapper that replaces a leaf has a ``grad_fn`` in the trace (the node of `Wrap`), and would not be a leaf.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        super().__init__()
        self._leaves = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer `is_leaf` and `grad_fn` for these wrappers."""
        if args and id(args[0]) in self._leaves and func in _OF_LEAVES:
            return _OF_LEAVES[func]
        return func(*args, **kwargs or {})
