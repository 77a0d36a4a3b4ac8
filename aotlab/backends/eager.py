"""The eager backend: run the fx graph op by op. Slow and exact; semantics are tested on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotlab import _torch as internals
from aotlab.backends.base import Backend, CompileRequest


class EagerBackend(Backend):
    """Run graphs as they are."""

    name = "eager"
    writes_last = True
    exact = True

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Return the graph's own Python, boxed: each input dies when it was used last."""
        return internals.boxed_forward_of(request.module)
