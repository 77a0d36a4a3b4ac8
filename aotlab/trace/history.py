"""What the nodes of the traced autograd graph keep, and which of them gradients reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.edges import Edge, leading_to, next_edges, walk
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import Tape, tensors_in


def watches(bits: Mapping[Any, int], tensors: Sequence[Tensor], kept_by: Mapping[Any, Sequence[Tensor]]) -> list[int]:
    """Say for each tensor which autograd nodes keep it or an alias of it, or keep it unseen by ``kept_by``, as bits.

    Writing it after the call is an error in these nodes' backward, whatever the compiled forward saved.
    """
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_storage.setdefault(internals.storage_key(tensor), []).append(i)
    found = [0] * len(tensors)
    for node, bit in bits.items():
        for kept in [*internals.saved_tensors_of(node), *internals.kept_by_checkpoint(node), *kept_by.get(node, ())]:
            for i in by_storage.get(internals.storage_key(kept), ()):
                if internals.share_version(kept, tensors[i]):
                    found[i] |= 1 << bit
    return found


def read_by_themselves(tape: Tape, nodes: Iterable[Any], bits: Mapping[Any, int]) -> dict[int, int]:
    """Find what custom functions and checkpoints read in the backward, saved or not: node masks by storage.

    Eager reads what they did not save as it is by then; here it is saved, so that a write to it is an error.
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
    """Return the numbers of the entries that are edges of what ``nodes`` keep with its history, or may, unseen."""
    unsaved = (node for node in nodes_of(part) if internals.keeps_unsaved(node))
    kept = {edge for node in (*nodes, *unsaved) for edge in _edges_kept(node, part)}
    return tuple(n for n, edge in enumerate(part.entries) if edge in kept and edge not in part.stops)


def _edges_kept(node: Any, part: Segment) -> list[Edge]:
    """Return the edges of what a node keeps, or may keep where autograd does not show it."""
    tensors = list(internals.saved_tensors_of(node))
    if internals.is_custom_function_node(node):
        tensors += tensors_in(list(vars(node).values()))
    edges: list[Edge] = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors if tensor.requires_grad]
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
    for node in (node for part in parts for node in nodes_of(part)):
        if internals.saves_tensors(node):
            bits[node] = 1 if lone else len(bits) + 2
    return bits


def nodes_of(part: Segment, starts: Sequence[Edge] | None = None) -> list[Any]:
    """Return the autograd nodes of a segment behind some edges, those of its entries if none are given."""
    stops = set(part.stops)
    first = [node for node, _ in (part.entries if starts is None else starts) if part.has(node)]
    return walk(first, lambda node: [e[0] for e in next_edges(node) if e not in stops and part.has(e[0])])


def survey(parts: Sequence[Segment]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the nodes of custom functions, the hidden ones and the lost ones, behind all segments.

    From hidden nodes a gradient gets to where nobody looks, a leaf of the function's or nothing; from lost, only there.
    """
    stops = {edge for part in parts for edge in part.inputs}
    starts = [node for part in parts for node, _ in part.entries if (node, 0) not in stops]
    nodes = walk(starts, lambda node: [edge[0] for edge in next_edges(node) if edge not in stops])
    custom = [node for node in nodes if internals.is_custom_function_node(node)]
    ends = [node for node in nodes if not next_edges(node)]
    if not ends:
        return custom, [], []
    hidden = leading_to(nodes, ends, stops)
    arrived = set(leading_to(nodes, [node for node in nodes if not stops.isdisjoint(next_edges(node))], stops))
    return custom, hidden, [node for node in hidden if node not in arrived]


def reachable(part: Segment) -> set[Edge]:
    """Return the stops to which there is a way, whether or not a gradient goes it."""
    return {*part.entries, *(edge for node in nodes_of(part) for edge in next_edges(node))}.intersection(part.stops)


def nodes_before(part: Segment, ways: Sequence[Exit]) -> list[Any]:
    """Return the nodes of a segment through which a gradient gets to some of its exits."""
    nodes = nodes_of(part)
    ends = {edge for edge, sender, _ in ways if sender is None}
    senders = [node for node in nodes if not ends.isdisjoint(next_edges(node))]
    return leading_to(nodes, [*senders, *(sender for _, sender, _ in ways if sender is not None)], set(part.stops))


def state_masks(parts: Sequence[Segment], bits: Mapping[Any, int]) -> list[list[int]]:
    """Say for each entry of each segment which of the nodes in ``bits`` it reaches there, and whether lasting ones."""

    def mask(nodes: Sequence[Any]) -> int:
        held = {1 << bits[node] for node in nodes if node in bits}  # several may have the same
        lasting = any(internals.keeps_unsaved(node) and not internals.saves_tensors(node) for node in nodes)
        return sum(held, LASTING if lasting else 0)

    return [[mask(nodes_of(part, [entry])) for entry in part.entries] for part in parts]
