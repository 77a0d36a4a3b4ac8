"""Which module of the user's made an op, as the nodes of graphs say it.

Nodes carry it as ``meta["nn_module_stack"]``, in the form of Dynamo and torch's exporter: from a key of each module
around the op, the outermost first, to its path and its class::

    {"1403…": ("L['self'].layers", <class Layers>), "1404…": ("L['self'].layers.0", <class Linear>)}

While a thread traces, what its `torch.nn.Module.__call__` calls is noted.
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
from aotlab.guards.places import user_line
from aotlab.trace.running import noted

_modules = threading.local()
_lock = threading.Lock()
_tracing = 0
_ordinary_call: Any = internals.module_call()


@contextmanager
def modules_named(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
    """Let the recorder write down in which of these (path, module), or of strangers a class, an op is made."""
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
    if own := internals.way_of_its_own(self, args, kwargs):
        raise RunEagerly(
            f"`{type(self).__name__}` {own} where nothing is differentiated, at {user_line()}",
            suggestion="make it with enable_nested_tensor=False, or call it without autocast, to have it compiled",
        )
    stack: dict[str, tuple[str, type]] = _modules.stack
    path = paths.get(id(self))
    if path is None:
        if stack:  # made by a module that is known
            return _ordinary_call(self, *args, **kwargs)
        path = f"L[{type(self).__name__!r}]"
    inside = {**stack, str(id(self)): (path, type(self))}
    with replaced(_modules, "stack", inside), noted({"nn_module_stack": inside}):
        return _ordinary_call(self, *args, **kwargs)
