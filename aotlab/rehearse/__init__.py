"""Onto the GPU without one: what Inductor would write for a card, compiled by Triton, or run by its interpreter.

    kernels = aotlab.rehearse.rehearse(step, x, weight, card="h100")
    kernels[0].registers, kernels[0].shared, kernels[0].grid

The inputs are on the CPU. aotlab traces and partitions as it does for any call; the graphs are then moved to the card,
whose properties come from a table. What torch does by another op on a GPU, such as attention, stays the CPU's op. With
``TRITON_INTERPRET=1`` in the environment of the process a `RehearsalBackend` with ``interpret=True`` runs the kernels
on CPU tensors, so that their numbers can be compared with eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotlab._torch import FakeTensor, pytree
from aotlab.errors import UsageError
from aotlab.frontends.api import compile
from aotlab.rehearse.backend import Kernel, RehearsalBackend
from aotlab.rehearse.cards import CARDS, Card

__all__ = ["CARDS", "Card", "Kernel", "RehearsalBackend", "rehearse"]


def rehearse(function: Callable[..., Any], *args: Any, card: str | Card = "h100", **kwargs: Any) -> list[Kernel]:
    """Compile a call for a card that is not there, with its backward; return the kernels.

    Parameters
    ----------
    function
        What is compiled; it is called once, on the CPU, with ``args`` and ``kwargs``, which are there.
    card
        One of `CARDS`, or another `Card`.

    Raises
    ------
    UsageError
        Triton is not installed, or there is a GPU, or no such card, or an argument is a fake tensor.
    """
    if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise UsageError("an argument is a fake tensor: a rehearsal runs on the CPU, so pass tensors with data")
    backend = RehearsalBackend(card)
    compile(function, backend=backend)(*args, **kwargs)
    return backend.kernels_made
