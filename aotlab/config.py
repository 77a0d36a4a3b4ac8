"""The engine's switches. Read at compile time, unless the text says otherwise.

Change them by assignment (``aotlab.config.recompile_limit = 16``) or for a while with ``patch``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

#: Whether anything is compiled at all, or called compiled. Read at every call; set by `aotlab.disable` and `enable`.
enabled: bool = True

#: What becomes of a program that cannot be compiled faithfully as a whole. ``"dynamo"``: where that can help, Dynamo
#: captures it, else it runs eagerly; a warning says which, and why. ``"eager"``: it runs eagerly. ``"error"``: that is
#: raised as a `RefusedError`, before anything was changed. Read at every call that compiles.
fallback: Literal["dynamo", "eager", "error"] = "dynamo"

#: How many entries one function may have before further signatures run eagerly with a warning.
recompile_limit: int = 8

#: Check the graphs between the stages, and outputs of the compiled graphs at run time, against what the trace
#: promised (dtype, sizes, strides, requires_grad, memory of their own). Costs microseconds per output and call.
debug_assert: bool = False

#: Make graphs that draw random numbers functions of their arguments: the state of each generator is their last input,
#: and the one to which the runtime sets it their last output. So a partitioner may let the backward draw a dropout's
#: mask again, and keep the state (5056 bytes on the CPU; 16 on a GPU) in place of the mask. The numbers are eager's, on
#: every backend. (Upstream's switch of this name is for GPUs alone, with seed and offset as two numbers.)
functionalize_rng_ops: bool = False

#: Compile the backward of all outputs together with the forward (False), or at the first backward (True).
lazy_backward: bool = False

#: What becomes of a call under ``saved_tensors_hooks`` that are not torch's own (``save_on_cpu`` and checkpoint are).
#: ``"eager"``: it runs eagerly with one warning, as pack would see other values of a compiled forward. ``"apply"``: it
#: is given what that saves: right where unpack returns what was packed. Read at every call.
saved_tensors_hooks: Literal["eager", "apply"] = "eager"

#: The corners that are compiled; what is left out of them runs eagerly. See `aotlab.quirks`, one file each.
quirks: tuple[str, ...] = ("hooks", "moves", "windows", "gradients", "warnings", "draws", "lstm", "kernels", "hops")


def disable() -> None:
    """Switch all compilation off, at once: compiled functions and cells run eagerly until `enable` is called."""
    global enabled
    enabled = False


def enable() -> None:
    """Switch compilation on again after `disable`; what was compiled before serves again."""
    global enabled
    enabled = True


@contextmanager
def patch(**changes: object) -> Iterator[None]:
    """Set switches for the length of a ``with`` block; raises AttributeError at a name that is no switch.

    Examples
    --------
    >>> import aotlab
    >>> with aotlab.config.patch(recompile_limit=2):
    ...     aotlab.config.recompile_limit
    2
    """
    module = sys.modules[__name__]
    for name in changes:
        if name not in module.__annotations__:
            raise AttributeError(f"aotlab.config has no switch {name!r}; there are {', '.join(module.__annotations__)}")
    before = {name: getattr(module, name) for name in changes}
    for name, value in changes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
