"""Rehearse: compile for a GPU on a machine without one. Triton compiles or interprets Inductor's kernels.

    kernels = aotlab.rehearse.rehearse(step, x, weight, card="h100")
    kernels[0].registers, kernels[0].shared, kernels[0].grid

A *card* is a model of GPU; a table has its properties. The inputs are on the CPU. aotlab traces and partitions as for
any call. Then the device of the graphs' tensors is changed to the GPU, and Inductor compiles the graphs for the card.
If torch uses another op on a GPU (another attention op, for example), the rehearsal keeps the CPU's op. If the process
has ``TRITON_INTERPRET=1`` in its environment, a `RehearsalBackend` with ``interpret=True`` runs the kernels on CPU
tensors, so that their results can be compared with eager's.
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
    """Compile a call and its backward for a GPU that this machine does not have; return the kernels.

    Parameters
    ----------
    function
        The function to compile. It is called once, on the CPU, with ``args`` and ``kwargs``, which must contain data.
    card
        The model of GPU: a name in `CARDS`, or another `Card`.

    Raises
    ------
    UsageError
        Triton is not installed, the machine has a GPU, the card is unknown, or an argument is a fake tensor.
    """
    if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise UsageError("an argument is a fake tensor: a rehearsal runs on the CPU, so pass tensors with data")
    backend = RehearsalBackend(card)
    compile(function, backend=backend)(*args, **kwargs)
    return backend.kernels_made
