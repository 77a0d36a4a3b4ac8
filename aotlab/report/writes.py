"""Which bytes of the caller's tensors a traced function writes.

    def f(x):
        x[:, 1] = 0        # select_scatter = select_scatter(x, zeros, 1, 1), the new value of x

In a trace a write through a view is an op that puts the view's new value into a new value of the whole tensor. So a
written input's last value leads back to the input, over each write to it; each op on the way says which part it
replaced. The ops of views, repeated without memory on the input's own sizes and strides, say where that part lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.ir.graphs import moves_nothing, output_args
from aotlab.ir.metadata import MutationType
from aotlab.report.model import Written

if TYPE_CHECKING:
    from aotlab.ir.specs import TensorSpec
    from aotlab.trace.records import TraceRecord

_ATEN = torch.ops.aten
#: Ops that put a new value into a view of their first argument, and the op that makes the view.
_SCATTERS: Mapping[Any, Any] = {
    _ATEN.select_scatter.default: _ATEN.select.int,
    _ATEN.slice_scatter.default: _ATEN.slice.Tensor,
    _ATEN.diagonal_scatter.default: _ATEN.diagonal.default,
    _ATEN.as_strided_scatter.default: _ATEN.as_strided.default,
}
#: Ops whose result is their first argument but for some elements, which the values of other arguments say.
_IN_PART = frozenset(
    (
        *("index_put", "_unsafe_index_put", "index_copy", "index_fill", "index_add", "index_reduce", "put"),
        *("scatter", "scatter_add", "scatter_reduce", "masked_fill", "masked_scatter", "fill_diagonal", "tril", "triu"),
    )
)
_SAME_VALUE = frozenset(("clone", "contiguous"))
#: Of one tensor so many windows are told apart, and so many runs of bytes are counted one by one.
MOST_WINDOWS = 64
MOST_RUNS = 20_000

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Value:
    """A value that is its input's but for what was written: where its elements lie there, and the windows written.

    ``place`` is a tensor without memory, as the input would be seen through the value's views.
    """

    source: fx.Node
    place: Tensor
    windows: frozenset[Written] = frozenset()

    def written(self, place: Tensor, *, certain: bool) -> _Value:
        return replace(self, windows=self.windows.union(_window(place, certain=certain)))


class _NotKnown(Exception):  # noqa: N818  # how the search ends where it meets what it does not know
    pass


def written_windows(record: TraceRecord) -> tuple[tuple[Written, ...], ...]:
    """Return, for each kept input of a trace, what of its storage is written."""
    metadata, finals = record.metadata, _finals(record)
    found: list[tuple[Written, ...]] = []
    known: dict[fx.Node, Any] = {}
    groups = {k: members for members in record.bases for k in members}
    with internals.outside_of_trace(), torch.no_grad():
        for info in metadata.input_info:
            if not info.mutates_data or (info.index not in finals and info.index in groups):  # a longer one tells
                found.append(())
                continue
            origins = [metadata.input_info[k].spec.byte_offset for k in groups.get(info.index, ())]
            try:
                found.append(_joined(_windows_of(info.spec, _value_of(finals[info.index], known), origins)))
            except Exception:  # noqa: BLE001  # whatever an op says to sizes that it was not recorded with
                found.append(_whole(info.spec, certain=False))
    return tuple(found)


def _finals(record: TraceRecord) -> dict[int, fx.Node]:
    """Return the last value of each written input: the graph writes it itself, or returns it to the epilogue."""
    inputs, graph = record.metadata.input_info, record.module.graph
    copies = [node for node in graph.nodes if node.target is _ATEN.copy_.default]
    kept = [info.index for info in inputs if info.mutation_type is MutationType.MUTATED_IN_GRAPH]
    found = {k: node.args[1] for k, node in zip(kept, copies, strict=False)}
    named = {f"mutated input {info.name}": info.index for info in inputs}
    for label, node in zip(record.outputs, output_args(graph), strict=False):
        if label in named and node is not None:
            found[named[label]] = node
    return found


def _windows_of(spec: TensorSpec, value: _Value | None, origins: Sequence[Any]) -> Iterable[Written]:
    """Return the windows written of one input, in bytes of its storage; ``origins`` are of those it shares it with."""
    if value is None:
        return _whole(spec, certain=True)
    source = value.source.meta["val"]
    begin = source.storage_offset() * source.element_size()
    if not origins and (tuple(source.shape), source.stride()) != (spec.shape, spec.stride):
        raise _NotKnown
    shift = (min(origins) if origins else spec.byte_offset) - begin
    return [replace(window, start=window.start + shift) for window in value.windows]


def _value_of(final: fx.Node, known: dict[fx.Node, Any]) -> _Value | None:
    """Say what a value has of an input's; None if it is computed as a whole."""
    todo = [final]
    while todo:
        before = _before(todo[-1])
        missing = [node for node in before if node not in known]
        if missing:
            todo += missing
        else:
            node = todo.pop()
            known[node] = _step(node, [known[each] for each in before])
    found: _Value | None = known[final]
    return found


