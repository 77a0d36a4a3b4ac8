"""Sparse gradients of looked-up weights, as in `nn.Embedding(sparse=True)`: in a trace they are wrappers.

    weight.grad  =  a sparse tensor of indices and rows      # in eager
    SparseGradient(places, rows)                             # in a trace; each part has an anchor

A graph computes the parts, and the autograd node that made the anchors makes the sparse tensor from them. ``places``
are the indices as float64, because only floating-point tensors can be gradients. float64 represents indices below 2**53
exactly. The node also removes the rows of ``padding_idx``. The graph cannot do that, because the number of these rows
depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.ir.subclass_records import AnchoredGradient, Layout, SizeOfPart, SubclassSpec
from aotlab.trace.recorder import running

aten = torch.ops.aten


class SparseGradient(Tensor):
    """The sparse gradient of a weight in a trace: a wrapper whose parts are the looked-up indices and the rows.

    The weight's row ``padding`` (``padding_idx``) gets no gradient; -1 means that there is no such row.
    """

    places: Tensor
    rows: Tensor
    padding: int

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """Return the names of the parts, and the number of the weight's padding row as context."""
        return ["places", "rows"], self.padding

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], padding: int, size: Sequence[int], _: Any) -> Any:
        """Make the gradient that a compiled call returns: a sparse tensor."""
        places, rows = parts["places"].to(torch.int64), parts["rows"]
        if padding >= 0:
            has_gradient = places != padding
            places, rows = places[has_gradient], rows[has_gradient]
        return internals.SPARSE(places.view(1, -1), rows, list(size))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # mypy sees a method of tensors
        """Refuse an op that computes with the gradient, such as the sum of the gradients of two uses."""
        if func is not aten.detach.default:
            raise RunEagerly("computes-with-sparse-gradient", why=f"`{func}` computes with it")
        return _gradient(args[0].places, args[0].rows, args[0].padding, args[0].shape)


def _gradient(places: Tensor, rows: Tensor, padding: int, size: Sequence[int]) -> Any:
    gradient = internals.make_wrapper(SparseGradient, size, dtype=rows.dtype, device=rows.device)
    gradient.places, gradient.rows, gradient.padding = places.reshape(-1).to(torch.float64), rows, padding
    return gradient


def run_op(mode: Any, func: Any, args: tuple[Any, ...]) -> Any:
    """Handle the ops of an embedding with ``sparse=True`` in a trace; return NotImplemented for all other ops.

    ``mode`` is the `AboveFunctionalization` of the trace. In the forward, this function notes in ``mode`` which weights
    are looked up. In the backward, it computes a `SparseGradient` in place of a sparse tensor.
    """
    if running.recorders[-1].phase == "forward":
        padding = internals.padding_of_lookup(func, args)
        if padding is not None and args[0].requires_grad:
            _note(mode, args[0], args[1], padding)
    elif func is internals.BACKWARD_OF_BAGS and args[9] and not args[7]:  # the arguments sparse and scale_grad_by_freq
        return _of_bags(*args)
    elif (node := internals.current_node()) is not None and node.name().startswith("Embedding"):
        if func is aten.ne.Scalar:
            mode.mask = func(*args), args[1]
            return mode.mask[0]
        if func is aten.index.Tensor and args[1][0] is mode.mask[0]:  # selects the rows that are not padding
            mode.padding = mode.mask[1]
            return args[0].view(args[0].shape)
        if func is internals.MAKES_SPARSE:
            padding, mode.padding = mode.padding, -1
            return _gradient(args[3], args[4], padding, args[2])
    return NotImplemented


def _note(mode: Any, weight: Tensor, indices: Tensor, padding: int) -> None:
    """If ``weight`` is an argument of the function, note the layout of its sparse gradient in ``mode.lookups``.

    The gradient has one row for each element of ``indices``. If an argument has that many elements, the number of rows
    is read from that argument in each call.
    """
    tensors = [(n, value) for n, value in enumerate(mode.values) if isinstance(value, Tensor)]
    place = next((n for n, value in tensors if value is weight), None)
    if place in mode.lookups:
        raise RunEagerly("computes-with-sparse-gradient", why="the weight is looked up twice", at=user_line())
    if place is not None:
        wanted = internals.storage_key(indices), internals.expression_of(indices.numel())
        like = [n for n, t in tensors if (internals.storage_key(t), internals.expression_of(t.numel())) == wanted]
        rows = SizeOfPart(1 + like[0], -1) if like else int(indices.numel())
        layout = Layout(size=tuple(map(int, weight.shape)), stride=tuple(map(int, weight.stride())))
        parts, dtype = (("places", 0), ("rows", 1)), weight.dtype
        spec = SubclassSpec(type=SparseGradient, dtype=dtype, parts=parts, context=padding, layout=layout)
        anchors = (torch.float64, (rows,)), (dtype, (rows, layout.size[1]))
        mode.lookups[place] = AnchoredGradient(spec=spec, anchors=anchors)


def _of_bags(grad: Tensor, indices: Tensor, offsets: Tensor, *rest: Any) -> Any:
    """Compute the gradient of the weight of an `EmbeddingBag`, in place of the backward op with these arguments.

    This function computes the bag of each row from ``offsets``, because the forward does not always return the bags.
    """
    _, bag_size, _, count, _, kind, _, weights, padding = (*rest, -1)[:9]
    numbers = torch.arange(indices.size(0), dtype=offsets.dtype, device=offsets.device)
    bags = torch.searchsorted(offsets, numbers, right=True) - 1
    rows = grad.index_select(0, bags)
    if kind == 1:  # the mean
        rows = rows * bag_size.to(grad.dtype).reciprocal().unsqueeze(1).index_select(0, bags)
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    return _gradient(indices, rows, padding, (count, grad.size(1)))
