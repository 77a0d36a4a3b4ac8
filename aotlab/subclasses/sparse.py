"""Sparse gradients of weights that are looked up, as in `nn.Embedding(sparse=True)`: in a trace they are wrappers.

    weight.grad  =  a sparse tensor of indices and rows      # in eager
    SparseGradient(places, rows)                             # in a trace; both parts have anchors

Graphs compute the parts, and the node behind the anchors makes the sparse tensor of them. Places are float64, as only
floats are gradients: exact below 2**53. The rows of ``padding_idx`` are left out at the end, too: how many there are
hangs on values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import DoubleBackwardError
from aotlab.ir.subclasses import Layout, SubclassSpec
from aotlab.trace.running import here, is_tracing

#: What to do instead.
DENSE = "`sparse=False` is compiled"
#: How torch numbers the mode of bags.
_MEAN = 1
aten = torch.ops.aten


class SparseGradient(Tensor):
    """The gradient of a weight of ``size`` in a trace; the row ``padding`` gets none, -1 if all do."""

    places: Tensor
    rows: Tensor
    padding: int

    @staticmethod
    def __new__(cls, places: Tensor, rows: Tensor, padding: int, size: Sequence[int]) -> SparseGradient:
        """Make the wrapper."""
        made: SparseGradient = internals.wrapper_of(cls, size, rows)
        made.places, made.rows, made.padding = places, rows, padding
        return made

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """Name the parts."""
        return ["places", "rows"], self.padding

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], padding: int, size: Sequence[int], _: Any) -> Tensor:
        """Make the gradient of a call, a sparse tensor."""
        places, rows = parts["places"].to(torch.int64), parts["rows"]
        if padding >= 0:
            kept = places != padding
            places, rows = places[kept], rows[kept]
        return internals.sparse_of_rows(places, rows, size)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Leave to eager what computes with it, as the sum of the gradients of two uses."""
        if func is not aten.detach.default:
            raise RunEagerly(f"`{func}` computes with a sparse gradient", suggestion=DENSE)
        it = args[0]
        return cls(it.places.detach(), it.rows.detach(), it.padding, it.shape)


def of_another_kind() -> Exception:
    """Make the error for what is no sparse gradient of a trace, where one comes in."""
    if is_tracing():
        return RunEagerly("a weight that is looked up with sparse=True has a dense gradient", suggestion=DENSE)
    return DoubleBackwardError(
        "a sparse gradient of a compiled function is differentiated",
        why="its node knows its rows only",
        suggestion="call the original function where higher derivatives are needed, or use sparse=False",
    )


class Lookups:
    """Does ops of lookups in a trace; ``found`` are the weights, what their gradients are and of how many rows."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, SubclassSpec, Any]] = []
        self._padding = -1

    def call(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Do an op; NotImplemented if it is to be done as it is."""
        if here.active[-1].phase == "forward":
            padding = internals.padding_of_lookup(func, args)
            if padding is not None and args[0].requires_grad:
                self.found.append((args[0], _spec(args[0], padding), args[1].numel()))
        elif func is internals.BACKWARD_OF_BAGS and args[9] and not args[7]:  # by frequency, it raises
            return _of_bags(*args)
        elif internals.is_in_lookup():
            if func is aten.ne.Scalar:
                self._padding = args[1]
            elif func is aten.index.Tensor:  # of what is no padding
                return args[0].view(args[0].shape)
            elif func is internals.MAKES_SPARSE:
                padding, self._padding = self._padding, -1
                return _gradient(args[3], args[4], padding, args[2])
        return NotImplemented


def _spec(weight: Tensor, padding: int) -> SubclassSpec:
    if internals.is_symbolic(weight):
        raise RunEagerly("a weight whose sizes vary has a sparse gradient", suggestion=DENSE)
    layout = Layout(size=tuple(weight.shape), stride=tuple(weight.stride()))
    parts = (("places", 0), ("rows", 1))
    return SubclassSpec(type=SparseGradient, dtype=weight.dtype, parts=parts, context=padding, layout=layout)


def _gradient(indices: Tensor, rows: Tensor, padding: int, size: Sequence[int]) -> SparseGradient:
    return SparseGradient(indices.reshape(-1).to(torch.float64), rows, padding, size)


def _of_bags(grad: Tensor, indices: Tensor, offsets: Tensor, *rest: Any) -> SparseGradient:
    """Compute the gradient of bags; in which of them a row is, the forward may have left out."""
    _, bag_size, _, count, _, kind, _, weights, padding = (*rest, -1)[:9]
    numbers = torch.arange(indices.size(0), dtype=offsets.dtype, device=offsets.device)
    bags = torch.searchsorted(offsets, numbers, right=True) - 1
    rows = grad.index_select(0, bags)
    if kind == _MEAN:
        rows = rows * bag_size.to(grad.dtype).reciprocal().unsqueeze(1).index_select(0, bags)
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    return _gradient(indices, rows, padding, (count, grad.size(1)))
