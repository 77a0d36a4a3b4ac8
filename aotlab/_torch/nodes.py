"""Nodes of the autograd graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from aotlab._torch.undocumented_ops import unseen_by_dynamo

#: Returns the sequence number that the next autograd node will get.
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
#: Returns the sequence number of an autograd node. A node that was made later has a higher number, and runs earlier in
#: a backward.
sequence_of: Callable[[Any], int] = methodcaller("_sequence_nr")
#: Returns the autograd node that is running, or None outside a backward.
current_node: Callable[[], Any] = torch._C._current_autograd_node
#: Returns the number of the backward that is running, or -1.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
#: Tells whether the backward that is running was called with ``retain_graph=True``.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
#: The op that gives a tensor a new autograd node, in place.
_lift: Any = torch.ops.aten.lift.default._op
#: The autograd nodes of ``max``, ``min`` and ``median`` of all elements. Such a node divides the gradient of the result
#: among the elements that are equal to the result.
_EXTREMA = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")


def is_custom_function_node(node: Any) -> bool:
    """Tell whether an autograd node belongs to a user's `torch.autograd.Function`."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def with_own_node(tensor: Tensor) -> Tensor:
    """Give a tensor an identity node as its new ``grad_fn``, and return the tensor.

    Hooks on the tensor then belong to this node, and not to the old node, which may have other results, too. The tensor
    must be new, so that no other code has used its old ``grad_fn``.
    """
    if tensor.is_complex():  # `lift` has no derivative for complex numbers
        return with_common_node(None, tensor)[0]
    return _lift(tensor)  # type: ignore[no-any-return]  # `lift` returns this very tensor


class _ViewInFunction(torch.autograd.Function):
    """The autograd function of `view_in_function`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return a view of a tensor without history."""
        ctx.set_materialize_grads(False)
        plain = tensor.detach()
        return plain.view_as(plain)

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient unchanged."""
        return gradient


def view_in_function(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a view that a custom Function made: autograd raises if such a view is written in place."""
    return _ViewInFunction.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


class _CommonNode(torch.autograd.Function):
    """An identity function of several tensors with one autograd node.

    If a result gets no gradient, its gradient remains None and does not become zeros. So hooks on the corresponding
    tensor do not run.
    """

    @staticmethod
    def forward(ctx: Any, note: Callable[[Any], None] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results = tuple([tensor.detach() for tensor in tensors])
        if note is not None:  # the node saves its results, as the node of an op like ``exp`` does
            ctx.to_save = results
            note(ctx)
        return results

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients


def with_common_node(note: Callable[[Any], None] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return aliases of the tensors with one common autograd node, as if one function had returned them.

    If the callback ``note`` is given, the node saves the aliases, and ``note`` is called with the node, so that
    `outputs_saved_by` can read the aliases later. ``note`` may store only a weak reference to the node.
    """
    return _CommonNode.apply(note, *tensors)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


class PassOn(torch.autograd.Function):
    """The autograd function of `pass_on`: its argument gets the gradient of its result, but they share no memory."""

    @staticmethod
    def forward(ctx: Any, through: Tensor) -> Tensor:
        """Return a tensor with the shape of ``through`` and memory for only one element. Its values are not used."""
        ctx.set_materialize_grads(False)
        return through.new_empty(()).expand(through.shape).detach()

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient unchanged."""
        return gradient


def pass_on(through: Tensor) -> Tensor:
    """Return a tensor whose gradient flows on to ``through``, and whose values do not matter.

    The result refers to the present autograd history of ``through``. So the gradient flows to this history, even if a
    later in-place write gives ``through`` another one. The result has memory for one element only.
    """
    return PassOn.apply(through)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


def current_node_sequence() -> int | None:
    """Return the sequence number of the autograd node that is running, or None outside a backward."""
    node = current_node()
    return None if node is None else sequence_of(node)


def fills_by_mask(mask: Tensor) -> bool:
    """Tell whether eager's kernel assigns the gradient at ``mask`` where the trace multiplies the gradient by ``mask``.

    This is so on the CPU if the running autograd node belongs to an extremum such as ``max``. torch's formula for its
    backward multiplies by a mask of the extremal elements. Eager's CPU code instead assigns the gradient at these
    elements, so that an infinite gradient does not turn into NaN at the other elements.
    """
    if mask.dtype != torch.bool or mask.device.type != "cpu":
        return False
    node = current_node()
    return node is not None and node.name() in _EXTREMA


def is_to_be_run(node: Any) -> bool:
    """Tell whether the backward that is running has run this autograd node, or will run it."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True  # torch raises for the node of a leaf whose gradient was requested; that node will be run


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf whose gradient an ``AccumulateGrad`` node accumulates, or None for other nodes."""
    return getattr(node, "variable", None)


@contextlib.contextmanager
def arrivals(edges: Sequence[tuple[Any, int]], arrived: list[tuple[Any, int]] | None) -> Iterator[None]:
    """Record the order in which gradients reach leaves during a backward in the block.

    ``edges`` are autograd edges. An edge that ends at a leaf is appended to ``arrived`` when autograd has computed the
    gradient of this leaf. Nothing is recorded if ``arrived`` is None.
    """
    leaves = [] if arrived is None else [(edge, getattr(edge[0], "variable", None)) for edge in edges]

    def listener(edge: tuple[Any, int]) -> Callable[[Tensor], None]:
        return lambda _: None if arrived is None else arrived.append(edge)

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
    """Return the order in which autograd's engine handles ``count`` leaves that become ready at the same time.

    The leaves have equal priority in the engine's queue, a C++ heap, which does not keep the order of insertion:
    ``turns(5)`` is ``[0, 2, 4, 1, 3]``.
    """
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
    """Tell whether an autograd node is a ``CopySlices`` node: the ``grad_fn`` of a base after a write to its view."""
    return type(node).__name__ == "CopySlices"


class _Seen(Exception):  # noqa: N818  # a signal, not an error
    """Raised in a hook of `run_node`, to stop autograd after one node."""


def run_node(
    node: Any, incoming: dict[int, Tensor], edges: Sequence[tuple[Any, int]], *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Run one autograd node alone, including autograd's preparations, and return the gradients that it computes.

    ``incoming`` maps the index of a forward output of the node to the gradient of this output. ``edges`` are autograd
    edges that the node's gradients reach, directly or through other nodes. Autograd has no function that runs one node:
    ``torch.autograd.grad`` would also run all other nodes on the way to ``edges``. So a hook on the node raises an
    exception after the node has run.
    """
    results: list[tuple[Tensor | None, ...]] = []

    def look(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        results.append(gradients)
        raise _Seen

    numbers = sorted(incoming)
    handle = node.register_hook(look)
    try:
        torch.autograd.grad(
            [torch.autograd.graph.GradientEdge(node, number) for number in numbers],
            [torch.autograd.graph.GradientEdge(*edge) for edge in edges],
            [incoming[number] for number in numbers],
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    except _Seen:
        pass
    finally:
        handle.remove()
    return results[0]


def edge_metadata(node: Any, number: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Return the shape, dtype and device of the gradient that an autograd node receives for a forward output."""
    described = node._input_metadata[number]
    return tuple(described.shape), described.dtype, described.device


def always_raises(node: Any) -> bool:
    """Tell whether an autograd node only raises an error, as the node of an op without a derivative does."""
    return type(node).__name__ in ("NotImplemented", "DelayedError", "Error")
