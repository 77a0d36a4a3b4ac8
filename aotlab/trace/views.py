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

_ALIAS_NAMES = ("aten.detach.default", "aten.alias.default", "aten.lift_fresh.default")


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
    to_value, top = _steps_from_top(tape, value, base)
    if top is base:
        return tuple(to_value)
    # After a write each alias is made anew from the new value of the top, by all steps from there. So the base, itself
    # a view, is not on the way; but the steps to it, but for aliases, may be the first of those to the value.
    to_base, other_top = _steps_from_top(tape, base)
    if top is not other_top:
        return None
    wanted = [step for step in to_base if step.target not in _ALIAS_NAMES]
    for count in range(len(to_value), -1, -1):
        if [step for step in to_value[:count] if step.target not in _ALIAS_NAMES] == wanted:
            return tuple(to_value[count:])
    return None


def _steps_from_top(tape: Tape, value: Tensor, base: Tensor | None = None) -> tuple[list[ViewStep], Tensor]:
    """Return the view ops that lead to ``value``, and from where: from ``base`` if that is on the way."""
    steps: list[ViewStep] = []
    while value is not base and (parent := view_parent(tape, value)) is not None:
        value, step = parent
        steps.append(step)
    return steps[::-1], value


def covers_storage(value: Tensor) -> bool:
    """Tell whether ``value`` begins its storage and is as large: whether returning it returns the whole storage."""
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def canonical_base(tape: Tape, value: Tensor) -> Tensor:
    """Walk up from ``value`` to the nearest tensor that is a whole storage, and past mere aliases of it."""
    while (parent := view_parent(tape, value)) is not None:
        above, step = parent
        if covers_storage(value) and not (step.target in _ALIAS_NAMES and covers_storage(above)):
            return value
        value = above
    return value


_DETACH = ViewStep(target="aten.detach.default")
_ALIAS = ViewStep(target="aten.alias.default")


def with_detach(views: tuple[ViewStep, ...] | None, output: Tensor, base: Tensor | None) -> tuple[ViewStep, ...] | None:
    """Add the detach that functionalization may have swallowed: views of a base that requires grad mirror it."""
    if views is None or (views and torch.is_inference_mode_enabled()) or output.is_inference():
        return (_ALIAS,) if views == () else views  # they mirror it by themselves, and nothing is swallowed
    if internals.base_of(output) is None and (not output.requires_grad or is_new_leaf(output)):  # it is no view
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


def ends_nowhere(output: Tensor) -> bool:
    """Tell whether the gradient of a view ends at another view, which was made under ``no_grad``."""
    *_, last = (None, *_nodes(output))
    return last is not None and [edge for edge, _ in last.next_functions] == [None]


def call_of_several(output: Tensor) -> Any:
    """Return the autograd node of the call that made a view together with others; None for other tensors."""
    if not output.requires_grad or not internals.is_one_of_several_views(output):
        return None
    return next((node for node in _nodes(output) if internals.is_call_of_several_views(node)), None)


def is_view_of(output: Tensor, base: Tensor) -> bool:
    """Tell whether autograd takes ``output`` for a view of ``base`` and leads its gradient straight there.

    Two views of one tensor count, as what is made from the one by the steps to the other is a view of that too; so
    does a view that was made under ``no_grad``, which has no gradient function.
    """
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
    return output.grad_fn is None


def is_new_leaf(output: Tensor) -> bool:
    """Tell whether ``output`` is a leaf that the function made to require grad, unless it is an input."""
    return output.requires_grad and output.is_leaf and internals.base_of(output) is None


def reaches(root: Tensor, leaf: Tensor) -> bool:
    """Tell whether a gradient of ``root`` gets to ``leaf``."""
    seen: set[Any] = set()
    todo = [root.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return False


def common_base(tape: Tape, candidates: list[Tensor]) -> Tensor | None:
    """Find the candidate of which all others are views; None if there is none."""
    for candidate in candidates:
        if all(views_between(tape, candidate, other) is not None for other in candidates):
            return candidate
    tops = [_steps_from_top(tape, value)[1] for value in candidates]
    return tops[0] if all(top is tops[0] for top in tops) else None
