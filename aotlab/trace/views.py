"""Which view ops lead from one value of a trace to another."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.ir.graphs import is_view_op
from aotlab.ir.metadata import ViewStep
from aotlab.trace.inputs import owner_of
from aotlab.trace.tape import Tape


def view_parent(tape: Tape, value: Tensor) -> tuple[Tensor, ViewStep] | None:
    """Return the tensor of which ``value`` is a view, and the step; None if it is no view."""
    made = tape.producer(value)
    if made is None or not is_view_op(made[0].target):
        return None
    operation, path = made
    step = ViewStep(
        target=str(operation.target),
        args=tuple(operation.args[1:]),
        kwargs=tuple(operation.kwargs.items()),
        item=path[0] if path else None,
    )
    return operation.args[0], step


def root_among(tape: Tape, value: Tensor, known: Collection[int]) -> Tensor | None:
    """Return the value, by its ``id`` one of ``known``, that another is or is a view of; None if there is none."""
    while id(value) not in known and (parent := view_parent(tape, value)) is not None:
        value = parent[0]
    return value if id(value) in known else None


def views_between(tape: Tape, base: Tensor, value: Tensor) -> tuple[ViewStep, ...] | None:
    """Return the view ops that lead from ``base`` to ``value``; None if there is no such way."""
    steps: list[ViewStep] = []
    while value is not base:
        parent = view_parent(tape, value)
        if parent is None:
            return None
        value, step = parent
        steps.append(step)
    return tuple(reversed(steps))


def top_of(tape: Tape, value: Tensor) -> Tensor:
    """Return the value that another is a view of, and that is no view itself."""
    while (parent := view_parent(tape, value)) is not None:
        value = parent[0]
    return value


def covers_storage(value: Tensor) -> bool:
    """Tell whether ``value`` begins its storage and is as large: whether returning it returns the whole storage."""
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.element_size()


_DETACH = ViewStep(target="aten.detach.default")
_ALIAS = ViewStep(target="aten.alias.default")


def with_detach(views: tuple[ViewStep, ...], output: Tensor, base: Tensor | None) -> tuple[ViewStep, ...]:
    """Add the detach that functionalization may have swallowed: views of a base that requires grad mirror it."""
    if (views and torch.is_inference_mode_enabled()) or internals.is_inference(output):
        return views or (_ALIAS,)  # they mirror it by themselves, and nothing is swallowed
    if internals.base_of(output) is None and not output.requires_grad:  # it is no view
        ends = views and views[-1].target in (_DETACH.target, "aten.view.dtype")
        return views if ends else (*views, _DETACH)
    lost = base is not None and base.requires_grad and not output.requires_grad
    ends = any(step.target in (_DETACH.target, "aten.view.dtype") for step in views)
    return (*([_DETACH] if lost and not ends else []), *(views or (_ALIAS,)))


def _nodes(output: Tensor) -> Iterator[Any]:
    """Go through the autograd nodes from a tensor on, as long as each goes on to a single one."""
    node = output.grad_fn
    while node is not None:
        yield node
        following = [edge for edge, _ in node.next_functions if edge is not None]
        node = following[0] if len(following) == 1 else None


def call_of_several(output: Tensor) -> Any:
    """Return the autograd node of the call that made a view together with others; None for other tensors."""
    if not output.requires_grad or not internals.is_one_of_several_views(output):
        return None
    return next((node for node in _nodes(output) if internals.is_call_of_several_views(node)), None)


def is_view_of(output: Tensor, base: Tensor) -> bool:
    """Tell whether autograd leads ``output``'s gradient straight to ``base``, a view of it or of the same tensor."""
    top = owner_of(base)
    if output is base or internals.base_of(output) is not top:
        return output is base
    for node in _nodes(output):
        if node in (base.grad_fn, top.grad_fn):
            return True
        if internals.is_custom_function_node(node):
            return False  # its backward is the user's, not a view's
        variable = getattr(node, "variable", None)  # of the node that accumulates into a leaf
        if variable is not None:
            return variable is base or variable is top
    # what a custom Function made under `no_grad` has no gradient function either, and another protection from writes
    return output.grad_fn is None and internals.was_made_under_no_grad(output)


def is_new_leaf(output: Tensor) -> bool:
    """Tell whether ``output`` is a leaf that the function made to require grad, unless it is an input."""
    return output.requires_grad and output.is_leaf and internals.base_of(output) is None
