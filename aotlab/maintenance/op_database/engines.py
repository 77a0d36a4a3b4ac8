"""The engines that are compared with eager: aotlab on the function itself, aotlab behind Dynamo, and Dynamo alone.

Dynamo alone runs the graphs that it captures without a compiler. If its result differs from eager, the captured graph
is wrong, and no backend can correct that.
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
from aotlab.frontends import dynamo_frontend as frontend

Function = Callable[..., Any]


class Engine(Protocol):
    """Compiles one function or module, and reports afterwards how its calls were run."""

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""

    def ran_eagerly(self) -> bool:
        """Tell whether a call, or a part of a call, ran eagerly."""

    def close(self) -> None:
        """Reset the state of the process that belongs to the function, for example Dynamo's compiled code."""


class Direct:
    """aotlab on the function itself: `aotlab.aot_function`, and `aotlab.aot_module` for modules.

    With ``dynamic``, the function is compiled for all sizes at once.
    """

    def __init__(self, *, dynamic: bool = False) -> None:
        self._dynamic = dynamic

    def candidate(self, function: Function) -> Function:
        """Compile ``function``; its graphs run with torch's own kernels."""
        if isinstance(function, nn.Module):
            self._compiled: Any = api.aot_module(function, api.nop, dynamic=self._dynamic)
        else:
            self._compiled = api.aot_function(function, api.nop, dynamic=self._dynamic)

        def call(*args: Any, **kwargs: Any) -> Any:
            with config.patch(fallback="eager"):  # calls that cannot be compiled run eagerly and are counted
                return self._compiled(*args, **kwargs)

        return call

    def ran_eagerly(self) -> bool:
        """Tell whether a call ran eagerly."""
        return bool(getattr(self._compiled, "compiled", self._compiled).calls.eager)

    def close(self) -> None:
        """Do nothing: there is no process-wide state."""


class BehindDynamo:
    """``torch.compile(backend="aotlab")``; the graphs run with torch's own kernels."""

    def candidate(self, function: Function) -> Function:
        """Compile ``function`` with an empty cache of fake tensor results.

        Dynamo can fail for an op whose fake result is not in the cache. If the cache had results of earlier variants,
        the outcome would depend on these variants.
        """
        FakeTensorMode.cache_clear()
        self._parts: list[CompiledFunction] = []

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Function:
            call = frontend.backend(graph, inputs, options={"compiler": "eager"})
            self._parts.append(call.compiled)  # type: ignore[attr-defined]  # set for those who look behind it
            return call

        return torch.compile(function, backend=backend)

    def ran_eagerly(self) -> bool:
        """Tell whether a part of a call ran eagerly."""
        return any(part.calls.eager for part in self._parts)

    def captured(self) -> bool:
        """Tell whether Dynamo captured any graph."""
        return bool(self._parts)

    def close(self) -> None:
        """Reset Dynamo."""
        torch.compiler.reset()


class DynamoAlone(BehindDynamo):
    """``torch.compile(backend="eager")``: Dynamo captures graphs and runs them without aotlab."""

    def candidate(self, function: Function) -> Function:
        """Compile ``function`` with Dynamo's backend ``eager``."""
        FakeTensorMode.cache_clear()
        return torch.compile(function, backend="eager")

    def close(self) -> None:
        """Reset Dynamo, and run the garbage collector.

        If a graph raises inside of inference mode, a reference cycle through the traceback can keep the mode's guard
        object alive. Inference mode then stays on until the collector destroys this object.
        """
        super().close()
        gc.collect()
