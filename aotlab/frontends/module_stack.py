"""Record for each op by which of the user's modules it was called.

Graph nodes have this record as ``meta["nn_module_stack"]``, in the format of Dynamo and torch's exporter. The record is
a dictionary with one item for each module whose ``__call__`` was running, the outermost module first. The key
identifies the module, and the value is the module's path and class::

    {"1403…": ("L['self'].layers", <class Layers>), "1404…": ("L['self'].layers.0", <class Linear>)}

While a thread traces, a replacement of `torch.nn.Module.__call__` records the modules that the thread calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from aotlab import _torch as internals
from aotlab._torch.replaced import replaced
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.trace.running_recorder import with_node_metadata

_modules = threading.local()
_lock = threading.Lock()
_tracing = 0
_ordinary_call: Any = internals.module_call()


@contextmanager
def modules_named(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Make the recorder store the modules that call each op, while the context is open.

    ``modules`` are pairs of a path and a module, for the modules that the function can reach. A module that is not in
    this list, for example one that the function creates, gets its class name as its path, and is recorded only if no
    recorded module calls it.
    """
    before = getattr(_modules, "paths", None), getattr(_modules, "stack", {})
    paths: dict[int, str] = {}
    for path, module in modules:
        name, _, attribute_path = path.partition(".")
        paths.setdefault(id(module), f"L[{name!r}].{attribute_path}" if attribute_path else f"L[{name!r}]")
    _modules.paths, _modules.stack = paths, {}
    _count_traces(1)
    try:
        yield
    finally:
        _count_traces(-1)
        _modules.paths, _modules.stack = before


def _count_traces(difference: int) -> None:
    """Change the number of running traces. The first trace replaces `nn.Module.__call__`, and the last restores it."""
    global _tracing, _ordinary_call
    with _lock:
        if _tracing == 0:
            _ordinary_call = internals.module_call()
            internals.set_module_call(_call)
        _tracing += difference
        if _tracing == 0:
            internals.set_module_call(_ordinary_call)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module and record it for the ops that it calls; this replaces `nn.Module.__call__` during traces."""
    paths: dict[int, str] | None = getattr(_modules, "paths", None)
    if paths is None:
        return _ordinary_call(self, *args, **kwargs)
    if kernel_difference := internals.eager_only_behaviour(self, args, kwargs):
        raise RunEagerly("transformer-kernel-differs", kind=type(self).__name__, what=kernel_difference, at=user_line())
    stack: dict[str, tuple[str, type]] = _modules.stack
    path = paths.get(id(self))
    if path is None:
        if stack:  # a recorded module calls this one
            return _ordinary_call(self, *args, **kwargs)
        path = f"L[{type(self).__name__!r}]"
    inside = {**stack, str(id(self)): (path, type(self))}
    with replaced(_modules, "stack", inside), with_node_metadata({"nn_module_stack": inside}):
        return _ordinary_call(self, *args, **kwargs)
