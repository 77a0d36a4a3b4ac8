"""What is compared with eager: aotlab on the function itself, or behind Dynamo; and Dynamo alone.

What differs from eager with Dynamo alone, which then runs its graphs as they are, is nothing that a backend could mend.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from aotlab import config
from aotlab._torch import FakeTensorMode
from aotlab.cache import CompiledFunction
from aotlab.frontends import api
from aotlab.frontends import dynamo as frontend

Function = Callable[..., Any]


class Engine(Protocol):
    """Compiles one function or module, and tells afterwards what became of it."""

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""

    def ran_eagerly(self) -> bool:
        """Tell whether eager ran a call, or a part of one."""

    def close(self) -> None:
        """Forget what is kept of the function in the process."""


class Direct:
    """`aotlab.aot_function`, and `aotlab.aot_module` for modules; ``dynamic``: for all sizes at once."""

    def __init__(self, *, dynamic: bool = False) -> None:
        self._dynamic = dynamic

    def candidate(self, function: Function) -> Function:
        """Compile ``function`` for torch's own kernels."""
        if isinstance(function, nn.Module):
            self._made: Any = api.aot_module(function, api.nop, dynamic=self._dynamic)
        else:
            self._made = api.aot_function(function, api.nop, dynamic=self._dynamic)

        def call(*args: Any, **kwargs: Any) -> Any:
            with config.patch(fallback="eager"):  # Dynamo would break at what is not compiled, which is to be seen
                return self._made(*args, **kwargs)

        return call

    def ran_eagerly(self) -> bool:
        """Tell whether eager ran a call."""
        return bool(getattr(self._made, "compiled", self._made).calls.eager)

    def close(self) -> None:
        """Nothing is kept."""


class BehindDynamo:
    """``torch.compile(backend="aotlab")``, for torch's own kernels."""

    def candidate(self, function: Function) -> Function:
        """Compile ``function``, with no memory of what fake tensors met before: Dynamo may fail where they are new."""
        FakeTensorMode.cache_clear()
        self._parts: list[CompiledFunction] = []

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Function:
            call = frontend.backend(graph, inputs, options={"compiler": "eager"})
            self._parts.append(call.compiled)  # type: ignore[attr-defined]  # set for those who look behind it
            return call

        return torch.compile(function, backend=backend)

    def ran_eagerly(self) -> bool:
        """Tell whether eager ran a part of a call."""
        return any(part.calls.eager for part in self._parts)

    def captured(self) -> bool:
        """Tell whether Dynamo gave us anything to compile."""
        return bool(self._parts)

    def close(self) -> None:
        """Reset Dynamo."""
        torch.compiler.reset()


class DynamoAlone(BehindDynamo):
    """``torch.compile(backend="eager")``."""

    def candidate(self, function: Function) -> Function:
        """Let Dynamo capture ``function``."""
        FakeTensorMode.cache_clear()
        return torch.compile(function, backend="eager")

    def close(self) -> None:
        """Reset Dynamo, and let go of the modes that a graph has entered and, as it raised, not left."""
        super().close()
        gc.collect()
