"""Which view ops lead from one value of a trace to another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.ir.metadata import ViewStep
from aotlab.trace.tape import Tape

_view_ops: dict[OpOverload, bool] = {}
_ALIAS_OPS = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default))
_ALIAS_NAMES = frozenset(map(str, _ALIAS_OPS))


def _is_view_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    known = _view_ops.get(target)
    if known is None:
        schema = target._schema
        first = schema.arguments[0].alias_info if schema.arguments else None
        result = schema.returns[0].alias_info if schema.returns else None
        known = first is not None and not first.is_write and result is not None
        _view_ops[target] = known
    return known


def view_parent(tape: Tape, value: Tensor) -> tuple[Tensor, ViewStep] | None:
    """Return the tensor of which ``value`` is a view, and the step; None if it is no view."""
    made = tape.producer(value)
    if made is None or not _is_view_op(made[0].target):
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
    while id(value) not in known:
        parent = view_parent(tape, value)
        if parent is None:
            return None
        value = parent[0]
    return value


def views_between(tape: Tape, base: Tensor, value: Tensor) -> tuple[ViewStep, ...] | None:
    """Return the view ops that lead from ``base`` to ``value``; None if there is no such way."""
    steps: list[ViewStep] = []
    below = value
    while below is not base:
        parent = view_parent(tape, below)
        if parent is None:
            return views_from_window(tape, base, value)
        below, step = parent
        steps.append(step)
    return tuple(reversed(steps))


def views_from_window(tape: Tape, window: Tensor, value: Tensor) -> tuple[ViewStep, ...] | None:
    """Return the view ops that lead from a window of a synthetic base, or from another view, to ``value``.

    After a write each alias of the base is made anew from its new value, by all steps from there. So the window is not
    on the way to ``value``; but the steps to the window may be the first of those to ``value``.
    """
    to_window, top = _steps_from_top(tape, window)
    to_value, other_top = _steps_from_top(tape, value)
    if top is not other_top:
        return _same_past_unsafe(tape, (to_window, top), (to_value, other_top))
    if to_value[: len(to_window)] == to_window:
        return tuple(to_value[len(to_window) :])
    # windows with other histories go by other aliases of the base; what is detached behind the window says so itself
    wanted = [step for step in to_window if step.target not in _ALIAS_NAMES]
    for count in range(len(to_value), -1, -1):
        if [step for step in to_value[:count] if step.target not in _ALIAS_NAMES] == wanted:
            return tuple(to_value[count:])
    return None


def _same_past_unsafe(
    tape: Tape, window: tuple[list[ViewStep], Tensor], value: tuple[list[ViewStep], Tensor]
) -> tuple[ViewStep, ...] | None:
    """Return the views between two, by their steps and tops, where `_unsafe_view` made these of the same.

    It does so for products of several matrices at once. To functionalization it is a view, which after a write is made
    anew for each alias.
    """
    (to_window, top), (to_value, other_top) = window, value
    ways = [tape.producer(each) for each in (top, other_top)]
    if None in ways or any(way[0].target is not internals.UNSAFE_VIEW for way in ways if way is not None):
        return None
    (first, _), (second, _) = (way for way in ways if way is not None)
    if first.args[0] is not second.args[0] or first.args[1:] != second.args[1:] or first.kwargs != second.kwargs:
        return None
    return tuple(to_value[len(to_window) :]) if to_value[: len(to_window)] == to_window else None


def views_past_detaches(tape: Tape, window: Tensor, value: Tensor) -> tuple[ViewStep, ...] | None:
    """Return the same as `views_from_window` also where a write left another number of detaches on the two ways."""
    (to_window, top), (to_value, other_top) = _steps_from_top(tape, window), _steps_from_top(tape, value)
    if top is not other_top:
        return None
    rest = list(to_value)
    for step in (step for step in to_window if not _changes_nothing(step)):
        while rest and _changes_nothing(rest[0]):
            rest.pop(0)
        if not rest or rest.pop(0) != step:
            return None
    return tuple(step for step in rest if not _changes_nothing(step))


def _changes_nothing(step: ViewStep) -> bool:
    return step.target in _ALIAS_NAMES


def _steps_from_top(tape: Tape, value: Tensor) -> tuple[list[ViewStep], Tensor]:
    steps: list[ViewStep] = []
    while (parent := view_parent(tape, value)) is not None:
        value, step = parent
        steps.append(step)
    return steps[::-1], value


def covers_storage(value: Tensor) -> bool:
    """Tell whether ``value`` begins its storage and is as large: whether returning it returns the whole storage."""
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def canonical_base(tape: Tape, value: Tensor) -> Tensor:
    """Walk up from ``value`` to the nearest tensor that is a whole storage, and past mere aliases of it."""
    while True:
        parent = view_parent(tape, value)
        if parent is None:
            return value
        if covers_storage(value) and not (
            tape.producer(value)[0].target in _ALIAS_OPS and covers_storage(parent[0])  # type: ignore[index]  # a view has a producer
        ):
            return value
        value = parent[0]


_DETACH = ViewStep(target="aten.detach.default")
_ALIAS = ViewStep(target="aten.alias.default")


def with_detach(views: tuple[ViewStep, ...] | None, output: Tensor, base: Tensor | None) -> tuple[ViewStep, ...] | None:
    """Add the detach that functionalization may have swallowed: views of a base that requires grad mirror it."""
    if views and torch.is_inference_mode_enabled():
        return views  # there they mirror it whatever the trace's own tensors say, and nothing is swallowed
    lost = base is not None and base.requires_grad and not output.requires_grad and views is not None
    ends = any(step.target == "aten.view.dtype" for step in views or ())  # where gradients end by themselves
    is_view = internals.base_of(output) is not None
    if views == () and (output.requires_grad or is_view) and not is_new_leaf(output):
        return (_DETACH, _ALIAS) if lost else (_ALIAS,)
    if views and lost and not ends and _DETACH not in views and is_view:
        return (_DETACH, *views)  # a view of what was detached, where a detached view is none
    if views == () or (lost and not ends and _DETACH not in views):  # type: ignore[operator]  # not None where lost
        return (*(views or ()), _DETACH)
    # a compiler may have asked for an alias in its place, and what moved in place is none: what was detached is no view
    if not views or output.requires_grad or is_view or views[-1].target in ("aten.detach.default", "aten.view.dtype"):
        return views
    return (*views, _DETACH)


_PARTS = ("aten.slice.Tensor", "aten.select.int")


def with_several(views: tuple[ViewStep, ...] | None, output: Tensor) -> tuple[ViewStep, ...] | None:
    """Write a view that was made together with others as autograd knows it, which forbids to write it in place.

    Functionalization of torch 2.15 makes such views anew, after a write, by a `slice` or a `select` each.
    """
    if not views or not output.requires_grad or not internals.is_one_of_several_views(output):
        return views
    node, number = output.grad_fn, output.output_nr
    for at in reversed(range(len(views))):
        if node is None:
            break
        call = internals.call_of_several_views(node)
        if call is not None:
            if views[at].target not in _PARTS:
                break
            target, args = call
            return (*views[:at], ViewStep(target=target, args=args, item=number), *views[at + 1 :])
        if len(node.next_functions) != 1:
            break
        node, number = node.next_functions[0]
    return views


def call_of_several(output: Tensor) -> Any:
    """Return the autograd node of the call that made a view together with others; None for other tensors."""
    if not output.requires_grad or not internals.is_one_of_several_views(output):
        return None
    node = output.grad_fn
    while node is not None and internals.call_of_several_views(node) is None:
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node


def _ends_on_the_way(output: Tensor) -> bool:
    """Tell whether the gradient of a view ends at another view, which was made under ``no_grad``."""
    node = output.grad_fn
    while node is not None and not internals.is_custom_function_node(node) and not hasattr(node, "variable"):
        following = [edge for edge, _ in node.next_functions if edge is not None]
        if not following:
            return True
        node = following[0] if len(following) == 1 else None
    return False


def is_view_of(output: Tensor, base: Tensor) -> bool:
    """Tell whether autograd takes ``output`` for a view of ``base`` and leads its gradient straight there.

    A view made under ``no_grad`` counts: it has no gradient function. A view of such a view does not count: its
    gradient ends at the former.
    """
    if output is base:
        return True
    owner = internals.base_of(base)
    if owner is not None and internals.base_of(output) is owner:
        # both are views of one tensor, and so will be what is made from the one by the steps to the other
        return not _passes_custom_function(output, (base.grad_fn, owner.grad_fn)) and not _ends_on_the_way(output)
    if internals.base_of(output) is not base:
        return False
    node = output.grad_fn
    if node is None:
        return True
    while node is not base.grad_fn:
        if internals.is_custom_function_node(node):
            return False  # its backward is the user's, not a view's
        variable = getattr(node, "variable", None)  # of the node that accumulates into a leaf
        if variable is not None:
            return variable is base
        following = [edge for edge, _ in node.next_functions if edge is not None]
        if len(following) != 1:
            return False
        node = following[0]
    return True


def _passes_custom_function(output: Tensor, ends: Sequence[Any]) -> bool:
    """Tell whether a custom function's backward stands on the way from a view to where its history begins."""
    node = output.grad_fn
    while node is not None and node not in ends:
        if internals.is_custom_function_node(node):
            return True
        following = [edge for edge, _ in node.next_functions if edge is not None]
        if len(following) != 1:
            return False
        node = following[0]
    return False


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


def or_else(a: Tensor | None, b: Tensor) -> Tensor:
    """Return ``a`` unless it is None."""
    return b if a is None else a


def common_base(tape: Tape, candidates: list[Tensor]) -> Tensor | None:
    """Find the candidate of which all others are views; None if there is none."""
    for candidate in candidates:
        if all(views_between(tape, candidate, other) is not None for other in candidates):
            return candidate
    tops = []
    for value in candidates:
        while (parent := view_parent(tape, value)) is not None:
            value = parent[0]
        tops.append(value)
    return tops[0] if all(top is tops[0] for top in tops) else None
