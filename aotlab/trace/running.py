"""What is asked of the recorder that is running, and noted there, by those that have it not at hand.

Among it is which module of the user's made an op. Nodes carry it as ``meta["nn_module_stack"]``, in the form in which
Dynamo and torch's exporter write it: from a key of each module around the op, the outermost first, to its path and its
class::

    {"1403…": ("L['self'].layers", <class Layers>), "1404…": ("L['self'].layers.0", <class Linear>)}
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.trace.places import Locator, located, user_line
from aotlab.trace.tape import Operation

if TYPE_CHECKING:
    from aotlab.trace.recorder import Recorder


class _Here(threading.local):
    """The recorders that are running in this thread, the innermost last: another thread's calls are none of theirs."""

    def __init__(self) -> None:
        self.active: list[Recorder] = []


here = _Here()


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    """Let the running recorder, if there is one, have another attribute in the block."""
    recorder = here.active[-1] if here.active else None
    if recorder is None:
        yield
        return
    before = getattr(recorder, name)
    setattr(recorder, name, value)
    try:
        yield
    finally:
        setattr(recorder, name, before)


def values_only() -> AbstractContextManager[None]:
    """Let decompositions in the block compute no vectors: what is called there does not look at them."""
    return _set("values_only", value=True)


def ordinary_values() -> AbstractContextManager[None]:
    """Let ops in the block make ordinary tensors, under inference_mode too: they are new values of ordinary ones."""
    return _set("ordinary", value=True) if torch.is_inference_mode_enabled() else nullcontext()


def noted(meta: dict[str, Any]) -> AbstractContextManager[None]:
    """Let the running recorder write ``meta`` with the ops in the block."""
    return _set("meta", meta)


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

    The stride of a dimension of size one, or of a tensor without elements, says nothing, and kernels and their fakes
    choose it by rules of their own. They agree where all such tensors of a trace lie row by row.
    """
    if not here.active or not _has_free_strides(internals.from_functional(wrapper)):
        return True
    return all(map(_is_row_by_row, filter(_has_free_strides, here.active[-1].tape.values())))


def _has_free_strides(tensor: Tensor) -> bool:
    return 1 in tensor.shape or 0 in tensor.shape


def _is_row_by_row(tensor: Tensor) -> bool:
    """Tell whether a tensor has the strides of a new one, also where its dimensions have the size one."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


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


# --- modules -------------------------------------------------------------------------------------------------------
# While any trace runs, what `torch.nn.Module.__call__` calls is noted; for threads that trace nothing it does no more
# than before. An op of the backward gets the stack of the op that it differentiates, by autograd's sequence numbers.

_modules = threading.local()
_lock = threading.Lock()
_tracing = 0
_ordinary_call: Any = internals.module_call()


@contextmanager
def modules_named(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Let the running recorder write down in which of these modules an op is made.

    Each comes with its path (``self.layers.0``; the first name is that of a variable). Others are named by their class
    where no named module is around them.
    """
    before = getattr(_modules, "paths", None), getattr(_modules, "stack", {})
    paths: dict[int, str] = {}
    for path, module in modules:
        name, _, rest = path.partition(".")
        paths.setdefault(id(module), f"L[{name!r}].{rest}" if rest else f"L[{name!r}]")
    _modules.paths, _modules.stack = paths, {}
    _change(1)
    try:
        yield
    finally:
        _change(-1)
        _modules.paths, _modules.stack = before


def _change(by: int) -> None:
    global _tracing, _ordinary_call
    with _lock:
        if _tracing == 0:
            _ordinary_call = internals.module_call()
            internals.set_module_call(_call)  # put back with the last trace
        _tracing += by
        if _tracing == 0:
            internals.set_module_call(_ordinary_call)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    paths: dict[int, str] | None = getattr(_modules, "paths", None)
    if paths is None:
        return _ordinary_call(self, *args, **kwargs)
    if internals.leaves_padding_out(self, args, kwargs):
        raise RunEagerly(
            f"`{type(self).__name__}` leaves padded places out where nothing is differentiated, at {user_line()}",
            suggestion="make it with enable_nested_tensor=False, to have it compiled",
        )
    stack: dict[str, tuple[str, type]] = _modules.stack
    path = paths.get(id(self))
    if path is None:
        if stack:  # made by a module that is known
            return _ordinary_call(self, *args, **kwargs)
        path = f"L[{type(self).__name__!r}]"
    _modules.stack = {**stack, str(id(self)): (path, type(self))}
    try:
        with noted({"nn_module_stack": _modules.stack}):
            return _ordinary_call(self, *args, **kwargs)
    finally:
        _modules.stack = stack
