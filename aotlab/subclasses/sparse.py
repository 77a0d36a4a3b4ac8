"""Sparse gradients of weights that are looked up, as in `nn.Embedding(sparse=True)`: in a trace they are wrappers.

    weight.grad  =  a sparse tensor of indices and rows      # in eager
    SparseGradient(places, rows)                             # in a trace; both parts have anchors

Graphs compute the parts, and the anchors' node makes the sparse tensor of them. Places are float64, as only floats are
gradients: exact below 2**53. Rows of ``padding_idx`` are left out there, too: how many there are hangs on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.subclasses import AnchoredGradient, Layout, SizeOfPart, SubclassSpec
from aotlab.trace.running import here

_DENSE = "`sparse=False` is compiled"
aten = torch.ops.aten


class SparseGradient(Tensor):
    """The gradient of a weight in a trace; the row ``padding`` gets none, -1 if all do."""

    places: Tensor
    rows: Tensor
    padding: int

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """Name the parts."""
        return ["places", "rows"], self.padding

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], padding: int, size: Sequence[int], _: Any) -> Any:
        """Make the gradient of a call, a sparse tensor."""
        places, rows = parts["places"].to(torch.int64), parts["rows"]
        if padding >= 0:
            kept = places != padding
            places, rows = places[kept], rows[kept]
        return internals.SPARSE(places.view(1, -1), rows, list(size))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # mypy sees a method of tensors
        """Leave to eager what computes with it, as the sum of the gradients of two uses."""
        if func is not aten.detach.default:
            raise RunEagerly(f"`{func}` computes with a sparse gradient", suggestion=_DENSE)
        return _gradient(args[0].places, args[0].rows, args[0].padding, args[0].shape)


def _gradient(places: Tensor, rows: Tensor, padding: int, size: Sequence[int]) -> Any:
    made = internals.make_wrapper(SparseGradient, size, dtype=rows.dtype, device=rows.device)
    made.places, made.rows, made.padding = places.reshape(-1).to(torch.float64), rows, padding
    return made


def called(mode: Any, func: Any, args: tuple[Any, ...]) -> Any:
    """Do an op as the trace of a lookup needs it; NotImplemented if it is to be done as it is."""
    if here.active[-1].phase == "forward":
        padding = internals.padding_of_lookup(func, args)
        if padding is not None and args[0].requires_grad:
            _note(mode, args[0], args[1], padding)
    elif func is internals.BACKWARD_OF_BAGS and args[9] and not args[7]:  # by frequency, it raises
        return _of_bags(*args)
    elif (node := internals.current_node()) is not None and node.name().startswith("Embedding"):
        if func is aten.ne.Scalar:
            mode.mask = func(*args), args[1]
            return mode.mask[0]
        if func is aten.index.Tensor and args[1][0] is mode.mask[0]:  # of what is no padding
            mode.padding = mode.mask[1]
            return args[0].view(args[0].shape)
        if func is internals.MAKES_SPARSE:
            padding, mode.padding = mode.padding, -1
            return _gradient(args[3], args[4], padding, args[2])
    return NotImplemented


def _note(mode: Any, weight: Tensor, indices: Tensor, padding: int) -> None:
    """Note the gradient of a weight that is an argument; the number of its rows is that of another's elements."""
    tensors = [(n, value) for n, value in enumerate(mode.values) if isinstance(value, Tensor)]
    place = next((n for n, value in tensors if value is weight), None)
    if place in mode.lookups:
        raise RunEagerly("a weight is looked up twice, and its gradient is sparse", suggestion=_DENSE)
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
    """Compute the gradient of bags; in which of them a row is, the forward may have left out."""
    _, bag_size, _, count, _, kind, _, weights, padding = (*rest, -1)[:9]
    numbers = torch.arange(indices.size(0), dtype=offsets.dtype, device=offsets.device)
    bags = torch.searchsorted(offsets, numbers, right=True) - 1
    rows = grad.index_select(0, bags)
    if kind == 1:  # the mean
        rows = rows * bag_size.to(grad.dtype).reciprocal().unsqueeze(1).index_select(0, bags)
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    return _gradient(indices, rows, padding, (count, grad.size(1)))