def _before(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of a node whose values may be in its own."""
    name = _name(node)
    if name == "copy":  # into new memory it copies, over what there is it writes all
        kept = node.args[1:2] if _name(node.args[0]).startswith(("empty", "new_empty")) else ()
    elif name == "where":
        kept = node.args[1:3]
    elif node.target in _SCATTERS:
        kept = node.args[:2]
    elif name in _IN_PART or name in _SAME_VALUE or name == "getitem" or _is_view(node):
        kept = node.args[:1]
    else:
        kept = ()
    return [each for each in kept if isinstance(each, fx.Node)]


def _step(node: fx.Node, before: Sequence[Any]) -> Any:
    """Say what a node's value has of an input's, from what the arguments have; of a list of views, for each."""
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
    """Make a tensor without memory that lies in its storage as another does."""
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    extent = offset + 1 + sum(max(n - 1, 0) * step for n, step in zip(shape, stride, strict=True))
    return torch.empty(extent, dtype=tensor.dtype, device="meta").as_strided(shape, stride, offset)


def _layout(tensor: Tensor) -> Any:
    steps = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]
    return tensor.storage_offset(), tensor.dtype, steps


# --- windows


def _whole(spec: TensorSpec, *, certain: bool) -> tuple[Written, ...]:
    sizes = (*spec.shape, *spec.stride, spec.byte_offset)
    if not all(isinstance(size, int) for size in sizes):
        return ()
    return strided(spec.byte_offset, spec.shape, spec.stride, spec.dtype.itemsize, certain=certain)  # type: ignore[arg-type]  # as was asked


def _window(place: Tensor, *, certain: bool) -> tuple[Written, ...]:
    size = place.element_size()
    return strided(int(place.storage_offset()) * size, place.shape, place.stride(), size, certain=certain)


def strided(
    start: int, shape: Sequence[int], stride: Sequence[int], itemsize: int, *, certain: bool = True
) -> tuple[Written, ...]:
    """Describe the bytes of a strided tensor as one window in as few dimensions as there can be; none if it is empty.

    The sizes and strides are in elements, as a tensor has them.
    """
    steps = [step * itemsize for step in stride]
    return () if 0 in shape else (_folded(start, shape, steps, itemsize, certain=certain),)


def _folded(start: int, counts: Sequence[int], steps: Sequence[int], length: int, *, certain: bool) -> Written:
    kept: list[tuple[int, int]] = []  # the innermost first
    for step, count in sorted((step, count) for step, count in zip(steps, counts, strict=True) if count > 1 and step):
        if not kept and step <= length:
            length += step * (count - 1)
        elif kept and step == kept[-1][1] * kept[-1][0]:
            kept[-1] = kept[-1][0] * count, kept[-1][1]
        else:
            kept.append((count, step))
    counts, steps = tuple([count for count, _ in reversed(kept)]), tuple([step for _, step in reversed(kept)])
    return Written(start=start, length=length, counts=counts, steps=steps, certain=certain)


def _joined(windows: Iterable[Written]) -> tuple[Written, ...]:
    """Join windows that touch or are equally far apart; of too many only keep between which bytes they lie."""
    kinds: dict[Any, list[Written]] = {}
    for each in windows:
        kinds.setdefault((each.certain, each.counts, each.steps), []).append(each)
    found: dict[Written, None] = {}
    for (certain, counts, steps), alike in kinds.items():
        lengths: dict[int, list[int]] = {}
        for start, stop in union([(each.start, each.start + each.length) for each in alike]):
            lengths.setdefault(stop - start, []).append(start)
        for length, starts in lengths.items():
            gaps = {later - start for start, later in pairwise(starts)}
            if len(gaps) == 1:  # as a loop over rows leaves them
                found[_folded(starts[0], (len(starts), *counts), (*gaps, *steps), length, certain=certain)] = None
                continue
            for start in starts:
                found[_folded(start, counts, steps, length, certain=certain)] = None
    if len(found) > MOST_WINDOWS:
        start = min(each.start for each in found)
        return (Written(start=start, length=max(map(_stop, found)) - start, certain=False),)
    return tuple(sorted(found, key=lambda each: (each.start, not each.certain)))


def _stop(window: Written) -> int:
    steps = zip(window.counts, window.steps, strict=True)
    return window.start + window.length + sum((count - 1) * step for count, step in steps)


def bytes_written(own: Sequence[Written], windows: Sequence[Written]) -> tuple[int | None, int]:
    """Count how many bytes of a tensor's ``own`` are in windows that are written, and in others; None: not counted."""
    if not windows:
        return 0, 0
    lists = [runs(each) for each in (own, [each for each in windows if each.certain], windows)]
    mine, sure, every = lists
    if mine is not None and sure is not None and every is not None:
        count = _common(mine, sure)
        return count, _common(mine, every) - count
    kinds = {(each.certain, each.counts, each.steps) for each in windows}
    first, last = min(each.start for each in windows), max(each.start + each.length for each in windows)
    apart = len(windows) == 1 or (len(kinds) == 1 and last - first <= windows[0].steps[-1])
    inside = [replace(each, certain=True) for each in windows] == list(own) or (
        len(own) == 1 and not own[0].counts and own[0].start <= first and max(map(_stop, windows)) <= _stop(own[0])
    )
    if not (apart and inside):
        return None, 0
    count = sum(each.length * prod(each.counts) for each in windows)
    return (count, 0) if windows[0].certain else (0, count)


def _common(some: Sequence[Range], others: Sequence[Range]) -> int:
    """Count the bytes that two merged lists of ranges have in common."""
    return sum(b - a for ranges in (some, others) for a, b in ranges) - sum(b - a for a, b in union((*some, *others)))


def runs(windows: Iterable[Written]) -> list[Range] | None:
    """List the runs of bytes in windows, merged; None if they are too many."""
    windows = list(windows)
    if sum(prod(each.counts) for each in windows) > MOST_RUNS:
        return None
    found = []
    for each in windows:
        starts = [each.start]
        for count, step in zip(each.counts, each.steps, strict=True):
            starts = [start + i * step for start in starts for i in range(count)]
        found += [(start, start + each.length) for start in starts]
    return union(found)


def union(ranges: Iterable[Range]) -> list[Range]:
    """Merge ranges that overlap or touch."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
