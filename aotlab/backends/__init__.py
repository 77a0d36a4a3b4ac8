"""Backends turn graphs into callables: `eager` runs the fx graph, `inductor` compiles it, or pass any function."""

from __future__ import annotations

from typing import Literal

from aotlab.backends.base import Backend, CallableBackend, EagerBackend, GraphKind, KernelSource, boxed
from aotlab.backends.inductor_backend import InductorBackend
from aotlab.errors import UsageError

__all__ = [
    "Backend", "CallableBackend", "EagerBackend", "GraphKind", "InductorBackend", "KernelSource", "boxed", "resolve",
]  # fmt: skip


def resolve(backend: object, *, draws: Literal["torch", "eager"] = "torch") -> Backend:
    """Return the `Backend` for a name, a compiler function or a backend.

    With ``draws="eager"``, Inductor's random numbers equal eager's (see `InductorBackend`). Raises `UsageError` if
    ``backend`` is something else.
    """
    if backend == "eager":
        return EagerBackend()
    if backend == "inductor":
        return InductorBackend(draws=draws)
    if isinstance(backend, Backend):
        return backend
    if callable(backend):
        return CallableBackend(backend)
    raise UsageError(f"backend {backend!r}: pass 'inductor', 'eager', or a function (graph_module, example_inputs)")
