"""What it costs to keep a value for the backward, and what to compute it again.

All costs are in bytes of memory traffic, which bounds the time of all ops but a few: a value that is kept is written
once and read once, an op that runs again reads its inputs and writes its results. Matrix products and their kind cost
their arithmetic besides. A pointwise op that runs again is fused with its reader, as Inductor does, so that only its
arithmetic counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from aotlab.ir.graphs import STAYS, phase_of
from aotlab.partitioners.copies import COPY, moves_nothing
from aotlab.torch_internals import ASSERTIONS, OpOverload

#: Floating-point operations in the time of one byte of traffic: between a CPU's 10 and a GPU's 100 and more.
FLOPS_PER_BYTE = 32

#: Of the bytes that a fused pointwise op makes, the part that its arithmetic costs.
FUSED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The costs of one value.

    Attributes
    ----------
    keep
        To keep it, in bytes of traffic; None if it cannot be kept.
    nbytes
        Memory that is held from the forward to the backward if it is kept.
    again
        To compute it again, its inputs given, in bytes of traffic; None if it must not run twice.
    kind
        What it is, in words that fit behind "is".
    """

    keep: int | None
    nbytes: int
    again: int | None
    kind: str


#: What a value is that the caller can reach.
REACHABLE = "a value that the caller can reach"


def cost_of(
    node: fx.Node, *, in_forward: bool, static: bool = False, overwritten: bool = False, reachable: bool = False
) -> Cost:
    """Estimate the costs of a node of a joint graph that no tangent reaches.

    Parameters
    ----------
    in_forward
        Whether the forward computes it in any case.
    static
        It is a parameter or buffer, which lives longer than the call.
    overwritten
        It is an input that the call overwrites, so that keeping it takes a clone.
    reachable
        It lies in memory that the caller can reach: computed again, it would not be what the caller wrote there.
    """
    value = node.meta.get("val")
    size = nbytes(value)
    if node.op == "placeholder":
        held = size if overwritten else 0
        return Cost(keep=2 * held if overwritten or static else size, nbytes=held, again=None, kind="an input")
    if node.op == "get_attr":
        return Cost(keep=None, nbytes=0, again=0, kind="a constant")
    recorded_in_backward = phase_of(node) == "backward"
    keep = None if recorded_in_backward or not isinstance(value, Tensor | torch.SymInt | torch.SymFloat) else 2 * size
    if COPY in node.meta:
        return Cost(keep=keep, nbytes=size, again=None, kind="a copy")
    if reachable and keep is not None:
        return Cost(keep=keep, nbytes=size, again=None, kind=REACHABLE)
    if must_not_run_twice(node):
        return Cost(keep=keep, nbytes=size, again=None, kind="an op that must not run twice")
    if not in_forward:  # it runs once, wherever that is
        return Cost(keep=keep, nbytes=size, again=0, kind="an op that the forward does not need")
    again, kind = _again(node, size)
    return Cost(keep=keep, nbytes=size, again=again, kind=kind)


def nbytes(value: Any) -> int:
    """Return the memory that a value keeps alive: of a view, all of what it views; 8 for a number."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            return int(value.untyped_storage().nbytes())
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(nbytes(item) for item in value)
    return 8


def must_not_run_twice(node: fx.Node) -> bool:
    """Tell whether a node draws random numbers, writes, asserts, or is there only since it may raise."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    tags = target.tags
    return (
        torch.Tag.nondeterministic_seeded in tags
        or target._schema.is_mutable
        or target in ASSERTIONS
        or STAYS in node.meta
    )


def is_cheap(node: fx.Node) -> bool:
    """Tell whether an op might run again though memory is not short."""
    target = node.target
    return not (isinstance(target, OpOverload) and target.overloadpacket in flop_registry)


def _again(node: fx.Node, size: int) -> tuple[int, str]:
    """Estimate the traffic of running ``node`` again, and say what kind of op that is."""
    target = node.target
    if not isinstance(target, OpOverload):  # an item of a result
        return 0, "an item of a result"
    if moves_nothing(target):
        return 1, "a view"
    if torch.Tag.pointwise in target.tags or not node.all_input_nodes:
        return size // FUSED + 1, "a pointwise op"
    traffic = size + sum(nbytes(each.meta.get("val")) for each in node.all_input_nodes)
    if target.overloadpacket in flop_registry:
        # at least what it costs to keep it, so that it runs again only if memory is short
        return max(_flops(node) // FLOPS_PER_BYTE, 1) + traffic + 2 * size, "a product"
    return traffic + 1, "an op that reads all of its inputs"


def _flops(node: fx.Node) -> int:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    return int(flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=node.meta["val"]))  # type: ignore[union-attr]
