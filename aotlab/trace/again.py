"""A checkpoint whose function does not do the same each time that it is run.

    def f(x):
        runs = []

        def body(y):
            runs.append(y)
            return y.cos() if len(runs) == 2 else y.sin()

        return checkpoint(body, x, use_reentrant=False)

Eager runs the body once more in each backward, and there are as many as the caller likes; a compiled backward computes
what the body did in the trace. So it is derived twice. Where the second derivation is not the first one, op by op, the
body acts on something that it changes, in Python or in a tensor, and eager has to run it. So does a selective
checkpoint that is traced directly, whose cache serves one backward.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab.capture.signals import RunEagerly
from aotlab.trace.deriver import Deriver
from aotlab.trace.tape import Operation, Tape


def check_again(deriver: Deriver, segment: int, first: Sequence[Tensor | None]) -> None:
    """Derive a segment's backward once more, if checkpoints run functions again for it; ``first`` came of it before.

    Raises
    ------
    RunEagerly
        Now it is something else.
    """
    if not deriver.recorder.has_checkpoints:
        return
    try:
        second = deriver.derive(segment, [True] * len(deriver.segments[segment].entries), again=True)
        is_same, raises = are_same(deriver.recorder.tape, first, second), ""
    except Exception as error:  # noqa: BLE001  # whatever the function raises when it is run again
        is_same, raises = False, f": the next time it raises {type(error).__name__}"
    if not is_same:
        raise RunEagerly(
            f"a checkpoint computes something else each time that it runs its function{raises}",
            suggestion="let the function change nothing that it acts on, to have it compiled",
        )


def are_same(tape: Tape, first: Any, second: Any) -> bool:
    """Tell whether values are computed by the same ops from the same inputs."""
    compared: set[tuple[int, int]] = set()
    todo = [(first, second)]
    while todo:
        one, other = todo.pop()
        if one is other:
            continue
        if type(one) is not type(other):
            return False
        if isinstance(one, Tensor):
            if (id(one), id(other)) in compared:
                continue
            compared.add((id(one), id(other)))
            made, again = tape.producer(one), tape.producer(other)
            if made is None or again is None:
                if not _are_equal_constants(tape, one, other):
                    return False
                continue
            if made[0].target is not again[0].target or not _are_in_one_place(made, again):
                return False
            todo += [(made[0].args, again[0].args), (made[0].kwargs, again[0].kwargs)]
        elif isinstance(one, (list, tuple)):
            if len(one) != len(other):
                return False
            todo += zip(one, other, strict=True)
        elif isinstance(one, dict):
            if one.keys() != other.keys():
                return False
            todo += [(value, other[key]) for key, value in one.items()]
        elif one != other and not (one != one and other != other):  # a nan is no other nan
            return False
    return True


def _are_in_one_place(made: tuple[Operation, tuple[int, ...]], again: tuple[Operation, tuple[int, ...]]) -> bool:
    """Tell whether two are the same of the results of an op, which may return one tensor in two places."""
    places = made[1], again[1]
    return places[0] == places[1] or any(
        functools.reduce(operator.getitem, places[0], operation.result)
        is functools.reduce(operator.getitem, places[1], operation.result)
        for operation, _ in (made, again)
    )


def _are_equal_constants(tape: Tape, one: Tensor, other: Tensor) -> bool:
    """Tell whether both are constants, which each run of a function makes anew, with the same values."""
    first, second = tape.constant(one), tape.constant(other)
    if first is None or second is None or (first.dtype, first.device) != (second.dtype, second.device):
        return False
    return torch.equal(first, second)
