"""Hooks that the traced program registers on its tensors.

    def f(x):
        y = x * 2
        y.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return y.exp()

A hook is Python that runs in each backward. While tracing it is only noted, with the place of the autograd graph where
it hangs; at run time it is registered on the caller's tensor, or on one that stands for the intermediate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from aotlab.errors import UserLine
from aotlab.recorder.held import refuse_state_of_the_call
from aotlab.recorder.places import user_line

HookKind = Literal["hook", "retain_grad", "post_accumulate"]


@dataclass(frozen=True, slots=True, eq=False)
class Hook:
    """A hook: where in the autograd graph it hangs (a node and the number of its output), on which traced tensor."""

    kind: HookKind
    edge: tuple[Any, int]
    tensor: Tensor
    function: Callable[..., Any] | None
    line: UserLine | None


def _edge_of(tensor: Tensor) -> GradientEdge:
    with torch.inference_mode(False):  # torch looks at a leaf through a view, which has no history in inference mode
        return get_gradient_edge(tensor)


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

    def has(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has a hook, of whatever history."""
        return any(hook.tensor is tensor for hook in self.all)

    def has_older(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has hooks on a history that it had before a write."""
        edge = _edge_of(tensor)
        older = (hook for hook in self.all if hook.tensor is tensor and hook.kind == "hook")
        return any(hook.edge != (edge.node, edge.output_nr) for hook in older)

    def add(self, kind: HookKind, tensor: Tensor, function: Callable[..., Any] | None = None) -> RemovableHandle:
        """Note a hook and return its handle.

        Raises
        ------
        HooksError
            The hook keeps state that each call makes anew.
        """
        line = user_line()
        if function is not None:
            refuse_state_of_the_call(function, line)
        edge = _edge_of(tensor)
        handle = RemovableHandle(self._table)
        self._table[handle.id] = Hook(kind, (edge.node, edge.output_nr), tensor, function, line)
        return handle
