"""The traced autograd graph: the tensors that its nodes save for the backward, and the nodes that gradients reach.

A set of nodes is stored as a bit mask. `node_bits` maps each node that saves tensors to the index of its bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import LeakedTensorError
from aotlab.ir import fx_graphs as ir
from aotlab.trace.autograd_edges import Edge, leading_to, next_edges, walk
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import Tape, tensors_in


def keeping_masks(
    bits: Mapping[Any, int], tensors: Sequence[Tensor], hidden_saved: Mapping[Any, Sequence[Tensor]]
) -> list[int]:
    """Return for each of ``tensors`` a mask of the autograd nodes that save the tensor or an alias of it.

    In eager, the backward of such a node raises if the caller writes to the tensor after the call. The compiled
    backward must raise too, even if the compiled forward saved other tensors. ``bits`` is the result of `node_bits`.
    ``hidden_saved`` has, by node, saved tensors that Python cannot read from the node.
    """
    by_storage: dict[int, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_storage.setdefault(internals.storage_key(tensor), []).append(i)
    masks = [0] * len(tensors)
    for node, bit in bits.items():
        for saved in [
            *internals.saved_tensors_of(node),
            *internals.kept_by_checkpoint(node),
            *hidden_saved.get(node, ()),
        ]:
            for i in by_storage.get(internals.storage_key(saved), ()):
                if internals.share_version(saved, tensors[i]):
                    masks[i] |= 1 << bit
    return masks


def hidden_read_masks(tape: Tape, nodes: Iterable[Any], bits: Mapping[Any, int]) -> dict[int, int]:
    """Return, by storage key, a mask of the custom Functions and checkpoints whose backward reads the storage.

    Their backward may read tensors that they did not save through autograd. In eager, it then reads the current value
    of the tensor. The compiled forward saves the value that the tensor has at the call. So the compiled backward must
    raise if the tensor was written after the call. ``nodes`` are the nodes to consider, and ``bits`` is the result of
    `node_bits`.
    """
    masks = {
        internals.sequence_of(node): 1 << bits[node] if node in bits else LASTING
        for node in nodes
        if internals.is_custom_function_node(node) or internals.is_checkpointed(node)
    }
    masks_by_storage: dict[int, int] = {}
    for operation in tape.operations:
        if operation.phase == "backward" and (mask := masks.get(operation.sequence or -1)):
            for tensor in tensors_in((operation.args, operation.kwargs)):
                if tensor.layout == torch.strided:
                    masks_by_storage[internals.storage_key(tensor)] = (
                        masks_by_storage.get(internals.storage_key(tensor), 0) | mask
                    )
    return masks_by_storage


def kept_entries(segment: Segment, nodes: Iterable[Any]) -> tuple[int, ...]:
    """Return the indices of the segment's entries whose tensors a node holds together with their autograd history.

    The search covers ``nodes``, and the custom Functions of the segment that store tensors outside of autograd. If
    Python cannot read which tensors a node holds, the result includes all tensors that the node might hold.
    """
    unsaved = (node for node in nodes_of(segment) if internals.keeps_unsaved(node))
    kept_edges = {edge for node in (*nodes, *unsaved) for edge in _edges_kept(node, segment)}
    return tuple(n for n, edge in enumerate(segment.entries) if edge in kept_edges and edge not in segment.stops)


def _edges_kept(node: Any, segment: Segment) -> list[Edge]:
    """Return the edges of the tensors that a node holds, or might hold if Python cannot read its saved tensors."""
    tensors = list(internals.saved_tensors_of(node))
    if internals.is_custom_function_node(node):
        tensors += tensors_in(list(vars(node).values()))
    edges: list[Edge] = [(tensor.grad_fn, tensor.output_nr) for tensor in tensors if tensor.requires_grad]
    if internals.is_copy_slices(node):  # this node may hold the view that was written
        edges += [edge for edge in segment.entries if any(behind[0] is node for behind in next_edges(edge[0]))]
    if internals.is_copy_slices(node) or internals.is_checkpointed(node):
        edges += [edge for edge in segment.entries if edge[0] is node]
        edges += next_edges(node)
    return edges


#: Bit 0 of a mask. It says that a node holds values that autograd does not free after a backward. The higher bits are
#: those of the nodes.
LASTING = 1


def node_bits(segments: Sequence[Segment]) -> dict[Any, int]:
    """Map each autograd node that saves tensors to the index of its bit in masks.

    If all segments together have only one entry, all nodes share one bit, because a backward reaches all nodes or none.
    """
    lone = sum(len(segment.entries) for segment in segments) == 1
    bits: dict[Any, int] = {}
    for node in (node for segment in segments for node in nodes_of(segment)):
        if internals.saves_tensors(node):
            bits[node] = 1 if lone else len(bits) + 2
    return bits


def nodes_of(segment: Segment, starts: Sequence[Edge] | None = None) -> list[Any]:
    """Return the autograd nodes of a segment that gradients reach from ``starts`` (default: the segment's entries)."""
    stops = set(segment.stops)
    first = [node for node, _ in (segment.entries if starts is None else starts) if segment.has(node)]
    return walk(first, lambda node: [e[0] for e in next_edges(node) if e not in stops and segment.has(e[0])])


def classify_nodes(segments: Sequence[Segment]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return three lists of the autograd nodes of all segments: nodes of custom Functions, hidden nodes, lost nodes.

    From a hidden node, gradients reach an end that the caller cannot see: a leaf that the function made, or a node
    without next nodes. From a lost node, gradients reach only such ends. Eager runs all these nodes. But a compiled
    backward does not run the lost ones, because it computes only the gradients that the caller can see.
    """
    stops = {edge for segment in segments for edge in segment.inputs}
    starts = [node for segment in segments for node, _ in segment.entries if (node, 0) not in stops]
    nodes = walk(starts, lambda node: [edge[0] for edge in next_edges(node) if edge not in stops])
    custom = [node for node in nodes if internals.is_custom_function_node(node)]
    ends = [node for node in nodes if not next_edges(node)]
    if not ends:
        return custom, [], []
    hidden = leading_to(nodes, ends, stops)
    not_lost = set(leading_to(nodes, [node for node in nodes if not stops.isdisjoint(next_edges(node))], stops))
    return custom, hidden, [node for node in hidden if node not in not_lost]


def check_readers(segments: Sequence[Segment], tape: Tape, *, has_checkpoints: bool) -> None:
    """Raise `LeakedTensorError` if Python code of the user that runs later may read a value that the function sets.

    A compiled call sets the value after its forward. So a custom op in the forward, also in the function of a
    higher-order op, would read the old value. A backward was traced while the old value was in place. The call runs
    eagerly, because Dynamo has the same problem.
    """
    in_backward = has_checkpoints or classify_nodes(segments)[0]
    targets = [each.target for each in tape.operations]
    if in_backward or any(
        ir.may_have_effects(each) or isinstance(each, internals.HigherOrderOperator) for each in targets
    ):
        where = "its backward" if in_backward else "a custom op"
        raise LeakedTensorError(
            f"the function sets a Python value, and {where} may read it",
            why="a compiled call sets the value after its forward",
            suggestion="return the new value",
        )


def reachable_stops(segment: Segment) -> set[Edge]:
    """Return the segment's stops that are connected to its entries, including those whose gradient is undefined."""
    return {*segment.entries, *(edge for node in nodes_of(segment) for edge in next_edges(node))}.intersection(
        segment.stops
    )


def nodes_to_exits(segment: Segment, exits: Sequence[Exit]) -> list[Any]:
    """Return the nodes of a segment through which gradients reach ``exits``."""
    nodes = nodes_of(segment)
    ends = {edge for edge, sender, _ in exits if sender is None}
    senders = [node for node in nodes if not ends.isdisjoint(next_edges(node))]
    return leading_to(nodes, [*senders, *(sender for _, sender, _ in exits if sender is not None)], set(segment.stops))


def state_masks(segments: Sequence[Segment], bits: Mapping[Any, int]) -> list[list[int]]:
    """Return for each entry of each segment a mask of the nodes that gradients reach from it within the segment.

    ``bits`` is the result of `node_bits`. The mask also has the bit `LASTING` if a custom Function among the nodes
    stores values outside of autograd, because no backward frees such values.
    """

    def mask(nodes: Sequence[Any]) -> int:
        held = {1 << bits[node] for node in nodes if node in bits}  # several nodes may have the same bit
        lasting = any(internals.keeps_unsaved(node) and not internals.saves_tensors(node) for node in nodes)
        return sum(held, LASTING if lasting else 0)

    return [[mask(nodes_of(segment, [entry])) for entry in segment.entries] for segment in segments]
