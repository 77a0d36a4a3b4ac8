"""Find the bytes of the caller's tensors that a traced function writes.

    def f(x):
        x[:, 1] = 0        # select_scatter = select_scatter(x, zeros, 1, 1), the new value of x

In a trace, a write through a view is an op that takes the whole tensor and the view's new value, and returns a new
whole tensor. So the path from an input's last value back to the input contains an op for each write to the input, and
the arguments of this op describe the view that was written. To find the bytes of the view, the view ops are run again
on a meta tensor with the input's sizes and strides. In this module, a *window* is a `Written`: a set of bytes that the
function writes, in runs at equal distances.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.errors import UserLine
from aotlab.ir.fx_graphs import line_of, moves_nothing, output_args
from aotlab.ir.metadata import MutationType
from aotlab.report.model import Written

if TYPE_CHECKING:
    from aotlab.ir.specs import TensorSpec
    from aotlab.trace.records import TraceRecord

_ATEN = torch.ops.aten
#: Ops that replace the value of a view of their first argument, and the op that makes the view.
_SCATTERS: Mapping[Any, Any] = {
    _ATEN.select_scatter.default: _ATEN.select.int,
    _ATEN.slice_scatter.default: _ATEN.slice.Tensor,
    _ATEN.diagonal_scatter.default: _ATEN.diagonal.default,
    _ATEN.as_strided_scatter.default: _ATEN.as_strided.default,
}
#: Ops that replace some elements of their first argument. The set of these elements depends on the values of other
#: arguments, or is not computed here.
_IN_PART = frozenset(
    (
        *("index_put", "_unsafe_index_put", "index_copy", "index_fill", "index_add", "index_reduce", "put"),
        *("scatter", "scatter_add", "scatter_reduce", "masked_fill", "masked_scatter", "fill_diagonal", "tril", "triu"),
    )
)
#: Ops whose result has the same elements as their first argument.
_SAME_VALUE = frozenset(("clone", "contiguous"))
#: The text of a line that writes a tensor in place.
_IN_PLACE = re.compile(r"\w_\(|\]\s*=[^=]|[-+*/@|&^%]=[^=]|\bout=")
#: If a tensor has more than `MOST_WINDOWS` windows, they are replaced by one large window. If it has more than
#: `MOST_RUNS` runs of bytes, these are not counted one by one.
MOST_WINDOWS = 64
MOST_RUNS = 20_000

#: The position of the first byte, and the position after the last byte.
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Value:
    """The value of a node that equals an input, or a view of the input, except for the elements that were written.

    ``source`` is the placeholder of the input. ``place`` is a meta tensor whose sizes, strides and offset describe the
    view of the input that the value equals. ``windows`` are the bytes of the input that were written.
    """

    source: fx.Node
    place: Tensor
    windows: frozenset[Written] = frozenset()

    def written(self, place: Tensor, *, certain: bool) -> _Value:
        """Return this value after a write to the elements of ``place``, a view of the same input.

        If ``certain`` is false, perhaps only some of these elements are written.
        """
        return replace(self, windows=self.windows.union(_window(place, certain=certain)))


class _NotKnown(Exception):  # noqa: N818  # not an error: `written_windows` catches it
    """Raised if the written bytes cannot be determined. Then any byte of the tensor is reported as perhaps written."""


def written_windows(record: TraceRecord) -> tuple[tuple[Written, ...], ...]:
    """Return for each kept input the windows of its storage that the function writes."""
    metadata, finals = record.metadata, _finals(record)
    windows: list[tuple[Written, ...]] = []
    values: dict[fx.Node, Any] = {}
    groups = {k: members for members in record.bases for k in members}
    with internals.outside_of_trace(), torch.no_grad():
        for info in metadata.input_info:
            # All writes to a synthetic base are found from the last value of any of its inputs. So a base's input
            # without a last value needs no windows: the other inputs have them.
            if not info.mutates_data or (info.index not in finals and info.index in groups):
                windows.append(())
                continue
            origins = [metadata.input_info[k].spec.byte_offset for k in groups.get(info.index, ())]
            try:
                windows.append(_joined(_windows_of(info.spec, _value_of(finals[info.index], values), origins)))
            except Exception:  # noqa: BLE001  # an op may raise anything on a meta tensor
                windows.append(_whole(info.spec, certain=False))
    return tuple(windows)


def writing_lines(record: TraceRecord) -> tuple[tuple[UserLine, ...], ...]:
    """Return for each kept input the lines of the user's program that write it, the last one first."""
    finals = _finals(record)
    groups = {k: members for members in record.bases for k in members}
    lines = []
    for info in record.metadata.input_info:
        ends = [finals[k] for k in (info.index, *groups.get(info.index, ())) if k in finals and info.mutates_data]
        found = [line_of(node) for node in _writes(ends[0])] if ends else []
        lines.append(tuple(dict.fromkeys([line for line in found if line is not None])))
    return tuple(lines)


