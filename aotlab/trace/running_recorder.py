"""Access to the innermost running recorder of this thread, for code that has no reference to it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch.replaced import replaced
from aotlab.guards.user_code import Locator, set_code_position
from aotlab.trace.recorder import running
from aotlab.trace.tape import Operation, tensors_in


def values_only() -> AbstractContextManager[None]:
    """Return a context manager in which `eigh` and `svd` are recorded without the computation of vectors.

    It is for functions such as `svdvals`, which return only the values, because eager computes no vectors for them.
    """
    return replaced(running.recorders[-1], "values_only", True) if running.recorders else nullcontext()


def with_node_metadata(meta: dict[str, Any]) -> AbstractContextManager[None]:
    """Return a context manager in which the running recorder stores ``meta`` with each op, for ``fx.Node.meta``."""
    return replaced(running.recorders[-1], "meta", meta) if running.recorders else nullcontext()


def operations_since(count: int) -> list[Operation]:
    """Return the ops that the running recorder has recorded, without the first ``count``."""
    return running.recorders[-1].tape.operations[count:] if running.recorders else []


def operations_so_far() -> int:
    """Return the number of ops that the running recorder has recorded."""
    return len(running.recorders[-1].tape.operations) if running.recorders else 0


def describe_views(traced: Tensor) -> list[str]:
    """Describe the view ops that made a traced tensor from its base, the last op first.

    If two views of one base have equal descriptions, they certainly have the same sizes and strides in eager.
    """
    internals.sync(traced)  # regenerates the value from the storage's current value
    steps: list[str] = []
    value = internals.from_functional(traced)
    while (
        running.recorders
        and (producer := running.recorders[-1].tape.producer(value))
        and getattr(producer[0].target, "is_view", False)
    ):
        operation, path = producer
        steps.append(str((operation.target, operation.args[1:], operation.kwargs, path)))
        value = operation.args[0]
    return steps


def strides_are_certain(traced: Tensor) -> bool:
    """Tell whether a traced tensor certainly has the strides that eager gives it.

        c = torch.ones(3, 1, 1).permute(2, 1, 0)     # strides (1, 1, 1), of shape (1, 1, 3)
        (c * 2).stride()                             # (1, 1, 1); torch's fake tensors say (3, 3, 1)

    The stride of a dimension of size one has no effect, so kernels and fake tensors may choose different strides. The
    strides are certain only if all tensors of the trace with such a dimension are contiguous. (A tensor without
    elements is treated in the same way.)
    """
    if not running.recorders or not _has_free_strides(internals.from_functional(traced)):
        return True
    tape = running.recorders[-1].tape
    free = filter(_has_free_strides, [*tape.entered, *tensors_in([operation.result for operation in tape.operations])])
    return all(tensor.stride() == internals.make_contiguous_strides_for(tensor.shape) for tensor in free)


def _has_free_strides(tensor: Tensor) -> bool:
    return 1 in tensor.shape or 0 in tensor.shape


def note_random_state(name: str, state: Tensor) -> None:
    """Note that torch's checkpoint read or set the random generator's state with the function ``name``."""
    if not running.recorders:
        return
    recorder = running.recorders[-1]
    if name == "get_rng_state":
        recorder.states.note_read(state, in_forward=recorder.phase == "forward")
    elif name == "set_rng_state" and recorder.phase == "backward":
        recorder.states.replay(state)


def note_checkpoint() -> None:
    """Note that torch's checkpoint starts to run its function."""
    if running.recorders:
        running.recorders[-1].has_checkpoints = True


def is_exact() -> bool:
    """Tell whether the running recorder's graphs must give bit for bit the same results as eager."""
    return bool(running.recorders) and running.recorders[-1].exact


def is_tracing() -> bool:
    """Tell whether a recorder is running."""
    return bool(running.recorders)


def set_location(position: Locator | None, meta: dict[str, Any] | None) -> None:
    """Set the user line (``position``) and the fx metadata (``meta``) of the ops that are recorded from now on.

    A frontend calls this if it knows the user line although Python's stack does not show this line.
    """
    set_code_position(position)
    if running.recorders:
        running.recorders[-1].meta = meta
