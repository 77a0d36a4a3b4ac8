"""Estimate the cost of saving a value for the backward, and of computing it again.

All costs of time are in bytes of memory traffic, because memory traffic limits the time of most ops. Matrix products,
convolutions and attention also cost time for their arithmetic: `FLOPS_PER_BYTE` floating-point operations take as long
as one byte. Symbolic sizes have the values of the traced call. The compiler fuses a pointwise op that runs again with
the op that reads its result, so it costs only its arithmetic::

    save                    2 * bytes of the value; 1 * bytes if the caller holds it anyway; nothing for a parameter
    recompute a view        1
    recompute pointwise     bytes of the result / FUSED
    recompute a look-up     bytes of the result + bytes of the indices + bytes of the result / FUSED
    recompute another op    bytes of the inputs + bytes of the result + flops / FLOPS_PER_BYTE
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from aotlab._torch import ASSERTIONS, TORCHS_OWN, HigherOrderOperator, OpOverload, has_effects, is_symbolic, traced
from aotlab.ir.fx_graphs import COPY, STAYS, is_random, moves_nothing, phase_of

#: The number of floating-point operations that take as long as one byte of memory traffic: about 10 on a CPU, 100 or
#: more on a GPU.
FLOPS_PER_BYTE = 32

#: The arithmetic of a fused pointwise op costs the bytes of its result, divided by this number.
FUSED = 8

_ATEN = torch.ops.aten
#: Ops that move values or combine several tensors. The compiler fuses them like pointwise ops.
_MOVES = frozenset(
    (_ATEN.cat, _ATEN.stack, _ATEN.constant_pad_nd, _ATEN.flip, _ATEN.roll, _ATEN.repeat, _ATEN.tril, _ATEN.triu)
) | {_ATEN.select_scatter, _ATEN.slice_scatter}
#: Ops that read at positions that a tensor of indices gives.
_LOOK_UPS = frozenset((_ATEN.index, _ATEN.gather, _ATEN.index_select, _ATEN.embedding))

#: The `Cost.kind` of an op that must not run twice.
ONCE = "an op that must not run twice"

#: Reasons why some values are never computed again.
AN_INPUT = "an input cannot be computed again"
A_COPY = "a value that is computed again from this copy must not see the caller's writes"
REACHABLE = "the caller can write it, and eager saves it too"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The costs of one value, if it is saved and if it is computed again.

    ``save`` is the memory traffic of saving it, in bytes. ``save`` is None if the value cannot be saved. ``nbytes`` is
    the number of bytes of memory that are held only because the value is saved. ``recompute`` is the cost of computing
    it again from its inputs, in bytes of traffic. ``recompute`` is None if the value must not be computed twice. Then
    ``ban`` is the reason, as text. ``kind`` describes the value for messages, for example "a pointwise op".
    """

    save: int | None
    nbytes: int
    recompute: int | None
    kind: str
    ban: str = ""


def _flops(node: fx.Node, counts: dict[object, int]) -> int:
    """Count the floating-point operations of a matrix product, convolution or attention.

    ``counts`` caches the numbers by op and sizes.
    """
    target = node.target
    assert isinstance(target, OpOverload)
    key = (target, *(_size(each) for each in (*node.args, *node.kwargs.items())), _size(node.meta["val"]))
    if key not in counts:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: _as_traced(each.meta["val"]))
        counts[key] = int(flop_registry[target.overloadpacket](*args, **kwargs, out_val=_as_traced(node.meta["val"])))
    return counts[key]


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
    """Estimate the costs of a node of a joint graph that does not depend on a tangent.

    ``in_forward``: the forward computes the node in any case, because its outputs need it. ``static``: the node is a
    parameter or buffer. ``reachable``: the caller can write the node's memory. ``flops`` caches the counts of
    floating-point operations.
    """
    value = node.meta.get("val")
    size = nbytes(value)
    if node.op == "placeholder":
        held = size if node.meta.get("overwritten") else 0  # if the call overwrites the input, a clone is saved
        return Cost(
            save=2 * held if held or static else size, nbytes=held, recompute=None, kind="an input", ban=AN_INPUT
        )
    if node.op == "get_attr":
        return Cost(save=None, nbytes=0, recompute=0, kind="a constant")
    is_value = isinstance(value, Tensor | torch.SymInt | torch.SymFloat)
    save = 2 * size if is_value and phase_of(node) == "forward" else None
    if COPY in node.meta:
        return Cost(save=save, nbytes=size, recompute=None, kind="a copy", ban=A_COPY)
    if reachable and save is not None:
        return Cost(save=size, nbytes=0, recompute=None, kind="in the caller's reach", ban=REACHABLE)
    if ban := why_once(node):
        return Cost(save=save, nbytes=size, recompute=None, kind=ONCE, ban=ban)
    if not in_forward:  # only the backward needs it: it runs once anyway, in the forward or in the backward
        return Cost(save=save, nbytes=size, recompute=0, kind="an op that the forward does not need")
    recompute, kind = _recompute_cost(node, size, flops)
    return Cost(save=save, nbytes=size, recompute=recompute, kind=kind)


