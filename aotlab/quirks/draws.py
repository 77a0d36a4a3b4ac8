"""In what order random numbers are written into a tensor whose dimensions are not in the order of its memory.

    x = torch.ones(30, 20).t()
    x.bernoulli_(0.5)                            # eager's kernel may go along the memory
    torch.ones(20, 30).bernoulli_(0.5).t()       # the same numbers, then
    torch.ones(30, 20).bernoulli_(0.5)           # others

A graph has no op in place, but one that makes a new tensor, row by row. Where eager goes along the memory, drawing for
the dimensions in the memory's order gives eager's numbers, and eager's strides. Whether it does is the kernel's choice,
which differs from processor to processor; so the kernel is asked, once in a process. And it has to be certain that the
tensor lies in memory as its fake says: of some ops' results, fakes are wrong (`aotlab.trace.fakes`). So the kernels
of the ops that it comes from are asked as well, with zeros in tensors that lie like the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import OpOverload, pytree
from aotlab.ir.random_state import original
from aotlab.trace.fakes import order_of_memory
from aotlab.trace.quirk import OpHandler, Quirk
from aotlab.trace.tape import Tape, tensors_in

if TYPE_CHECKING:
    from aotlab.trace.recorder import Recorder

_BERNOULLI = torch.ops.aten.bernoulli.p

#: Ops whose results are new and lie row by row.
_ROW_BY_ROW = frozenset(
    (
        torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default, _BERNOULLI,
    )
)  # fmt: skip


class Draws(Quirk):
    """Records a draw for the dimensions in the order of the memory."""

    name = "draws"

    def ops(self) -> Mapping[Any, OpHandler]:
        return {_BERNOULLI: _draw}


def _draw(recorder: Recorder, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    if tensor.is_contiguous() or tensor.device.type != "cpu":
        return NotImplemented
    order = order_of_memory(tensor)
    certain = order is not None and _strides_are_certain(recorder.tape, tensor, recorder.likes)
    if order is None or not certain or not _goes_along_memory(tensor.dtype):
        return NotImplemented
    permute = torch.ops.aten.permute.default
    first = recorder.record(permute, types, (tensor, list(order)), {})
    drawn = recorder.record(_BERNOULLI, types, (first, *args[1:]), kwargs)
    return recorder.record(permute, types, (drawn, [order.index(d) for d in range(len(order))]), {})


def _strides_are_certain(tape: Tape, tensor: Tensor, likes: Mapping[int, Tensor]) -> bool:
    """Tell whether a tensor lies in memory as its fake says, by what it is computed from and by which ops."""
    todo, seen = [tensor], set()
    while todo:
        tensor = todo.pop()
        made = tape.producer(tensor)
        if made is None or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in likes:
            todo.append(likes[id(tensor)])
            continue
        target, args, kwargs = made[0].target, made[0].args, made[0].kwargs
        random = original(target)
        if random is not None:
            target, args = random, args[1:]  # behind the state
        if target in _ROW_BY_ROW and tensor.is_contiguous():
            continue
        given = tensors_in((args, kwargs))
        looks = target._schema.arguments[0].alias_info if target._schema.arguments else None
        like = target is torch.ops.aten.empty_like.default and kwargs.get("memory_format") is None
        if looks is not None and not looks.is_write:
            todo.append(args[0])
        elif like or (torch.Tag.pointwise in target.tags and all(t.shape == tensor.shape for t in given if t.dim())):
            todo += [t for t in given if t.dim()]
        elif random is None and _kernel_lays_out_so(target, args, kwargs, made[0].result):
            todo += given
        else:
            return False
    return True


def _kernel_lays_out_so(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Run an op on zeros; tell whether its results have the strides that the fake ones have."""
    if torch.Tag.nondeterministic_seeded in op.tags or any(t.device.type != "cpu" for t in tensors_in((args, kwargs))):
        return False
    with internals.outside_of_trace(), torch.inference_mode(False), torch.no_grad():

        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()

        try:
            found = op(*pytree.tree_map(real, args), **pytree.tree_map(real, kwargs))
        except Exception:  # noqa: BLE001  # what a kernel has against zeros is no answer
            return False
    pairs = zip(tensors_in(found), tensors_in(result), strict=True)
    return all(one.shape == two.shape and one.stride() == two.stride() for one, two in pairs)


@functools.cache
def _goes_along_memory(dtype: torch.dtype) -> bool:
    """Ask ``bernoulli_``, with a generator of its own, whether it fills a permuted tensor along its memory."""
    with internals.outside_of_trace(), torch.inference_mode(False), torch.no_grad():
        for large in (3, 211):  # a kernel may go to work otherwise where there is much to do
            along, permuted = (torch.empty(large, 4, 50, dtype=dtype, device="cpu") for _ in range(2))
            for each in (along, permuted.permute(2, 0, 1)):
                each.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
            if not torch.equal(along, permuted):
                return False
    return True
