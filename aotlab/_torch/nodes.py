"""Nodes of the autograd graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from aotlab._torch.ops import unseen_by_dynamo

#: Returns the number that the next autograd node will get.
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
#: Returns the number of an autograd node: the later it was made, the higher, and the earlier it runs.
sequence_of: Callable[[Any], int] = methodcaller("_sequence_nr")
#: Returns the autograd node that is being run, None outside a backward.
current_node: Callable[[], Any] = torch._C._current_autograd_node
#: Returns the number of the backward that is being run.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
#: Tells whether the backward that is running was called with ``retain_graph=True``.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
#: Hangs a node behind a tensor, in place.
_lift: Any = torch.ops.aten.lift.default._op
#: The autograd nodes of an extremum of all elements, which share its gradient out among those that are it.
_EXTREMA = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")


def is_custom_function_node(node: Any) -> bool:
    """Tell whether an autograd node belongs to a user's `torch.autograd.Function`."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def with_own_node(tensor: Tensor) -> Tensor:
    """Return a new tensor, that nobody else has yet, behind an autograd node of its own."""
    if tensor.is_complex():  # `lift` has no derivative for complex numbers
        return with_common_node(None, tensor)[0]
    return _lift(tensor)  # type: ignore[no-any-return]  # this very tensor


class _CommonNode(torch.autograd.Function):
    """Hangs one node behind several tensors; the gradients that do not come are None to it, and to their hooks."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[Any], None] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results = tuple([tensor.detach() for tensor in tensors])
        if note is not None:  # it keeps them, as the node of an op like ``exp`` keeps what it made
            ctx.to_save = results
            note(ctx)
        return results

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients


def with_common_node(note: Callable[[Any], None] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors behind one autograd node, as behind the results of one function.

    A ``note`` is given the node, by which `outputs_saved_by` finds them; it may keep but a weak reference to it.
    """
    return _CommonNode.apply(note, *tensors)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


class PassOn(torch.autograd.Function):
    """Hands a gradient on to ``through``, and has the shape of ``like``."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, through: Tensor) -> Tensor:
        """Return something without memory that has the history of ``through``."""
        ctx.set_materialize_grads(False)
        return like.detach()

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None]:
        """Hand the gradient on."""
        return None, gradient


def pass_on(through: Tensor) -> Tensor:
    """Return a tensor without memory whose gradient goes where that of ``through`` goes now, before a later write."""
    like = torch.empty((), dtype=through.dtype, device=through.device).expand(through.shape)
    return PassOn.apply(like, through)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


def current_node_sequence() -> int | None:
    """Return the number of the autograd node that is being run, None outside a backward."""
    node = current_node()
    return None if node is None else sequence_of(node)


def fills_by_mask(mask: Tensor) -> bool:
    """Tell whether ``mask`` times a gradient is what eager's kernels write by that mask; it is so on the CPU."""
    if mask.dtype != torch.bool or mask.device.type != "cpu":
        return False
    node = current_node()
    return node is not None and node.name() in _EXTREMA


def is_to_be_run(node: Any) -> bool:
    """Tell whether the backward that is being run will come to an autograd node, or has."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True  # a leaf whose gradient is asked for: there torch has no answer


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf into which an autograd node accumulates; None if it is another node."""
    return getattr(node, "variable", None)


@contextlib.contextmanager
def arrivals(edges: Sequence[tuple[Any, int]], seen: list[tuple[Any, int]] | None) -> Iterator[None]:
    """Append those of ``edges`` that end at leaves to ``seen``, as their gradients arrive."""
    leaves = [] if seen is None else [(edge, getattr(edge[0], "variable", None)) for edge in edges]

    def listener(edge: tuple[Any, int]) -> Callable[[Tensor], None]:
        return lambda _: None if seen is None else seen.append(edge)

    with torch._C.DisableTorchFunction():
        handles = [
            leaf.register_hook(listener(edge)) for edge, leaf in leaves if leaf is not None and leaf.requires_grad
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def turns(count: int) -> list[int]:
    """Return in which order autograd's heap, kept by C++, serves ``count`` leaves whose gradients come at once."""
    heap, order = list(range(count)), []
    while heap:
        order.append(heap[0])
        last = heap.pop()
        hole, length = 0, len(heap)
        while 2 * hole + 2 < length:
            heap[hole], hole = heap[2 * hole + 2], 2 * hole + 2
        if 2 * hole + 2 == length:
            heap[hole], hole = heap[2 * hole + 1], 2 * hole + 1
        if heap:
            heap[hole] = last
    return order


def is_copy_slices(node: Any) -> bool:
    """Tell whether an autograd node is that of a write to a view."""
    return type(node).__name__ == "CopySlices"


class _Seen(Exception):  # noqa: N818  # a signal, not an error
    """Stops autograd behind one node."""


def run_node(
    node: Any, given: dict[int, Tensor], wanted: Sequence[tuple[Any, int]], *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Run one autograd node alone, with autograd's preparations, and return its gradients as it makes them.

    ``given`` are gradients by the number of the forward output; ``wanted`` are edges behind the node. Autograd has no
    call for this: asked for the edges alone, it goes on to whatever lies between the node and them.
    """
    seen: list[tuple[Tensor | None, ...]] = []

    def look(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        seen.append(gradients)
        raise _Seen

    numbers = sorted(given)
    handle = node.register_hook(look)
    try:
        torch.autograd.grad(
            [torch.autograd.graph.GradientEdge(node, number) for number in numbers],
            [torch.autograd.graph.GradientEdge(*edge) for edge in wanted],
            [given[number] for number in numbers],
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    except _Seen:
        pass
    finally:
        handle.remove()
    return seen[0]


def edge_metadata(node: Any, number: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Return what the gradient looks like that an autograd node takes for one of its forward outputs."""
    described = node._input_metadata[number]
    return tuple(described.shape), described.dtype, described.device


def always_raises(node: Any) -> bool:
    """Tell whether an autograd node is one that stands for an error, as that of an op without a derivative."""
    return type(node).__name__ in ("NotImplemented", "DelayedError", "Error")
