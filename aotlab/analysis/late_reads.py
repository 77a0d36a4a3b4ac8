"""Saved values that a backward reads as they are by then, whatever was written since.

    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w                   # not save_for_backward
        return x * w

Autograd neither compares versions of such a tensor nor hands it to ``saved_tensors_hooks``: the backward sees what the
caller has written to ``w`` since. A checkpoint's function likewise sees it of all that it was not given. So a saved
value is read late where every op of the backward that takes it was called by such a node, from the very memory. What
the node keeps as autograd does besides is watched by itself, for the nodes that keep it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from aotlab import torch_internals as internals
from aotlab.ir.graphs import READS_LATE, is_view, phase_of, placeholders
from aotlab.recorder import Tape, tensors_in


def read_late(tape: Tape) -> frozenset[int]:
    """Return the keys of the storages that some op of the backward reads late."""
    late = (operation for operation in tape.operations if operation.reads_late)
    return frozenset(
        internals.storage_key(tensor)
        for operation in late
        for tensor in tensors_in((operation.args, operation.kwargs))
        if tensor.layout == torch.strided
    )


def saved_properly(nodes: Collection[object]) -> frozenset[int]:
    """Return the keys of the storages of what autograd nodes keep as autograd does, as the trace knows it."""
    kept = (t for node in nodes for t in (*internals.saved_tensors_of(node), *internals.kept_by_checkpoint(node)))
    return frozenset(
        internals.storage_key(internals.from_functional(tensor)) for tensor in kept if internals.is_functional(tensor)
    )


def only_read_late(graph: fx.Graph, numbers: Sequence[int], lent: Collection[int]) -> frozenset[int]:
    """Return those of the saved values, by their ``numbers``, that the graph of a backward reads late and not else.

    ``lent`` are those that may be.
    """
    if not lent:
        return frozenset()
    pairs = zip(numbers, placeholders(graph), strict=False)
    return frozenset(n for n, node in pairs if n in lent and _is_read_late(node, node.meta.get("val")))


def _is_read_late(node: fx.Node, value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or not node.users:
        return False
    key = internals.storage_key(value)
    return all(
        key in user.meta.get(READS_LATE, ())
        or (is_view(user) and phase_of(user) == "forward" and _is_read_late(user, value))
        for user in node.users
    )
