"""Functions of a cell that are captured by tracing their calls (``--frontend direct``), with their verification."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aotlab import events, pipeline
from aotlab.backends import Backend
from aotlab.cache import CompiledFunction, Declined, Entry
from aotlab.capture import nesting
from aotlab.frontends.direct import FunctionTarget
from aotlab.notebook.graphs import wrong_device
from aotlab.partition.partition_stage import Partitioner
from aotlab.runtime.draft import MISS
from aotlab.runtime.forward_call import ForwardFailed
from aotlab.subclasses import compile_call as compile_apart
from aotlab.trace.running_recorder import is_tracing
from aotlab.verification import Comparison, compare


class _Comparing(threading.local):
    """Whether this thread is comparing a function with eager. Then the traced functions that it calls run eagerly."""

    on = False


_comparing = _Comparing()


class _NotebookFunction(FunctionTarget):
    """A function of a cell, for the direct frontend. ``here.eager`` is set if a call on this thread runs eagerly.

    If a call that ran eagerly raises an error, the error comes from the user's code, and not from the compiled form.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function)
        self.name = name
        self.here = threading.local()

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function eagerly."""
        self.here.eager = True
        return super().eager(args, kwargs)


class TracedFunction:
    """A function of the cell, compiled by the direct frontend. Reports treat it like a captured graph.

    Parameters
    ----------
    function, name
        The function, and its name in reports.
    backend
        The backend that compiles the function's graphs.
    partitioner
        The partitioner that chooses the values that the forward saves.
    number
        The number by which events identify the function.
    device
        The device on which the function's inputs must be; None if any device is allowed.
    dynamic
        Whether sizes and numbers are dynamic from the first call on. If None, a size or number that changes becomes
        dynamic.
    verify
        Whether each entry is compared with eager before it is used.
    refused
        Called with the reason if aotlab refuses a call, which then runs eagerly.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        backend: Backend,
        partitioner: Partitioner,
        number: int,
        device: torch.device | None,
        dynamic: bool | None,
        verify: bool,
        refused: Callable[[str], None],
    ) -> None:
        self.name = name
        self.function = function
        self.verified: dict[int, tuple[Comparison, ...]] = {}
        self.unverified: dict[int, str] = {}
        self.served_calls = 0
        self.failure: str | None = None
        self.refused: str | None = None
        self.surprising = False
        self._backend = backend
        self._device = device
        self._verify = verify
        self._target = _NotebookFunction(function, name)
        options = pipeline.Options(
            backend=backend, partitioner=partitioner, keep_inference_input_mutations=True, dynamic=dynamic
        )

        def compile_call(*arguments: Any) -> Entry:
            try:
                return compile_apart(options, *arguments)
            except Declined as declined:
                refused(str(declined.refusal))  # no event reports a call that is refused before it is traced
                raise

        self.compiled = CompiledFunction(
            self._target,
            compile_call,
            backend_name=backend.name,
            number=number,
            warn=False,
            accept=self._accept if verify or device is not None else None,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call from the user's code."""
        if is_tracing() or _comparing.on:
            return self.function(*args, **kwargs)  # the trace or the comparison of the caller includes this call
        here = self._target.here
        here.eager = False
        random = torch.get_rng_state()
        try:
            result = self.compiled(*args, **kwargs)
        except Exception as error:
            if here.eager:
                raise
            # A compiled form that fails has changed nothing yet. Run eagerly: eager gives the right result or error.
            failure = f"{type(error).__name__}: {error}"
        else:
            self.served_calls += not here.eager
            return result
        torch.set_rng_state(random)
        result = self.function(*args, **kwargs)
        self.failure, self.surprising = failure, True  # eager did not raise
        return result

    def written(self) -> dict[str, Tensor | None]:
        """Return no names: calls of the function may write inputs, but the cell that defines the function does not."""
        return {}

    def settle(self) -> None:
        """Do nothing, because this object saves no values of inputs."""

    def result_names(self, present: Mapping[int, tuple[str, Tensor]]) -> dict[int, dict[str, str]]:
        """Return no names, because the results belong to the callers, and not to the cell that defines the function."""
        return {}

    def _accept(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Compare a new entry with the function on copies of the arguments; return a reason to reject it, or None."""
        elsewhere = self._elsewhere(args, kwargs)
        if elsewhere is not None or not self._verify:
            return elsewhere
        events.emit(events.Begun(kind="verification", subject=self.name))
        missed: list[bool] = []
        exact = self._backend.name == "eager"

        def by_entry(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*inputs: Any, **named: Any) -> Any:
                # If the compiled forward raises in a call of the user, the call runs eagerly. Do the same here.
                with contextlib.suppress(ForwardFailed):
                    result = entry.run(inputs, named)
                    if result is not MISS:
                        return result
                    missed.append(True)
                return function(*inputs, **named)

            return call

        _comparing.on = True
        began = time.perf_counter_ns()
        try:
            # The trace has already printed the function's output, so the comparison does not print it again.
            with contextlib.redirect_stdout(io.StringIO()):
                verification = compare(
                    self.function,
                    args,
                    kwargs,
                    candidate=by_entry,
                    calls=1,
                    tolerance="exact" if exact else "close",
                    yardstick=None if exact else partial(torch.compile, dynamic=False),
                )
        except Exception as error:  # noqa: BLE001  # an entry whose arguments cannot be copied is used unverified
            self.unverified[entry.number] = f"its arguments cannot be copied: {error}"
            return None
        finally:
            _comparing.on = False
            events.emit(events.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))
        if missed:
            self.unverified[entry.number] = "copies of its arguments do not meet its guards"
            return None
        self.verified[entry.number] = verification.comparisons
        return None if verification.ok else f"its compiled form differs from eager: {verification.first}"

    def _elsewhere(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        if self._device is None:
            return None
        names = self._target.argument_names(args, kwargs)
        leaves = nesting.flatten((args, kwargs))[0]
        for name, value in zip(names, leaves, strict=False):
            if isinstance(value, Tensor) and value.device != self._device and value.dim():
                return wrong_device(name, value, self._device)
        return None
