"""The engine's settings. They are read at compile time, unless their text says otherwise.

Change them by assignment (``aotlab.config.recompile_limit = 16``), or temporarily with `patch`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

#: Whether functions are compiled and entries are used. Read at every call; set by `aotlab.disable` and `aotlab.enable`.
enabled: bool = True

#: The fallback for a program that cannot be compiled faithfully as a whole. ``"dynamo"``: Dynamo captures the program
#: if that can help; otherwise the program runs eagerly. A warning says which of the two happens, and why. ``"eager"``:
#: the program runs eagerly, with a warning. ``"error"``: a `RefusedError` is raised before the program changes
#: anything. Read at every call that compiles.
fallback: Literal["dynamo", "eager", "error"] = "dynamo"

#: The largest number of compiled entries per function. Calls that need another entry run eagerly, with a warning.
recompile_limit: int = 8

#: Check the graphs between the stages, and compare the outputs of compiled graphs at run time with the traced ones
#: (dtype, sizes, strides, requires_grad, shared memory). This costs microseconds per output and call.
debug_assert: bool = False

#: Make graphs that draw random numbers functional. Such a graph takes the states of the random generators as its last
#: inputs and returns the new states as its last outputs; the run-time function then sets the generators to the new
#: states. So the backward can draw the mask of a dropout again, and a partitioner may save the state (5056 bytes on the
#: CPU, 16 on a GPU) in place of the mask. The random numbers equal eager's on every backend. (Upstream's setting of
#: this name is for GPUs only, and passes seed and offset as two numbers.)
functionalize_rng_ops: bool = False

#: When to compile the backward for gradients of all outputs: together with the forward (False), or when it first runs
#: (True).
lazy_backward: bool = False

#: The treatment of a call under the user's own ``saved_tensors_hooks``. ``"eager"``: the call runs eagerly with one
#: warning, because the pack hook would see the values that a compiled forward saves, which are not the values that
#: eager saves. ``"apply"``: the hooks get the values that the compiled forward saves. This is correct if unpack returns
#: the value that was packed. torch's own hooks, which ``save_on_cpu`` and checkpoint install, are always applied. Read
#: at every call.
saved_tensors_hooks: Literal["eager", "apply"] = "eager"

#: The frontend of cells without the option ``--frontend``. With ``"auto"``, the cell's lines and the functions that
#: they call are traced directly, which takes a fraction of Dynamo's time. Dynamo captures what cannot be traced, and
#: optimizer steps run as plain Python. With ``"dynamo"``, Dynamo captures the cell. Cells with ``--rehearse``,
#: ``--engine upstream`` or ``--engine both`` always use Dynamo, because these options need it. Read when a cell runs.
#: In a notebook, ``%aotlab config cell_frontend=dynamo`` sets it.
cell_frontend: Literal["dynamo", "auto"] = "auto"

#: How the page in a notebook shows a new report. ``"report"``: in full. ``"verdict"``: as the line with the verdict, so
#: that the cell's own results stay in view; a click shows the rest. Read when a cell runs. In a notebook,
#: ``%aotlab config open=verdict`` sets it.
open: Literal["report", "verdict"] = "report"

#: Whether aotlab stores the reports of cells and of ``aotlab run`` in the user's data directory, where ``%aotlab runs``
#: finds them (see `aotlab.runs`). Read when a cell or a script has run. The environment variable ``AOTLAB_RUNS=off``
#: sets it to False.
save_runs: bool = os.environ.get("AOTLAB_RUNS", "").lower() != "off"

#: Whether graphs that Inductor compiles for aotlab are stored in Inductor's cache on disk, so that later processes take
#: them from there. ``aotlab doctor`` shows the folder. The environment variable ``AOTLAB_CACHE=off`` sets it to False.
#: (``TORCHINDUCTOR_FX_GRAPH_CACHE=0`` also disables it.) aotlab does not use a folder that belongs to another user or
#: is world-writable.
cache: bool = os.environ.get("AOTLAB_CACHE", "").lower() != "off"

#: The limit for the graphs and kernels in Inductor's cache on disk, in bytes, or None for no limit. Stock
#: ``torch.compile`` uses the same folder and has no limit. When aotlab compiles a graph, and at most once in ten
#: minutes, it removes the least recently used files until the rest is no larger than this. Precompiled headers do not
#: count, and files that were written in the last hour stay.
cache_bytes: int | None = 10_000_000_000

#: The rare cases that are compiled, by the name of their file in `aotlab.quirks`. A call that needs a quirk that is not
#: in this list runs eagerly.
quirks: tuple[str, ...] = (
    "hooks", "metadata_changes", "storage_offsets", "gradients", "warnings", "random_order", "lstm", "kernels", "hops",
    "storage_sizes", "other_memory",
)  # fmt: skip


def data_folder() -> Path:
    """Return the folder for aotlab's files in the user's data directory. The folder need not exist."""
    if sys.platform == "win32":
        home = Path(os.environ.get("APPDATA") or Path.home())
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Application Support"
    else:
        home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return home / "aotlab"


def disable() -> None:
    """Switch compilation off: all compiled functions and cells run eagerly until `enable` is called."""
    global enabled
    enabled = False


def enable() -> None:
    """Switch compilation on again after `disable`. The entries from before `disable` serve calls again."""
    global enabled
    enabled = True


@contextmanager
def patch(**changes: object) -> Iterator[None]:
    """Change settings for the duration of a ``with`` block. Raises AttributeError for an unknown setting.

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
            raise AttributeError(f"aotlab.config has no setting {name!r}, only {', '.join(module.__annotations__)}")
    before = {name: getattr(module, name) for name in changes}
    for name, value in changes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
