"""What is asked of the recorder that is running, and noted there, by those that have it not at hand."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch.replaced import replaced
from aotlab.guards.places import Locator, located
from aotlab.trace.tape import Operation, tensors_in

if TYPE_CHECKING:
    from aotlab.trace.recorder import Recorder


class _Here(threading.local):
    """The recorders that are running in this thread, the innermost last: another thread's calls are none of theirs."""

    def __init__(self) -> None:
        self.active: list[Recorder] = []


here = _Here()


def values_only() -> AbstractContextManager[None]:
    """Let decompositions in the block compute no vectors: what is called there does not look at them."""
    return replaced(here.active[-1], "values_only", True) if here.active else nullcontext()


def noted(meta: dict[str, Any]) -> AbstractContextManager[None]:
    """Let the running recorder write ``meta`` with the ops in the block."""
    return replaced(here.active[-1], "meta", meta) if here.active else nullcontext()


def operations_since(count: int) -> list[Operation]:
    """Return what the running recorder has written after so many."""
    return here.active[-1].tape.operations[count:] if here.active else []


def operations_so_far() -> int:
    """Count what the running recorder has written."""
    return len(here.active[-1].tape.operations) if here.active else 0


def strides_are_certain(wrapper: Tensor) -> bool:
    """Tell whether a traced tensor surely has the strides that eager gives it.

        c = torch.ones(3, 1, 1).permute(2, 1, 0)     # strides (1, 1, 1), of shape (1, 1, 3)
        (c * 2).stride()                             # (1, 1, 1); torch's fake tensors say (3, 3, 1)

    Where a stride says nothing, kernels and fakes agree only if all such tensors of a trace lie row by row.
    """
    if not here.active or not _has_free_strides(internals.from_functional(wrapper)):
        return True
    tape = here.active[-1].tape
    free = filter(_has_free_strides, [*tape.entered, *tensors_in([operation.result for operation in tape.operations])])
    return all(tensor.stride() == internals.make_contiguous_strides_for(tensor.shape) for tensor in free)


def _has_free_strides(tensor: Tensor) -> bool:
    return 1 in tensor.shape or 0 in tensor.shape


def note_random_state(name: str, state: Tensor) -> None:
    """Note that torch's checkpoint took or set the random generator's state, by the function ``name``."""
    if not here.active:
        return
    recorder = here.active[-1]
    if name == "get_rng_state":
        recorder.states.taken(state, in_forward=recorder.phase == "forward")
    elif name == "set_rng_state" and recorder.phase == "backward":
        recorder.states.set(state)


def note_checkpoint() -> None:
    """Note that torch's checkpoint begins to run its function."""
    if here.active:
        here.active[-1].has_checkpoints = True


def is_exact() -> bool:
    """Tell whether the running recorder's graphs are to compute bit for bit what eager does."""
    return bool(here.active) and here.active[-1].exact


def is_tracing() -> bool:
    """Tell whether a recorder is running."""
    return bool(here.active)


def locate(place: Locator | None, meta: dict[str, Any] | None) -> None:
    """Tell the running recorder where the following ops come from; for frontends that know better than the stack."""
    located(place)
    if here.active:
        here.active[-1].meta = meta
