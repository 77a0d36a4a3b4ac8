"""The order of random numbers in a tensor whose dimensions are permuted in memory.

    x = torch.ones(30, 20).t()
    x.bernoulli_(0.5)                            # eager's kernel may fill the tensor in memory order
    torch.ones(20, 30).bernoulli_(0.5).t()       # then the numbers are the same
    torch.ones(30, 20).bernoulli_(0.5)           # other numbers

A graph draws into a new, contiguous tensor. On some processors, eager's kernel fills a permuted tensor in memory order.
On these processors, a draw into a tensor whose dimensions are in memory order gives eager's numbers and strides. So
this quirk tests the kernel once per process and dtype. It reads the memory order from the strides of fake tensors
(`aotlab._torch.as_in_eager`). After an op that is neither torch's nor aotlab's, these strides may differ from eager's.
Then the call runs eagerly.

    y = torch.ones(30, 20)[:, ::2]
    y.normal_()                                  # has a kernel for tensors that are not contiguous
    torch.ones(30, 10).normal_()                 # other numbers
    torch.ones(10, 30).t().normal_()             # the numbers of the first line, in another order

Before a graph draws into a tensor with gaps, torch copies it into a contiguous tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.trace.corrections import draws_otherwise, order_of_memory
from aotlab.trace.quirk import Quirk
from aotlab.trace.recorder import OpHandler, Recorder

_BERNOULLI = torch.ops.aten.bernoulli.p
_NORMAL = torch.ops.aten.normal_functional.default
_UNIFORM = torch.ops.aten.uniform.default
_CLONE = torch.ops.aten.clone.default
_PERMUTE = torch.ops.aten.permute.default


class RandomOrder(Quirk):
    """Records draws into tensors that are not contiguous so that eager's numbers are drawn.

    The recorded `bernoulli` draws into a tensor whose dimensions are in memory order. The recorded `normal` draws into
    a tensor without gaps whose dimensions are not in memory order. The result is permuted back. The recorded `uniform`
    draws into a tensor without gaps.
    """

    name = "random_order"

    def ops(self) -> Mapping[Any, OpHandler]:
        return {_BERNOULLI: _draw_bernoulli, _NORMAL: _draw_normal, _UNIFORM: _draw_uniform}


def _draw_bernoulli(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    if tensor.is_contiguous() or tensor.device.type != "cpu":
        return NotImplemented
    plain_namespaces = {*internals.TORCHS_OWN, "aotlab"}
    certain = all(each.target.namespace in plain_namespaces for each in recorder.tape.operations)
    if not certain or not _goes_along_memory(tensor.dtype):
        return NotImplemented
    if order_of_memory(tensor) is None:
        tensor = recorder.record(_CLONE, (tensor,), {})
    return _draw_permuted(recorder, _BERNOULLI, (tensor, *args[1:]), kwargs, 1)


def _draw_normal(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    gaps = draws_otherwise(_NORMAL, args, exact=recorder.exact_draws)
    if not gaps or sum(size != 1 for size in tensor.shape) < 2:
        return NotImplemented
    dense = recorder.record(_CLONE, (tensor,), {})
    return _draw_permuted(recorder, _NORMAL, (dense, *args[1:]), kwargs, -1)


def _draw_uniform(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if order_of_memory(args[0]) is not None:
        return NotImplemented
    return recorder.record(_UNIFORM, (recorder.record(_CLONE, args[:1], {}), *args[1:]), kwargs)


def _draw_permuted(
    recorder: Recorder, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], direction: int
) -> Any:
    """Record a random op on its first argument with the dimensions permuted, and permute the result back.

    The dimensions are in memory order if ``direction`` is 1, and in reversed memory order if it is -1.
    """
    order = (order_of_memory(args[0]) or ())[::direction]
    permuted = recorder.record(_PERMUTE, (args[0], list(order)), {})
    drawn = recorder.record(op, (permuted, *args[1:]), kwargs)
    return recorder.record(_PERMUTE, (drawn, [order.index(d) for d in range(len(order))]), {})


@functools.cache
def _goes_along_memory(dtype: torch.dtype) -> bool:
    """Test whether ``bernoulli_`` with a new generator fills a permuted tensor in memory order."""
    with internals.outside_of_trace(), torch.inference_mode(False), torch.no_grad():
        for large in (3, 211):  # a kernel may work differently on large tensors
            along, permuted = (torch.empty(large, 4, 50, dtype=dtype, device="cpu") for _ in range(2))
            for each in (along, permuted.permute(2, 0, 1)):
                each.bernoulli_(0.5, generator=torch.Generator().manual_seed(0))
            if not torch.equal(along, permuted):
                return False
    return True
