"""aotlab: an ahead-of-time autograd that you can read, run and inspect.

>>> import aotlab
>>> import torch
>>> @aotlab.compile(backend="eager")
... def scale(x, factor):
...     x.mul_(factor)
...     return x.t()
>>> x = torch.ones(2, 3)
>>> scale(x, 2.0).shape, x[0, 0].item()
(torch.Size([3, 2]), 2.0)

The public names are imported at their first use (PEP 562), so that ``import aotlab`` takes little time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from aotlab import config, errors
from aotlab.config import disable, enable

if TYPE_CHECKING:
    from aotlab.export import aot_export_joint_simple, aot_export_module
    from aotlab.fallbacks import explain
    from aotlab.frontends.api import (
        aot_function,
        aot_module,
        aot_module_simplified,
        compile,
        compiled_function,
        compiled_module,
        get_aot_compilation_context,
        make_boxed_compiler,
        make_boxed_func,
        nop,
    )
    from aotlab.notebook import load_ipython_extension, unload_ipython_extension
    from aotlab.notebook.dashboard import dashboard
    from aotlab.partition.default import default_partition
    from aotlab.partition.min_cut import min_cut_rematerialization_partition
    from aotlab.report import Report
    from aotlab.upstream import observe, read_trace
    from aotlab.verification import verify

#: The version of the package. The build reads it from this line.
__version__ = "0.1.0"

__all__ = [
    "Report",
    "__version__",
    "aot_export_joint_simple",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "compile",
    "compiled_function",
    "compiled_module",
    "config",
    "dashboard",
    "default_partition",
    "disable",
    "enable",
    "errors",
    "explain",
    "get_aot_compilation_context",
    "load_ipython_extension",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "nop",
    "observe",
    "read_trace",
    "unload_ipython_extension",
    "verify",
]

#: Public name → the module that defines it.
_ROOMS = {
    **dict.fromkeys((
        "aot_function", "aot_module", "aot_module_simplified", "compile", "compiled_function", "compiled_module",
        "get_aot_compilation_context", "make_boxed_compiler", "make_boxed_func", "nop",
    ), "aotlab.frontends.api"),
    **dict.fromkeys(("aot_export_joint_simple", "aot_export_module"), "aotlab.export"),
    "default_partition": "aotlab.partition.default",
    "min_cut_rematerialization_partition": "aotlab.partition.min_cut",
    "explain": "aotlab.fallbacks",
    "Report": "aotlab.report",
    **dict.fromkeys(("observe", "read_trace"), "aotlab.upstream"),
    "verify": "aotlab.verification",
    "dashboard": "aotlab.notebook.dashboard",
    **dict.fromkeys(("load_ipython_extension", "unload_ipython_extension"), "aotlab.notebook"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Import the module that defines a public name at the first use of the name, and cache the value."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_ROOMS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all public names, including names that are not imported yet."""
    return sorted({*globals(), *__all__})
