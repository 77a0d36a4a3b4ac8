"""Inputs that are used after a write that autograd does not see.

    def f(x, y):
        x.detach().mul_(2)
        return x * y

Autograd makes the history of a view anew after any write to its memory. So if ``x`` is a view, what is returned hangs
on another node than what hangs on ``x`` from before, and the gradient of ``x`` is to be had from the one only. The
traced input is no view, and the compiled function takes all its inputs at one moment: such a call is eager's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aotlab import torch_internals as internals
from aotlab.analysis.history import Edge, users_of
from aotlab.ir.metadata import InputAliasInfo
from aotlab.recorder import RunEagerly
from aotlab.stages.trace.function import Findings


def with_moving_histories(
    findings: Findings, infos: tuple[InputAliasInfo, ...], roots: Sequence[Edge]
) -> tuple[InputAliasInfo, ...]:
    """Mark the inputs whose history would be made anew in the midst of the function if they were views.

    Raises
    ------
    RunEagerly
        One of them is a view.
    """
    found = []
    for info, item in zip(infos, findings.inputs, strict=True):
        unseen = info.mutates_data and info.moves_version and not item.written_visibly
        if unseen and info.requires_grad and not info.is_leaf and item.base is None and item.edge is not None:
            first = findings.chronicle.first_write(item.wrapper)
            users = users_of(item.edge, roots)
            if any(first is None or internals.sequence_of(node) >= first for node in users):
                if internals.base_of(item.real) is not None:
                    raise RunEagerly(f"`{item.name}` is a view and is used after a write that autograd does not see")
                info = replace(info, history_moves=True)
        found.append(info)
    return tuple(found)