def nbytes(value: Any) -> int:
    """Return the bytes of memory that a value keeps alive: for a view, its whole storage; for a number, 8."""
    if isinstance(value, Tensor):
        is_strided = value.layout is torch.strided
        return traced([value.untyped_storage().nbytes() if is_strided else value.numel() * value.element_size()])[0]
    if isinstance(value, (list, tuple)):
        return sum(nbytes(item) for item in value)
    return 8


def why_once(node: fx.Node) -> str:
    """Return the reason why a node's op must not run twice, or an empty string if it may run twice."""
    target = node.target
    if not isinstance(target, OpOverload | HigherOrderOperator):
        return ""
    reason = _why_once(target)
    if not reason and (STAYS in node.meta or target in ASSERTIONS):
        reason = "the graph has it only because it may raise"
    if not reason and ("unbacked_bindings" in node.meta or target is torch.ops.aten.sym_size.int):
        reason = "it binds a size"
    return reason and f"`{target}` must not run twice: {reason}"


@functools.cache
def _why_once(target: OpOverload | HigherOrderOperator) -> str:
    if isinstance(target, HigherOrderOperator):
        return "it runs functions, which may behave differently when run again"
    if is_random(target):
        return "it would draw other random numbers"
    if target._schema.is_mutable:
        return "it writes to its argument"
    if target.namespace not in TORCHS_OWN and target.namespace != "aotlab":
        return "it is not an op of torch, and may behave differently when run again"
    if target not in ASSERTIONS and has_effects(target):
        return "it has side effects"
    return ""


def is_cheap(node: fx.Node) -> bool:
    """Tell whether an op is cheap enough to run again even if memory is not limited.

    All ops are cheap, except matrix products, convolutions and attention, whose arithmetic costs time.
    """
    target = node.target
    return not (isinstance(target, OpOverload) and target.overloadpacket in flop_registry)


def fuses_of(node: fx.Node) -> int:
    """Tell how Inductor usually fuses an op; see `aotlab.partition.joint_values.JointValues.fuses`."""
    target = node.target
    if node.op == "placeholder" or not isinstance(target, OpOverload) or COPY in node.meta or not is_cheap(node):
        return 2 if node.op == "call_function" and not isinstance(target, OpOverload | HigherOrderOperator) else 0
    packet, inlined = target.overloadpacket, torch.Tag.pointwise in target.tags or not node.all_input_nodes
    return 2 if inlined or moves_nothing(target) or packet in _MOVES or packet in _LOOK_UPS else 1


def traffic_of(node: fx.Node, flops: dict[object, int]) -> int:
    """Estimate the memory traffic of running ``node``, in bytes. ``flops`` is the cache of `cost_of`."""
    return _recompute_cost(node, nbytes(node.meta.get("val")), flops)[0] if node.op == "call_function" else 0


def _recompute_cost(node: fx.Node, size: int, flops: dict[object, int]) -> tuple[int, str]:
    """Estimate the memory traffic of running ``node`` again; return it with a description of the kind of op."""
    target = node.target
    if not isinstance(target, OpOverload):  # `operator.getitem`: reads one result of an op that has several
        return 0, "an item of a result"
    if moves_nothing(target):
        return 1, "a view"
    if torch.Tag.pointwise in target.tags or not node.all_input_nodes:
        return size // FUSED + 1, "a pointwise op"
    if target.overloadpacket in _MOVES:
        return size // FUSED + 1, "an op that moves values"
    if target.overloadpacket in _LOOK_UPS:
        index_dtypes = torch.bool, torch.uint8, torch.int32, torch.int64
        input_values = [each.meta.get("val") for each in node.all_input_nodes]
        indices = sum(
            nbytes(value) for value in input_values if isinstance(value, Tensor) and value.dtype in index_dtypes
        )
        return size + indices + size // FUSED + 1, "a look-up"
    traffic = size + sum(nbytes(each.meta.get("val")) for each in node.all_input_nodes)
    if target.overloadpacket in flop_registry:
        # at least the cost of saving its result, so that it runs again only if memory is limited
        return max(_flops(node, flops) // FLOPS_PER_BYTE, 1) + traffic + 2 * size, "a product"
    return traffic + 1, "an op that reads all of its inputs"
