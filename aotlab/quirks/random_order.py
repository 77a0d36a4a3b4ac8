"""The order of random numbers in a tensor whose dimensions are permuted in memory.

    x = torch.ones(30, 20).t()
    x.bernoulli_(0.5)                            # eager's kernel may fill the tensor in memory order
    torch.ones(20, 30).bernoulli_(0.5).t()       # then the numbers are the same
    torch.ones(30, 20).bernoulli_(0.5)           # other numbers

A graph draws into a new, contiguous tensor. On some processors, eager's kernel fills a permuted tensor in memory order.
On these processors, a draw into a tensor whose dimensions are in memory order gives eager's numbers and strides. So
this quirk tests the kernel once per process and dtype. It reads the memory order from the strides of fake tensors
(`aotlab._torch.as_in_eager`). After an op that is neither torch's nor aotlab's, these strides may differ from eager's.
Then the draw is recorded unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.corrections import order_of_memory
from aotlab.trace.quirk import Quirk
from aotlab.trace.recorder import OpHandler, Recorder

_BERNOULLI = torch.ops.aten.bernoulli.p


class RandomOrder(Quirk):
    """Records a `bernoulli` op on a permuted tensor so that the random numbers are in eager's order.

    The recorded op draws into a tensor whose dimensions are in memory order; the result is permuted back.
    """

    name = "random_order"

    def ops(self) -> Mapping[Any, OpHandler]:
        return {_BERNOULLI: _draw}


def _draw(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    if tensor.is_contiguous() or tensor.device.type != "cpu":
        return NotImplemented
    order = order_of_memory(tensor)
    plain_namespaces = {*internals.TORCHS_OWN, "aotlab"}
    certain = all(each.target.namespace in plain_namespaces for each in recorder.tape.operations)
    if order is None or not certain or not _goes_along_memory(tensor.dtype):
        return NotImplemented
    permute = torch.ops.aten.permute.default
    first = recorder.record(permute, (tensor, list(order)), {})
    drawn = recorder.record(_BERNOULLI, (first, *args[1:]), kwargs)
    return recorder.record(permute, (drawn, [order.index(d) for d in range(len(order))]), {})


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
