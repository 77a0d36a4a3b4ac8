"""What it costs to keep a value for the backward, and what to compute it again.

All costs of time are in bytes of memory traffic, which bounds the time of all ops but a few. Products (also
convolutions, attention) cost their arithmetic besides, `FLOPS_PER_BYTE` floating-point operations in the time of a
byte. Sizes that vary count as they were in the traced call. A pointwise op that runs again is fused with its reader, so
that only its arithmetic counts::

    kept                    2 * bytes of the value; once if the caller has it anyway; nothing for a parameter
    again, a view           1
    again, pointwise        bytes of the result / FUSED
    again, a look-up        bytes of the result and of the indices, and the former / FUSED
    again, all else         bytes of the inputs + bytes of the result + flops / FLOPS_PER_BYTE
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from aotlab._torch import ASSERTIONS, TORCHS_OWN, HigherOrderOperator, OpOverload, has_effects, is_symbolic, traced
from aotlab.ir.graphs import COPY, STAYS, is_random, moves_nothing, phase_of

#: Floating-point operations in the time of one byte of traffic: between a CPU's 10 and a GPU's 100 and more.
FLOPS_PER_BYTE = 32

#: Of the bytes that a fused pointwise op makes, the part that its arithmetic costs.
FUSED = 8

_ATEN = torch.ops.aten
#: Ops that put values into other places, or some of several; they are fused as pointwise ops are.
_MOVES = frozenset(
    (_ATEN.cat, _ATEN.stack, _ATEN.constant_pad_nd, _ATEN.flip, _ATEN.roll, _ATEN.repeat, _ATEN.tril, _ATEN.triu)
) | {_ATEN.select_scatter, _ATEN.slice_scatter}
#: Ops that read at places that a tensor says.
_LOOK_UPS = frozenset((_ATEN.index, _ATEN.gather, _ATEN.index_select, _ATEN.embedding))

#: What an op is that must not run twice.
ONCE = "an op that must not run twice"

#: Why some values are never computed again.
AN_INPUT = "an input cannot be computed again"
A_COPY = "what is computed again from it must not see what the caller writes there"
REACHABLE = "the caller can write it, and eager keeps it too"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The costs of one value, ``kind`` in words that fit behind "is".

    ``keep``: the traffic of keeping it, in bytes, None if it cannot be kept; ``nbytes``: the memory held for that
    alone; ``again``: the cost of computing it, its inputs given; None if it must not run twice, and ``ban`` says why.
    """

    keep: int | None
    nbytes: int
    again: int | None
    kind: str
    ban: str = ""


def _flops(node: fx.Node, known: dict[object, int]) -> int:
    """Count the floating-point operations of a product; ``known`` are those of products counted before."""
    target = node.target
    assert isinstance(target, OpOverload)
    key = (target, *(_size(each) for each in (*node.args, *node.kwargs.items())), _size(node.meta["val"]))
    if key not in known:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: _as_traced(each.meta["val"]))
        known[key] = int(flop_registry[target.overloadpacket](*args, **kwargs, out_val=_as_traced(node.meta["val"])))
    return known[key]


def _as_traced(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_traced, value))
    if not is_symbolic(value):
        return value
    return value.new_empty(traced(value.shape), device="meta") if isinstance(value, Tensor) else traced([value])[0]


