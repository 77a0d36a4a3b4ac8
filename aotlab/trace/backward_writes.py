"""Writes that a custom function's backward makes in place, or a checkpointed function that is run again for one.

    def backward(ctx, gradient):
        (count,) = ctx.saved_tensors
        count.add_(1)
        return gradient.mul_(2)

The first changes a tensor that the caller may hold, the second the very gradient that the caller handed in; and what
is kept for the backward is another at the next backward. So is a buffer that a checkpointed function counts with. A
traced backward is a pure function, so such programs are left to eager.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import RefusedError


@contextmanager
def unwritten(
    named: Sequence[tuple[str, Tensor]], custom: Sequence[Any], *, has_checkpoints: bool = False
) -> Iterator[None]:
    """Watch the backward that is traced in a ``with`` block.

    Parameters
    ----------
    named
        The wrappers that stand for the caller's tensors and gradients, with what to call them.
    custom
        The autograd nodes of custom functions; what they keep is watched too.
    has_checkpoints
        Whether functions are run again; without them and custom functions there is nothing to watch.

    Raises
    ------
    RunEagerly
        One of them was written.
    """
    if not custom and not has_checkpoints:
        yield
        return
    watched = [*named, *((f"what `{type(node).__name__}` keeps", kept) for node in custom for kept in _kept(node))]
    before = [_value(tensor) for _, tensor in watched]

    def check() -> None:
        for (name, tensor), value in zip(watched, before, strict=True):
            if _value(tensor) is not value:
                raise RunEagerly(f"the backward writes {name} in place")

    try:
        yield
    except (RefusedError, RunEagerly):  # a write is the better reason, and eager takes it
        check()
        raise
    check()


def _value(wrapper: Tensor) -> Tensor:
    internals.sync(wrapper)
    return internals.from_functional(wrapper)


def _kept(node: Any) -> list[Tensor]:
    kept = [*internals.saved_tensors_of(node), *vars(node).values()]
    return [value for value in kept if isinstance(value, Tensor) and internals.is_functional(value)]
