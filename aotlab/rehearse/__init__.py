"""Rehearse: compile for a GPU on a machine without one. Triton compiles or interprets Inductor's kernels.

    kernels = aotlab.rehearse.rehearse(step, x, weight, card="h100")
    kernels[0].registers, kernels[0].shared, kernels[0].grid

A *card* is a model of GPU. `CARDS` has the properties of each card. The inputs are on the CPU, and aotlab traces and
partitions as for any call. Then it changes the device of the graphs' tensors to the GPU, and Inductor compiles the
graphs for the card. For some calls torch uses another op on a GPU than on the CPU, for example for attention. A
rehearsal compiles the CPU's op, because the call was traced on the CPU. If the process has ``TRITON_INTERPRET=1`` in
its environment, a `RehearsalBackend` with ``interpret=True`` runs the kernels on CPU tensors, so that their results can
be compared with eager's.
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
    """Compile a call, and its backward, for a GPU that this machine does not have. Return the compiled kernels.

    Parameters
    ----------
    function
        The function to compile. It is called once, on the CPU, with ``args`` and ``kwargs``, which must contain data.
    card
        The model of GPU: a name in `CARDS`, or a `Card`.

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
