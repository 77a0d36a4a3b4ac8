"""Whether the strides of a traced tensor are those that eager gives.

    c = torch.ones(3, 1, 1).permute(2, 1, 0)     # strides (1, 1, 1), of shape (1, 1, 3)
    (c * 2).stride()                             # (1, 1, 1); torch's fake tensors say (3, 3, 1)

The stride of a dimension of size one, or of a tensor without elements, says nothing, and kernels and their fakes choose
it by rules of their own, which differ from op to op. They agree for tensors that are laid out row by row. So what is
computed from these only, and what has no such dimension, has eager's strides; so has an input, and a view of what has
them, but for ``view`` and ``reshape``, which choose such strides, too::

    b = torch.arange(8)[None, 1:]                # strides (8, 1), of shape (1, 7)
    b.view(1, 7).stride()                        # (7, 1); torch's fake tensors say (8, 1)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aotlab.trace.tape import Operation, Tape, tensors_in

#: Views whose strides follow from their sizes.
_BY_SIZES = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def are_certain(tape: Tape, value: Tensor, below: Callable[[Operation], Tensor | None]) -> bool:
    """Tell whether ``value`` has eager's strides; ``below`` returns what an op makes a view of, None for other ops."""
    todo = [value]
    seen: set[int] = set()
    while todo:
        tensor = todo.pop()
        made = tape.producer(tensor)
        if id(tensor) in seen or not _has_free_strides(tensor) or made is None:
            continue
        seen.add(id(tensor))
        viewed = below(made[0])
        if viewed is not None:
            if made[0].target in _BY_SIZES and not (_is_row_by_row(tensor) and _is_row_by_row(viewed)):
                return False
            todo.append(viewed)
            continue
        for given in tensors_in((made[0].args, made[0].kwargs)):
            if _has_free_strides(given) and not _is_row_by_row(given):
                return False
            todo.append(given)
    return True


def _has_free_strides(tensor: Tensor) -> bool:
    """Tell whether a tensor has strides that say nothing: of dimensions of size one, and all where it is empty."""
    return 1 in tensor.shape or 0 in tensor.shape


def _is_row_by_row(tensor: Tensor) -> bool:
    """Tell whether a tensor has the strides of a new one, also where its dimensions have the size one."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True