def _size(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    return ("size", *traced(value.shape)) if isinstance(value, Tensor) else repr(value)


def cost_of(node: fx.Node, *, in_forward: bool, static: bool, reachable: bool, flops: dict[object, int]) -> Cost:
    """Estimate the costs of a node of a joint graph that no tangent reaches.

    ``in_forward``: computed there anyhow; ``static``: a parameter or buffer; ``reachable``: the caller may write it.
    """
    value = node.meta.get("val")
    size = nbytes(value)
    if node.op == "placeholder":
        held = size if node.meta.get("overwritten") else 0  # then it takes a clone
        return Cost(keep=2 * held if held or static else size, nbytes=held, again=None, kind="an input", ban=AN_INPUT)
    if node.op == "get_attr":
        return Cost(keep=None, nbytes=0, again=0, kind="a constant")
    is_value = isinstance(value, Tensor | torch.SymInt | torch.SymFloat)
    keep = 2 * size if is_value and phase_of(node) == "forward" else None
    if COPY in node.meta:
        return Cost(keep=keep, nbytes=size, again=None, kind="a copy", ban=A_COPY)
    if reachable and keep is not None:
        return Cost(keep=size, nbytes=0, again=None, kind="in the caller's reach", ban=REACHABLE)
    if ban := why_once(node):
        return Cost(keep=keep, nbytes=size, again=None, kind=ONCE, ban=ban)
    if not in_forward:  # it runs once, wherever that is
        return Cost(keep=keep, nbytes=size, again=0, kind="an op that the forward does not need")
    again, kind = _again(node, size, flops)
    return Cost(keep=keep, nbytes=size, again=again, kind=kind)


def nbytes(value: Any) -> int:
    """Return the memory that a value keeps alive: of a view, all of what it views; 8 for a number."""
    if isinstance(value, Tensor):
        is_strided = value.layout is torch.strided
        return traced([value.untyped_storage().nbytes() if is_strided else value.numel() * value.element_size()])[0]
    if isinstance(value, (list, tuple)):
        return sum(nbytes(item) for item in value)
    return 8


def why_once(node: fx.Node) -> str:
    """Say why a node's op must not run twice; nothing if it may."""
    target = node.target
    if not isinstance(target, OpOverload | HigherOrderOperator):
        return ""
    reason = _why_once(target)
    if not reason and (STAYS in node.meta or target in ASSERTIONS):
        reason = "it is there since it may raise"
    return reason and f"`{target}` must not run twice: {reason}"


@functools.cache
def _why_once(target: OpOverload | HigherOrderOperator) -> str:
    if isinstance(target, HigherOrderOperator):
        return "it runs functions, which might do something else then"
    if is_random(target):
        return "it would draw other random numbers"
    if target._schema.is_mutable:
        return "it writes to what it is given"
    if target.namespace not in TORCHS_OWN and target.namespace != "aotlab":
        return "it is not torch's own, and might do something else then"
    if target not in ASSERTIONS and has_effects(target):
        return "it has effects besides its results"
    return ""


def is_cheap(node: fx.Node) -> bool:
    """Tell whether an op might run again though memory is not short."""
    target = node.target
    return not (isinstance(target, OpOverload) and target.overloadpacket in flop_registry)


def _again(node: fx.Node, size: int, flops: dict[object, int]) -> tuple[int, str]:
    """Estimate the traffic of running ``node`` again, and say what kind of op that is."""
    target = node.target
    if not isinstance(target, OpOverload):  # an item of a result
        return 0, "an item of a result"
    if moves_nothing(target):
        return 1, "a view"
    if torch.Tag.pointwise in target.tags or not node.all_input_nodes:
        return size // FUSED + 1, "a pointwise op"
    if target.overloadpacket in _MOVES:
        return size // FUSED + 1, "an op that moves values"
    if target.overloadpacket in _LOOK_UPS:
        whole = torch.bool, torch.uint8, torch.int32, torch.int64
        read = [each.meta.get("val") for each in node.all_input_nodes]
        indices = sum(nbytes(value) for value in read if isinstance(value, Tensor) and value.dtype in whole)
        return size + indices + size // FUSED + 1, "a look-up"
    traffic = size + sum(nbytes(each.meta.get("val")) for each in node.all_input_nodes)
    if target.overloadpacket in flop_registry:
        # at least what it costs to keep it, so that it runs again only if memory is short
        return max(_flops(node, flops) // FLOPS_PER_BYTE, 1) + traffic + 2 * size, "a product"
    return traffic + 1, "an op that reads all of its inputs"