def _writes(final: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that compute new elements of an input, from the node ``final`` with the input's last value.

    An op whose result consists of new elements may follow an earlier write, as for ``x.add_(1); x.mul_(2)``, or may be
    the only write, as for ``x.copy_(y + 1)``. The text of the line decides whether the node before it is a write.
    """
    todo, seen = [(final, True)], set[fx.Node]()
    while todo:
        node, certain = todo.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        before, line = _before(node), line_of(node)
        if node.target in _SCATTERS:  # the second argument has the new elements
            todo += [(each, certain and k == 1) for k, each in enumerate(before)]
        elif before and _name(node) not in _IN_PART and _name(node) != "where":
            todo += [(each, certain) for each in before]
        elif certain or (line is not None and _IN_PLACE.search(line.code)):
            yield node
            todo += [(each, False) for each in (before or node.args[:1]) if isinstance(each, fx.Node)]


def _finals(record: TraceRecord) -> dict[int, fx.Node]:
    """Map the index of each written input to the node with the input's last value.

    The graph itself copies this value into the input, or the graph returns it and the epilogue copies it.
    """
    inputs, graph = record.metadata.input_info, record.module.graph
    copies = [node for node in graph.nodes if node.target is _ATEN.copy_.default]
    copied = [info.index for info in inputs if info.mutation_type is MutationType.MUTATED_IN_GRAPH]
    finals = {k: node.args[1] for k, node in zip(copied, copies, strict=False)}
    named = {f"mutated input {info.name}": info.index for info in inputs}
    for label, node in zip(record.outputs, output_args(graph), strict=False):
        if label in named and node is not None:
            finals[named[label]] = node
    return finals


def _windows_of(spec: TensorSpec, value: _Value | None, origins: Sequence[Any]) -> Iterable[Written]:
    """Return the windows of one input, as positions in its storage.

    ``spec`` describes the input. ``value`` is the input's last value; None if the function computes all elements of it,
    and so writes the whole input. ``origins`` are the byte offsets of the inputs that the same synthetic base replaces;
    empty if there is no base.
    """
    if value is None:
        return _whole(spec, certain=True)
    source = value.source.meta["val"]
    begin = source.storage_offset() * source.element_size()
    if not origins and (tuple(source.shape), source.stride()) != (spec.shape, spec.stride):
        raise _NotKnown
    shift = (min(origins) if origins else spec.byte_offset) - begin
    return [replace(window, start=window.start + shift) for window in value.windows]


def _value_of(final: fx.Node, values: dict[fx.Node, Any]) -> _Value | None:
    """Return the `_Value` of the node ``final``: the input that it equals, except for the bytes that were written.

    Return None if no element of the node's result is an element of an input. ``values`` caches the `_Value` of each
    node on which ``final`` depends.
    """
    todo = [final]
    while todo:
        before = _before(todo[-1])
        missing = [node for node in before if node not in values]
        if missing:
            todo += missing
        else:
            node = todo.pop()
            values[node] = _step(node, [values[each] for each in before])
    value: _Value | None = values[final]
    return value


def _before(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of a node from which its result takes elements; empty if the op computes all elements."""
    name = _name(node)
    if name == "copy":  # a copy into a new tensor equals its source; a copy into an existing tensor is a write
        operands = node.args[1:2] if _name(node.args[0]).startswith(("empty", "new_empty")) else ()
    elif name == "where":
        operands = node.args[1:3]
    elif node.target in _SCATTERS:
        operands = node.args[:2]
    elif name in _IN_PART or name in _SAME_VALUE or name == "getitem" or _is_view(node):
        operands = node.args[:1]
    else:
        operands = ()
    return [each for each in operands if isinstance(each, fx.Node)]


def _step(node: fx.Node, before: Sequence[Any]) -> Any:
    """Return the `_Value` of a node, a list of them if the node returns several views, or None.

    None means that the op computes all elements of its result. ``before`` has the `_Value` of each node that `_before`
    returns.
    """
    name, first = _name(node), before[0] if before else None
    if node.op == "placeholder":
        return _Value(node, _like(node.meta["val"]))
    if name == "where":
        same = [each for each in before if each is not None and each.place.shape == node.meta["val"].shape]
        if len(same) > 1:
            raise _NotKnown
        return same[0].written(same[0].place, certain=False) if same else None
    if first is None or name in _SAME_VALUE or name == "copy":
        return first
    if name == "getitem":
        return first[node.args[1]]
    if name in _IN_PART:
        return first.written(first.place, certain=False)
    if node.target in _SCATTERS:
        place = _SCATTERS[node.target](first.place, *node.args[2:], **node.kwargs)
        new = before[1] if len(before) > 1 else None
        if new is not None and new.source is first.source and _layout(new.place) == _layout(place):
            return replace(first, windows=first.windows | new.windows)
        return first.written(place, certain=True)
    target: Any = node.target
    seen = target(first.place, *node.args[1:], **node.kwargs)
    return replace(first, place=seen) if isinstance(seen, Tensor) else [replace(first, place=each) for each in seen]


def _name(node: Any) -> str:
    target = getattr(node, "target", None)
    return str(target.overloadpacket.__name__ if isinstance(target, OpOverload) else getattr(target, "__name__", ""))


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and moves_nothing(node.target)


def _like(tensor: Tensor) -> Tensor:
    """Make a meta tensor with the same size, stride and storage offset as ``tensor``."""
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    extent = offset + 1 + sum(max(n - 1, 0) * step for n, step in zip(shape, stride, strict=True))
    return torch.empty(extent, dtype=tensor.dtype, device="meta").as_strided(shape, stride, offset)


def _layout(tensor: Tensor) -> Any:
    """Return a key of a view: two views of one tensor with equal keys have the same elements."""
    steps = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    return tensor.storage_offset(), tensor.dtype, steps


# --- windows


def _whole(spec: TensorSpec, *, certain: bool) -> tuple[Written, ...]:
    """Return the window of a whole tensor, or an empty tuple if its sizes, strides or offset are symbolic."""
    sizes = (*spec.shape, *spec.stride, spec.byte_offset)
    if not all(isinstance(size, int) for size in sizes):
        return ()
    return strided(spec.byte_offset, spec.shape, spec.stride, spec.dtype.itemsize, certain=certain)  # type: ignore[arg-type]  # ints, as checked above


def _window(place: Tensor, *, certain: bool) -> tuple[Written, ...]:
    size = place.element_size()
    return strided(int(place.storage_offset()) * size, place.shape, place.stride(), size, certain=certain)


def strided(
    start: int, shape: Sequence[int], stride: Sequence[int], itemsize: int, *, certain: bool = True
) -> tuple[Written, ...]:
    """Describe the bytes of a strided tensor as one window with as few dimensions as possible.

    ``start`` is a position in bytes. ``stride`` is in elements, as in a tensor. An empty tensor has no window.
    """
    steps = [step * itemsize for step in stride]
    return () if 0 in shape else (_folded(start, shape, steps, itemsize, certain=certain),)


def _folded(start: int, counts: Sequence[int], steps: Sequence[int], length: int, *, certain: bool) -> Written:
    """Make a window of runs of ``length`` bytes, and merge dimensions if their runs are at equal distances together.

    ``counts`` and ``steps`` have the number of runs and their distance in bytes for each dimension.
    """
    dims: list[tuple[int, int]] = []  # the innermost first
    for step, count in sorted((step, count) for step, count in zip(steps, counts, strict=True) if count > 1 and step):
        if not dims and step <= length:
            length += step * (count - 1)
        elif dims and step == dims[-1][1] * dims[-1][0]:
            dims[-1] = dims[-1][0] * count, dims[-1][1]
        else:
            dims.append((count, step))
    counts, steps = tuple([count for count, _ in reversed(dims)]), tuple([step for _, step in reversed(dims)])
    return Written(start=start, length=length, counts=counts, steps=steps, certain=certain)


def _joined(windows: Iterable[Written]) -> tuple[Written, ...]:
    """Merge windows that touch, and combine windows at equal distances into one window with one more dimension.

    If more than `MOST_WINDOWS` windows remain, return one window from the first to the last byte, which is not certain.
    """
    kinds: dict[Any, list[Written]] = {}
    for each in windows:
        kinds.setdefault((each.certain, each.counts, each.steps), []).append(each)
    joined: dict[Written, None] = {}
    for (certain, counts, steps), alike in kinds.items():
        lengths: dict[int, list[int]] = {}
        for start, stop in union([(each.start, each.start + each.length) for each in alike]):
            lengths.setdefault(stop - start, []).append(start)
        for length, starts in lengths.items():
            gaps = {later - start for start, later in pairwise(starts)}
            if len(gaps) == 1:  # for example, writes in a loop over rows
                joined[_folded(starts[0], (len(starts), *counts), (*gaps, *steps), length, certain=certain)] = None
                continue
            for start in starts:
                joined[_folded(start, counts, steps, length, certain=certain)] = None
    if len(joined) > MOST_WINDOWS:
        start = min(each.start for each in joined)
        return (Written(start=start, length=max(map(stop_of, joined)) - start, certain=False),)
    return tuple(sorted(joined, key=lambda each: (each.start, not each.certain)))


def stop_of(window: Written) -> int:
    """Return the position after the last byte of a window."""
    steps = zip(window.counts, window.steps, strict=True)
    return window.start + window.length + sum((count - 1) * step for count, step in steps)


def bytes_written(extent: Sequence[Written], windows: Sequence[Written]) -> tuple[int | None, int]:
    """Count the bytes of a tensor that are certainly written, and the other bytes that may be written.

    ``extent`` has the window of the bytes that belong to the tensor. ``windows`` are the bytes of the storage that are
    written, certainly or not. The first number is None if it cannot be computed.
    """
    if not windows:
        return 0, 0
    lists = [runs(each) for each in (extent, [each for each in windows if each.certain], windows)]
    mine, sure, every = lists
    if mine is not None and sure is not None and every is not None:
        count = _common(mine, sure)
        return count, _common(mine, every) - count
    kinds = {(each.certain, each.counts, each.steps) for each in windows}
    first, last = min(each.start for each in windows), max(each.start + each.length for each in windows)
    apart = len(windows) == 1 or (len(kinds) == 1 and last - first <= windows[0].steps[-1])
    inside = [replace(each, certain=True) for each in windows] == list(extent) or (
        len(extent) == 1
        and not extent[0].counts
        and extent[0].start <= first
        and max(map(stop_of, windows)) <= stop_of(extent[0])
    )
    if not (apart and inside):
        return None, 0
    count = sum(each.length * prod(each.counts) for each in windows)
    return (count, 0) if windows[0].certain else (0, count)


def _common(some: Sequence[Range], others: Sequence[Range]) -> int:
    """Count the bytes that two lists of ranges have in common; the ranges of each list are disjoint."""
    return sum(b - a for ranges in (some, others) for a, b in ranges) - sum(b - a for a, b in union((*some, *others)))


def runs(windows: Iterable[Written]) -> list[Range] | None:
    """Return the runs of bytes in windows, and merge runs that touch; return None for more than `MOST_RUNS` runs."""
    windows = list(windows)
    if sum(prod(each.counts) for each in windows) > MOST_RUNS:
        return None
    ranges = []
    for each in windows:
        starts = [each.start]
        for count, step in zip(each.counts, each.steps, strict=True):
            starts = [start + i * step for start in starts for i in range(count)]
        ranges += [(start, start + each.length) for start in starts]
    return union(ranges)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Merge ranges that overlap or touch."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
