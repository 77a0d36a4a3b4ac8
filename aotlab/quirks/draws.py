"""In what order random numbers are written into a tensor whose dimensions are not in the order of its memory.

    x = torch.ones(30, 20).t()
    x.bernoulli_(0.5)                            # eager's kernel may go along the memory
    torch.ones(20, 30).bernoulli_(0.5).t()       # the same numbers, then
    torch.ones(30, 20).bernoulli_(0.5)           # others

A graph makes a new tensor, row by row. Where eager goes along the memory, as processors differ in, drawing for the
dimensions in the memory's order gives its numbers and strides; so the kernel is asked, once in a process. The strides
are those of fakes (`aotlab._torch.as_in_eager`), unless an op that is not torch's own comes before.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.corrections import order_of_memory
from aotlab.trace.quirk import OpHandler, Quirk
from aotlab.trace.recorder import Recorder

_BERNOULLI = torch.ops.aten.bernoulli.p


class Draws(Quirk):
    """Records a draw for the dimensions in the order of the memory."""

    name = "draws"

    def ops(self) -> Mapping[Any, OpHandler]:
        return {_BERNOULLI: _draw}


def _draw(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Tensor = args[0]
    if tensor.is_contiguous() or tensor.device.type != "cpu":
        return NotImplemented
    order = order_of_memory(tensor)
    known = {*internals.TORCHS_OWN, "aotlab"}
    certain = all(each.target.namespace in known for each in recorder.tape.operations)
    if order is None or not certain or not _goes_along_memory(tensor.dtype):
        return NotImplemented
    permute = torch.ops.aten.permute.default
    first = recorder.record(permute, (tensor, list(order)), {})
    drawn = recorder.record(_BERNOULLI, (first, *args[1:]), kwargs)
    return recorder.record(permute, (drawn, [order.index(d) for d in range(len(order))]), {})


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
