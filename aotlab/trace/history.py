"""What the nodes of the traced autograd graph keep, and which of them gradients reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.edges import Edge, next_edges
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import Tape, tensors_in


def watches(
    bits: Mapping[Any, int], tensors: Sequence[Tensor], kept_by: Mapping[Any, Sequence[Tensor]] | None = None
) -> list[int]:
    """Say for each tensor which autograd nodes keep it or an alias of it, as bits like those of the masks.

    ``kept_by`` says of some nodes what they keep unseen.

    A write to the tensor after the call is an error in the backward of these nodes, also where the compiled forward
    saved something else.
    """
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_storage.setdefault(internals.storage_key(tensor), []).append(i)
    # what was given other memory still counts with what was kept of it before
    moved = [i for i, t in enumerate(tensors) if internals.is_functional(t) and internals.was_storage_changed(t)]
    found = [0] * len(tensors)
    for node, bit in bits.items():
        hidden = kept_by.get(node, ()) if kept_by else ()
        for kept in [*internals.saved_tensors_of(node), *internals.kept_by_checkpoint(node), *hidden]:
            for i in (*by_storage.get(internals.storage_key(kept), ()), *moved):
                if internals.share_version(kept, tensors[i]):
                    found[i] |= 1 << bit
    return found


def read_by_themselves(tape: Tape, nodes: Iterable[Any], bits: Mapping[Any, int]) -> dict[int, int]:
    """Find what custom functions and checkpoints among ``nodes`` read in the backward, whether or not they saved it.

    Eager reads what they did not save, as an attribute or a captured tensor, as it is by then; here it is saved like
    all else, so that a write to it is an error. Returns masks of the nodes by the keys of storages.
    """
    masks = {
        internals.sequence_of(node): 1 << bits[node] if node in bits else LASTING
        for node in nodes
        if internals.is_custom_function_node(node) or internals.is_checkpointed(node)
    }
    found: dict[int, int] = {}
    for operation in tape.operations:
        if operation.phase == "backward" and (mask := masks.get(operation.sequence or -1)):
            for tensor in tensors_in((operation.args, operation.kwargs)):
                if tensor.layout == torch.strided:
                    found[internals.storage_key(tensor)] = found.get(internals.storage_key(tensor), 0) | mask
    return found


def kept_entries(part: Segment, nodes: Iterable[Any]) -> tuple[int, ...]:
    """Return the numbers of the entries of a segment that are edges of what ``nodes`` keep with its history.

    What cannot be seen counts as kept: all that went through a node of a checkpoint, which computes again what had
    that history, and through one of a write to a view.
    """
    unsaved = (node for node in _nodes_of(part) if internals.keeps_unsaved(node))
    kept = {edge for node in (*nodes, *unsaved) for edge in (*_edges_kept(node), *_edges_kept_unseen(node, part))}
    return tuple(n for n, edge in enumerate(part.entries) if edge in kept and edge not in part.stops)


def _edges_kept(node: Any) -> list[Edge]:
    return [(tensor.grad_fn, tensor.output_nr) for tensor in internals.saved_tensors_of(node) if tensor.requires_grad]


def _edges_kept_unseen(node: Any, part: Segment) -> list[Edge]:
    """Return the edges of what a node may keep where autograd does not show it, or as an attribute."""
    edges: list[Edge] = []
    if internals.is_custom_function_node(node):
        attributes = tensors_in(list(vars(node).values()))
        edges += [(tensor.grad_fn, tensor.output_nr) for tensor in attributes if tensor.requires_grad]
    if internals.is_copy_slices(node):  # it may keep the view that was written
        edges += [edge for edge in part.entries if any(behind[0] is node for behind in next_edges(edge[0]))]
    if internals.is_copy_slices(node) or internals.is_checkpointed(node):
        edges += [edge for edge in part.entries if edge[0] is node]
        edges += next_edges(node)
    return edges


#: The bit of nodes that hold values which autograd does not let go of after a backward; the others' bits follow.
LASTING = 1


def node_bits(parts: Sequence[Segment]) -> dict[Any, int]:
    """Give the autograd nodes that hold saved tensors their numbers; where there is a single entry all have one."""
    lone = sum(len(part.entries) for part in parts) == 1
    bits: dict[Any, int] = {}
    for node in (node for part in parts for node in _nodes_of(part)):
        if internals.saves_tensors(node):
            bits[node] = 1 if lone else len(bits) + 2
    return bits


def _nodes_of(part: Segment) -> Iterator[Any]:
    """Yield the autograd nodes that run in a segment, the later ones first."""
    stops = set(part.stops)
    entered: set[Any] = set()
    todo = [node for node, _ in part.entries]
    while todo:
        node = todo.pop()
        if node not in entered and part.runs(node):
            entered.add(node)
            yield node
            todo += [edge[0] for edge in next_edges(node) if edge not in stops]


@dataclass(frozen=True, slots=True)
class Survey:
    """What is special in an autograd graph: nodes of ``custom`` functions, ``hidden`` and ``lost`` ones.

    From a hidden node a gradient gets to where nobody looks: to a tensor of the function's own that requires grad, or
    to nothing at all, as from a view of a leaf that was made under ``no_grad``. From a lost one it gets nowhere else.
    """

    custom: tuple[Any, ...] = ()
    hidden: tuple[Any, ...] = ()
    lost: tuple[Any, ...] = ()


def survey(parts: Sequence[Segment]) -> Survey:
    """Go through the graph behind all segments."""
    stops = {edge for part in parts for edge in part.inputs}
    entered: dict[Any, list[Any]] = {}
    todo = [node for part in parts for node, _ in part.entries if (node, 0) not in stops]
    ends, arriving = [], []
    while todo:
        node = todo.pop()
        if node in entered:
            continue
        edges = next_edges(node)
        entered[node] = [edge[0] for edge in edges if edge not in stops]
        todo += entered[node]
        if not edges:
            ends.append(node)
        if len(entered[node]) < len(edges):
            arriving.append(node)
    custom = tuple(node for node in entered if internals.is_custom_function_node(node))
    if not ends:
        return Survey(custom)
    before: dict[Any, list[Any]] = {}
    for node, following in entered.items():
        for target in following:
            before.setdefault(target, []).append(node)

    def leading_to(nodes: list[Any]) -> dict[Any, None]:
        found: dict[Any, None] = {}
        while nodes:
            node = nodes.pop()
            if node not in found:
                found[node] = None
                nodes += before.get(node, [])
        return found

    hidden, arrived = leading_to(ends), leading_to(arriving)
    return Survey(custom, tuple(hidden), tuple(node for node in hidden if node not in arrived))


def reachable(segment: Segment) -> set[Edge]:
    """Return the stops to which there is a way, whether or not a gradient goes it."""
    stops = set(segment.stops)
    found = {edge for edge in segment.entries if edge in stops}
    entered: set[Any] = set()
    todo = [node for node, _ in segment.entries if segment.has(node)]
    while todo:
        node = todo.pop()
        if node in entered:
            continue
        entered.add(node)
        for edge in next_edges(node):
            if edge in stops:
                found.add(edge)
            elif segment.has(edge[0]):
                todo.append(edge[0])
    return found


def leading_to(part: Segment, ways: Sequence[Exit]) -> list[Any]:
    """Return the nodes of a segment through which a gradient gets to some of its exits."""
    before: dict[Any, list[Any]] = {}
    senders: list[Any] = []
    entered: set[Any] = set()
    todo = [node for node, _ in part.entries]
    ends = {edge for edge, sender, _ in ways if sender is None}
    while todo:
        node = todo.pop()
        if node in entered or not part.has(node):
            continue
        entered.add(node)
        for edge in next_edges(node):
            if edge in ends:
                senders.append(node)
            if edge not in part.stops:
                before.setdefault(edge[0], []).append(node)
                todo.append(edge[0])
    found: dict[Any, None] = {}
    todo = [*senders, *(sender for _, sender, _ in ways if sender is not None)]
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += before.get(node, [])
    return list(found)


def state_masks(parts: Sequence[Segment], bits: Mapping[Any, int]) -> list[list[int]]:
    """Say for each entry of each segment which of the nodes in ``bits`` it reaches there, and whether lasting ones."""
    masks = []
    for part in parts:
        stops = set(part.stops)
        own = []
        for start, _ in part.entries:
            mask = 0
            entered: set[Any] = set()
            todo = [start]
            while todo:
                node = todo.pop()
                if node in entered or not part.runs(node):
                    continue
                entered.add(node)
                if node in bits:
                    mask |= 1 << bits[node]
                if internals.keeps_unsaved(node) and not internals.saves_tensors(node):
                    mask |= LASTING
                todo += [edge[0] for edge in next_edges(node) if edge not in stops]
            own.append(mask)
        masks.append(own)
    return masks
