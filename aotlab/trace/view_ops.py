"""Find the view ops that make one value of a trace from another, so that the epilogue can repeat them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.ir.fx_graphs import is_view_op
from aotlab.ir.metadata import ViewStep
from aotlab.trace.inputs import owner_of
from aotlab.trace.tape import Tape


def view_parent(tape: Tape, value: Tensor) -> tuple[Tensor, ViewStep] | None:
    """Return the tensor from which a view op made ``value``, and this view op, or None if ``value`` is not a view."""
    producer = tape.producer(value)
    if producer is None or not is_view_op(producer[0].target):
        return None
    operation, path = producer
    step = ViewStep(
        target=str(operation.target),
        args=tuple(operation.args[1:]),
        kwargs=tuple(operation.kwargs.items()),
        item=path[0] if path else None,
    )
    return operation.args[0], step


def root_among(tape: Tape, value: Tensor, candidates: Collection[int]) -> Tensor | None:
    """Return the nearest value whose ``id`` is in ``candidates``: ``value`` itself, or a value of which it is a view.

    Return None if there is no such value.
    """
    while id(value) not in candidates and (parent := view_parent(tape, value)) is not None:
        value = parent[0]
    return value if id(value) in candidates else None


def views_between(tape: Tape, base: Tensor, value: Tensor) -> tuple[ViewStep, ...] | None:
    """Return, in order, the view ops that make ``value`` from ``base``, or None if ``value`` is no view of ``base``."""
    steps: list[ViewStep] = []
    while value is not base:
        parent = view_parent(tape, value)
        if parent is None:
            return None
        value, step = parent
        steps.append(step)
    return tuple(reversed(steps))


def base_value(tape: Tape, value: Tensor) -> Tensor:
    """Return the value at the start of the chain of view ops that made ``value``; it is not a view itself."""
    while (parent := view_parent(tape, value)) is not None:
        value = parent[0]
    return value


def covers_storage(value: Tensor) -> bool:
    """Tell whether ``value`` starts at offset 0 of its storage and has as many bytes as the storage."""
    offset, gap = value.storage_offset(), value.untyped_storage().nbytes() - value.numel() * value.element_size()
    if internals.unbacked_in(gap):
        return internals.is_zero(offset) and internals.is_zero(gap)
    return offset == 0 and gap == 0


_DETACH = ViewStep(target="aten.detach.default")
_ALIAS = ViewStep(target="aten.alias.default")


def with_detach(views: tuple[ViewStep, ...], output: Tensor, base: Tensor | None) -> tuple[ViewStep, ...]:
    """Return the view ops ``views``, with a ``detach`` added if functionalization dropped it.

    ``views`` make ``output`` from ``base``. If the function called ``detach``, the output does not require grad. But a
    view that the epilogue makes from a base that requires grad would require grad, too, without this ``detach``. If
    there are no view ops, return an ``alias`` op.
    """
    if (views and torch.is_inference_mode_enabled()) or internals.is_inference(output):
        return views or (_ALIAS,)  # functionalization dropped no `detach`
    if internals.base_of(output) is None and output.is_leaf:  # the output is not a view for autograd
        ends = views and views[-1].target in (_DETACH.target, "aten.view.dtype")
        return views if ends else (*views, _DETACH)
    lost = base is not None and base.requires_grad and not output.requires_grad
    ends = any(step.target in (_DETACH.target, "aten.view.dtype") for step in views)
    return (*([_DETACH] if lost and not ends else []), *(views or (_ALIAS,)))


def nodes_before(output: Tensor) -> Iterator[Any]:
    """Yield the autograd nodes from ``output`` on, up to the first node with several next nodes (or with none)."""
    node = output.grad_fn
    while node is not None:
        yield node
        following = [edge for edge, _ in node.next_functions if edge is not None]
        node = following[0] if len(following) == 1 else None


def multi_output_node(output: Tensor) -> Any:
    """Return the autograd node of a call that made several views (``unbind``), if ``output`` is one of these views.

    A view of such a view counts too. Return None for other tensors.
    """
    if not output.requires_grad or not internals.is_one_of_several_views(output):
        return None
    return next((node for node in nodes_before(output) if internals.is_call_of_several_views(node)), None)


def is_view_of(output: Tensor, base: Tensor) -> bool:
    """Tell whether autograd treats ``output`` as a view of ``base``.

    Then the gradient of ``output`` flows to ``base`` (or to the base of ``base``) through the nodes of view ops only.
    """
    top = owner_of(base)
    if output is base or internals.base_of(output) is not top:
        return output is base
    for node in nodes_before(output):
        if node in (base.grad_fn, top.grad_fn):
            return True
        if internals.is_custom_function_node(node):
            return False  # the backward of a custom Function is the user's code, not the backward of a view op
        variable = getattr(node, "variable", None)  # only an AccumulateGrad node has it
        if variable is not None:
            return variable is base or variable is top
    # A view that was made under `no_grad` has no `grad_fn`. A view that a custom Function made may also have no
    # `grad_fn`, but autograd gives such a view another creation meta.
    return output.grad_fn is None and internals.was_made_under_no_grad(output)


def is_new_leaf(output: Tensor) -> bool:
    """Tell whether ``output``, which is not an input, is a leaf that the function made to require grad."""
    # Reading `is_leaf` of a view that was made under `no_grad` may raise.
    return output.requires_grad and internals.base_of(output) is None and output.is_leaf
