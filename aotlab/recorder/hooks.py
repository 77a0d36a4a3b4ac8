"""Hooks that the traced program registers on its tensors.

    def f(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return y.exp()

A hook is Python that runs in each backward. While tracing it is only noted, with the place of the autograd graph where
it hangs; at run time it is registered on the caller's tensor, or on one that stands for the intermediate.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from aotlab import torch_internals as internals
from aotlab.errors import HooksError
from aotlab.recorder.places import user_line

HookKind = Literal["hook", "retain_grad", "post_accumulate"]
_DEPTH = 4


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A hook: where in the autograd graph it hangs (a node and the number of its output), on which traced tensor."""

    kind: HookKind
    edge: tuple[Any, int]
    tensor: Tensor
    function: Callable[..., Any] | None


class Hooks:
    """The hooks of one trace, in the order of their registration."""

    def __init__(self) -> None:
        self._table: OrderedDict[int, Hook] = OrderedDict()

    @property
    def all(self) -> tuple[Hook, ...]:
        """Those that were not removed again."""
        return tuple(self._table.values())

    def retains(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` was asked to retain its gradient."""
        return any(hook.kind == "retain_grad" and hook.tensor is tensor for hook in self.all)

    def add(self, kind: HookKind, tensor: Tensor, function: Callable[..., Any] | None = None) -> RemovableHandle:
        """Note a hook and return its handle.

        Raises
        ------
        HooksError
            The hook uses a tensor of the traced call, which is gone when it runs.
        """
        if function is not None and _holds_traced(function, _DEPTH):
            raise HooksError(
                "a hook uses a tensor of the call in which it is registered",
                line=user_line(),
                why="it would see the traced tensor, not the one of the call",
                suggestion="compute what it needs from the gradient, or register it outside of the compiled function",
            )
        handle = RemovableHandle(self._table)
        try:
            edge = torch.autograd.graph.get_gradient_edge(tensor)
        except AssertionError:  # a view made under ``no_grad``: no gradient gets there
            return handle
        self._table[handle.id] = Hook(kind, (edge.node, edge.output_nr), tensor, function)
        return handle


def _holds_traced(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return internals.is_functional(value)
    if not depth:
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        inner: list[Any] = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    else:
        function = getattr(value, "__func__", value)
        inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
        inner += list(getattr(function, "__defaults__", None) or ())
        inner += list((getattr(function, "__kwdefaults__", None) or {}).values())
        owner = getattr(value, "__self__", None)
        inner += (
            [owner]
            if isinstance(owner, (Tensor, list, dict, set))
            else list(vars(owner).values() if _has_vars(owner) else ())
        )
        inner += list(vars(value).values()) if _has_vars(value) else []
    return any(_holds_traced(item, depth - 1) for item in inner)


def _has_vars(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type) and value is not None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if the name is not bound yet
    except ValueError:
        return False
    return True
